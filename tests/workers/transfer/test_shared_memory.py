"""KV cache read out of another worker's memory, in the host's or a GPU's: byte for byte, and never
after its blocks were freed.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.proto import worker_pb2
from tandem.tests.waits import WAIT, line_of
from tandem.tests.workers.spans import read_now, span
from tandem.tests.workers.stream_model import run_out_of_memory
from tandem.tests.workers.transfer.played import (
    EPOCH,
    Calls,
    handle,
    one_table,
    placed,
    sender_of,
)
from tandem.tests.workers.transfer.played_ipc import Held, play_ipc
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.host.streams import DeviceData
from tandem.workers.kv_cache.layout import KvLayout, KvSpan
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv.gpu import GpuKv
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer import leases, shared_memory
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.frames import (
    BlockTable,
    Commit,
    Data,
    FetchTarget,
    TransferError,
    TransferKey,
    decode,
    encode,
)
from tandem.workers.transfer.leases import LeaseTable
from tandem.workers.transfer.receiver import KvReceiver
from tandem.workers.transfer.sender import FrameHook
from tandem.workers.transfer.shared_memory import IpcConnector, SharedMemoryConnector

LAYOUT = KvLayout.uniform(
    num_layers=3, num_heads=2, num_kv_heads=2, head_dim=4, dtype="bfloat16", model="m"
)


def memory(
    block_size: int = 4, num_blocks: int = 16, seed: int | None = None, *, is_shared: bool = True
) -> PagedKv:
    kv = PagedKv(
        LAYOUT,
        num_blocks=num_blocks,
        block_size=block_size,
        device=torch.device("cpu"),
        shared=is_shared,
    )
    if seed is not None:
        kv.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return kv


@dataclass
class P2pGroup:
    """A sender and a receiver, and the frames that went between them."""

    source: PagedKv
    target: PagedKv
    transport: str
    hook: FrameHook | None = None
    frames: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.released: list[int] = []
        transports = (self.transport,)
        self.sender = sender_of(self.source, transports, self.released, frame_hook=self._spy)
        self.calls = Calls({"there": self.sender})
        context = TransferContext(kv=self.target, transports=transports)
        self.receiver = KvReceiver(context, stall_seconds=WAIT, channel=self.calls.channel)

    async def _spy(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in self.hook(frames) if self.hook else frames:
            self.frames.append(decode(frame)[1:])
            yield frame

    async def move(
        self,
        blocks: tuple[int, ...],
        into: tuple[int, ...],
        num_tokens: int,
        cached: int = 0,
        chunk: int = 1000,
    ) -> worker_pb2.KvReceived:
        key = TransferKey(transfer_id=b"0123456789abcdef", epoch=EPOCH)
        self.sender.offer(1, key.transfer_id, one_table(blocks), num_tokens, b"hash")
        fetching = asyncio.create_task(
            self._fetch(handle(key, ["there"], LAYOUT, num_tokens), placed(into, cached))
        )
        for ready in range(chunk, num_tokens + chunk, chunk):
            self.sender.progress(1, min(ready, num_tokens))
            await asyncio.sleep(0)
        self.sender.complete(1, FirstTokens(tokens=(42,)))
        async with asyncio.timeout(WAIT):
            try:
                return await fetching
            finally:
                await self.receiver.connections.close()
                await self.calls.ended()

    async def _fetch(
        self, offered: worker_pb2.KvHandle, target: asyncio.Future[FetchTarget]
    ) -> worker_pb2.KvReceived:
        async with self.receiver.fetch(offered, b"hash", target) as (first_tokens, received):
            assert first_tokens.tokens == (42,)
            return received

    @property
    def payload_bytes(self) -> int:
        return sum(len(payload) for message, payload in self.frames if isinstance(message, Data))


@pytest.fixture(params=["shared", "ipc"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ipc":
        play_ipc(monkeypatch)
    return str(request.param)


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # one for all examples
)
@given(
    st.sampled_from([(4, 4), (3, 8), (16, 5), (1, 2)]),
    st.integers(1, 40),
    st.data(),
    st.sampled_from([1000, 7]),
)
async def test_what_arrives_is_what_was_there(
    transport: str, sizes: tuple[int, int], num_tokens: int, data: st.DataObject, chunk: int
) -> None:
    source, target = (memory(size, 64, seed) for size, seed in zip(sizes, (1, 2), strict=True))
    blocks, into = (
        tuple(data.draw(st.permutations(range(64)))[: -(-num_tokens // kv.block_size)])
        for kv in (source, target)
    )
    cached = data.draw(st.integers(0, num_tokens - 1))
    pair = P2pGroup(source, target, transport)
    fetched = await pair.move(blocks, into, num_tokens, cached, chunk)
    assert pair.payload_bytes == 0
    moved = span(source, cached, num_tokens - cached)
    assert (fetched.transfer_bytes, fetched.transport) == (moved.size(LAYOUT), transport)
    assert read_now(target, into, moved) == read_now(source, blocks, moved)
    if cached:  # is as it was
        kept = span(target, 0, cached)
        assert read_now(target, into, kept) == read_now(memory(sizes[1], 64, 2), into, kept)


async def withdrawn_at_commit(transport: str) -> worker_pb2.KvReceived:
    """The sender frees the blocks when the Commit is under way already."""
    pair = P2pGroup(memory(seed=1), memory(), transport)

    async def hook(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in frames:
            if isinstance(decode(frame)[1], Commit):
                pair.sender.withdraw(1)
            yield frame

    pair.hook = hook
    return await pair.move((1, 2), (3, 4), 8)


async def test_a_copy_of_blocks_that_were_freed_is_refused(transport: str) -> None:
    with pytest.raises(TransferError, match="withdrawn"):
        await withdrawn_at_commit(transport)


async def test_without_the_lease_table_it_would_be_taken(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(shared_memory, "check_entry", lambda content, table: None)
    await withdrawn_at_commit(transport)  # which checks the first tokens


@pytest.mark.parametrize(
    "why",
    [
        "host",
        "token",
        "not shared",
        "no entry",
        "too small",
        "other ranks",
        "no ranks",
        "no file",
        "a pipe",
    ],
)
async def test_what_cannot_be_mapped_goes_over_the_stream(
    why: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = memory(seed=1, is_shared=why != "not shared"), memory()
    if why == "no entry":
        monkeypatch.setattr(leases, "_NUM_ENTRIES", 0)
    ends = os.pipe()
    changes: dict[str, dict[str, Any]] = {
        "token": {"token": b"x" * 16},
        "too small": {"num_blocks": 10**9},
        "other ranks": {"tp": 3},
        "no ranks": {"tp": 0},
        "no file": {"kv_fd": 10**6},
        "a pipe": {"kv_fd": ends[0]},
    }
    if transport == "ipc":
        changes["no file"] = {"memory": msgpack.packb([os.getpid(), 10**6])}
        changes["a pipe"] = {"memory": b"no description"}
    pair = P2pGroup(source, target, transport)
    if why == "host":
        hosts = iter(["here", "elsewhere"])
        monkeypatch.setattr(shared_memory, "host_id", lambda: next(hosts))
    describe(monkeypatch, **changes.get(why, {}))
    fetched = await pair.move((1, 2), (3, 4), 8)
    whole = span(source, 0, 8)
    assert read_now(target, (3, 4), whole) == read_now(source, (1, 2), whole)
    assert fetched.transport == "grpc"
    assert pair.payload_bytes == whole.size(LAYOUT)
    for end in ends:
        os.close(end)


def describe(monkeypatch: pytest.MonkeyPatch, **change: Any) -> None:
    """Lets senders describe their memory otherwise; a value of None leaves the field out."""
    true = SharedMemoryConnector.description

    def description(self: SharedMemoryConnector) -> dict[str, Any]:
        return {name: value for name, value in (true(self) | change).items() if value is not None}

    monkeypatch.setattr(SharedMemoryConnector, "description", description)


@pytest.mark.parametrize(
    "change", [{"pid": None}, {"token": 7}, {"kv_fd": -1}, {"pid": "self"}, {"more": 1}]
)
async def test_an_impossible_description_is_refused(
    change: dict[str, Any], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = P2pGroup(memory(seed=1), memory(), transport)
    describe(monkeypatch, **change)
    assert (await pair.move((1, 2), (3, 4), 8)).transport == "grpc"


@pytest.mark.parametrize("change", [{"entry": 10**6}, {"entry": 2**63}, {"number": 7}])
async def test_an_impossible_lease_is_a_failed_transfer(
    change: dict[str, int], transport: str
) -> None:
    pair = P2pGroup(memory(seed=1), memory(), transport)

    async def hook(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in frames:
            key, message, payload = decode(frame)
            yield (
                encode(key, replace(message, **change), payload)
                if isinstance(message, BlockTable)
                else frame
            )

    pair.hook = hook
    with pytest.raises(TransferError):
        await pair.move((1, 2), (3, 4), 8)


async def test_blocks_that_the_memory_has_not_are_a_failed_transfer(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = P2pGroup(memory(seed=1), memory(), transport)
    describe(monkeypatch, num_blocks=2)
    with pytest.raises(TransferError, match=r"out of bounds|of other tokens"):
        await pair.move((1, 2), (3, 4), 8)


@pytest.mark.parametrize("change", [{"tp": 2}, {"block_size": 1}, {"block_bytes": 1}])
async def test_memory_with_other_blocks_than_expected_is_not_read(
    change: dict[str, int], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of another version of the service."""
    pair = P2pGroup(memory(seed=1), memory(), transport)
    describe(monkeypatch, **change)
    assert (await pair.move((1, 2), (3, 4), 8)).transport == "grpc"


async def test_the_event_loop_goes_on_while_a_gpu_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    play_ipc(monkeypatch)
    held = Held(monkeypatch)
    pair = P2pGroup(memory(seed=1), memory(), "ipc")
    moving = asyncio.create_task(pair.move((1, 2), (3, 4), 8))
    while not held.reached.is_set():
        await asyncio.sleep(0)
    for _ in range(100):  # turns of the loop that a blocking wait would not allow
        await asyncio.sleep(0)
    assert not moving.done()
    held.let_go.set()
    assert (await moving).transport == "ipc"


async def test_a_gpu_copy_uses_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    play_ipc(monkeypatch)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("KV in host memory")

    pair = P2pGroup(memory(seed=1), memory(), "ipc")
    for name in ("read", "write"):
        monkeypatch.setattr(PagedKv, name, refuse)
    monkeypatch.setattr(GpuKv, "read", refuse)
    assert (await pair.move((1, 2), (3, 4), 8)).transport == "ipc"
    assert pair.payload_bytes == 0


async def test_a_device_that_cannot_share_its_memory_goes_over_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play_ipc(monkeypatch)

    def refuse(kv: PagedKv) -> bytes:
        raise OSError("GPU memory cannot be shared: expandable segments")

    monkeypatch.setattr(PagedKv, "export", refuse)
    pair = P2pGroup(memory(seed=1), memory(), "ipc")
    assert (await pair.move((1, 2), (3, 4), 8)).transport == "grpc"
    assert pair.payload_bytes > 0


async def test_a_cancelled_copy_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks may have another owner when the copy ends."""
    play_ipc(monkeypatch)
    held = Held(monkeypatch)
    source, target = memory(seed=1), memory(seed=2)
    before = target.data.clone()
    pair = P2pGroup(source, target, "ipc")
    moving = asyncio.create_task(pair.move((1, 2), (3, 4), 8))
    while not held.reached.is_set():
        await asyncio.sleep(0)
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    held.let_go.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert torch.equal(target.data.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("at", [0, 1])  # the copy of the sender's blocks, the write
async def test_a_gpu_without_memory_for_a_frame_fails_the_transfer(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    play_ipc(monkeypatch)
    run_out_of_memory(monkeypatch, at)
    with pytest.raises(TransferError, match="the GPU has no memory left"):
        await P2pGroup(memory(seed=1), memory(), "ipc").move((1, 2), (3, 4), 8)


async def test_few_frames_are_in_a_gpu_s_memory_at_once() -> None:
    """Whatever the number of transfers: no memory is kept for frames."""
    connector = IpcConnector(TransferContext(kv=memory()), "ipc")
    num_copies = 0
    let_go = asyncio.Event()

    async def gather(table: TableBlocks, part: KvSpan) -> DeviceData:
        nonlocal num_copies
        num_copies += 1
        await let_go.wait()
        return DeviceData(torch.zeros(1, dtype=torch.uint8), checksum=0)

    connector._gather = gather
    frame = Data(
        index=0,
        first_layer=0,
        num_layers=1,
        first_token=0,
        num_tokens=1,
        first_slot=0,
        num_slots=1,
        num_bytes=1,
        burst=0,
        age=0.0,
    )
    fetches = [
        asyncio.create_task(connector.fetch(1, TableBlocks((0,)), frame, memoryview(b"")))
        for _ in range(20)
    ]
    for _ in range(100):
        await asyncio.sleep(0)
    assert num_copies == 4
    let_go.set()
    await asyncio.gather(*fetches)
    assert num_copies == 20


async def connect(context: TransferContext, description: dict[str, Any]) -> SharedMemoryConnector:
    return await SharedMemoryConnector.connect(context, "shared", description)


async def test_an_entry_is_reused_under_another_number() -> None:
    context = TransferContext(kv=memory(), transports=("shared",))
    table = context.leases
    peer = await connect(context, SharedMemoryConnector(context, "shared").description())
    first = BlockTable(first=0, **dict(zip(("entry", "number"), table.open(), strict=True)))
    await peer.verify(first)
    table.close(first.entry, first.number)
    with pytest.raises(TransferError, match="withdrawn"):
        await peer.verify(first)
    second = BlockTable(first=0, **dict(zip(("entry", "number"), table.open(), strict=True)))
    assert second.entry == first.entry
    await peer.verify(second)
    with pytest.raises(TransferError, match="withdrawn"):
        await peer.verify(first)


def test_a_table_that_nobody_can_map_has_no_entries() -> None:
    assert LeaseTable(shared=False).open() == (0, 0)


@contextmanager
def sender_process() -> Iterator[tuple[dict[str, Any], BlockTable]]:
    """A process with KV cache; its memory's description and an open lease."""
    code = (
        "from tandem.tests.workers.transfer.test_shared_memory import *; import json, time; "
        "context = TransferContext(kv=memory(seed=9)); entry, number = context.leases.open(); "
        "found = SharedMemoryConnector(context, 'shared').description(); found['token'] = "
        "found['token'].hex(); "
        "print(json.dumps([found, entry, number]), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            found, entry, number = json.loads(line_of(child))
            yield (
                found | {"token": bytes.fromhex(found["token"])},
                BlockTable(first=0, entry=entry, number=number),
            )
        finally:
            os.kill(child.pid, signal.SIGKILL)


async def test_memory_of_another_process_is_readable_and_goes_away_with_it() -> None:
    own = TransferContext(kv=memory())
    part, expected_kv = span(own.kv, 1, 10), memory(seed=9)
    with sender_process() as (found, table):
        peer = await connect(own, found)
        await peer.verify(table)
        assert peer._read(TableBlocks((5, 0, 7)), part) == read_now(expected_kv, (5, 0, 7), part)
    assert peer._read(TableBlocks((5, 0, 7)), part) == read_now(
        expected_kv, (5, 0, 7), part
    )  # what is mapped stays until it is unmapped
    with pytest.raises(OSError, match="No such file"):
        await connect(own, found)
