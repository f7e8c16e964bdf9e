"""The sending side on its own: its order of frames, its lease, and what a receiver may and may not
send.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, nullcontext
from dataclasses import replace

import pytest
import torch

from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import FakeKv
from tandem.tests.workers.spans import read_now, span
from tandem.tests.workers.transfer.played import EPOCH, LAYOUT, one_table, sender_of
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.tables import SequenceKv, TableBlocks
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.transfer import sender
from tandem.workers.transfer.connector import KvConnector
from tandem.workers.transfer.frames import (
    Ack,
    Alive,
    Commit,
    Data,
    Message,
    Open,
    Pull,
    TransferError,
    TransferKey,
    decode,
    encode,
)

OPEN = Open(layout=LAYOUT.digest)
PULL = Pull(first_token=0, group=0, first_slot=0, num_slots=2)


class Side:
    """A sender with one prefill on offer, and a receiver that sends what the test says."""

    def __init__(self, lease_seconds: float | None = 30.0, stall_seconds: float = 30.0) -> None:
        self.released: list[int] = []
        self.kv = FakeKv(4, 16, LAYOUT)
        self.sender = sender_of(
            self.kv, (), self.released, lease_seconds=lease_seconds, stall_seconds=stall_seconds
        )
        self.key = TransferKey(transfer_id=b"0123456789abcdef", epoch=EPOCH)
        self.sender.offer(1, self.key.transfer_id, one_table((3, 0)), 20, b"hash")
        self.said: asyncio.Queue[bytes | None] = asyncio.Queue()

    def finish(self) -> None:
        self.sender.progress(1, 20)
        self.sender.complete(1, FirstTokens(tokens=(42,)))

    def say(self, *messages: Message, key: TransferKey | None = None) -> None:
        for message in messages:
            self.said.put_nowait(encode(key or self.key, message))

    async def incoming(self) -> AsyncIterator[bytes]:
        while (frame := await self.said.get()) is not None:
            yield frame

    async def answers(self) -> list[Message]:
        """All that it sends until the stream has ended well."""
        async with asyncio.timeout(WAIT), aclosing(self.sender.serve(self.incoming())) as frames:
            return [decode(frame)[1] async for frame in frames]


async def test_an_acknowledged_transfer_is_released_once() -> None:
    side = Side()
    side.finish()
    side.say(OPEN, PULL, Ack())
    answers = await side.answers()
    assert [type(answer) for answer in answers] == [Data, Commit]
    assert answers[-1] == Commit(
        num_frames=1, num_tokens=20, prefix_hash=b"hash", tokens=[42], logprobs=[]
    )
    assert side.released == [1]
    assert (side.sender.num_offers, side.sender.num_streams) == (0, 0)


async def test_a_frame_without_memory_for_its_copy_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*place: object) -> None:
        raise MemoryError("the GPU has no memory left to copy KV cache")

    side = Side()
    side.finish()
    side.say(OPEN, PULL)
    monkeypatch.setattr(side.kv, "read", fail)
    with pytest.raises(TransferError, match="not copied: the GPU has no memory left"):
        await side.answers()
    assert (side.released, side.sender.num_offers, side.sender.num_streams) == ([], 1, 0)


async def test_a_stream_that_ends_without_an_ack_starts_the_lease_again() -> None:
    side = Side(lease_seconds=0.02)
    side.finish()
    side.say(OPEN, PULL)
    side.said.put_nowait(None)
    assert isinstance((await side.answers())[-1], Commit)
    assert (side.released, side.sender.num_offers, side.sender.num_streams) == ([], 1, 0)
    async with asyncio.timeout(WAIT):
        while side.sender.num_offers:
            await asyncio.sleep(0.005)
    assert side.released == [1]


async def test_without_a_lease_an_offer_ends_by_withdraw_alone() -> None:
    side = Side(lease_seconds=None)
    side.finish()
    side.say(OPEN, PULL, Ack())
    with pytest.raises(TransferError, match="out of order"):
        await side.answers()
    side.say(OPEN, PULL)
    side.said.put_nowait(None)
    await side.answers()
    (offer,) = side.sender._offers.values()
    assert offer.expiry is None
    assert (side.released, side.sender.num_offers, side.sender.num_streams) == ([], 1, 0)
    side.sender.withdraw(1)
    assert (side.released, side.sender.num_offers) == ([], 0)


@pytest.mark.parametrize("slots", [range(1), range(1, 2), range(2)])
async def test_only_the_slots_that_were_asked_for_are_sent(slots: range) -> None:
    side = Side()
    whole = span(side.kv, 0, 20)
    side.kv.write((3, 0), whole, memoryview(random.Random(1).randbytes(whole.size(LAYOUT))))
    side.finish()
    first, count = slots.start, len(slots)
    side.say(OPEN, replace(PULL, first_slot=first, num_slots=count))
    side.said.put_nowait(None)
    async with aclosing(side.sender.serve(side.incoming())) as frames:
        _, data, payload = decode(await anext(frames))
        assert isinstance(data, Data)
        assert (data.first_slot, data.num_slots, data.num_bytes) == (first, count, payload.nbytes)
        assert payload == read_now(
            side.kv, (3, 0), replace(whole, first_slot=first, num_slots=count)
        )
        assert isinstance(decode(await anext(frames))[1], Commit)


async def test_a_stream_without_slots_brings_the_commit_alone_when_the_prefill_is_done() -> None:
    side = Side()
    side.sender.progress(1, 8)
    side.say(OPEN, Pull(first_token=0, group=0, first_slot=2, num_slots=0), Ack())
    stream = asyncio.create_task(side.answers())
    for _ in range(10):
        await asyncio.sleep(0)
    assert side.sender.num_streams == 1
    side.finish()
    assert await stream == [
        Commit(num_frames=0, num_tokens=20, prefix_hash=b"hash", tokens=[42], logprobs=[])
    ]
    assert side.released == [1]


async def test_frames_flow_while_the_prefill_runs() -> None:
    side = Side()
    side.sender.progress(1, 8)
    side.say(OPEN, PULL)
    async with aclosing(side.sender.serve(side.incoming())) as frames:
        first = decode(await anext(frames))[1]
        assert isinstance(first, Data)
        assert (first.first_token, first.num_tokens, first.burst) == (0, 8, 0)
        waiting = asyncio.ensure_future(anext(frames))
        side.finish()
        second = decode(await waiting)[1]
        assert isinstance(second, Data)
        assert (second.first_token, second.num_tokens, second.burst) == (8, 12, 1)


async def test_layers_leave_before_the_chunk_is_through() -> None:
    side = Side()
    side.sender.progress(1, 8, num_ahead=16, num_layers=2)
    side.say(OPEN, PULL)
    async with aclosing(side.sender.serve(side.incoming())) as frames:

        async def next_one() -> tuple[range, range]:
            data = decode(await anext(frames))[1]
            assert isinstance(data, Data)
            layers = range(data.first_layer, data.first_layer + data.num_layers)
            return layers, range(data.first_token, data.first_token + data.num_tokens)

        assert [await next_one(), await next_one()] == [
            (range(2), range(16)),
            (range(2, 3), range(8)),
        ]
        waiting = asyncio.ensure_future(next_one())
        side.finish()
        assert [await waiting, await next_one()] == [
            (range(2), range(16, 20)),
            (range(2, 3), range(8, 20)),
        ]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([PULL], "out of order"),
        ([Open(layout=replace(LAYOUT, layers=LAYOUT.layers[1:]).digest)], "layouts differ"),
        ([OPEN, replace(PULL, group=1)], "out of order"),
        ([OPEN, Ack()], "out of order"),
        ([OPEN, replace(PULL, first_token=21)], "out of order"),
        ([OPEN, replace(PULL, num_slots=3)], "out of order"),
        ([OPEN, replace(PULL, first_slot=1)], "out of order"),
        ([OPEN, replace(PULL, first_slot=2**62)], "out of order"),
        ([OPEN, PULL, PULL], "out of order"),
    ],
)
async def test_a_receiver_that_breaks_the_order_gets_nothing(
    messages: list[Message], text: str
) -> None:
    side = Side()
    side.finish()
    side.say(*messages)
    with pytest.raises(TransferError, match=text):
        await side.answers()
    assert side.released == []
    assert side.sender.num_streams == 0


@pytest.mark.parametrize("change", [{"epoch": EPOCH + 1}, {"epoch": 0}, {"transfer_id": b"x" * 16}])
async def test_another_epoch_or_id_is_gone(change: dict[str, object]) -> None:
    side = Side()
    side.finish()
    side.say(OPEN, key=replace(side.key, **change))  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="KV cache gone"):
        await side.answers()


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("fault", ["flip", "foreign", "end", "silence"])
async def test_a_fault_in_what_the_receiver_says_releases_nothing(
    position: int, fault: str
) -> None:
    side = Side(stall_seconds=0.05 if fault == "silence" else WAIT)
    side.finish()
    frames = [encode(side.key, message) for message in (OPEN, PULL, Ack())]
    if fault == "flip":
        frames[position] = frames[position][:-1] + bytes([frames[position][-1] ^ 1])
    elif fault == "foreign":
        frames[position] = encode(replace(side.key, epoch=EPOCH + 1), (OPEN, PULL, Ack())[position])
    else:
        del frames[position:]
        if position == 1 and fault == "silence":
            frames.append(encode(side.key, PULL))  # a receiver may be silent before Pull: it waits
    for frame in frames:
        side.said.put_nowait(frame)
    if fault == "end":
        side.said.put_nowait(None)
    # Streams that are not rank 0's just end after the Commit.
    with nullcontext() if (fault, position) == ("end", 2) else pytest.raises(TransferError):
        await side.answers()
    assert side.released == []
    assert (side.sender.num_offers, side.sender.num_streams) == (1, 0)


async def test_a_lease_that_nobody_uses_ends() -> None:
    side = Side(lease_seconds=0.02)
    side.finish()
    async with asyncio.timeout(WAIT):
        while side.sender.num_offers:
            await asyncio.sleep(0.005)
    assert side.released == [1]
    side.say(OPEN)
    with pytest.raises(TransferError, match="KV cache gone"):
        await side.answers()


async def test_an_open_stream_pins_the_cache_and_its_end_starts_the_lease() -> None:
    side = Side(lease_seconds=0.05)
    side.finish()
    side.say(OPEN)
    stream = asyncio.create_task(side.answers())
    left: list[int] = []
    # Called before any timer that begins with the end of the stream, however late it is called.
    stream.add_done_callback(lambda _: left.append(side.sender.num_offers))
    async with asyncio.timeout(WAIT):
        while not side.sender.num_streams:
            await asyncio.sleep(0)
    await asyncio.sleep(0.15)  # three leases long
    assert side.released == []
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert left == [1]
    async with asyncio.timeout(WAIT):
        while side.sender.num_offers:
            await asyncio.sleep(0.005)
    assert side.released == [1]


async def test_withdrawn_memory_is_not_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even between two frames of one burst: the blocks may be somebody else's by then."""
    monkeypatch.setattr(KvConnector, "frame_bytes", 64)
    side = Side()
    side.finish()
    side.say(OPEN, PULL, Ack())
    async with aclosing(side.sender.serve(side.incoming())) as frames:
        await anext(frames)
        side.sender.withdraw(1)
        side.sender.withdraw(1)
        with pytest.raises(TransferError, match="withdrawn"):
            await anext(frames)
    assert side.released == []
    assert (side.sender.num_offers, side.sender.num_streams) == (0, 0)


async def test_a_prefill_that_makes_no_progress_ends_the_stream() -> None:
    side = Side(stall_seconds=0.02)
    side.say(OPEN, PULL)
    with pytest.raises(TransferError, match="no progress"):
        await side.answers()
    side.sender.withdraw(1)


# --- windows
# --------------------------------------------------------------------------------------------------

LAYER = LayerGeometry(num_heads=2, num_kv_heads=2, head_dim=4)
WINDOWS = KvLayout(
    layers=(LAYER, replace(LAYER, window=5), LAYER, replace(LAYER, window=5)),
    dtype="float32",
    model="fake",
)
WINDOW_PULL = Pull(first_token=16, group=1, first_slot=0, num_slots=2)


class WindowSide(Side):
    """A sender whose layers 1 and 3 have a window; the next token, 20, sees the tokens from 16."""

    def __init__(self, stall_seconds: float = 30.0) -> None:
        super().__init__(stall_seconds=stall_seconds)
        kv = PagedKv(WINDOWS, num_blocks=8, block_size=8, device=torch.device("cpu"))
        self.sender = sender_of(kv, (), self.released, stall_seconds=stall_seconds)
        tables = TableBlocks((3, 0, 1)), TableBlocks((5,), 2)
        self.sender.offer(1, self.key.transfer_id, SequenceKv(tables), 20, b"hash")
        self.open = Open(layout=WINDOWS.digest)


async def test_layers_of_a_window_leave_when_their_tail_is_computed() -> None:
    side = WindowSide()
    side.sender.progress(1, 8, num_ahead=18, num_layers=2)  # of its layers only number 1
    side.say(side.open, WINDOW_PULL)
    async with aclosing(side.sender.serve(side.incoming())) as frames:

        async def next_one() -> tuple[range, range]:
            data = decode(await anext(frames))[1]
            assert isinstance(data, Data)
            layers = range(data.first_layer, data.first_layer + data.num_layers)
            return layers, range(data.first_token, data.first_token + data.num_tokens)

        assert await next_one() == (range(1), range(16, 18))
        waiting = asyncio.ensure_future(next_one())
        side.finish()
        assert [await waiting, await next_one()] == [
            (range(1), range(18, 20)),
            (range(1, 2), range(16, 20)),
        ]
        assert isinstance(decode(await anext(frames))[1], Commit)


@pytest.mark.parametrize("first_token", [0, 15])
async def test_what_has_left_the_window_is_not_sent(first_token: int) -> None:
    side = WindowSide()
    side.finish()
    side.say(side.open, replace(WINDOW_PULL, first_token=first_token))
    with pytest.raises(TransferError, match="out of order"):
        await side.answers()
    assert side.released == []


async def test_a_stream_says_that_the_prefill_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of a long prompt before its window is sent, so the stream would seem to stall."""
    monkeypatch.setattr(sender, "_ALIVE_SHARE", 0.0)
    side = WindowSide()
    side.say(side.open, WINDOW_PULL, Ack())
    async with aclosing(side.sender.serve(side.incoming())) as frames:
        for num_ready in (4, 8, 12):
            waiting = asyncio.ensure_future(anext(frames))
            await asyncio.sleep(0)
            side.sender.progress(1, num_ready)
            assert isinstance(decode(await waiting)[1], Alive)
        side.finish()
        assert [type(decode(frame)[1]) async for frame in frames] == [Data, Commit]
    assert side.released == [1]
