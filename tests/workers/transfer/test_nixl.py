"""Memory of another worker, read by NIXL: byte for byte, no wait without end. Where it is not
installed, the transport is tested over fake bindings, and the library itself is not.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tandem.proto import worker_pb2
from tandem.tests.peers import IDENTITY, peer_server
from tandem.tests.waits import NEVER, START, WAIT, line_of
from tandem.tests.workers.spans import read_now, span
from tandem.tests.workers.transfer import fake_nixl
from tandem.tests.workers.transfer.played import EPOCH, handle, one_table, placed, sender_of
from tandem.tests.workers.transfer.test_unequal import NUM_TOKENS, Transfer, layout_of
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import KvLayout, KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer import nixl, nixl_agent
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.endpoint import KvEndpoint
from tandem.workers.transfer.frames import (
    FRAME_BYTES,
    Commit,
    Data,
    TransferError,
    TransferKey,
    TransportError,
    decode,
)
from tandem.workers.transfer.nixl import NixlConnector
from tandem.workers.transfer.nixl_agent import NixlPeer, NixlReader, available

installed = pytest.mark.skipif(not available(), reason="NIXL is not installed")

SIZES = [1 << 20, 3 << 20]  # of the sender's regions
STAGING = 2 << 20
TIMEOUT = 2.0

SENDER = """
import json, sys
from tandem.tests.workers.transfer.test_nixl import regions
from tandem.workers.transfer.nixl_agent import NixlMemory
memory = NixlMemory(regions(), devices="lo")
print(json.dumps(memory.describe().hex()), flush=True)
sys.stdin.readline()
"""


def regions() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES
    ]


@contextmanager
def sender_process(transports: str) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "UCX_TLS": transports},
    )
    try:
        yield process, bytes.fromhex(json.loads(line_of(process)))
    finally:
        process.kill()
        process.communicate(timeout=WAIT)


@asynccontextmanager
async def reading(description: bytes) -> AsyncIterator[NixlPeer]:
    reader = NixlReader(timeout=TIMEOUT, devices="lo")
    try:
        yield await reader.connect(description, staging_bytes=STAGING)
    finally:
        reader.close()
        reader._thread.shutdown()


@pytest.fixture(params=["all", "tcp"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Within a host UCX copies from process to process; over a network without RDMA the peer's
    threads help.
    """
    name = str(request.param)
    monkeypatch.setenv("UCX_TLS", name)
    return name


@installed
async def test_pieces_arrive_in_order(transports: str) -> None:
    whole = torch.cat(regions()).numpy().tobytes()
    with sender_process(transports) as (_, description):
        assert len(description) < 4096
        async with reading(description) as peer:
            for size, step in ((2048, 3), (6144, 5), (STAGING, 1)):
                count = STAGING // size
                starts = [
                    (index * step * size + 1) % (SIZES[1] - size + 1) + SIZES[0]
                    for index in range(count)
                ]
                pieces = [(start, size) for start in starts]
                expected = b"".join(whole[start : start + size] for start in starts)
                assert bytes(await peer.read(pieces)) == expected
            pieces = [(SIZES[0] - 5, 5), (SIZES[0], 7), (0, 1), (sum(SIZES) - 1, 1)]
            expected = b"".join(whole[start : start + size] for start, size in pieces)
            assert bytes(await peer.read(pieces)) == expected


@installed
async def test_a_reader_has_many_peers(transports: str) -> None:
    whole = torch.cat(regions()).numpy().tobytes()
    with (
        sender_process(transports) as (_, one),
        sender_process(transports) as (other_process, other),
    ):
        async with reading(one) as peer:
            second = await peer._reader.connect(other, staging_bytes=100)
            views = await asyncio.gather(peer.read([(9, 50)]), second.read([(7, 60)]))
            assert [bytes(view) for view in views] == [whole[9:59], whole[7:67]]
            other_process.kill()
            other_process.wait(WAIT)
            with pytest.raises(TransferError):
                await second.read([(7, 60)])
            assert bytes(await peer.read([(9, 50)])) == whole[9:59]
            twin = await peer._reader.connect(one, staging_bytes=100)
            peer.close()
            peer.close()
            assert bytes(await twin.read([(9, 50)])) == whole[9:59]  # one agent serves both
            twin.close()
            with pytest.raises(TransferError, match="lost"):
                await peer.read([(9, 50)])
            again = await peer._reader.connect(one, staging_bytes=100)
            assert bytes(await again.read([(9, 50)])) == whole[9:59]


@installed
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_peer_is_noticed(transports: str, how: signal.Signals) -> None:
    with sender_process(transports) as (process, description):
        async with reading(description) as peer:
            await peer.read([(0, 1)])
            process.send_signal(how)
            if how is signal.SIGKILL:
                process.wait(WAIT)
            async with asyncio.timeout(WAIT):
                if how is signal.SIGSTOP and transports == "all":
                    await peer.read(
                        [(SIZES[0], STAGING)]
                    )  # the kernel reads its memory, whether it runs or not
                else:
                    with pytest.raises(TransferError):
                        await peer.read([(SIZES[0], STAGING)])
                    with pytest.raises(TransferError, match="lost"):
                        await peer.read([(0, 1)])


@installed
async def test_pieces_outside_are_refused() -> None:
    with sender_process("all") as (_, description):
        async with reading(description) as peer:
            total = sum(SIZES)
            outside = [
                (total, 1),
                (total - 1, 2),
                (SIZES[0] - 1, 2),
                (0, 0),
                (2**63, 2**63),
                (2**64 - 1, 2),
            ]
            for piece in outside:
                with pytest.raises(ValueError, match="outside"):
                    await peer.read([(0, 1), piece])
            with pytest.raises(ValueError, match="larger"):
                await peer.read([(0, SIZES[0]), (SIZES[0], SIZES[1])])
            await peer.read([(total - 1, 1)])


@installed
async def test_impossible_descriptions() -> None:
    with sender_process("all") as (_, description):
        async with reading(description) as peer:
            for wrong in (
                b"",
                b"x" * 50,
                description[:-1],
                b"\x92\xc4\x00\x90",
                b"\x92\xa0\x91\x93\x01\x01\x00",
            ):
                with pytest.raises(TransferError):
                    await peer._reader.connect(wrong, staging_bytes=10)
            await peer.read([(0, 1)])


def busy_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@installed
async def test_threads_sleep_and_end() -> None:
    before = set(threading.enumerate()), len(os.listdir("/proc/self/task"))
    with sender_process("all") as (process, description):
        async with reading(description) as peer:
            await peer.read([(SIZES[0], STAGING)])
            busy = busy_seconds(process.pid), busy_seconds(os.getpid())
            began = time.monotonic()
            while time.monotonic() - began < 1:
                await asyncio.sleep(0.2)
            assert busy_seconds(process.pid) - busy[0] < 0.3
            assert busy_seconds(os.getpid()) - busy[1] < 0.3
        del peer
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/task"))) == before


# --- as a transport
# --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fake", pytest.param("installed", marks=installed)])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fake":
        monkeypatch.setattr(nixl, "available", lambda: True)
        monkeypatch.setattr(nixl_agent, "_bindings", lambda: fake_nixl)


async def test_a_library_that_cannot_be_loaded_is_as_good_as_none_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """KV cache moves over gRPC."""
    package = tmp_path / "unloadable_nixl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_bindings.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nixl_agent, "_MODULES", ("unloadable_nixl", "absent_nixl"))
    nixl_agent._bindings.cache_clear()
    try:
        transfer = Transfer(layout_of(4), 1, 1, 8, 0, transports=lambda rank: ("nixl",))
        with caplog.at_level(logging.INFO, "tandem.workers.transfer"):
            for _ in range(2):
                assert not nixl_agent.available()
            (fetched,) = await transfer.run()
        transfer.check()
        with pytest.raises(OSError, match="NIXL is not installed"):
            NixlReader(timeout=1.0)
    finally:
        nixl_agent._bindings.cache_clear()
    assert fetched.transport == "grpc"
    lines = [record.getMessage() for record in caplog.records if "nixl" in record.getMessage()]
    assert lines == [
        "no KV transport nixl: unloadable_nixl cannot be loaded: libcudart.so.13: no such file"
    ]


@pytest.mark.parametrize("source_tp", [1, 2])
@pytest.mark.parametrize(("source_block", "num_cached"), [(8, 0), (16, 21)])
async def test_ranks_move_kv_cache(
    source_tp: int, source_block: int, num_cached: int, library: None
) -> None:
    transfer = Transfer(
        layout_of(4), source_tp, 1, source_block, num_cached, transports=lambda rank: ("nixl",)
    )
    (fetched,) = await transfer.run()
    transfer.check()
    moved = span(transfer.targets[0], num_cached, NUM_TOKENS - num_cached)
    assert (fetched.transport, fetched.transfer_bytes) == ("nixl", moved.size(transfer.layout))
    assert transfer.released == [1]


async def test_what_is_larger_than_the_staging_comes_in_parts(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = 2 * 1024 * 1024
    monkeypatch.setattr(nixl, "_STAGING_BYTES", staging)
    layout = KvLayout.uniform(
        num_layers=2, num_heads=8, num_kv_heads=8, head_dim=1024, dtype="bfloat16", model="m"
    )
    kv = PagedKv(layout, num_blocks=16, block_size=16, device=torch.device("cpu"), shared=True)
    kv.data.view(torch.uint8).random_(0, 256)
    context = TransferContext(kv=kv, transports=("nixl",))
    description = (
        await NixlConnector.listen(context, "nixl", lambda announcement: None)
    ).description()
    memory = await NixlConnector.connect(context, "nixl", description)

    async def read(blocks: tuple[int, ...], part: KvSpan) -> memoryview:
        return await memory.fetch(0, TableBlocks(blocks), cast(Data, part), memoryview(b""))

    blocks, part = (9, 3, 4, 15), span(kv, 5, 50)
    assert part.size(layout) > staging
    assert await read(blocks, part) == read_now(kv, blocks, part)
    one_slot = replace(part, first_slot=5, num_slots=1, first_layer=1, num_layers=1)
    views = await asyncio.gather(*(read(blocks, each) for each in (one_slot, part)))  # take turns
    assert views == [read_now(kv, blocks, one_slot), read_now(kv, blocks, part)]
    wrong: list[dict[str, int]] = [
        {"first_token": 30},
        {"num_layers": 3},
        {"first_slot": 1},
        {"num_tokens": 0},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="not within"):
            await read(blocks, replace(part, **change))
    with pytest.raises(ValueError, match="block"):
        await read((9, 3, 4, 16), part)
    for change in ({"num_blocks": 15}, {"num_blocks": 0}, {"tp": 2}):
        with pytest.raises(ValueError, match=r"are not|blocks have"):
            await NixlConnector.connect(context, "nixl", description | change)
    memory.close()
    with pytest.raises(TransportError):
        await read(blocks, part)
    await context.close()


async def test_a_span_across_blocks_that_are_larger_than_the_staging(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "_STAGING_BYTES", 64 * 1024)
    layout = KvLayout.uniform(
        num_layers=1, num_heads=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="m"
    )
    kv = PagedKv(layout, num_blocks=3, block_size=1024, device=torch.device("cpu"), shared=True)
    kv.data.view(torch.uint8).random_(0, 256)
    context = TransferContext(kv=kv, transports=("nixl",))
    listening = await NixlConnector.listen(context, "nixl", lambda announcement: None)
    memory = await NixlConnector.connect(context, "nixl", listening.description())
    part = span(kv, 900, 250)
    assert part.size(layout) <= FRAME_BYTES
    found = await memory.fetch(0, TableBlocks((2, 0)), cast(Data, part), memoryview(b""))
    assert found == read_now(kv, (2, 0), part)
    memory.close()
    await context.close()


async def withdrawn_at_commit() -> worker_pb2.KvReceived:
    transfer = Transfer(layout_of(4), 1, 1, transports=lambda rank: ("nixl",))
    (sender,) = transfer.senders

    async def hook(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in frames:
            if isinstance(decode(frame)[1], Commit):
                sender.withdraw(1)
            yield frame

    sender.frame_hook = hook
    try:
        (fetched,) = await transfer.run()
    finally:
        await transfer.disconnect()
    return fetched


async def test_a_copy_of_blocks_that_were_freed_is_refused(library: None) -> None:
    with pytest.raises(TransferError, match="withdrawn"):
        await withdrawn_at_commit()


async def test_without_the_lease_table_it_would_be_taken(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(nixl, "check_entry", lambda content, table: None)
    fetched = await withdrawn_at_commit()
    assert fetched.transport == "nixl"


async def test_a_peer_that_is_lost_costs_nothing_but_time(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Transfer(layout_of(4), 1, 1, transports=lambda rank: ("nixl",))

    async def lost(self: NixlPeer, pieces: Any) -> memoryview:
        raise TransportError("KV peer lost")

    monkeypatch.setattr(NixlPeer, "read", lost)
    transfer.complete()
    fetched = await transfer.fetch(0)
    transfer.check()
    assert transfer.receivers[0].connections.transports == {}
    await transfer.disconnect()
    assert fetched.transport == "grpc"


async def test_a_sender_that_cannot_open_it_is_reached_by_grpc(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError("NIXL: no")

    monkeypatch.setattr(nixl, "NixlMemory", fails)
    transfer = Transfer(layout_of(4), 1, 1, transports=lambda rank: ("nixl",))
    (fetched,) = await transfer.run()
    transfer.check()
    assert fetched.transport == "grpc"


async def test_a_rank_opens_the_library_once(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    true = nixl_agent._Agent.__init__

    def counted(self: Any, **options: Any) -> None:
        made.append("sends" if options["serves"] else "reads")
        true(self, **options)

    monkeypatch.setattr(nixl_agent._Agent, "__init__", counted)
    transfer = Transfer(layout_of(8), 4, 1, transports=lambda rank: ("nixl",))
    await transfer.run()
    transfer.check()
    assert sorted(made) == ["reads", *["sends"] * 4]


SERVER = """
import asyncio
from tandem.tests.workers.transfer.test_nixl import serve
asyncio.run(serve())
"""
LAYOUT = layout_of(4)
KEYS = [TransferKey(transfer_id=bytes([number]) * 16, epoch=EPOCH) for number in range(2)]
BLOCKS = ((5, 1, 3), (0, 7, 2))  # of each transfer, on both sides


def endpoint_of(seed: int) -> KvEndpoint:
    kv = PagedKv(LAYOUT, num_blocks=8, block_size=16, device=torch.device("cpu"), shared=True)
    kv.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return KvEndpoint(sender_of(kv, ("nixl",), stall_seconds=NEVER), IDENTITY)


async def serve() -> None:
    """One cache on offer that is done, and one of which only half will ever be."""
    there, server = endpoint_of(1), peer_server()
    there.serve_on(server)
    for number, (key, blocks) in enumerate(zip(KEYS, BLOCKS, strict=True)):
        there.sender.offer(number, key.transfer_id, one_table(blocks), NUM_TOKENS, b"hash")
    there.sender.progress(0, NUM_TOKENS)
    there.sender.complete(0, FirstTokens(tokens=(42,)))
    there.sender.progress(1, NUM_TOKENS // 2)
    print(server.bind("127.0.0.1", 0), flush=True)
    await server.start()
    await asyncio.Event().wait()


async def fetch(here: KvEndpoint, address: str, number: int) -> worker_pb2.KvReceived:
    offered = handle(KEYS[number], [address], LAYOUT, NUM_TOKENS)
    async with here.receiver.fetch(offered, b"hash", placed(BLOCKS[number])) as (_, received):
        return received


@installed
async def test_between_processes_until_one_is_killed(transports: str) -> None:
    here, expected = endpoint_of(2), endpoint_of(1).sender.context.kv
    own = here.sender.context.kv
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START):
            endpoint = (await process.stdout.readline()).decode().strip()
            assert (await fetch(here, endpoint, 0)).transport == "nixl"
        whole, half = span(own, 0, NUM_TOKENS), span(own, 0, NUM_TOKENS // 2)
        assert read_now(own, BLOCKS[0], whole) == read_now(expected, BLOCKS[0], whole)
        fetching = asyncio.create_task(fetch(here, endpoint, 1))
        async with asyncio.timeout(WAIT):
            while read_now(own, BLOCKS[1], half) != read_now(expected, BLOCKS[1], half):
                await asyncio.sleep(0.002)
        process.kill()
        async with asyncio.timeout(WAIT):  # before the stall's deadline
            with pytest.raises(TransferError):
                await fetching
            while here.receiver.connections.transports:
                await asyncio.sleep(0.002)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        async with asyncio.timeout(WAIT):
            await process.wait()
            await here.close()
