"""The receiving side on its own, against an exporter that the test plays."""

import asyncio
from collections.abc import Callable
from typing import cast

import grpc.aio
import pytest

from tandem.workers.engine.fake import FakeKv
from tandem.workers.engine.plan import KvLayout
from tandem.workers.transfer.pull import Puller, Target, Want
from tandem.workers.transfer.wire import Ack, Commit, Data, Message, TransferError, TransferKey, decode, encode

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", model="fake")
KEY = TransferKey(transfer_id=b"0123456789abcdef", epoch=1)
WANT = Want(key=KEY, num_tokens=2, prefix_hash=b"hash")
PAYLOAD = bytes(range(128)) * 3
DATA = Data(index=0, first_layer=0, num_layers=3, first_token=0, num_tokens=2, num_bytes=384, burst=0, age=0.0)
COMMIT = Commit(num_frames=1, num_tokens=2, prefix_hash=b"hash", first_token=42)


class PlayedCall:
    """A gRPC call whose other side is the test."""

    def __init__(self) -> None:
        self.written: list[Message] = []
        self.reads: asyncio.Queue[object] = asyncio.Queue()
        self.ended = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def write(self, frame: bytes) -> None:
        self.written.append(decode(frame)[1])

    async def read(self) -> object:
        return await self.reads.get()

    async def code(self) -> None:
        await asyncio.shield(self.ended)

    async def done_writing(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True
        if not self.ended.done():
            self.ended.set_result(None)


class PlayedChannel:
    def __init__(self, call: PlayedCall) -> None:
        self._call = call

    def stream_stream(self, method: str) -> Callable[[], PlayedCall]:
        return lambda: self._call


class Side:
    """A puller, its memory and one fetch under way."""

    def __init__(self, stall_seconds: float = 30.0, layout: KvLayout = LAYOUT) -> None:
        self.kv = FakeKv(2, 16, LAYOUT)
        self.call = PlayedCall()
        channel = cast(grpc.aio.Channel, PlayedChannel(self.call))
        self.puller = Puller(self.kv, stall_seconds=stall_seconds, channel=lambda endpoint: channel)
        self.target: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
        self.fetch = asyncio.create_task(self.puller.fetch("nowhere", layout, WANT, self.target))

    def place(self) -> None:
        self.target.set_result(Target(blocks=(1,), num_cached=0))

    def send(self, message: Message, payload: bytes = b"", key: TransferKey = KEY) -> None:
        self.call.reads.put_nowait(encode(key, message, payload))

    def written(self) -> bytes:
        return bytes(self.kv.read((1,), 0, 2, 0, 3))


async def test_a_whole_transfer_is_acknowledged_and_its_stream_ends() -> None:
    side = Side()
    side.place()
    side.send(DATA, PAYLOAD)
    side.send(COMMIT)
    fetched = await side.fetch
    assert (fetched.first_token, fetched.num_bytes) == (42, 384)
    assert side.written() == PAYLOAD
    assert isinstance(side.call.written[-1], Ack)
    assert side.puller.num_closing == 1
    side.call.ended.set_result(None)
    async with asyncio.timeout(5):
        while side.puller.num_closing:
            await asyncio.sleep(0)
    assert not side.call.cancelled


@pytest.mark.parametrize("after", range(12))
async def test_a_cancel_at_any_moment_ends_the_fetch(after: int) -> None:
    """Also one that comes together with a frame: the blocks are somebody else's from the cancel on, so not one byte
    may be written after it."""
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


@pytest.mark.parametrize("frame", [b"", b"rubbish", grpc.aio.EOF, encode(KEY, Ack()), encode(KEY, COMMIT)])
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
    other = Side(layout=KvLayout(num_layers=9, num_kv_heads=2, head_dim=4, dtype="float32", model="fake"))
    with pytest.raises(TransferError, match="layouts differ"):
        await other.fetch
