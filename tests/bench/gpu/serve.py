"""Measures a prefill and a decode worker in two processes on one device, without Ray."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tandem.proto import worker_pb2
from tandem.proto.identity import PeerIdentity
from tandem.tests.bench.engine import overlap
from tandem.tests.bench.engine.overlap import (
    WorkerProcess,
    WorkerSession,
    greedy_request,
    start_worker,
)
from tandem.tests.bench.gpu.bench import Bench
from tandem.tests.bench.gpu.kv import DEVICE_TRANSPORTS

_ROUNDS: Final = 3
_STREAM_PROMPT: Final = 16  # tokens
_STREAM_TOKENS: Final = 4_000
_FAILURE_SECONDS: Final = 60.0


def measure(bench: Bench) -> None:
    """Measures each transport with two lengths of prompts; over gRPC, kills the prefill worker.

    Raises RuntimeError if a transport does not work.
    """
    with TemporaryDirectory() as folder:
        asyncio.run(_measure(bench, "grpc", Path(folder), then_kill=True))
        for transport in DEVICE_TRANSPORTS if bench.is_gpu else ():
            asyncio.run(_measure(bench, transport, Path(folder)))


@asynccontextmanager
async def _pair(
    bench: Bench, transport: str, folder: Path
) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    """Starts the two workers."""
    arguments = ["--shape", bench.shape, "--device", bench.device]
    arguments += ["--kv-gib", bench.pick("8", "0.25"), "--chunk-tokens", str(bench.chunk)]
    arguments += [] if transport == "grpc" else ["--transports", transport]
    options = overlap.with_random_weights(overlap.parse(arguments), folder)
    identity = PeerIdentity.generate()
    async with (
        start_worker("prefill", options, identity) as prefill,
        start_worker("decode", options, identity) as decode,
    ):
        yield prefill, decode


async def _measure(bench: Bench, transport: str, folder: Path, *, then_kill: bool = False) -> None:
    async with _pair(bench, transport, folder) as (prefill, decode):
        for length in bench.pick((2048, 8192), (100,)):
            for streams in (0, bench.pick(8, 2)):
                await _requests(bench, prefill, decode, transport, length, streams)
        if then_kill:
            await _kill(bench, prefill, decode)


async def _requests(
    bench: Bench,
    prefill: WorkerProcess,
    decode: WorkerProcess,
    transport: str,
    length: int,
    streams: int,
) -> None:
    """Runs prompts of a length, one after the other, beside streams of the decode worker."""
    name = f"{transport}, prompt of {length}, {streams} streams"
    found = []
    async with _streams(bench, decode, streams) as gaps:
        for turn in range(-1, _ROUNDS):
            label = f"{name} {turn}"
            prompt = _prompt(bench, length, label)
            if turn == 0:
                gaps.clear()
                for worker in (prefill, decode):
                    await worker.take_stall()
            each = await overlap.measure(prefill.session, decode.session, prompt, label, early=True)
            if turn >= 0:
                found.append(each)
    used = found[-1].received.transport
    if used != transport:
        raise RuntimeError(f"{name}: expected {transport}, but {used} was used")
    stalls = [await worker.take_stall() for worker in (prefill, decode)]
    bench.row(
        name,
        mb=found[-1].received.transfer_bytes / 1e6,
        first_token_ms=statistics.median(each.first_token for each in found) * 1e3,
        second_token_ms=statistics.median(each.second_token for each in found) * 1e3,
        prefill_stall_ms=stalls[0] * 1e3,
        decode_stall_ms=stalls[1] * 1e3,
        **(
            {"itl_ms": statistics.median(gaps) * 1e3, "itl_max_ms": max(gaps) * 1e3} if gaps else {}
        ),
    )


@asynccontextmanager
async def _streams(bench: Bench, decode: WorkerProcess, count: int) -> AsyncIterator[list[float]]:
    """Runs streams on the decode worker; yields the gaps between the tokens of the first."""
    gaps: list[float] = []
    if not count:
        yield gaps
        return
    session = WorkerSession(decode.channel)
    names = [f"stream {random.random()}" for _ in range(count)]
    for name in names:
        prompt = _prompt(bench, _STREAM_PROMPT, name)
        request = greedy_request(name, prompt, worker_pb2.TASK_COLOCATED, _STREAM_TOKENS)
        await session.send(submit=request)
    reader = asyncio.ensure_future(_read_gaps(session, names[0], gaps))
    try:
        yield gaps
    finally:
        reader.cancel()  # this ends the session, and the worker drops its requests
        with suppress(asyncio.CancelledError):
            await reader


async def _read_gaps(session: WorkerSession, name: str, gaps: list[float]) -> None:
    await session.next(name, "tokens")
    last = time.monotonic()
    while True:
        await session.next(name, "tokens")
        now = time.monotonic()
        gaps.append(now - last)
        last = now


async def _kill(bench: Bench, prefill: WorkerProcess, decode: WorkerProcess) -> None:
    """Kills the prefill worker while the decode worker pulls; that one must go on."""
    length = bench.pick(8192, 300)
    prompt = _prompt(bench, length, "victim")
    submit = greedy_request("victim", prompt, worker_pb2.TASK_PREFILL, max_tokens=4)
    await prefill.session.send(submit=submit)
    submit.kv.CopyFrom((await prefill.session.next("victim", "admitted")).admitted.kv)
    prefill.process.kill()
    submit.task = worker_pb2.TASK_DECODE
    began = time.monotonic()
    await decode.session.send(submit=submit)
    try:
        async with asyncio.timeout(_FAILURE_SECONDS):
            await decode.session.next("victim", "tokens")
        outcome = "tokens"
    except RuntimeError as error:
        outcome = f"failure: {error}"
    seconds = time.monotonic() - began
    request = greedy_request(
        "after", _prompt(bench, 8, "after"), worker_pb2.TASK_COLOCATED, max_tokens=2
    )
    await decode.session.send(submit=request)
    await decode.session.next("after", "tokens")
    bench.row("the prefill worker is killed", outcome=outcome, seconds=seconds, decodes_on=True)


def _prompt(bench: Bench, length: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(bench.config.vocab_size), k=length)
