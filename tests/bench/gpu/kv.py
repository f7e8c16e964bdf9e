"""Measures reads, writes and transfers of the KV cache."""

import asyncio
import random
import statistics
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from tandem.tests.bench.engine import transfer
from tandem.tests.bench.gpu.bench import NEEDS_GPU, Bench, Stopwatch
from tandem.tests.workers.spans import span
from tandem.workers.kv_cache.layout import KvLayout, KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.costs.measure import synchronize
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.tp.process_group import TpGroup

DEVICE_TRANSPORTS: Final = ("ipc",)
"""The transports between two processes with one GPU; NCCL refuses two ranks on one."""

_ROUNDS: Final = 9

Call = Callable[[], Awaitable[object]]


def measure(bench: Bench) -> None:
    """Measures the store, a group of one rank, and transfers between two processes."""
    _last_block(bench)
    _reads_and_writes(bench)
    _lonely_group(bench)
    names = ["grpc", *DEVICE_TRANSPORTS] if bench.is_gpu else ["shared"]
    sizes = bench.pick([1, 128, 1024], [1])
    for name in names:
        rates = asyncio.run(transfer.measure([name], sizes, 3, device=bench.device))
        for transport, by_size in rates.items():
            for size, rate in by_size.items():
                bench.row(f"transfer over {transport}, {size} MB", gb_per_s=rate)
    if not bench.is_gpu:
        bench.row("transfer between two processes on one GPU", note=NEEDS_GPU)


def _last_block(bench: Bench) -> None:
    """Checks the addresses of a cache of more than 2**32 bytes."""
    num_blocks = bench.pick(20_000, 200)
    kv = _make_kv(bench, num_blocks)
    synchronize(bench.torch_device)  # the kernels that fill 42 GB with zeros still run
    part = span(kv, 0, kv.block_size)
    data = random.Random(0).randbytes(part.size(kv.layout))
    kv.write(TableBlocks((0,)), part, memoryview(bytes(len(data))))
    kv.write(TableBlocks((num_blocks - 1,)), part, memoryview(data))
    are_equal = bytes(asyncio.run(_read(kv, (num_blocks - 1,), part))) == data
    bench.row("the last block holds its bytes", blocks=num_blocks, equal=are_equal)
    if not are_equal:
        raise RuntimeError(f"block {num_blocks - 1} of {num_blocks} holds other bytes")


def _make_kv(bench: Bench, num_blocks: int) -> PagedKv:
    layout = KvLayout(layers=bench.config.layers, dtype="bfloat16", model="")
    return PagedKv(layout, num_blocks=num_blocks, block_size=16, device=bench.torch_device)


def _reads_and_writes(bench: Bench) -> None:
    """Measures a read and a write of about a MiB, idle and beside decodes."""
    context = bench.pick(1024, 64)
    batch = bench.pick(32, 2)
    runner = bench.load(batch * (context // 16 + 32))
    kv = runner.runner.kv
    token_bytes = kv.layout.bytes_per_token
    num_tokens = max(1, min(context, 2**20 // token_bytes))
    blocks = tuple(range(-(-num_tokens // kv.block_size)))
    part = span(kv, 0, num_tokens)
    data = memoryview(bytes(asyncio.run(_read(kv, blocks, part))))

    async def write() -> None:
        kv.write(TableBlocks(blocks), part, data)

    calls: dict[str, Call] = {"read": lambda: _read(kv, blocks, part), "write": write}
    for name, call in calls.items():
        bench.row(f"{name} of {len(data) / 2**20:.2f} MiB, idle", **asyncio.run(_times(call)))
    busy = threading.Event()
    done = threading.Event()

    def decode() -> None:
        while not done.is_set():
            busy.set()
            runner.decode(batch, context, 50)

    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(decode)
        try:
            busy.wait(bench.seconds)
            for name, call in calls.items():
                bench.row(f"{name}, beside decodes of {batch}", **asyncio.run(_times(call)))
        finally:
            done.set()
        decoding.result()  # raises the exception of a decode


async def _read(kv: PagedKv, blocks: Sequence[int], part: KvSpan) -> memoryview:
    return await kv.read(TableBlocks(tuple(blocks)), part)


async def _times(call: Call) -> dict[str, float]:
    times = []
    for _ in range(_ROUNDS):
        clock = Stopwatch()
        await call()
        times.append(clock.ms)
    return {"median_ms": statistics.median(times), "max_ms": max(times)}


def _lonely_group(bench: Bench) -> None:
    """Sums over a group of one rank; on a GPU over NCCL and within a graph."""
    kind = bench.torch_device.type
    group = TpGroup.listen(host="127.0.0.1", size=1, device=kind, timeout=30, start_timeout=30)
    group.connect()
    x = torch.ones(8, device=bench.torch_device)  # [8]
    _check_sum(bench, "all-reduce of one rank", group.all_reduce(x), 8.0)
    if not bench.is_gpu:
        bench.row("all-reduce of one rank in a graph", note=NEEDS_GPU)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = group.all_reduce(x * 2)
    x.fill_(5)
    graph.replay()
    _check_sum(bench, "all-reduce of one rank in a graph", y, 80.0)


def _check_sum(bench: Bench, name: str, x: torch.Tensor, expected: float) -> None:
    found = x.sum().item()
    bench.row(name, sum=found)
    if found != expected:
        raise RuntimeError(f"{name}: the sum is {found}, expected {expected}")
