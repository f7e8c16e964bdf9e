"""KV cache read out of another worker's memory: byte for byte, and never after its blocks were given away."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.tests.workers.spans import span
from tandem.tests.workers.transfer.played import Calls
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.model.kv_store import PagedKv
from tandem.workers.transfer import connect, shared
from tandem.workers.transfer.receiver import Fetched, KvReceiver, Target, Want
from tandem.workers.transfer.sender import FrameHook, KvSender
from tandem.workers.transfer.shared import LeaseTable, Memory, PeerMemory
from tandem.workers.transfer.transports import Means
from tandem.workers.transfer.wire import Commit, Data, Offer, TransferError, TransferKey, decode

LAYOUT = KvLayout(num_layers=3, num_heads=2, num_kv_heads=2, head_dim=4, dtype="bfloat16", model="m")
EPOCH = 3
MEANS = Means(transports=("shared",))


def memory(block_size: int = 4, num_blocks: int = 16, seed: int | None = None, *, is_shared: bool = True) -> PagedKv:
    kv = PagedKv(LAYOUT, num_blocks=num_blocks, block_size=block_size, device=torch.device("cpu"), shared=is_shared)
    if seed is not None:
        kv.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return kv


@dataclass
class Pair:
    """An exporter and a puller, and the frames that went between them."""

    source: PagedKv
    target: PagedKv
    hook: FrameHook | None = None
    frames: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.released: list[int] = []
        self.exporter = KvSender(
            self.source,
            epoch=EPOCH,
            lease_seconds=30,
            stall_seconds=5,
            on_release=self.released.append,
            means=MEANS,
            frame_hook=self._spy,
        )
        self.calls = Calls({"there": self.exporter})
        self.puller = KvReceiver(self.target, stall_seconds=5, channel=self.calls.channel, means=MEANS)

    async def _spy(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in self.hook(frames) if self.hook else frames:
            self.frames.append(decode(frame)[1:])
            yield frame

    async def move(
        self, blocks: tuple[int, ...], into: tuple[int, ...], num_tokens: int, cached: int = 0, chunk: int = 1000
    ) -> Fetched:
        key = TransferKey(transfer_id=b"0123456789abcdef", epoch=EPOCH)
        self.exporter.offer(1, key.transfer_id, blocks, num_tokens, b"hash")
        target: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
        target.set_result(Target(blocks=into, num_cached=cached))
        want = Want(key=key, num_tokens=num_tokens, prefix_hash=b"hash")
        fetching = asyncio.create_task(self._fetch(want, target))
        for ready in range(chunk, num_tokens + chunk, chunk):
            self.exporter.progress(1, min(ready, num_tokens))
            await asyncio.sleep(0)
        self.exporter.complete(1, FirstTokens(tokens=(42,)))
        try:
            return await fetching
        finally:
            await self.puller.close()
            await self.calls.ended()

    async def _fetch(self, want: Want, target: asyncio.Future[Target]) -> Fetched:
        async with self.puller.fetch(["there"], LAYOUT, want, target) as fetched:
            return fetched

    @property
    def payload_bytes(self) -> int:
        return sum(len(payload) for message, payload in self.frames if isinstance(message, Data))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(4, 4), (3, 8), (16, 5), (1, 2)]), st.integers(1, 40), st.data(), st.sampled_from([1000, 7]))
async def test_what_arrives_is_what_was_there(
    sizes: tuple[int, int], num_tokens: int, data: st.DataObject, chunk: int
) -> None:
    source, target = (memory(size, 64, seed) for size, seed in zip(sizes, (1, 2), strict=True))
    blocks, into = (
        tuple(data.draw(st.permutations(range(64)))[: -(-num_tokens // kv.block_size)]) for kv in (source, target)
    )
    cached = data.draw(st.integers(0, num_tokens - 1))
    pair = Pair(source, target)
    fetched = await pair.move(blocks, into, num_tokens, cached, chunk)
    assert fetched.opening.tokens == (42,)
    assert pair.payload_bytes == 0
    moved = span(source, cached, num_tokens - cached)
    assert (fetched.num_bytes, fetched.transport) == (moved.size(LAYOUT), "shared")
    assert target.read(into, moved) == source.read(blocks, moved)
    if cached:  # is as it was
        kept = span(target, 0, cached)
        assert target.read(into, kept) == memory(sizes[1], 64, 2).read(into, kept)


async def withdrawn_at_commit() -> Fetched:
    """The exporter gives the blocks away when the Commit is under way already."""
    pair = Pair(memory(seed=1), memory())

    async def hook(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in frames:
            if isinstance(decode(frame)[1], Commit):
                pair.exporter.withdraw(1)
            yield frame

    pair.hook = hook
    return await pair.move((1, 2), (3, 4), 8)


async def test_a_copy_of_blocks_that_were_given_away_is_refused() -> None:
    with pytest.raises(TransferError, match="withdrawn"):
        await withdrawn_at_commit()


async def test_without_the_ledger_it_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(PeerMemory, "check", lambda self, offer: None)
    assert (await withdrawn_at_commit()).opening.tokens == (42,)


@pytest.mark.parametrize(
    "why", ["host", "token", "not shared", "no line", "too small", "too many slots", "no slots", "no file", "a pipe"]
)
async def test_what_cannot_be_mapped_goes_over_the_stream(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = memory(seed=1, is_shared=why != "not shared"), memory()
    if why == "host":
        monkeypatch.setattr(connect, "host_id", lambda: "elsewhere")
    if why == "no line":
        monkeypatch.setattr(shared, "_NUM_LINES", 0)
    ends = os.pipe()
    changes: dict[str, dict[str, Any]] = {
        "token": {"token": b"x" * 16},
        "too small": {"num_blocks": 10**9},
        "too many slots": {"num_slots": 10**6},
        "no slots": {"num_slots": 0},
        "no file": {"fd": 10**6},
        "a pipe": {"fd": ends[0]},
    }
    pair = Pair(source, target)
    spoil(pair, monkeypatch, **changes.get(why, {}))
    fetched = await pair.move((1, 2), (3, 4), 8)
    whole = span(source, 0, 8)
    assert target.read((3, 4), whole) == source.read((1, 2), whole)
    assert fetched.transport == "grpc"
    assert pair.payload_bytes == whole.size(LAYOUT)
    for end in ends:
        os.close(end)


def spoil(pair: Pair, monkeypatch: pytest.MonkeyPatch, **change: Any) -> None:
    """Lets the exporter describe its memory otherwise."""
    true = pair.exporter._ledger.describe()
    monkeypatch.setattr(pair.exporter._ledger, "describe", lambda: replace(true, **change) if true else None)


@pytest.mark.parametrize("info", [{}, {"pid": 1}, {"token": 7}, {"fd": -1}, {"pid": "self"}, {"more": 1}])
async def test_an_impossible_description_is_refused(info: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(memory(seed=1), memory())
    true = pair.exporter._ledger.describe()
    assert true is not None
    said = asdict(true) | info if (len(info) == 1 and "pid" not in info) or info.get("pid") == "self" else info
    monkeypatch.setattr("tandem.workers.transfer.outlets.SharedOutlet.info", lambda self: said)
    assert (await pair.move((1, 2), (3, 4), 8)).transport == "grpc"


async def test_impossible_offers_are_failed_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"line": 10**6}, {"number": 7}):
        pair = Pair(memory(seed=1), memory())
        make = pair.exporter._carrier

        def carrier(*asked: Any, make: Any = make, change: dict[str, int] = change) -> Any:
            carrier, offer = make(*asked)
            assert offer is not None
            return carrier, replace(offer, **change)

        monkeypatch.setattr(pair.exporter, "_carrier", carrier)
        with pytest.raises(TransferError):
            await pair.move((1, 2), (3, 4), 8)


async def test_blocks_that_the_memory_has_not_are_a_failed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"num_slots": 1}, {"block_size": 1}, {"num_blocks": 2}):
        pair = Pair(memory(seed=1), memory())
        spoil(pair, monkeypatch, **change)
        with pytest.raises(TransferError, match="out of bounds"):
            await pair.move((1, 2), (3, 4), 8)


def test_a_line_is_reused_under_another_number() -> None:
    kv = memory()
    ledger = LeaseTable(kv)
    peer = PeerMemory(described(ledger), kv)
    first = Offer(**dict(zip(("line", "number"), ledger.open(), strict=True)))
    peer.check(first)
    ledger.close(first.line, first.number)
    with pytest.raises(TransferError, match="withdrawn"):
        peer.check(first)
    second = Offer(**dict(zip(("line", "number"), ledger.open(), strict=True)))
    assert second.line == first.line
    peer.check(second)
    with pytest.raises(TransferError, match="withdrawn"):
        peer.check(first)


def described(ledger: LeaseTable) -> Memory:
    found = ledger.describe()
    assert found is not None
    return found


def test_memory_of_another_process_is_readable_and_goes_away_with_it() -> None:
    code = (
        "from dataclasses import asdict; from tandem.tests.workers.transfer.test_shared import *; import json, time; "
        "kv = memory(seed=9); ledger = Ledger(kv); line, number = ledger.open(); ledger.put_sample(b'x' * 2**21); "
        "words = asdict(described(ledger)); words['token'] = words['token'].hex(); "
        "print(json.dumps([words, line, number]), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            values, line, number = json.loads(child.stdout.readline())
            there = Memory(**(values | {"token": bytes.fromhex(values["token"])}))
            own = memory()
            peer = PeerMemory(there, own)
            peer.check(Offer(line=line, number=number))
            assert peer.sample() == b"x" * 2**21
            part = span(own, 1, 10)
            expected = memory(seed=9).read((5, 0, 7), part)
            assert peer.kv.read((5, 0, 7), part) == expected
        finally:
            os.kill(child.pid, signal.SIGKILL)
    assert peer.kv.read((5, 0, 7), part) == expected  # what is mapped stays until nobody maps it
    with pytest.raises(OSError, match="No such file"):
        PeerMemory(there, own)
