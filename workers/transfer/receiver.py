"""Fetches KV cache from other workers into this rank's own blocks.

The receiver writes its own memory, so a late write into reused blocks cannot happen. It fails
closed: until the context of `fetch` is entered, nothing that arrived may be used; and after that
was cancelled or has raised, it writes no more. A rank pulls from as many ranks as hold what it
needs, over a stream for each piece; the bytes go by the transport that the two ranks' connection
has chosen, and over the stream itself where there is none or it breaks.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import grpc.aio
import numpy as np

from ...proto import worker_pb2
from ...proto.channel import PeerChannel
from ...proto.metrics import KV_FAILURES
from ..engine.plan import FirstTokens
from ..kv_cache.layout import KvSpan
from ..kv_cache.reshard import Piece, plan_layout
from ..kv_cache.store import KvStore
from .connections import Connection, KvCall, ReceiverConnections
from .connector import KvConnector, TransferContext
from .frames import (
    CONNECTION_LOST,
    PULL_METHOD,
    Ack,
    BlockTable,
    Commit,
    Data,
    Message,
    Open,
    Pull,
    TransferError,
    TransferKey,
    TransportError,
    decode,
    encode,
)
from .grpc_connector import GrpcConnector

logger = logging.getLogger(__name__)


FetchTarget = tuple[tuple[int, ...], int]
"""Where a cache goes: the block table of the prompt, and how many tokens the prefix cache holds
already.
"""

FetchResult = tuple[FirstTokens, worker_pb2.KvReceived]
"""What a stream has brought, or all of a fetch, and verified. The active seconds go from reading at
the sender to writing here, without waits for the prefill; the transport of a stream without KV is
empty.
"""


class ShardWriter:
    """Checks that frames bring every layer of every token of a piece exactly once and in order, and
    writes them. Pure but for the writes; one per stream. A piece without slots takes nothing, and
    then is complete.
    """

    def __init__(
        self, num_tokens: int, prefix_hash: bytes, target: FetchTarget, kv: KvStore, piece: Piece
    ) -> None:
        """`num_tokens` and `prefix_hash` are those of the prompt that this worker was given."""
        self._num_tokens = num_tokens
        self._prefix_hash = prefix_hash
        self._blocks, num_cached = target
        self._kv = kv
        self._piece = piece
        first = num_cached if piece.target_slots else num_tokens
        self._next_token = dict.fromkeys(kv.layout.groups[piece.group], first)  # by layer
        self._num_frames = 0
        self.num_bytes = 0

    def write(self, frame: Data, payload: memoryview) -> None:
        """Writes one data frame. Raises TransferError for a repeated, reordered, short or foreign
        one.
        """
        end = frame.first_token + frame.num_tokens
        if frame.index != self._num_frames:
            raise TransferError("KV frame repeated or missing")
        if not frame.num_layers or not frame.num_tokens or end > self._num_tokens:
            raise TransferError("KV frame out of bounds")
        if range(frame.first_slot, frame.first_slot + frame.num_slots) != self._piece.source_slots:
            raise TransferError("KV frame out of bounds")
        # A number of layers that no model has must not be counted through. A layer of another group
        # has no next token.
        if frame.num_layers > len(self._next_token):
            raise TransferError("KV frame out of bounds")
        if set(map(self._next_token.get, frame.layers)) != {frame.first_token}:
            raise TransferError("KV frame out of order")
        if not frame.size(self._kv.layout) == frame.num_bytes == payload.nbytes:
            raise TransferError("KV frame of a wrong length")
        place = KvSpan(
            first_layer=frame.first_layer,
            num_layers=frame.num_layers,
            first_token=frame.first_token,
            num_tokens=frame.num_tokens,
            first_slot=self._piece.target_slots.start,
            num_slots=frame.num_slots,
        )
        self._kv.write(self._blocks, place, payload)
        self._next_token.update(dict.fromkeys(frame.layers, end))
        self._num_frames += 1
        self.num_bytes += payload.nbytes

    def finish(self, commit: Commit) -> FirstTokens:
        """Checks that everything has arrived and is what was asked for. Raises TransferError."""
        if commit.num_frames != self._num_frames or any(
            n != self._num_tokens for n in self._next_token.values()
        ):
            raise TransferError("KV cache incomplete")
        if commit.num_tokens != self._num_tokens or commit.prefix_hash != self._prefix_hash:
            raise TransferError("KV cache of another prompt")
        return commit.first_tokens


class ShardStream:
    """Brings one piece of a fetch over a stream of its own."""

    def __init__(
        self,
        piece: Piece,
        handle: worker_pb2.KvHandle,
        prefix_hash: bytes,
        context: TransferContext,
        connections: ReceiverConnections,
    ) -> None:
        self.piece = piece
        self._key = TransferKey(transfer_id=handle.transfer_id, epoch=handle.epoch)
        self._num_tokens = handle.num_tokens
        self._prefix_hash = prefix_hash
        self._kv = context.kv
        self._metrics = context.metrics
        self._connector: KvConnector = GrpcConnector(context, "grpc")
        self._endpoint = handle.endpoints[piece.source_rank]
        self._connections = connections
        self._connection: Connection | None = None
        self.call = self._open()
        if piece.source_slots:
            connections.connect(self._endpoint)

    async def pull(
        self,
        target: asyncio.Future[FetchTarget],
        stall: asyncio.Timeout,
        extend: Callable[[], None],
    ) -> FetchResult:
        """Brings the piece when the target is known, over gRPC if the transport breaks; `extend`
        postpones `stall`. Raises TransferError.
        """
        self._extend = extend
        try:
            await self._send(Open(layout=self._kv.layout.digest))
            place = await self._wait_for(target)
            extend()
            if self.piece.source_slots:
                self._connection = await self._connections.get(self._endpoint)
            if self._connection:
                try:
                    return await self._transfer(place, self._connection)
                except TransportError as error:
                    self._count_failure()
                    logger.warning(
                        "KV cache from %s goes over gRPC: %s", self._endpoint, str(error)
                    )
                self._connections.drop(self._connection)
                self._connection = None
                self.call.cancel()
                self.call = self._open()
                await self._send(Open(layout=self._kv.layout.digest))
            return await self._transfer(place, None)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._count_failure()
            raise TransferError("KV stream broke") from error
        except TransferError:
            self._count_failure()
            raise
        except asyncio.CancelledError:
            if stall.expired():
                self._count_failure()
                if self._connection:  # which may be stuck
                    self._connections.drop(self._connection)
            raise

    def _count_failure(self) -> None:
        connector = self._connection.connector if self._connection else None
        self._metrics.add(
            KV_FAILURES, transport=connector.name if connector else self._connector.name
        )

    async def close(self, seconds: float, *, acknowledge: bool) -> None:
        """Lets the sender end the stream, since a cancel could overtake the Ack; cancels it after
        so long.
        """
        try:
            async with asyncio.timeout(seconds):
                if acknowledge:
                    await self._send(Ack())
                await self.call.done_writing()
                await self.call.code()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.call.cancel()

    def _open(self) -> KvCall:
        return self._connections.channel(self._endpoint).stream_stream(PULL_METHOD)()

    async def _send(self, message: Message) -> None:
        await self.call.write(encode(self._key, message))

    async def _receive(self) -> tuple[Message, memoryview]:
        try:
            frame = await self.call.read()
        except grpc.aio.AioRpcError as error:
            if error.details() == CONNECTION_LOST:
                raise TransportError(CONNECTION_LOST) from error
            raise
        self._extend()
        if not isinstance(frame, bytes):
            raise TransferError("KV stream broke")
        key, message, payload = decode(frame)
        if key != self._key:
            raise TransferError("KV frame of another transfer")
        return message, payload

    async def _wait_for(self, target: asyncio.Future[FetchTarget]) -> FetchTarget:
        """Returns the target as soon as it is known. Raises TransferError if the stream ends first."""
        ended = asyncio.ensure_future(self.call.code())
        try:
            await asyncio.wait((target, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not target.done():
            raise TransferError("KV stream broke")
        return target.result()

    async def _transfer(self, target: FetchTarget, connection: Connection | None) -> FetchResult:
        """Brings the whole piece, from the Pull to the Commit. Raises TransportError if another
        transport might.
        """
        connector, stream = (
            (connection.connector, next(connection.streams)) if connection else (self._connector, 0)
        )
        if connector is None:
            raise TransportError(CONNECTION_LOST)
        slots = self.piece.source_slots
        with connector.open_stream(stream):
            pull = Pull(
                first_token=target[1],
                group=self.piece.group,
                first_slot=slots.start,
                num_slots=len(slots),
                connection=connection.key.transfer_id if connection else b"",
                stream=stream,
            )
            await self._send(pull)
            table: BlockTable | None = None
            blocks: list[int] = []
            if connector.one_sided:
                answer, payload = await self._receive()
                if not isinstance(answer, BlockTable) or len(payload) % 4:
                    raise TransferError("KV pull out of order")
                table, blocks = answer, np.frombuffer(payload, "<i4").tolist()
                connector = connector if table.number else self._connector
            writer = ShardWriter(self._num_tokens, self._prefix_hash, target, self._kv, self.piece)
            commit, active_seconds = await self._collect(connector, stream, blocks, writer)
            if table and table.number:
                await connector.verify(table)
        return writer.finish(commit), worker_pb2.KvReceived(
            transfer_bytes=writer.num_bytes,
            transfer_active_seconds=active_seconds,
            transport=connector.name if slots else "",
        )

    async def _collect(
        self, connector: KvConnector, stream: int, blocks: list[int], writer: ShardWriter
    ) -> tuple[Commit, float]:
        """Takes every frame up to the Commit; returns it and the active seconds."""
        active, last, burst = 0.0, 0.0, -1
        while True:
            message, payload = await self._receive()
            if isinstance(message, Commit):
                return message, active
            if not isinstance(message, Data):
                raise TransferError("KV pull out of order")
            received = time.monotonic()
            try:
                data = await connector.fetch(stream, blocks, message, payload)
            except ValueError as error:
                raise TransferError("KV frame out of bounds") from error
            writer.write(message, data)
            now = time.monotonic()
            # Within a burst nothing waits for the prefill: all the time since the frame before
            # counts.
            active += now - last if message.burst == burst else message.age + now - received
            last, burst = now, message.burst


# A stream to rank 0 that only pins the cache and, in the end, acknowledges it.
_PIN: Final = Piece(source_rank=0, source_slots=range(0), target_slots=range(0))


class KvReceiver:
    """Fetches this rank's part of KV caches from other workers, over channels that the caller owns."""

    def __init__(
        self,
        context: TransferContext,
        *,
        stall_seconds: float,
        channel: Callable[[str], PeerChannel],
    ) -> None:
        self.connections = ReceiverConnections(context, channel)
        self._context = context
        self._stall_seconds = stall_seconds
        self._closing: set[asyncio.Task[None]] = set()
        self._pieces: dict[
            int, tuple[Piece, ...]
        ] = {}  # by the source's degree of tensor parallelism

    @property
    def num_closing(self) -> int:
        """Streams of finished fetches whose end the sender has not confirmed yet."""
        return len(self._closing)

    @asynccontextmanager
    async def fetch(
        self, handle: worker_pb2.KvHandle, prefix_hash: bytes, target: asyncio.Future[FetchTarget]
    ) -> AsyncGenerator[FetchResult, None]:
        """Opens streams to ranks of the source group at once, which pins the cache, and pulls when
        `target` is known. `prefix_hash` is that of the tokens that this worker was given.

        Inside of the context everything has arrived and verified, and the streams are still open.
        At its clean end rank 0 acknowledges the cache for its whole group; if that is lost on the
        way, the source's lease runs out. After an exception in it nothing is acknowledged, and the
        streams break off: the cache can be fetched again. Raises TransferError on entry for every
        fault; the target's blocks then have undefined content.
        """
        streams: list[ShardStream] = []
        try:
            for piece in self._plan(handle):
                streams.append(
                    ShardStream(piece, handle, prefix_hash, self._context, self.connections)
                )
            yield await self._pull(streams, target)
        except BaseException:
            for stream in streams:
                stream.call.cancel()
            raise
        leading = next(
            (
                stream
                for stream in streams
                if stream.piece.source_rank == self._context.kv.rank == 0
            ),
            None,
        )
        for stream in streams:
            closing = asyncio.create_task(
                stream.close(self._stall_seconds, acknowledge=stream is leading)
            )
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _plan(self, handle: worker_pb2.KvHandle) -> tuple[Piece, ...]:
        """Returns what this rank pulls; rank 0 has at least one stream to rank 0. Raises
        TransferError if the source cannot be split so.
        """
        kv, source_tp = self._context.kv, len(handle.endpoints)
        if handle.layout != kv.layout.digest:
            raise TransferError("KV layouts differ")
        if source_tp not in self._pieces:
            try:
                pieces = plan_layout(kv.layout, source_tp, kv.tp, kv.rank)
            except ValueError as error:
                raise TransferError("KV layouts differ") from error
            if kv.rank == 0 and all(piece.source_rank for piece in pieces):
                pieces += (_PIN,)
            self._pieces[source_tp] = pieces
        return self._pieces[source_tp]

    async def _pull(
        self, streams: Sequence[ShardStream], target: asyncio.Future[FetchTarget]
    ) -> FetchResult:
        tasks: list[asyncio.Task[FetchResult]] = []
        loop = asyncio.get_running_loop()

        def extend() -> None:
            if not stall.expired():
                stall.reschedule(loop.time() + self._stall_seconds)

        async def pull(stream: ShardStream) -> FetchResult:
            try:
                return await stream.pull(target, stall, extend)
            except BaseException:
                for task in tasks:
                    if task is not asyncio.current_task():
                        task.cancel()
                raise

        try:
            # One deadline, which a frame on any stream extends: one that only pins the cache is
            # silent for long.
            async with asyncio.timeout(None) as stall:
                tasks += [asyncio.create_task(pull(stream)) for stream in streams]
                # Neither wait_for nor a TaskGroup nor wait: of all these only gather has cancelled
                # every task when `cancel` returns, and from then on the blocks may have another
                # owner. With exceptions as results it loses no cancel that comes together with a
                # failure.
                results = await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError as error:
            raise TransferError("KV cache made no progress") from error
        return _merge(results)


def _merge(results: Sequence[FetchResult | BaseException]) -> FetchResult:
    """Returns what the streams of one fetch have brought. Raises the failure of one, and
    TransferError if they are not of one cache.
    """
    if failures := [
        result for result in results if isinstance(result, BaseException)
    ]:  # the others were cancelled
        raise next((failure for failure in failures if isinstance(failure, Exception)), failures[0])
    parts = [result for result in results if not isinstance(result, BaseException)]
    if len({first_tokens for first_tokens, _ in parts}) > 1:
        raise TransferError("KV cache of another prompt")
    return parts[0][0], merge([received for _, received in parts])


def merge(parts: Sequence[worker_pb2.KvReceived]) -> worker_pb2.KvReceived:
    """Returns what several streams or ranks have received together."""
    transports = {name for part in parts for name in part.transport.split("+")}
    return worker_pb2.KvReceived(
        transfer_bytes=sum(part.transfer_bytes for part in parts),
        transfer_active_seconds=max(part.transfer_active_seconds for part in parts),
        transport="+".join(sorted(transports - {""})),
    )
