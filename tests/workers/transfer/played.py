"""gRPC calls whose other side is a sender of the same process."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import cast

import grpc
import grpc.aio

from tandem.proto import worker_pb2
from tandem.proto.channel import PeerChannel
from tandem.tests.waits import WAIT
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.kv_cache.store import KvStore
from tandem.workers.kv_cache.tables import SequenceKv, TableBlocks
from tandem.workers.transfer.connector import TransferContext
from tandem.workers.transfer.frames import (
    CONNECT_METHOD,
    FetchTarget,
    Message,
    TransferError,
    TransferKey,
    decode,
)
from tandem.workers.transfer.sender import FrameHook, KvSender

LAYOUT = KvLayout.uniform(
    num_layers=3, num_heads=2, num_kv_heads=2, head_dim=4, dtype="float32", model="fake"
)
"""Of the tests of one side on its own."""
EPOCH = 3
"""Of every sender."""

Serve = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]


def handle(
    key: TransferKey, endpoints: Iterable[str], layout: KvLayout, num_tokens: int
) -> worker_pb2.KvHandle:
    """Names an offer under this key."""
    return worker_pb2.KvHandle(
        transfer_id=key.transfer_id,
        epoch=key.epoch,
        endpoints=endpoints,
        layout=layout.digest,
        num_tokens=num_tokens,
    )


def sender_of(
    kv: KvStore,
    transports: tuple[str, ...],
    released: list[int] | None = None,
    *,
    lease_seconds: float | None = 30.0,
    stall_seconds: float = WAIT,
    frame_hook: FrameHook | None = None,
) -> KvSender:
    """Sends from this memory; what it releases goes to the list."""
    return KvSender(
        TransferContext(kv=kv, transports=transports),
        epoch=EPOCH,
        lease_seconds=lease_seconds,
        stall_seconds=stall_seconds,
        on_release=(lambda sequence_id: None) if released is None else released.append,
        frame_hook=frame_hook,
    )


def one_table(blocks: Iterable[int]) -> SequenceKv:
    """Places a sequence of a model without windows and states."""
    return SequenceKv((TableBlocks(tuple(blocks)),))


def placed(blocks: tuple[int, ...], num_cached: int = 0) -> asyncio.Future[FetchTarget]:
    """A target that is known already."""
    target: asyncio.Future[FetchTarget] = asyncio.get_running_loop().create_future()
    target.set_result(FetchTarget(one_table(blocks), num_cached))
    return target


class Call:
    """A stream between a receiver and a sender, which answers it by `serve`."""

    def __init__(self, serve: Serve) -> None:
        self.said: list[Message] = []  # by the receiver
        self.cancelled = False
        self._to_sender: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._answers: asyncio.Queue[object] = asyncio.Queue()
        self.error: TransferError | None = None  # with which the sender ended the stream
        self.serving = asyncio.create_task(self._serve(serve))

    async def _serve(self, serve: Serve) -> None:
        try:
            async with aclosing(serve(self._incoming())) as frames:
                async for frame in frames:
                    self._answers.put_nowait(frame)
        except TransferError as error:
            self.error = error
        except Exception:
            self._answers.put_nowait(grpc.aio.EOF)  # or the receiver would wait for ever
            raise
        self._answers.put_nowait(grpc.aio.EOF)

    async def _incoming(self) -> AsyncIterator[bytes]:
        while (frame := await self._to_sender.get()) is not None:
            yield frame

    async def write(self, frame: bytes) -> None:
        if self.serving.done():
            raise asyncio.InvalidStateError
        self.said.append(decode(frame)[1])
        self._to_sender.put_nowait(frame)

    async def read(self) -> object:
        answer = await self._answers.get()
        if answer is grpc.aio.EOF and self.error:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.ABORTED, metadata, metadata, details=str(self.error)
            )
        return answer

    async def code(self) -> None:
        await asyncio.wait([self.serving])

    async def done_writing(self) -> None:
        self._to_sender.put_nowait(None)

    def cancel(self) -> None:
        self.cancelled = True
        self.serving.cancel()


class Calls:
    """Makes the channels to senders and keeps the calls over them, with their endpoints."""

    def __init__(self, senders: Mapping[str, KvSender]) -> None:
        self.made: list[tuple[str, Call]] = []  # to pull
        self.connects: list[tuple[str, Call]] = []
        self._senders = senders

    async def ended(self) -> None:
        """Returns when no sender serves a connection any more."""
        async with asyncio.timeout(WAIT):
            await asyncio.gather(
                *(call.serving for _, call in self.connects), return_exceptions=True
            )

    def channel(self, endpoint: str) -> PeerChannel:
        return cast(PeerChannel, _Channel(lambda method: self._open(endpoint, method)))

    def _open(self, endpoint: str, method: str) -> Call:
        sender = self._senders[endpoint]
        if method == CONNECT_METHOD:
            call = Call(sender.connections.serve)
            self.connects.append((endpoint, call))
        else:
            call = Call(sender.serve)
            self.made.append((endpoint, call))
        return call


class _Channel:
    def __init__(self, start: Callable[[str], Call]) -> None:
        self._start = start

    def stream_stream(self, method: str) -> Callable[[], Call]:
        return lambda: self._start(method)
