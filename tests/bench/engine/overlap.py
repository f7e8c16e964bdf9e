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
from contextlib import asynccontextmanager
from pathlib import Path

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.proto.channel import PeerChannel, PeerStream
from tandem.proto.identity import PeerIdentity
from tandem.workers.engine.config import Budgets
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.loader import check_checkpoint
from tandem.workers.serve.worker import Worker, WorkerConfig
from tandem.workers.tp.rank import RankConfig

_WAIT_SECONDS = 120.0

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


async def measure(
    prefill: WorkerSession, decode: WorkerSession, prompt: Sequence[int], name: str, *, early: bool
) -> tuple[float, worker_pb2.KvReceived]:
    """Runs one request; returns the seconds between prefill and decode, and the transfer's stats.

    `early` sends the request to the decode worker when the prefill begins.
    """
    submit = worker_pb2.Submit(
        request_id=name,
        attempt=1,
        task=worker_pb2.TASK_PREFILL,
        token_ids=prompt,
        max_tokens=4,
        ignore_eos=True,
        sampling=inference_pb2.SamplingParams(temperature=0, top_p=1),
    )
    await prefill.send(submit=submit)
    admitted = (await prefill.next(name, "admitted")).admitted
    pulling = worker_pb2.Submit()
    pulling.CopyFrom(submit)
    pulling.task = worker_pb2.TASK_DECODE
    pulling.kv.CopyFrom(admitted.kv)
    if early:
        await decode.send(submit=pulling)
    await prefill.next(name, "tokens")
    began = time.monotonic()
    if not early:
        await decode.send(submit=pulling)
    received = (await decode.next(name, "kv_received")).kv_received
    seconds = time.monotonic() - began
    await decode.next(name, "tokens")
    for session in (decode, prefill):
        await session.send(cancel=worker_pb2.Cancel(request_id=name, attempt=1))
    return seconds, received


async def compare(options: argparse.Namespace) -> str:
    """Runs both cases in turns and returns the lines to print."""
    vocab_size = check_checkpoint(options.model).vocab_size
    waits: dict[bool, list[float]] = {True: [], False: []}
    identity = PeerIdentity.generate()
    async with (
        _worker("prefill", options, identity) as source,
        _worker("decode", options, identity) as target,
    ):
        for turn in range(-1, options.repeat):
            for early, seconds in waits.items():
                name = f"{turn} {early}"
                prompt = random.Random(name).choices(range(vocab_size), k=options.prompt_tokens)
                wait, received = await measure(source, target, prompt, name, early=early)
                if turn >= 0:
                    seconds.append(wait)
    overlapped, alone = (statistics.median(waits[early]) for early in (True, False))
    return (
        f"{options.prompt_tokens} prompt tokens, {received.transfer_bytes / 1e6:.1f} MB of KV "
        f"cache over {received.transport}, medians of {options.repeat}\n"
        f"wait if the transfer begins after the prefill  {1000 * alone:6.1f} ms\n"
        f"wait if it overlaps the prefill                {1000 * overlapped:6.1f} ms\n"
        f"remaining share                                {overlapped / alone:6.0%}"
    )


@asynccontextmanager
async def _worker(
    role: str, options: argparse.Namespace, identity: PeerIdentity
) -> AsyncIterator[WorkerSession]:
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
            yield WorkerSession(channel)
    finally:
        process.kill()
        await process.wait()


async def _serve(role: str, options: argparse.Namespace) -> None:
    rank = RankConfig(
        model=str(options.model),
        identity=PeerIdentity.from_text(sys.stdin.readline()),
        kv_cache_bytes=2**30,
        nice=10 if role == "prefill" else 0,
        transports=tuple(options.transports),
    )
    config = WorkerConfig(rank=rank, budgets=Budgets(chunk_tokens=options.chunk_tokens))
    worker = await Worker.start(config, worker_id=role, role=role)
    print(worker.address, flush=True)
    await worker.failed.wait()


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0, or 2 after one line on stderr if the model is unusable."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine.overlap", description=__doc__
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--transports",
        nargs="*",
        default=[],
        help="transports preferred to grpc: shared, gloo, nixl",
    )
    parser.add_argument("--serve", choices=("prefill", "decode"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if options.serve:
            asyncio.run(_serve(options.serve, options))
        else:
            print(asyncio.run(compare(options)))
    except CheckpointError as error:
        print(f"bench_overlap: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
