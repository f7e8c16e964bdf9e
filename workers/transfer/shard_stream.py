"""Fetches one shard of a KV cache over a stream of its own, and checks every frame of it."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import grpc.aio
import numpy as np

from ...proto import worker_pb2
from ...proto.metrics import KV_FAILURES
from ..engine.plan import FirstTokens
from ..kv_cache.layout import KvSpan
from ..kv_cache.reshard import Piece
from ..kv_cache.tables import TableBlocks, spec_of
from .connections import Connection, KvCall, ReceiverConnections
from .connector import DeviceKvStore, GrpcConnector, KvConnector, TransferContext
from .frames import (
    CONNECTION_LOST,
    PULL_METHOD,
    Ack,
    Alive,
    BlockTable,
    Commit,
    Data,
    FetchResult,
    FetchTarget,
    Message,
    Open,
    Pull,
    TransferError,
    TransferKey,
    TransportError,
    decode,
    encode,
)

if TYPE_CHECKING:
    from ..host.streams import DeviceData

logger = logging.getLogger(__name__)


class ShardWriter:
    """Writes the frames of one stream after strict checks.

    Checks that the frames bring every layer of every token of a shard exactly once and in order.
    Without side effects except for the writes. A shard without slots accepts no data and is
    complete at once.
    """

    def __init__(
        self,
        num_tokens: int,
        prefix_hash: bytes,
        target: FetchTarget,
        context: TransferContext,
        piece: Piece,
    ) -> None:
        """Prepares for the prompt of `num_tokens` and `prefix_hash` that this worker was given."""
        group = context.kv.layout.groups[piece.group]
        self._num_tokens = num_tokens
        self._prefix_hash = prefix_hash
        self._kv = context.kv
        self._piece = piece
        self._table = target.place.table(context.kv.tables, group)
        self.end = 1 if group.part.state else num_tokens  # of the tokens to be fetched
        self.first_token = self.end
        if piece.target_slots:
            self.first_token = target.first_token(context.kv.tables, group, num_tokens)
        # By the index of the layer in the group.
        self._next_token = dict.fromkeys(range(len(group.layers)), self.first_token)
        self._num_frames = 0
        self.num_bytes = 0

    def write(self, frame: Data, payload: "memoryview | DeviceData") -> None:
        """Writes one data frame.

        Raises TransferError for a frame that is repeated, out of order, of a wrong length or
        foreign.
        """
        end = frame.first_token + frame.num_tokens
        if frame.index != self._num_frames:
            raise TransferError("KV frame repeated or missing")
        if not frame.num_layers or not frame.num_tokens or end > self.end:
            raise TransferError("KV frame out of bounds")
        if range(frame.first_slot, frame.first_slot + frame.num_slots) != self._piece.source_slots:
            raise TransferError("KV frame out of bounds")
        if frame.group != self._piece.group:
            raise TransferError("KV frame out of bounds")
        # Checked before `frame.layers` is iterated, because num_layers may be huge.
        if frame.num_layers > len(self._next_token):
            raise TransferError("KV frame out of bounds")
        if set(map(self._next_token.get, frame.layers)) != {frame.first_token}:
            raise TransferError("KV frame out of order")
        if not frame.size(self._kv.layout) == frame.num_bytes == payload.nbytes:
            raise TransferError("KV frame of a wrong length")
        place = KvSpan(
            group=frame.group,
            first_layer=frame.first_layer,
            num_layers=frame.num_layers,
            first_token=frame.first_token,
            num_tokens=frame.num_tokens,
            first_slot=self._piece.target_slots.start,
            num_slots=frame.num_slots,
        )
        if isinstance(payload, memoryview):
            self._kv.write(self._table, place, payload)
        else:  # only a store on a GPU fetches such data
            cast(DeviceKvStore, self._kv).scatter(self._table, place, payload)
        self._next_token.update(dict.fromkeys(frame.layers, end))
        self._num_frames += 1
        self.num_bytes += payload.nbytes

    def finish(self, commit: Commit) -> FirstTokens:
        """Checks that everything requested has arrived. Raises TransferError."""
        if commit.num_frames != self._num_frames or any(
            n != self.end for n in self._next_token.values()
        ):
            raise TransferError("KV cache incomplete")
        if commit.num_tokens != self._num_tokens or commit.prefix_hash != self._prefix_hash:
            raise TransferError("KV cache of another prompt")
        return commit.first_tokens


class ShardStream:
    """Fetches one shard over a stream of its own.

    The bytes go by the transport that the connection of the two ranks has chosen. They go over the
    stream itself if gRPC was chosen or the transport breaks.
    """

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
        self._context = context
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
        """Fetches the shard once the target is known; uses gRPC if the transport breaks.

        `extend` postpones `stall`. Raises TransferError.
        """
        self._extend = extend
        try:
            await self._send(Open(layout=self._kv.layout.digest))
            place = await self._wait_for(target)
            extend()
            if self.piece.source_slots:
                self._connection = await self._connections.get(self._endpoint)
            if self._connection and not self._can_use(self._connection):
                self._connection = None
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
        except MemoryError as error:
            self._count_failure()
            raise TransferError(f"KV frame not copied: {error}") from error
        except TransferError:
            self._count_failure()
            raise
        except asyncio.CancelledError:
            if stall.expired():
                self._count_failure()
                if self._connection:  # it may be stuck
                    self._connections.drop(self._connection)
            raise

    def _can_use(self, connection: Connection) -> bool:
        """Returns False for a state over a one-sided transport, which shows the KV blocks only."""
        part = self._kv.layout.groups[self.piece.group].part
        return not (part.state and connection.connector and connection.connector.one_sided)

    def _count_failure(self) -> None:
        connector = self._connection.connector if self._connection else None
        self._metrics.add(
            KV_FAILURES, transport=connector.name if connector else self._connector.name
        )

    async def close(self, seconds: float, *, acknowledge: bool) -> None:
        """Lets the sender end the stream, because a cancel could overtake the Ack.

        Cancels the stream after `seconds`.
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
        """Returns the target once it is known. Raises TransferError if the stream ends first."""
        ended = asyncio.ensure_future(self.call.code())
        try:
            await asyncio.wait((target, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not target.done():
            raise TransferError("KV stream broke")
        return target.result()

    async def _transfer(self, target: FetchTarget, connection: Connection | None) -> FetchResult:
        """Fetches the whole shard, from the Pull to the Commit.

        Raises TransportError if another transport may still succeed.
        """
        connector: KvConnector | None = self._connector
        stream = 0
        if connection:
            connector = connection.connector
            stream = next(connection.streams)
        if connector is None:
            raise TransportError(CONNECTION_LOST)
        slots = self.piece.source_slots
        writer = ShardWriter(self._num_tokens, self._prefix_hash, target, self._context, self.piece)
        with connector.open_stream(stream):
            pull = Pull(
                first_token=writer.first_token,
                group=self.piece.group,
                first_slot=slots.start,
                num_slots=len(slots),
                connection=connection.key.transfer_id if connection else b"",
                stream=stream,
            )
            await self._send(pull)
            lease: BlockTable | None = None
            table = TableBlocks(())
            if connector.one_sided:
                lease, table = await self._receive_table(connector, writer)
                connector = connector if lease.number else self._connector
            commit, active_seconds = await self._collect(connector, stream, table, writer)
            if lease and lease.number:
                await connector.verify(lease)
        return writer.finish(commit), worker_pb2.KvReceived(
            transfer_bytes=writer.num_bytes,
            transfer_active_seconds=active_seconds,
            transport=connector.name if slots else "",
        )

    async def _receive_table(
        self, connector: KvConnector, writer: ShardWriter
    ) -> tuple[BlockTable, TableBlocks]:
        """Receives the sender's blocks. Raises TransferError unless they hold just the tokens."""
        answer, payload = await self._receive()
        if not isinstance(answer, BlockTable) or len(payload) % 4:
            raise TransferError("KV pull out of order")
        group = self._kv.layout.groups[self.piece.group]
        block_size = spec_of(self._kv.tables, group).block_size
        if not group.part.state:
            block_size = block_size // self._kv.block_size * connector.sender_block_size
        table = TableBlocks(tuple(np.frombuffer(payload, "<i4").tolist()), answer.first)
        # The sender and this side compute the same: another index would shift all positions.
        first, end = writer.first_token // block_size, -(-writer.end // block_size)
        if (table.first, len(table.blocks)) != (first, end - first):
            raise TransferError("KV block table of other tokens")
        return answer, table

    async def _collect(
        self, connector: KvConnector, stream: int, table: TableBlocks, writer: ShardWriter
    ) -> tuple[Commit, float]:
        """Receives every frame up to the Commit; returns it and the active seconds."""
        active = 0.0
        last = 0.0
        burst = -1
        while True:
            message, payload = await self._receive()
            if isinstance(message, Commit):
                return message, active
            if isinstance(message, Alive):
                continue
            if not isinstance(message, Data):
                raise TransferError("KV pull out of order")
            received = self._context.clock()
            try:
                data = await connector.fetch(stream, table, message, payload)
            except ValueError as error:
                raise TransferError("KV frame out of bounds") from error
            writer.write(message, data)
            now = self._context.clock()
            # The frames of a burst do not wait for the prefill, so all the time since the previous
            # frame counts.
            active += now - last if message.burst == burst else message.age + now - received
            last = now
            burst = message.burst
