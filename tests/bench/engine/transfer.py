"""Measures the speed of KV transfers by transport: `python -m tandem.tests.bench.engine.transfer`.

The setup is a service without models: a sender with its KV cache in one process, and a receiver
with its KV cache in this process. The same run also measures a bare gRPC stream of bytes.
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
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import grpc.aio
import torch
from rich.console import Console
from rich.table import Table

from tandem.cluster.certificate import make_peer_tls
from tandem.proto import worker_pb2
from tandem.proto.channel import PeerChannel, PeerServer, PeerStream
from tandem.proto.identity import PeerIdentity
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.host.malloc import keep_freed_memory
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.kv_cache.tables import SequenceKv, TableBlocks
from tandem.workers.model.device import enter_device
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.endpoint import KvEndpoint, add_bytes_method
from tandem.workers.transfer.frames import FRAME_BYTES, FetchTarget
from tandem.workers.transfer.sender import KvSender

LAYOUT: Final = KvLayout.uniform(
    num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, dtype="bfloat16", model="bench"
)
_BLOCK_SIZE: Final = 16
_EPOCH: Final = 1
_BYTES_METHOD: Final = "/tandem.bench/Bytes"
BARE: Final = "bare gRPC stream"
_WAIT_SECONDS: Final = 60.0
_MAX_TRIES: Final = 5

Rates = dict[int, float]
"""GB/s by size in MB."""


def make_endpoint(
    transport: str, num_tokens: int, identity: PeerIdentity, device: str
) -> KvEndpoint:
    """Returns an endpoint with the random KV cache of one long sequence, in blocks 0, 1, 2, ..."""
    kv = PagedKv(
        LAYOUT,
        num_blocks=-(-num_tokens // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        device=torch.device(device),
        shared=device == "cpu" and transport in ("shared", "nixl"),
    )
    kv.data.view(torch.uint8).random_(0, 256)
    return KvEndpoint(
        KvSender(
            TransferContext(
                kv=kv, transports=() if transport == "grpc" else (transport,), device=device
            ),
            epoch=_EPOCH,
            lease_seconds=_WAIT_SECONDS,
            stall_seconds=_WAIT_SECONDS,
            on_release=lambda sequence_id: None,
        ),
        identity,
    )


async def serve(transport: str, num_tokens: int, device: str) -> None:
    """Runs the sender's process.

    Reads the identity from stdin. Then makes an offer for every number of tokens on stdin and
    prints the offer's id.
    """
    identity = PeerIdentity.from_text(sys.stdin.readline())
    endpoint = make_endpoint(transport, num_tokens, identity, device)
    server = PeerServer(identity)
    endpoint.serve_on(server)
    add_bytes_method(server, _BYTES_METHOD, _send_bytes)
    print(server.bind("127.0.0.1", 0), flush=True)
    await server.start()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    for sequence_id in itertools.count():
        if not (line := await lines.readline()):
            return
        transfer_id = secrets.token_bytes(16)
        endpoint.sender.offer(
            sequence_id,
            transfer_id,
            _all_blocks(endpoint),
            int(line),
            b"",
        )
        endpoint.sender.progress(sequence_id, int(line))
        endpoint.sender.complete(sequence_id, FirstTokens(tokens=(0,)))
        print(transfer_id.hex(), flush=True)


def _all_blocks(endpoint: KvEndpoint) -> SequenceKv:
    return SequenceKv((TableBlocks(tuple(range(endpoint.sender.context.kv.num_blocks))),))


async def _send_bytes(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
) -> None:
    frame = os.urandom(FRAME_BYTES)
    async for request in requests:
        left = int(request)
        while left > 0:
            await context.write(frame[:left])
            left -= len(frame)


class TransferBench:
    """Measures one transport on the receiver's side."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        endpoint: KvEndpoint,
        address: str,
        identity: PeerIdentity,
    ) -> None:
        self._name = name
        self._process = process
        self._endpoint = endpoint
        self._address = address
        self._channel = PeerChannel(address, identity)
        self._bare: PeerStream[bytes, bytes] = self._channel.stream_stream(_BYTES_METHOD)()

    async def warm_up(self, num_tokens: int) -> None:
        """Connects and touches all memory; raises RuntimeError if the transport does not work."""
        for left in reversed(range(_MAX_TRIES)):
            try:
                await self.move(num_tokens)
                return
            except RuntimeError:
                if not left:
                    raise

    async def move(self, num_tokens: int) -> float:
        """Moves the KV cache of `num_tokens` tokens and returns the seconds.

        Raises RuntimeError if the receiver used another transport.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_tokens}\n".encode())
        transfer_id = bytes.fromhex((await self._process.stdout.readline()).decode())
        target: asyncio.Future[FetchTarget] = asyncio.get_running_loop().create_future()
        target.set_result(FetchTarget(_all_blocks(self._endpoint)))
        handle = worker_pb2.KvHandle(
            transfer_id=transfer_id,
            epoch=_EPOCH,
            endpoints=[self._address],
            layout=LAYOUT.digest,
            num_tokens=num_tokens,
        )
        began = time.perf_counter()
        async with self._endpoint.receiver.fetch(handle, b"", target) as (_, received):
            seconds = time.perf_counter() - began
        if received.transport != self._name:
            raise RuntimeError(f"expected {self._name}, but {received.transport} was used")
        return seconds

    async def bare(self, num_bytes: int) -> float:
        """Moves `num_bytes` bytes by plain gRPC and returns the seconds."""
        began = time.perf_counter()
        left = num_bytes
        await self._bare.write(str(num_bytes).encode())
        while left > 0:
            message = await self._bare.read()
            assert isinstance(message, bytes)
            left -= len(message)
        return time.perf_counter() - began

    async def close(self) -> None:
        """Closes the connections."""
        self._bare.cancel()
        await self._endpoint.close()
        await self._channel.close()


@asynccontextmanager
async def _started(
    name: str, num_tokens: int, tls: bool, device: str
) -> AsyncIterator[TransferBench]:
    command = [
        sys.executable,
        "-m",
        "tandem.tests.bench.engine.transfer",
        "--device",
        device,
        "--serve",
        name,
        str(num_tokens),
    ]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        identity = PeerIdentity.generate(make_peer_tls("tandem-peer") if tls else None)
        process.stdin.write(f"{identity.to_text()}\n".encode())
        address = (await process.stdout.readline()).decode().strip()
        bench = TransferBench(
            name, process, make_endpoint(name, num_tokens, identity, device), address, identity
        )
        await bench.warm_up(num_tokens)
        yield bench
        await bench.close()
    finally:
        process.kill()
        await process.wait()


async def measure(
    names: list[str], sizes: list[int], repeat: int, *, tls: bool = False, device: str = "cpu"
) -> dict[str, Rates]:
    """Returns the median rates of each transport and of the bare stream, which take turns.

    `sizes` are in MB; both KV caches are on `device`. With `tls` all gRPC is
    encrypted, including the bare stream. Raises RuntimeError if a transport does not work.
    """
    tokens = {size: max(1, size * 1_000_000 // LAYOUT.bytes_per_token) for size in sizes}
    found: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in sizes} for name in (*names, BARE)
    }
    async with AsyncExitStack() as stack:
        benches = {
            name: await stack.enter_async_context(_started(name, max(tokens.values()), tls, device))
            for name in names
        }
        for _, (size, num_tokens) in itertools.product(range(repeat), tokens.items()):
            num_bytes = num_tokens * LAYOUT.bytes_per_token
            times = {name: await bench.move(num_tokens) for name, bench in benches.items()}
            times[BARE] = await next(iter(benches.values())).bare(num_bytes)
            for name, seconds in times.items():
                found[name][size].append(num_bytes / seconds / 1e9)
    return {
        name: {size: statistics.median(rates) for size, rates in by_size.items()}
        for name, by_size in found.items()
    }


def report(rates: dict[str, Rates], sizes: list[int]) -> Table:
    """Returns a table with one line for each transport."""
    table = Table(title="KV cache between two processes", title_justify="left", header_style="bold")
    table.add_column("transport")
    for size in sizes:
        table.add_column(f"{size} MB, GB/s", justify="right")
        table.add_column("of bare", justify="right")
    for name, by_size in rates.items():
        cells = (
            (f"{by_size[size]:.2f}", f"{by_size[size] / rates[BARE][size]:.0%}") for size in sizes
        )
        table.add_row(name, *itertools.chain.from_iterable(cells))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine.transfer", description=__doc__
    )
    parser.add_argument("--transports", nargs="+", default=["grpc", "shared", "gloo"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 16, 128], metavar="MB")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument(
        "--peer-tls", action="store_true", help="encrypt gRPC as with `peer_tls.mode: cluster`"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N, of both KV caches")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    enter_device(options.device)
    keep_freed_memory()
    gc.freeze()  # a service does the same
    if options.serve:
        name, num_tokens = options.serve
        asyncio.run(serve(name, int(num_tokens), options.device))
    else:
        rates = asyncio.run(
            measure(
                options.transports,
                options.sizes,
                options.repeat,
                tls=options.peer_tls,
                device=options.device,
            )
        )
        Console().print(report(rates, options.sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
