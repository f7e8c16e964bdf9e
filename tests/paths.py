"""Lists the functions that a prompt, a token and a KV handle pass, and checks the lists.

Run as a module, it prints how many functions and files each path has: `python -m
tandem.tests.paths`.

A path has one function a line, `module:qualified.name`, in the order in which the data passes them.
Each is linked to the one before it: one of the two mentions the other's name, because it calls or
returns to it. A line may name two exceptions: `< name` links to an earlier function of the path
instead, `~ word` is a hand-over (a queue, a stream, a callback) that both functions mention. A
helper that only checks the data, or derives a part of it and returns, is not listed.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

PROMPT: Final = """
router.api.server.grpc_server:GrpcServer._generate
router.api.server.grpc_server:GrpcServer._read
router.api.service:GenerationService.accept < GrpcServer._generate
router.frontend.prepare:prepare
router.frontend.prepare:_encode_fitting
router.frontend.prepare:encode_prompt
router.frontend.tokenizer:Tokenizer.encode
router.frontend.tokenizer:Tokenizer._encode
router.frontend.served_model:fit_context < prepare
router.frontend.prepare:_submit < prepare
router.api.service:GenerationService.run < GrpcServer._generate
router.dispatch.dispatcher:Dispatcher.generate
router.dispatch.execution:RequestExecution.run
router.dispatch.execution:RequestExecution.start
router.dispatch.attempt:Attempt.start
router.dispatch.dispatcher:Dispatcher._send
router.dispatch.worker_client:WorkerClient.submit
router.dispatch.worker_client:WorkerClient._write ~ _commands
workers.serve.request_manager:RequestManager._read < WorkerClient.submit ~ SessionRequest
workers.serve.request_manager:RequestManager.submit
workers.serve.submit:parse_submit
workers.serve.request_manager:RequestManager._post < RequestManager.submit
workers.serve.engine_thread:EngineThread.post < RequestManager._post
workers.serve.engine_thread:EngineThread._take_commands ~ _commands
workers.serve.request_manager:RequestManager._enqueue < RequestManager._post
workers.engine.engine:Engine.submit
workers.engine.request_table:RequestTable.add
"""

TOKEN: Final = """
workers.model.sampling.sampler:Sampler.__call__
workers.model.runner:ModelRunner._launch
workers.model.pooling:collect
workers.engine.engine:Engine.finish ~ collect
workers.engine.update:update
workers.engine.update:append_tokens
workers.serve.request_manager:RequestManager.deliver < Engine.step ~ events
workers.serve.session:RouterSession.put_tokens
workers.serve.session:RouterSession.take ~ _outputs
workers.serve.request_manager:RequestManager._serve
router.dispatch.worker_client:WorkerClient._receive ~ SessionResponse
router.dispatch.worker_client:WorkerStream.put
router.dispatch.worker_client:WorkerStream.take ~ _outputs
router.dispatch.attempt:Attempt.poll
router.dispatch.attempt:Attempt._tokens
router.dispatch.execution:RequestExecution.deltas < Attempt.poll
router.dispatch.execution:RequestExecution.run
router.output.processor:OutputProcessor.run ~ deltas
router.output.choice:ChoiceOutput.push
router.output.choice:CompletionText.push ~ ids
router.api.server.grpc_server:GrpcServer._generate < OutputProcessor.run
"""

HANDLE: Final = """
workers.serve.request_manager:RequestManager.submit
workers.tp.kv_group:KvGroup.fetch
workers.tp.kv_group:KvGroup._fetch
workers.transfer.receiver:KvReceiver.fetch
workers.transfer.receiver:KvReceiver._plan
workers.kv_cache.reshard:plan_layout
workers.transfer.shard_stream:ShardStream.__init__ < KvReceiver.fetch
workers.transfer.connections:ReceiverConnections.connect
workers.transfer.receiver:KvReceiver._pull < KvReceiver.fetch
workers.transfer.shard_stream:ShardStream.pull
workers.transfer.connections:ReceiverConnections.get
workers.transfer.shard_stream:ShardStream._transfer < ShardStream.pull
workers.transfer.shard_stream:ShardStream._collect
workers.transfer.shard_stream:ShardStream._receive
workers.transfer.frames:decode
workers.transfer.shared_memory:SharedMemoryConnector.fetch < ShardStream._collect
workers.transfer.shard_stream:ShardWriter.write < ShardStream._collect
workers.model.kv.store:PagedKv.write
workers.transfer.shard_stream:ShardWriter.finish < ShardStream._transfer
workers.transfer.receiver:_merge < KvReceiver._pull
workers.serve.request_manager:RequestManager._fetched < RequestManager.submit
workers.engine.engine:Engine.commit_import
"""

PATHS: Final = {"prompt": (PROMPT, 30, 14), "token": (TOKEN, 21, 13), "KV handle": (HANDLE, 26, 11)}
"""Each path with the most functions and files that it may have."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of a path."""

    module: str
    function: str  # qualified name
    linked_to: str = ""  # an earlier function; empty: the one before
    hand_over: str = ""

    @property
    def name(self) -> str:
        """What a caller writes: the function's own name, of `__init__` the class, of `__call__` an
        instance.
        """
        owner, _, name = self.function.rpartition(".")
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", owner).lower()
        return {"__init__": owner, "__call__": f"_{snake}"}.get(name, name)


def parse(path: str) -> list[Step]:
    """Returns the steps of a path."""
    steps = []
    for line in path.strip().splitlines():
        target, *options = re.split(r" (?=[<~] )", line.strip())
        module, _, function = target.partition(":")
        named = {option[0]: option[2:] for option in options}
        step = Step(
            module=module,
            function=function,
            linked_to=named.get("<", ""),
            hand_over=named.get("~", ""),
        )
        steps.append(step)
    return steps


def source_of(step: Step, root: Path = ROOT) -> str | None:
    """Returns the source of the step's function; None if it does not exist."""
    path = root / f"{step.module.replace('.', '/')}.py"
    if not path.exists():
        return None
    text = path.read_text()
    node: ast.AST | None = ast.parse(text)
    for name in step.function.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = (
            (child for child in ast.walk(node) if isinstance(child, kinds) and child.name == name)
            if node
            else ()
        )
        node = next(iter(found), None)
    return None if node is None else ast.get_source_segment(text, node)


def problems(steps: list[Step], root: Path = ROOT) -> list[str]:
    """Returns one line for each function that does not exist, or is not linked to the one before
    it.
    """
    found = []
    sources: dict[str, str] = {}
    before: Step | None = None
    for step in steps:
        source = source_of(step, root)
        if source is None:
            found.append(f"{step.module}:{step.function} does not exist")
        elif before is not None:
            other = (
                next((one for one in steps if one.function == step.linked_to), before)
                if step.linked_to
                else before
            )
            if not _are_linked(step, source, other, sources.get(other.function, "")):
                found.append(f"{step.function} is not linked to {other.function}")
        sources[step.function] = source or ""
        before = step
    return found


def _are_linked(step: Step, source: str, other: Step, other_source: str) -> bool:
    if step.hand_over:
        return _mentions(source, step.hand_over) and _mentions(other_source, step.hand_over)
    return _mentions(source, other.name) or _mentions(other_source, step.name)


def _mentions(source: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", source) is not None


def count(steps: list[Step]) -> tuple[int, int]:
    """Returns the numbers of different functions and files."""
    return len({(step.module, step.function) for step in steps}), len(
        {step.module for step in steps}
    )


def main() -> None:
    """Prints the counts and the problems of every path."""
    for name, (path, most_functions, most_files) in PATHS.items():
        steps = parse(path)
        functions, files = count(steps)
        print(
            f"{name}: {functions} functions (at most {most_functions}), {files} files (at most "
            f"{most_files})"
        )
        for problem in problems(steps):
            print(f"  {problem}")


if __name__ == "__main__":
    main()
