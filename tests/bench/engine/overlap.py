"""Measures the overlap of KV transfer and prefill: `python -m tandem.tests.bench.engine.overlap`.

A prefill and a decode worker run in their own processes, and this process acts as the router. It
measures the wait between the first token and the moment when the sequence joins the decode worker's
batch. In one case the decode worker pulls KV cache while the prompt is computed. In the other case
it gets the request after the prefill.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.proto.channel import PeerChannel, PeerStream
from tandem.proto.identity import PeerIdentity
from tandem.tests.bench.engine.shapes import HF_CONFIGS, random_weight, write_unread_weights
from tandem.workers.engine.config import Budgets
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.loader import check_checkpoint
from tandem.workers.serve.worker import Worker, WorkerConfig
from tandem.workers.tp.rank import RankConfig

_WAIT_SECONDS = 120.0
_BEAT_SECONDS = 0.005  # between two looks at the delay of an event loop

SessionCall = PeerStream[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


class WorkerSession:
    """Holds a session with one worker, like a router's session."""

    def __init__(self, channel: PeerChannel) -> None:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        self._call: SessionCall = stub.Session()
        self._outputs: deque[worker_pb2.Output] = deque()

    async def send(self, **command: worker_pb2.Submit | worker_pb2.Cancel) -> None:
        """Sends `submit` or `cancel`."""
        await self._call.write(worker_pb2.SessionRequest(**command))  # type: ignore[arg-type]

    async def next(self, request_id: str, event: str) -> worker_pb2.Output:
        """Returns the request's next output of a kind; raises RuntimeError if the request fails."""
        while True:
            while self._outputs:
                output = self._outputs.popleft()
                if output.request_id == request_id and output.HasField("failure"):
                    raise RuntimeError(output.failure.message)
                if output.request_id == request_id and output.WhichOneof("event") == event:
                    return output
            async with asyncio.timeout(_WAIT_SECONDS):
                message = await self._call.read()
            if not isinstance(message, worker_pb2.SessionResponse):
                raise RuntimeError("a worker has ended")
            self._outputs += message.outputs


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Holds the times of one request, in seconds since its submission."""

    first_token: float
    kv_received: float  # the sequence has joined the decode worker's batch
    second_token: float
    received: worker_pb2.KvReceived

    @property
    def wait(self) -> float:
        """Returns the seconds between prefill and decode."""
        return self.kv_received - self.first_token


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """Holds a worker in a process of its own."""

    channel: PeerChannel
    session: WorkerSession
    process: asyncio.subprocess.Process

    async def take_stall(self) -> float:
        """Returns the longest delay of the worker's event loop since the last call, in seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        async with asyncio.timeout(_WAIT_SECONDS):
            return float(await self.process.stdout.readline())


async def measure(
    prefill: WorkerSession, decode: WorkerSession, prompt: Sequence[int], name: str, *, early: bool
) -> Handover:
    """Runs one request; `early` sends it to the decode worker when the prefill begins."""
    submit = greedy_request(name, prompt, worker_pb2.TASK_PREFILL, max_tokens=4)
    began = time.monotonic()
    await prefill.send(submit=submit)
    admitted = (await prefill.next(name, "admitted")).admitted
    pulling = worker_pb2.Submit()
    pulling.CopyFrom(submit)
    pulling.task = worker_pb2.TASK_DECODE
    pulling.kv.CopyFrom(admitted.kv)
    if early:
        await decode.send(submit=pulling)
    await prefill.next(name, "tokens")
    first_token = time.monotonic() - began
    if not early:
        await decode.send(submit=pulling)
    received = (await decode.next(name, "kv_received")).kv_received
    kv_received = time.monotonic() - began
    await decode.next(name, "tokens")
    second_token = time.monotonic() - began
    for session in (decode, prefill):
        await session.send(cancel=worker_pb2.Cancel(request_id=name, attempt=1))
    return Handover(
        first_token=first_token,
        kv_received=kv_received,
        second_token=second_token,
        received=received,
    )


def greedy_request(
    name: str, prompt: Sequence[int], task: worker_pb2.Task, max_tokens: int
) -> worker_pb2.Submit:
    """Returns a request that ends after `max_tokens` tokens."""
    return worker_pb2.Submit(
        request_id=name,
        attempt=1,
        task=task,
        token_ids=prompt,
        max_tokens=max_tokens,
        ignore_eos=True,
        sampling=inference_pb2.SamplingParams(temperature=0, top_p=1),
    )


async def compare(options: argparse.Namespace) -> str:
    """Runs both cases in turns and returns the lines to print."""
    vocab_size = check_checkpoint(options.model).vocab_size
    waits: dict[bool, list[float]] = {True: [], False: []}
    identity = PeerIdentity.generate()
    async with (
        start_worker("prefill", options, identity) as source,
        start_worker("decode", options, identity) as target,
    ):
        for turn in range(-1, options.repeat):
            for early, seconds in waits.items():
                name = f"{turn} {early}"
                prompt = random.Random(name).choices(range(vocab_size), k=options.prompt_tokens)
                found = await measure(source.session, target.session, prompt, name, early=early)
                if turn >= 0:
                    seconds.append(found.wait)
    overlapped, alone = (statistics.median(waits[early]) for early in (True, False))
    received = found.received
    return (
        f"{options.prompt_tokens} prompt tokens, {received.transfer_bytes / 1e6:.1f} MB of KV "
        f"cache over {received.transport}, medians of {options.repeat}\n"
        f"wait if the transfer begins after the prefill  {1000 * alone:6.1f} ms\n"
        f"wait if it overlaps the prefill                {1000 * overlapped:6.1f} ms\n"
        f"remaining share                                {overlapped / alone:6.0%}"
    )


@asynccontextmanager
async def start_worker(
    role: str, options: argparse.Namespace, identity: PeerIdentity
) -> AsyncIterator[WorkerProcess]:
    """Starts a worker, "prefill" or "decode"; at the end it is killed.

    `options` come from `parse`.
    """
    command = [sys.executable, "-m", __spec__.name, *options.arguments, "--serve", role]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "3000"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=environment
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{identity.to_text()}\n".encode())
        address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise RuntimeError("a worker did not start")
        async with PeerChannel(address, identity) as channel:
            yield WorkerProcess(channel=channel, session=WorkerSession(channel), process=process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serve(role: str, options: argparse.Namespace) -> None:
    """Runs a worker's process until stdin ends; prints the longest delay for each line of stdin."""
    rank = RankConfig(
        model=str(options.model),
        identity=PeerIdentity.from_text(sys.stdin.readline()),
        device=options.device,
        kv_cache_bytes=int(options.kv_gib * 2**30),
        nice=10 if role == "prefill" else 0,
        transports=tuple(options.transports),
    )
    config = WorkerConfig(rank=rank, budgets=Budgets(chunk_tokens=options.chunk_tokens))
    reader = "tandem.workers.model.loader.checkpoint_reader"
    with (
        mock.patch(reader, return_value=random_weight) if options.random_weights else nullcontext()
    ):
        worker = await Worker.start(config, worker_id=role, role=role)
    print(worker.address, flush=True)
    delays: list[float] = [0.0]
    watch = asyncio.ensure_future(_watch_loop(delays))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while await lines.readline():
        print(max(delays), flush=True)
        delays[:] = [0.0]
    watch.cancel()


async def _watch_loop(delays: list[float]) -> None:
    """Adds the delay of each beat to `delays`, in seconds."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(_BEAT_SECONDS)
        delays.append(time.monotonic() - began - _BEAT_SECONDS)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options; exits with 2 after one line on stderr if an argument is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine.overlap", description=__doc__
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, metavar="FOLDER")
    which.add_argument("--shape", choices=HF_CONFIGS, help="a model of random weights")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N, of both workers")
    parser.add_argument("--kv-gib", type=float, default=1.0, help="KV cache of each worker")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--transports",
        nargs="*",
        default=[],
        help="transports preferred to grpc: shared, gloo, nixl",
    )
    parser.add_argument("--random-weights", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=("prefill", "decode"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.arguments = arguments
    return options


def with_random_weights(options: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """Returns options for a model of `options.shape`, whose folder it writes."""
    write_unread_weights(folder, options.shape)
    at = options.arguments.index("--shape")
    rest = options.arguments[:at] + options.arguments[at + 2 :]
    return parse([*rest, "--model", str(folder), "--random-weights"])


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0, or 2 after one line on stderr if the model is unusable."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.serve:
            asyncio.run(_serve(options.serve, options))
            return 0
        with TemporaryDirectory() as folder:
            if options.shape:
                options = with_random_weights(options, Path(folder))
            print(asyncio.run(compare(options)))
    except CheckpointError as error:
        print(f"bench_overlap: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
