"""`python -m tandem.workers.bench.transfer`: how fast KV cache moves between two processes of this host, by transport.

Everything is as in a service, but for the models: an exporter with its KV cache in one process, a puller with another
in this one. Beside them, in the same run, a bare gRPC stream of bytes.
"""

import argparse
import asyncio
import gc
import itertools
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import grpc.aio
import torch
from rich.console import Console
from rich.table import Table

from ...proto.channel import bind, peer_channel, peer_server
from ..engine.plan import FirstTokens
from ..kv_cache.layout import KvLayout
from ..malloc import keep_freed_memory
from ..model.kv_store import PagedKv
from ..transfer import connect, wire
from ..transfer.connector import KvMover, add_bytes_method
from ..transfer.receiver import Target, Want
from ..transfer.transports import Means
from ..transfer.wire import FRAME_BYTES, TransferKey

LAYOUT: Final = KvLayout(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, dtype="bfloat16", model="bench")
TOKEN_BYTES: Final = LAYOUT.num_layers * LAYOUT.num_kv_heads * LAYOUT.bytes_per_slot
_BLOCK_SIZE: Final = 16
_EPOCH: Final = 1
_BYTES_METHOD: Final = "/tandem.bench/Bytes"
BARE: Final = "bare gRPC stream"
UNCHECKED: Final = "grpc-unchecked"
_WAIT_SECONDS: Final = 60.0
_MOST_TRIES: Final = 5

Rates = dict[int, float]
"""GB/s by size in MB."""


def make_mover(transport: str, num_tokens: int) -> KvMover:
    """A mover with random KV cache of one long sequence, in blocks 0, 1, 2, ..."""
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    kv = PagedKv(
        LAYOUT,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        device=torch.device("cpu"),
        shared=transport in ("shared", "nixl"),
    )
    kv.data.view(torch.uint8).random_(0, 256)
    return KvMover(
        kv,
        epoch=_EPOCH,
        lease_seconds=_WAIT_SECONDS,
        stall_seconds=_WAIT_SECONDS,
        on_release=lambda sequence_id: None,
        means=Means(transports=() if transport == "grpc" else (transport,)),
    )


async def serve(transport: str, num_tokens: int) -> None:
    """The exporter's process: for every number of tokens on stdin an export, whose id goes to stdout."""
    mover, server = make_mover(transport, num_tokens), peer_server()
    mover.serve_on(server)
    add_bytes_method(server, _BYTES_METHOD, _send_bytes)
    print(bind(server, "127.0.0.1", 0), flush=True)
    await server.start()
    blocks = tuple(range(-(-num_tokens // _BLOCK_SIZE)))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    sequence_id = 0
    while line := await lines.readline():
        sequence_id += 1
        transfer_id = secrets.token_bytes(16)
        mover.exporter.offer(sequence_id, transfer_id, blocks, int(line), b"")
        mover.exporter.progress(sequence_id, int(line))
        mover.exporter.complete(sequence_id, FirstTokens(tokens=(0,)))
        print(transfer_id.hex(), flush=True)


async def _send_bytes(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    frame = os.urandom(FRAME_BYTES)
    async for request in requests:
        left = int(request)
        while left > 0:
            await context.write(frame[:left])
            left -= len(frame)


class TransferLink:
    """The puller's side of two processes."""

    def __init__(self, process: asyncio.subprocess.Process, mover: KvMover, address: str) -> None:
        self._process = process
        self._mover = mover
        self._address = address
        self._channel = peer_channel(address)
        self._bare: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(_BYTES_METHOD)()

    async def warm_up(self, num_tokens: int, transport: str) -> None:
        """Connects, and touches all memory. Raises RuntimeError if there is no such way."""
        for _ in range(_MOST_TRIES):
            with suppress(RuntimeError):
                await self.move(num_tokens, transport)
                return
        await self.move(num_tokens, transport)

    async def move(self, num_tokens: int, transport: str) -> float:
        """Seconds to bring so many tokens. Raises RuntimeError if they came another way."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_tokens}\n".encode())
        transfer_id = bytes.fromhex((await self._process.stdout.readline()).decode())
        target: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
        target.set_result(Target(blocks=tuple(range(self._mover.kv.num_blocks)), num_cached=0))  # type: ignore[attr-defined]
        want = Want(key=TransferKey(transfer_id=transfer_id, epoch=_EPOCH), num_tokens=num_tokens, prefix_hash=b"")
        began = time.perf_counter()
        async with self._mover.puller.fetch([self._address], LAYOUT, want, target) as fetched:
            seconds = time.perf_counter() - began
        if fetched.transport != transport:
            raise RuntimeError(f"{transport} was asked for, but {fetched.transport} was taken")
        return seconds

    async def bare(self, num_bytes: int) -> float:
        """Seconds to bring so many bytes by plain gRPC."""
        began, left = time.perf_counter(), num_bytes
        await self._bare.write(str(num_bytes).encode())
        while left > 0:
            message = await self._bare.read()
            assert isinstance(message, bytes)
            left -= len(message)
        return time.perf_counter() - began

    async def close(self) -> None:
        self._bare.cancel()
        await self._mover.close()
        await self._channel.close()


@asynccontextmanager
async def _link(name: str, num_tokens: int) -> AsyncIterator[TransferLink]:
    command = [sys.executable, "-m", "tandem.workers.bench.transfer", "--serve", name, str(num_tokens)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        link = TransferLink(process, make_mover(_transport(name), num_tokens), address)
        yield link
        await link.close()
    finally:
        process.kill()
        await process.wait()


async def measure(names: list[str], sizes: list[int], repeat: int) -> dict[str, Rates]:
    """Medians, of each transport and of the bare stream; all take turns. `sizes` are in MB. Raises RuntimeError if a
    transport cannot be had."""
    tokens = {size: max(1, size * 1_000_000 // TOKEN_BYTES) for size in sizes}
    found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in (*names, BARE)}
    async with AsyncExitStack() as stack:
        links = {name: await stack.enter_async_context(_link(name, max(tokens.values()))) for name in names}
        for name, link in links.items():
            with _frames(name):
                await link.warm_up(max(tokens.values()), _transport(name))
        for _, (size, num_tokens) in itertools.product(range(repeat), tokens.items()):
            num_bytes = num_tokens * TOKEN_BYTES
            times = {name: await _move(link, name, num_tokens) for name, link in links.items()}
            times[BARE] = await next(iter(links.values())).bare(num_bytes)
            for name, seconds in times.items():
                found[name][size].append(num_bytes / seconds / 1e9)
    return {
        name: {size: statistics.median(rates) for size, rates in by_size.items()} for name, by_size in found.items()
    }


async def _move(link: TransferLink, name: str, num_tokens: int) -> float:
    with _frames(name):
        return await link.move(num_tokens, _transport(name))


@contextmanager
def _frames(name: str) -> Iterator[None]:
    """The frames of UNCHECKED have no checksum, to see what it costs."""
    checksum_of = wire.checksum_of
    if name == UNCHECKED:
        wire.checksum_of = lambda data, before=0: 0
    try:
        yield
    finally:
        wire.checksum_of = checksum_of


def _other_than_grpc(rates: Mapping[str, float]) -> str:
    """The way that is to be measured, in the place of the fastest."""
    return next((name for name in rates if name != "grpc"), "grpc")


def _transport(name: str) -> str:
    return "grpc" if name == UNCHECKED else name


def report(rates: dict[str, Rates], sizes: list[int]) -> Table:
    """One line for each transport."""
    table = Table(title="KV cache between two processes", title_justify="left", header_style="bold")
    table.add_column("transport")
    for size in sizes:
        table.add_column(f"{size} MB, GB/s", justify="right")
        table.add_column("of bare", justify="right")
    for name, by_size in rates.items():
        cells = ((f"{by_size[size]:.2f}", f"{by_size[size] / rates[BARE][size]:.0%}") for size in sizes)
        table.add_row(name, *itertools.chain.from_iterable(cells))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tandem.workers.bench.transfer", description=__doc__)
    parser.add_argument("--transports", nargs="+", default=["grpc", UNCHECKED, "shared", "gloo"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 16, 128], metavar="MB")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    gc.freeze()  # as a service does
    connect.fastest = _other_than_grpc
    if options.serve:
        name, num_tokens = options.serve
        with _frames(name):
            asyncio.run(serve(_transport(name), int(num_tokens)))
    else:
        rates = asyncio.run(measure(options.transports, options.sizes, options.repeat))
        Console().print(report(rates, options.sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
