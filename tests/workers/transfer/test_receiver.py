"""The receiving side on its own, against a sender that the test plays."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import grpc.aio
import pytest

from tandem.proto.channel import PeerChannel
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import FakeKv
from tandem.tests.workers.spans import read_now, span
from tandem.tests.workers.transfer.played import LAYOUT, handle, one_table
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.frames import (
    CONNECT_METHOD,
    Ack,
    Commit,
    Data,
    FetchResult,
    FetchTarget,
    Message,
    Open,
    Pull,
    TransferError,
    TransferKey,
    decode,
    encode,
)
from tandem.workers.transfer.receiver import KvReceiver

KEY = TransferKey(transfer_id=b"0123456789abcdef", epoch=1)
PAYLOAD = bytes(range(128)) * 3
DATA = Data(
    index=0,
    first_layer=0,
    num_layers=3,
    first_token=0,
    num_tokens=2,
    first_slot=0,
    num_slots=2,
    num_bytes=384,
    burst=0,
    age=0.0,
)
HALF = replace(DATA, num_slots=1, num_bytes=192)
COMMIT = Commit(num_frames=1, num_tokens=2, prefix_hash=b"hash", tokens=[42], logprobs=[-0.5])
FIRST_TOKENS = FirstTokens(tokens=(42,), logprobs=(-0.5,))


class PlayedCall:
    """A gRPC call whose other side is the test."""

    def __init__(self) -> None:
        self.written: list[Message] = []
        self.reads: asyncio.Queue[object] = asyncio.Queue()
        self.ended = asyncio.get_running_loop().create_future()
        self.cancelled = False
        self.half_closed = False

    async def write(self, frame: bytes) -> None:
        if self.ended.done():
            raise asyncio.InvalidStateError
        self.written.append(decode(frame)[1])

    async def read(self) -> object:
        return await self.reads.get()  # without a deadline: some tests let the loop's time jump

    async def code(self) -> None:
        await asyncio.shield(self.ended)

    async def done_writing(self) -> None:
        self.half_closed = True

    def cancel(self) -> None:
        self.cancelled = True
        if not self.ended.done():
            self.ended.set_result(None)


class PlayedChannel:
    """Over which nobody can connect, so that all goes over gRPC."""

    def __init__(self, call: PlayedCall) -> None:
        self._call = call

    def stream_stream(self, method: str) -> Callable[[], PlayedCall]:
        return lambda: refused() if method == CONNECT_METHOD else self._call


def refused() -> PlayedCall:
    call = PlayedCall()
    call.ended.set_result(None)
    return call


class Side:
    """A receiver, its memory and one fetch under way from a group of `num_sources` ranks."""

    def __init__(
        self,
        stall_seconds: float = 30.0,
        layout: KvLayout = LAYOUT,
        num_sources: int = 1,
        *,
        hold: bool = False,
    ) -> None:
        self.kv = FakeKv(2, 16, LAYOUT)
        self.calls = {f"rank {rank}": PlayedCall() for rank in range(num_sources)}
        self.call = self.calls["rank 0"]
        context = TransferContext(kv=self.kv)
        self.receiver = KvReceiver(context, stall_seconds=stall_seconds, channel=self._channel)
        self.target: asyncio.Future[FetchTarget] = asyncio.get_running_loop().create_future()
        self.inside = asyncio.Event()
        self.leave: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # ends the context
        if not hold:
            self.leave.set_result(None)
        self.fetch = asyncio.create_task(self._fetch(layout))

    def _channel(self, endpoint: str) -> PeerChannel:
        return cast(PeerChannel, PlayedChannel(self.calls[endpoint]))

    async def _fetch(self, layout: KvLayout) -> FetchResult:
        async with self.receiver.fetch(
            handle(KEY, self.calls, layout, 2), b"hash", self.target
        ) as fetched:
            self.inside.set()
            await self.leave
        return fetched

    def place(self) -> None:
        self.target.set_result(FetchTarget(one_table((1,))))

    def send(
        self, message: Message, payload: bytes = b"", key: TransferKey = KEY, rank: int = 0
    ) -> None:
        self.calls[f"rank {rank}"].reads.put_nowait(encode(key, message, payload))

    async def entered(self) -> None:
        """Waits until all has arrived."""
        async with asyncio.timeout(WAIT):
            await self.inside.wait()

    def written(self) -> bytes:
        return bytes(read_now(self.kv, (1,), span(self.kv, 0, 2)))

    @property
    def num_acks(self) -> int:
        return sum(
            isinstance(message, Ack) for call in self.calls.values() for message in call.written
        )


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_whole_transfer_is_acknowledged_when_the_context_ends_well() -> None:
    side = Side(hold=True)
    side.place()
    side.send(DATA, PAYLOAD)
    side.send(COMMIT)
    await side.entered()
    assert side.written() == PAYLOAD
    await turns()
    assert (side.num_acks, side.call.half_closed, side.receiver.num_closing) == (0, False, 0)
    side.leave.set_result(None)
    first_tokens, received = await side.fetch
    assert (first_tokens, received.transfer_bytes, received.transport) == (
        FIRST_TOKENS,
        384,
        "grpc",
    )
    assert side.receiver.num_closing == 1
    await turns()
    assert isinstance(side.call.written[-1], Ack)
    assert (side.num_acks, side.call.half_closed) == (1, True)
    side.call.ended.set_result(None)
    async with asyncio.timeout(WAIT):
        while side.receiver.num_closing:
            await asyncio.sleep(0)
    assert not side.call.cancelled


@pytest.mark.parametrize("how", ["exception", "cancel"])
async def test_a_context_that_ends_badly_acknowledges_nothing(how: str) -> None:
    side = Side(num_sources=2, hold=True)
    side.place()
    for rank in (0, 1):
        side.send(HALF, PAYLOAD[:192], rank=rank)
        side.send(COMMIT, rank=rank)
    await side.entered()
    if how == "cancel":
        side.fetch.cancel()
    else:
        side.leave.set_exception(ZeroDivisionError())
    with pytest.raises(asyncio.CancelledError if how == "cancel" else ZeroDivisionError):
        await side.fetch
    await turns()
    assert (side.num_acks, side.receiver.num_closing) == (0, 0)
    assert all(call.cancelled for call in side.calls.values())


async def test_an_ack_that_finds_the_stream_broken_is_no_fault() -> None:
    side = Side(hold=True)
    side.place()
    side.send(DATA, PAYLOAD)
    side.send(COMMIT)
    await side.entered()
    side.call.ended.set_result(None)
    side.leave.set_result(None)
    assert (await side.fetch)[0] == FIRST_TOKENS
    await turns()
    assert (side.num_acks, side.receiver.num_closing, side.call.cancelled) == (0, 0, True)


async def test_pieces_of_several_ranks_go_to_their_slots_and_rank_0_hears_the_ack() -> None:
    side = Side(num_sources=2)
    side.place()
    halves = [bytes([rank + 1]) * 192 for rank in (0, 1)]
    for rank in (1, 0):
        side.send(HALF, halves[rank], rank=rank)
        side.send(COMMIT, rank=rank)
    first_tokens, received = await side.fetch
    assert (first_tokens, received.transfer_bytes, received.transport) == (
        FIRST_TOKENS,
        384,
        "grpc",
    )
    assert (
        side.written() == (bytes([1]) * 16 + bytes([2]) * 16) * 12
    )  # [layer, key or value, token, slot]
    assert side.receiver.num_closing == 2
    await turns()
    first, second = side.calls.values()
    assert [type(message) for message in first.written] == [Open, Pull, Ack]
    assert [type(message) for message in second.written] == [Open, Pull]
    assert (first.half_closed, second.half_closed) == (True, True)
    assert (
        first.written[1]
        == second.written[1]
        == Pull(first_token=0, group=0, first_slot=0, num_slots=1)
    )


@pytest.mark.parametrize(
    "other", [{"tokens": [43]}, {"logprobs": [-0.25]}, {"logprobs": []}, {"tokens": [42, 42]}]
)
async def test_streams_that_disagree_on_the_first_tokens_are_of_two_prompts(
    other: dict[str, list[float]],
) -> None:
    side = Side(num_sources=2)
    side.place()
    commits = [replace(COMMIT, logprobs=[-0.5] * len(other.get("tokens", [42]))), COMMIT]
    commits[0] = replace(commits[0], **other)  # type: ignore[arg-type]
    for rank, commit in enumerate(commits):
        side.send(HALF, PAYLOAD[:192], rank=rank)
        side.send(commit, rank=rank)
    with pytest.raises(TransferError, match="another prompt"):
        await side.fetch
    assert all(call.cancelled for call in side.calls.values())


async def test_a_stream_that_fails_stops_the_others_in_that_moment() -> None:
    """Even if their next frames are there already."""
    side = Side(num_sources=2)
    side.place()
    side.send(HALF, PAYLOAD[:192])
    await turns()
    before = side.written()
    assert any(before)
    side.calls["rank 1"].reads.put_nowait(b"rubbish")
    side.send(replace(HALF, index=1, first_token=1), PAYLOAD[:192])
    with pytest.raises(TransferError, match="KV frame"):
        await side.fetch
    await turns()
    assert side.written() == before
    assert all(call.cancelled for call in side.calls.values())
    assert side.num_acks == 0


async def test_a_cancel_stops_all_streams_in_that_moment() -> None:
    side = Side(num_sources=2)
    side.place()
    await turns()
    for rank in (0, 1):
        side.send(HALF, PAYLOAD[:192], rank=rank)
    side.fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await side.fetch
    await turns()
    assert side.written() == bytes(384)
    assert all(call.cancelled for call in side.calls.values())


async def test_a_cancel_during_a_failure_stays_a_cancel() -> None:
    side = Side(num_sources=2)
    side.place()
    await turns()
    side.calls["rank 1"].reads.put_nowait(b"rubbish")
    await asyncio.sleep(0)  # the stream's task has failed, and the fetch has not heard of it
    side.fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await side.fetch
    assert all(call.cancelled for call in side.calls.values())


async def test_only_silence_of_all_streams_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, late = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + late)
    side = Side(stall_seconds=1000, num_sources=2)
    late += 3000  # a receiver may wait for blocks
    await turns()
    side.place()
    for token in (0, 1):
        await turns()
        late += 900
        await turns()
        side.send(
            replace(HALF, index=token, first_token=token, num_tokens=1, num_bytes=96), PAYLOAD[:96]
        )
    await turns()
    late += 900
    await turns()
    assert not side.fetch.done()
    late += 200
    with pytest.raises(TransferError, match="no progress"):
        await side.fetch


@pytest.mark.parametrize("num_sources", [0, 3])
async def test_a_source_that_cannot_be_split_so_is_refused(num_sources: int) -> None:
    side = Side()
    side.fetch.cancel()
    with pytest.raises(TransferError, match="layouts differ"):
        async with side.receiver.fetch(
            handle(KEY, ["rank 0"] * num_sources, LAYOUT, 2), b"hash", side.target
        ):
            pass
    assert side.call.written == []


@pytest.mark.parametrize("after", range(12))
async def test_a_cancel_at_any_moment_ends_the_fetch(after: int) -> None:
    """Also one that comes together with a frame: the blocks are somebody else's from the cancel on,
    so not one byte may be written after it.
    """
    side = Side()
    side.place()
    side.send(DATA, PAYLOAD)
    for _ in range(after):
        await asyncio.sleep(0)
    before = side.written()
    side.fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await side.fetch
    assert side.written() == before


@pytest.mark.parametrize(
    "frame", [b"", b"rubbish", grpc.aio.EOF, encode(KEY, Ack()), encode(KEY, COMMIT)]
)
async def test_what_is_no_data_ends_in_a_transfer_error(frame: object) -> None:
    side = Side()
    side.place()
    side.call.reads.put_nowait(frame)
    with pytest.raises(TransferError):
        await side.fetch
    assert side.call.cancelled
    assert not any(isinstance(message, Ack) for message in side.call.written)


async def test_a_frame_of_another_epoch_is_refused() -> None:
    side = Side()
    side.place()
    side.send(DATA, PAYLOAD, TransferKey(transfer_id=KEY.transfer_id, epoch=2))
    with pytest.raises(TransferError, match="another transfer"):
        await side.fetch
    assert side.written() == bytes(384)


async def test_a_stream_that_stalls_or_ends_before_its_turn_fails() -> None:
    stalled = Side(stall_seconds=0.02)
    stalled.place()
    with pytest.raises(TransferError, match="no progress"):
        await stalled.fetch
    broken = Side()
    broken.call.ended.set_result(None)
    with pytest.raises(TransferError, match="broke"):
        await broken.fetch
    other = Side(layout=replace(LAYOUT, model="another"))
    with pytest.raises(TransferError, match="layouts differ"):
        await other.fetch
