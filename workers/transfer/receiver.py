"""The side of a transfer that fetches KV cache into its own blocks.

The receiver writes its own memory, so a late write into reused blocks cannot happen. It fails closed: until the context
of `fetch` is entered, nothing that arrived may be used; and after that was cancelled or has raised, it writes no more.
A rank pulls from as many ranks as hold what it needs, over a stream for each piece; the bytes go by the way that the
two ranks' connection has chosen, and over the stream itself where there is none or it breaks.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from typing import Final

import grpc.aio

from ..engine.plan import FirstTokens
from ..kv_cache.layout import KvLayout, KvSpan
from ..kv_cache.reshard import Piece, plan
from ..kv_cache.store import KvStore
from .connect import Connection, Connections, KvCall, Peer
from .inlets import Payload, Source
from .transports import Means
from .wire import (
    PAIR_GONE,
    PULL_METHOD,
    Ack,
    Commit,
    Data,
    Message,
    Offer,
    Open,
    Pull,
    TransferError,
    TransferKey,
    TransportError,
    decode,
    encode,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Which cache is wanted, as the handle names it, and what the puller itself knows of it."""

    key: TransferKey
    num_tokens: int
    prefix_hash: bytes  # of the tokens that this worker was given, not what the handle claims


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where it goes: the block table of the prompt, and how many tokens its prefix cache holds already."""

    blocks: tuple[int, ...]
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a stream has brought, or all of a fetch, and verified."""

    opening: FirstTokens
    num_bytes: int
    active_seconds: float  # of the slowest stream: from reading there to writing here, without waits for the prefill
    transport: str  # several as "grpc+shared"; empty for a stream without KV


class Assembly:
    """Checks that frames bring every layer of every token of a piece exactly once and in order, and writes them. Pure
    but for the writes; one per stream. A piece without slots takes nothing, and then is complete."""

    def __init__(self, want: Want, target: Target, kv: KvStore, piece: Piece) -> None:
        self._want = want
        self._target = target
        self._kv = kv
        self._piece = piece
        first = target.num_cached if piece.target_slots else want.num_tokens
        self._next_token = [first] * kv.layout.num_layers  # per layer
        self._num_frames = 0
        self.num_bytes = 0

    def take(self, message: Data, payload: memoryview) -> None:
        """Writes one data frame. Raises TransferError for a repeated, reordered, short or foreign one."""
        layers = range(message.first_layer, message.first_layer + message.num_layers)
        end = message.first_token + message.num_tokens
        layout = self._kv.layout
        if message.index != self._num_frames:
            raise TransferError("KV frame repeated or missing")
        if not layers or layers.stop > layout.num_layers or not message.num_tokens or end > self._want.num_tokens:
            raise TransferError("KV frame out of bounds")
        if range(message.first_slot, message.first_slot + message.num_slots) != self._piece.source_slots:
            raise TransferError("KV frame out of bounds")
        if any(self._next_token[layer] != message.first_token for layer in layers):
            raise TransferError("KV frame out of order")
        if not message.size(layout) == message.num_bytes == payload.nbytes:
            raise TransferError("KV frame of a wrong length")
        span = KvSpan(
            first_layer=message.first_layer,
            num_layers=message.num_layers,
            first_token=message.first_token,
            num_tokens=message.num_tokens,
            first_slot=self._piece.target_slots.start,
            num_slots=message.num_slots,
        )
        self._kv.write(self._target.blocks, span, payload)
        for layer in layers:
            self._next_token[layer] = end
        self._num_frames += 1
        self.num_bytes += payload.nbytes

    def finish(self, commit: Commit) -> FirstTokens:
        """Checks that all is there and is what was wanted. Raises TransferError."""
        want = self._want
        if commit.num_frames != self._num_frames or any(n != want.num_tokens for n in self._next_token):
            raise TransferError("KV cache incomplete")
        if commit.num_tokens != want.num_tokens or commit.prefix_hash != want.prefix_hash:
            raise TransferError("KV cache of another prompt")
        return commit.opening


@dataclass(slots=True)
class _Stream:
    """What brings one piece."""

    call: KvCall
    endpoint: str
    piece: Piece
    connection: Connection | None = None  # that carries the bytes


# A stream to rank 0 that only pins the cache and, in the end, acknowledges it.
_PIN: Final = Piece(source_rank=0, source_slots=range(0), target_slots=range(0))


class KvReceiver:
    """Fetches this rank's part of KV caches from other workers, over channels that the caller owns."""

    def __init__(
        self, kv: KvStore, *, stall_seconds: float, channel: Callable[[str], grpc.aio.Channel], means: Means
    ) -> None:
        self._kv = kv
        self._stall_seconds = stall_seconds
        self._channel = channel
        self._closing: set[asyncio.Task[None]] = set()
        self._connections = Connections(kv, means=means, channel=channel)
        self._pieces: dict[int, tuple[Piece, ...]] = {}  # by the source's degree of tensor parallelism

    @property
    def num_closing(self) -> int:
        """Streams of finished fetches whose end the exporter has not confirmed yet."""
        return len(self._closing)

    @property
    def peers(self) -> list[Peer]:
        """The ranks from which this one has pulled, as long as they live."""
        return self._connections.peers

    async def close(self) -> None:
        """Ends the connections."""
        await self._connections.close()

    @asynccontextmanager
    async def fetch(
        self, endpoints: Sequence[str], layout: KvLayout, want: Want, target: asyncio.Future[Target]
    ) -> AsyncGenerator[Fetched, None]:
        """Opens streams to ranks of the source group at once, which pins the cache, and pulls when `target` is there.
        `endpoints` are HOST:PORT of all its ranks, in their order.

        Inside of the context everything has arrived and verified, and the streams are still open. At its clean end rank
        0 acknowledges the cache for its whole group; if that is lost on the way, the source's lease runs out. After an
        exception in it nobody does, and the streams break off. Raises TransferError on entry for every fault; the
        target's blocks then hold rubbish."""
        streams: list[_Stream] = []
        try:
            for piece in self._plan(layout, len(endpoints)):
                endpoint = endpoints[piece.source_rank]
                streams.append(_Stream(self._call(endpoint), endpoint, piece))
                if piece.source_slots:
                    self._connections.want(endpoint)
            yield await self._gather(streams, want, target)
        except BaseException:
            for stream in streams:
                stream.call.cancel()
            raise
        speaker = next((stream for stream in streams if stream.piece.source_rank == self._kv.rank == 0), None)
        for stream in streams:
            last_word = encode(want.key, Ack()) if stream is speaker else None
            ending = asyncio.create_task(self._close(stream.call, last_word))
            self._closing.add(ending)
            ending.add_done_callback(self._closing.discard)

    def _call(self, endpoint: str) -> KvCall:
        return self._channel(endpoint).stream_stream(PULL_METHOD)()

    def _plan(self, layout: KvLayout, source_tp: int) -> tuple[Piece, ...]:
        """What this rank pulls; rank 0 has at least one stream to rank 0. Raises TransferError if there is no way."""
        kv = self._kv
        if layout != kv.layout:
            raise TransferError("KV layouts differ")
        if source_tp not in self._pieces:
            try:
                pieces = plan(layout.num_heads, layout.num_kv_heads, source_tp, kv.tp, kv.rank)
            except ValueError as error:
                raise TransferError("KV layouts differ") from error
            if kv.rank == 0 and all(piece.source_rank for piece in pieces):
                pieces += (_PIN,)
            self._pieces[source_tp] = pieces
        return self._pieces[source_tp]

    async def _gather(self, streams: Sequence[_Stream], want: Want, target: asyncio.Future[Target]) -> Fetched:
        tasks: list[asyncio.Task[Fetched]] = []

        async def pull(stream: _Stream) -> Fetched:
            try:
                return await self._pull(stream, want, target, stall)
            except BaseException:
                for task in tasks:
                    if task is not asyncio.current_task():
                        task.cancel()
                raise

        try:
            # One deadline, which a frame on any stream puts off: one that only pins the cache says nothing for long.
            async with asyncio.timeout(None) as stall:
                tasks += [asyncio.create_task(pull(stream)) for stream in streams]
                # Neither wait_for nor a TaskGroup nor wait: of all these only gather has cancelled every task when
                # `cancel` returns, and from then on the blocks may be somebody else's. With exceptions as results it
                # loses no cancel that comes together with a failure.
                results = await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError as error:
            self._drop(streams)  # it may be the connection that is stuck
            raise TransferError("KV cache made no progress") from error
        return _sum(results)

    async def _pull(
        self, stream: _Stream, want: Want, target: asyncio.Future[Target], stall: asyncio.Timeout
    ) -> Fetched:
        opening = encode(want.key, Open(layout=asdict(self._kv.layout)))
        try:
            await stream.call.write(opening)
            place = await self._place(stream.call, target)
            self._put_off(stall)
            if stream.piece.source_slots:
                stream.connection = await self._connections.get(stream.endpoint)
            try:
                return await self._bring(stream, want, place, stall)
            except TransportError as error:
                logger.warning("KV cache from %s goes over gRPC: %s", stream.endpoint, error)
            self._drop([stream])
            stream.call.cancel()
            stream.call = self._call(stream.endpoint)
            await stream.call.write(opening)
            return await self._bring(stream, want, place, stall)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise TransferError("KV stream broke") from error

    def _drop(self, streams: Sequence[_Stream]) -> None:
        """The connections of these streams, which have failed them."""
        for stream in streams:
            if stream.connection:
                self._connections.drop(stream.connection)
                stream.connection = None

    async def _bring(self, stream: _Stream, want: Want, place: Target, stall: asyncio.Timeout) -> Fetched:
        """A whole piece, from the Pull to the Commit. Raises TransportError if another way might bring it."""
        call, slots, connection = stream.call, stream.piece.source_slots, stream.connection
        with closing(connection.source() if connection else Payload()) as source:
            pull = Pull(
                first_token=place.num_cached,
                first_slot=slots.start,
                num_slots=len(slots),
                transport=source.transport,
                pair=connection.pair if connection else b"",
                stream=source.stream,
            )
            await call.write(encode(want.key, pull))
            if source.one_sided:
                offer, table = await self._receive(call, want.key, stall)
                if not isinstance(offer, Offer):
                    raise TransferError("KV pull out of order")
                source = source.offered(offer, table)
            assembly = Assembly(want, place, self._kv, stream.piece)
            opening, active_seconds = await self._collect(call, want.key, assembly, source, stall)
        return Fetched(
            opening=opening,
            num_bytes=assembly.num_bytes,
            active_seconds=active_seconds,
            transport=source.transport if slots else "",
        )

    async def _place(self, call: KvCall, target: asyncio.Future[Target]) -> Target:
        """The target, unless the stream ends first."""
        ended = asyncio.ensure_future(call.code())
        try:
            await asyncio.wait((target, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not target.done():
            raise TransferError("KV stream broke")
        return target.result()

    async def _collect(
        self, call: KvCall, key: TransferKey, assembly: Assembly, source: Source, stall: asyncio.Timeout
    ) -> tuple[FirstTokens, float]:
        """Takes every frame up to the Commit. Returns the opening and the active seconds."""
        active, last, burst = 0.0, 0.0, -1
        while True:
            message, payload = await self._receive(call, key, stall)
            if isinstance(message, Commit):
                await source.check()
                return assembly.finish(message), active
            if not isinstance(message, Data):
                raise TransferError("KV pull out of order")
            received = time.monotonic()
            assembly.take(message, await source.read(message, payload))
            now = time.monotonic()
            # Within a burst nobody waits for the prefill: all the time since the frame before counts.
            active += now - last if message.burst == burst else message.age + now - received
            last, burst = now, message.burst

    async def _receive(self, call: KvCall, key: TransferKey, stall: asyncio.Timeout) -> tuple[Message, memoryview]:
        try:
            frame = await call.read()
        except grpc.aio.AioRpcError as error:
            if error.details() == PAIR_GONE:
                raise TransportError(PAIR_GONE) from error
            raise
        self._put_off(stall)
        if not isinstance(frame, bytes):
            raise TransferError("KV stream broke")
        found, message, payload = decode(frame)
        if found != key:
            raise TransferError("KV frame of another transfer")
        return message, payload

    def _put_off(self, stall: asyncio.Timeout) -> None:
        if not stall.expired():
            stall.reschedule(asyncio.get_running_loop().time() + self._stall_seconds)

    async def _close(self, call: KvCall, last_word: bytes | None) -> None:
        """Lets the exporter end the stream, since a cancel could overtake the Ack; gives up after the stall time."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                if last_word is not None:
                    await call.write(last_word)
                await call.done_writing()
                await call.code()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()


def _sum(results: Sequence[Fetched | BaseException]) -> Fetched:
    """What the streams of one fetch have brought. Raises what one has failed with, and TransferError if they are not of
    one cache."""
    parts = [result for result in results if isinstance(result, Fetched)]
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:  # the others were cancelled
        raise next((failure for failure in failures if isinstance(failure, Exception)), failures[0])
    if len({part.opening for part in parts}) > 1:
        raise TransferError("KV cache of another prompt")
    return Fetched(
        opening=parts[0].opening,
        num_bytes=sum(part.num_bytes for part in parts),
        active_seconds=max(part.active_seconds for part in parts),
        transport="+".join(sorted({part.transport for part in parts} - {""})),
    )
