"""The side of a transfer that fetches KV cache into its own blocks.

The receiver writes its own memory, so a late write into reused blocks cannot happen. It fails closed: until `fetch` has
returned, nothing that arrived may be used; and after it was cancelled or has raised, it writes no more.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import grpc.aio
import numpy as np

from ..engine.plan import KvLayout, KvStore
from .shared import PeerMemory, host_id
from .wire import (
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
    decode,
    encode,
)

KvCall = grpc.aio.StreamStreamCall[bytes, bytes]


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
    """A transfer that verified."""

    first_token: int
    num_bytes: int
    active_seconds: float  # from reading at the exporter to writing here, without the waits for the prefill


class Assembly:
    """Checks that frames bring every layer of every token exactly once and in order, and writes them. Pure but for
    the writes; one per transfer."""

    def __init__(self, want: Want, target: Target, kv: KvStore) -> None:
        self._want = want
        self._target = target
        self._kv = kv
        self._next_token = [target.num_cached] * kv.layout.num_layers  # per layer
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
        if any(self._next_token[layer] != message.first_token for layer in layers):
            raise TransferError("KV frame out of order")
        expected = message.num_layers * message.num_tokens * layout.bytes_per_token_layer
        if not expected == message.num_bytes == payload.nbytes:
            raise TransferError("KV frame of a wrong length")
        self._kv.write(
            self._target.blocks,
            message.first_token,
            message.num_tokens,
            message.first_layer,
            message.num_layers,
            payload,
        )
        for layer in layers:
            self._next_token[layer] = end
        self._num_frames += 1
        self.num_bytes += payload.nbytes

    def finish(self, commit: Commit) -> int:
        """Checks that all is there and is what was wanted; returns the first token. Raises TransferError."""
        want = self._want
        if commit.num_frames != self._num_frames or any(n != want.num_tokens for n in self._next_token):
            raise TransferError("KV cache incomplete")
        if commit.num_tokens != want.num_tokens or commit.prefix_hash != want.prefix_hash:
            raise TransferError("KV cache of another prompt")
        return commit.first_token


@dataclass(frozen=True, slots=True)
class _Source:
    """An export in memory that the puller reads itself."""

    peer: PeerMemory
    offer: Offer
    blocks: list[int]

    def read(self, message: Data) -> memoryview:
        try:
            return self.peer.kv.read(
                self.blocks, message.first_token, message.num_tokens, message.first_layer, message.num_layers
            )
        except ValueError as error:
            raise TransferError("KV frame out of bounds") from error


class Puller:
    """Fetches KV cache from other workers over channels that the caller owns."""

    def __init__(self, kv: KvStore, *, stall_seconds: float, channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._kv = kv
        self._stall_seconds = stall_seconds
        self._channel = channel
        self._closing: set[asyncio.Task[None]] = set()
        self._host = host_id() if kv.shared else ""
        self._peers: dict[str, PeerMemory] = {}  # by endpoint

    @property
    def num_closing(self) -> int:
        """Acknowledged streams whose end the exporter has not confirmed yet."""
        return len(self._closing)

    async def fetch(self, endpoint: str, layout: KvLayout, want: Want, target: asyncio.Future[Target]) -> Fetched:
        """Opens the stream at once, which pins the cache, and pulls when `target` is there.

        Raises TransferError for every fault; the target's blocks then hold rubbish."""
        if layout != self._kv.layout:
            raise TransferError("KV layouts differ")
        call: KvCall = self._channel(endpoint).stream_stream(PULL_METHOD)()
        try:
            await call.write(encode(want.key, Open(layout=asdict(layout), host=self._host)))
            place = await self._place(call, target)
            source = await self._source(call, want, endpoint) if self._host else None
            await call.write(encode(want.key, Pull(first_token=place.num_cached, shared=source is not None)))
            fetched = await self._collect(call, want, place, source)
            await call.write(encode(want.key, Ack()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            call.cancel()
            raise TransferError("KV stream broke") from error
        except BaseException:
            call.cancel()
            raise
        closing = asyncio.create_task(self._close(call))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return fetched

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

    async def _source(self, call: KvCall, want: Want, endpoint: str) -> "_Source | None":
        """The exporter's memory, if this process can map it."""
        offer, table = await self._receive(call, want.key)
        if not isinstance(offer, Offer) or len(table) % 4:
            raise TransferError("KV pull out of order")
        if not offer.number:
            return None
        self._peers = {place: peer for place, peer in self._peers.items() if peer.alive}
        peer = self._peers.get(endpoint)
        if peer is None or peer.token != offer.token:
            try:
                peer = self._peers[endpoint] = PeerMemory(offer, self._kv)
            except (OSError, ValueError):
                return None
        return _Source(peer, offer, np.frombuffer(table, "<i4").tolist())

    async def _collect(self, call: KvCall, want: Want, place: Target, source: "_Source | None") -> Fetched:
        assembly = Assembly(want, place, self._kv)
        active, last, burst = 0.0, 0.0, -1
        while True:
            message, payload = await self._receive(call, want.key)
            if isinstance(message, Commit):
                if source:
                    source.peer.check(source.offer)
                return Fetched(
                    first_token=assembly.finish(message), num_bytes=assembly.num_bytes, active_seconds=active
                )
            if not isinstance(message, Data):
                raise TransferError("KV pull out of order")
            received = time.monotonic()
            assembly.take(message, source.read(message) if source else payload)
            now = time.monotonic()
            # Within a burst nobody waits for the prefill: all the time since the frame before counts.
            active += now - last if message.burst == burst else message.age + now - received
            last, burst = now, message.burst

    async def _receive(self, call: KvCall, key: TransferKey) -> tuple[Message, memoryview]:
        try:
            # Not wait_for: until Python 3.12 it drops a cancel that comes together with a frame, and then this would
            # go on writing into blocks that somebody else owns.
            async with asyncio.timeout(self._stall_seconds):
                frame = await call.read()
        except TimeoutError as error:
            raise TransferError("KV cache made no progress") from error
        if not isinstance(frame, bytes):
            raise TransferError("KV stream broke")
        found, message, payload = decode(frame)
        if found != key:
            raise TransferError("KV frame of another transfer")
        return message, payload

    async def _close(self, call: KvCall) -> None:
        """Lets the exporter end the stream, since a cancel could overtake the Ack; gives up after the stall time."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await call.done_writing()
                await call.code()
        except (TimeoutError, grpc.aio.AioRpcError):
            call.cancel()
