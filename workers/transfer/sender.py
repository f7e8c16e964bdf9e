"""Sends KV cache to other workers, also while the prefill still runs.

All code of this module runs in one event loop, and checks that an offer stands just before it reads
KV memory. So once `withdraw` has returned, no further read begins and the blocks may be reused: on
CPUs a read is a copy that has ended, on GPUs the next owner's work waits for it. One file because
all that reads an offer must see its withdrawal.
"""

import asyncio
import itertools
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Mapping,
)
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Final

import numpy as np

from ..engine.plan import FirstTokens
from ..kv_cache.layout import CachePart, KvLayout, KvSpan
from ..kv_cache.tables import SequenceKv, TableBlocks, spec_of
from .connections import SenderConnections, receive
from .connector import GrpcConnector, KvConnector, TransferContext
from .frames import (
    Ack,
    Alive,
    BlockTable,
    Commit,
    Data,
    Message,
    Open,
    Pull,
    TransferError,
    TransferKey,
    encode,
)

# Bounds in seconds of the pause between two frames that no decode waits for yet. A shorter pause
# costs more than it helps.
_MIN_PAUSE: Final = 0.001
_MAX_PAUSE: Final = 0.05

_OFFER_SECONDS: Final = 2.0  # a receiver may connect this long before the offer arrives
_ALIVE_SHARE: Final = 0.25  # of stall_seconds: the longest silence while the prefill goes on
_SPAN_FIELDS: Final = tuple(each.name for each in fields(KvSpan))

FrameHook = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


@dataclass(slots=True, eq=False)
class KvOffer:
    """Holds the offer of a sequence's KV cache.

    The blocks belong to a prefill, whose tokens become readable as they are computed, or to a
    suspended sequence, whose tokens are all computed.
    """

    key: TransferKey
    sequence_id: int
    place: SequenceKv
    num_tokens: int
    prefix_hash: bytes
    entry: tuple[int, int]  # index and number of the lease table's entry
    progressed: float  # time of the last report of progress, or of the offer
    num_ready: int = 0  # tokens that are computed in all layers
    num_ahead: int = 0  # tokens that are computed in the first num_layers layers
    num_layers: int = 0
    num_reports: int = 0  # of progress
    interval: float = 0.0  # seconds between the last two reports of progress
    first_tokens: FirstTokens | None = None  # set when the prefill is done
    withdrawn: bool = False
    num_streams: int = 0  # open pulls; each pins the cache
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None

    def ready(self, layer: int, part: CachePart) -> int:
        """Returns the number of tokens whose KV cache is computed in a layer.

        The one token of a state is computed with the last token of the sequence.
        """
        num_tokens = self.num_ahead if layer < self.num_layers else self.num_ready
        return int(num_tokens == self.num_tokens) if part.state else num_tokens

    def end(self, part: CachePart) -> int:
        """Returns the number of tokens in a group: of the sequence, or the one of a state."""
        return 1 if part.state else self.num_tokens

    async def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Returns when the condition holds or the offer has ended. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition() and not self.withdrawn:
                self.changed.clear()
                await self.changed.wait()

    def check(self) -> None:
        """Raises TransferError if the offer has ended."""
        if self.withdrawn:
            raise TransferError("KV cache withdrawn")


@dataclass(eq=False)
class KvSender:
    """Offers this rank's KV cache, by transfer id.

    An offer is open to any receiver until one acknowledges it, its lease expires or it is
    withdrawn.

    `on_release(sequence_id)` is called exactly once for each offer that was acknowledged or whose
    lease expired; the engine may then free the blocks. After `withdraw` it is not called. With
    `lease_seconds` None it is never called, and offers end by `withdraw` alone: rank 0 decides for
    its group.
    """

    context: TransferContext
    _: KW_ONLY
    epoch: int
    lease_seconds: float | None
    stall_seconds: float
    on_release: Callable[[int], None]
    frame_hook: FrameHook | None = None
    connections: SenderConnections = field(init=False)
    _grpc: GrpcConnector = field(init=False)
    _offers: dict[bytes, KvOffer] = field(init=False, default_factory=dict)
    _by_sequence: dict[int, KvOffer] = field(init=False, default_factory=dict)
    _offered: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.connections = SenderConnections(self.context, epoch=self.epoch)
        self._grpc = GrpcConnector(self.context, "grpc")

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    @property
    def num_streams(self) -> int:
        return sum(offer.num_streams for offer in self._offers.values())

    def offer(
        self,
        sequence_id: int,
        transfer_id: bytes,
        place: SequenceKv,
        num_tokens: int,
        prefix_hash: bytes,
    ) -> None:
        """Opens an offer.

        The transfer id is 128 random bits, the same on every rank of the group.
        """
        key = TransferKey(transfer_id=transfer_id, epoch=self.epoch)
        offer = KvOffer(
            key,
            sequence_id,
            place,
            num_tokens,
            prefix_hash,
            self.context.leases.open(),
            self.context.clock(),
        )
        self._offers[transfer_id] = self._by_sequence[sequence_id] = offer
        self._offered.set()

    def progress(
        self, sequence_id: int, num_ready: int, num_ahead: int = 0, num_layers: int = 0
    ) -> None:
        """Reports the tokens that are computed.

        These are the first num_ready tokens in all layers, and the first num_ahead in the first
        num_layers layers.
        """
        offer = self._by_sequence.get(sequence_id)
        if offer is not None:
            offer.num_ready = num_ready
            offer.num_ahead = num_ahead
            offer.num_layers = num_layers
            offer.num_reports += 1
            now = self.context.clock()
            offer.interval = now - offer.progressed
            offer.progressed = now
            offer.changed.set()

    def complete(self, sequence_id: int, first_tokens: FirstTokens) -> None:
        """Reports the end of the prefill. If no stream is open, the lease begins."""
        offer = self._by_sequence.get(sequence_id)
        if offer is not None:
            offer.first_tokens = first_tokens
            offer.changed.set()
            self._start_lease(offer)

    def withdraw(self, sequence_id: int) -> None:
        """Ends an offer from this side; its streams end with an error. Idempotent."""
        offer = self._by_sequence.get(sequence_id)
        if offer is not None:
            self._forget(offer)

    async def serve(self, incoming: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """Answers one Pull stream. Raises TransferError for every failure."""
        async with aclosing(self._answer(aiter(incoming))) as frames:
            try:
                async for frame in self.frame_hook(frames) if self.frame_hook else frames:
                    yield frame
            except MemoryError as error:
                raise TransferError(f"KV frame not copied: {error}") from error

    async def _answer(self, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        key, first = await receive(incoming, self.stall_seconds)
        if not isinstance(first, Open):
            raise TransferError("KV pull out of order")
        offer = await self._find(key, first)
        offer.num_streams += 1
        if offer.expiry:
            offer.expiry.cancel()
        try:
            # No timeout: the receiver may wait for blocks of its own. Its stream pins the cache,
            # and ends if the peer dies.
            _, request = await receive(incoming, None, key)
            if not isinstance(request, Pull) or not self._has(offer, request):
                raise TransferError("KV pull out of order")
            connector: KvConnector = self._grpc
            if request.connection:
                connector = self.connections.connector(request.connection)
                if connector.one_sided:
                    table = self._table(offer, request)
                    entry, number = offer.entry
                    yield encode(
                        key,
                        BlockTable(first=table.first, entry=entry, number=number),
                        np.asarray(table.blocks, "<i4").tobytes(),
                    )
                    connector = connector if number else self._grpc
            num_frames = 0
            async with aclosing(self._send_data(offer, request, connector)) as frames:
                async for frame in frames:
                    num_frames += 1
                    yield frame
            yield encode(key, _commit(offer, num_frames))
            _, last = await receive(incoming, self.stall_seconds, key)
            if last is not None:
                self._acknowledge(offer, last)
        finally:
            offer.num_streams -= 1
            self._start_lease(offer)

    async def _find(self, key: TransferKey, first: Open) -> KvOffer:
        if first.layout != self.context.kv.layout.digest:
            raise TransferError("KV layouts differ")
        if self.lease_seconds is None:
            # Rank 0 sends the offer to this rank and to the router at the same time, so a receiver
            # may connect before the offer arrives.
            with suppress(TimeoutError):
                async with asyncio.timeout(_OFFER_SECONDS):
                    while key.transfer_id not in self._offers:
                        self._offered.clear()
                        await self._offered.wait()
        offer = self._offers.get(key.transfer_id)
        if offer is None or offer.key != key:
            raise TransferError("KV cache gone")
        return offer

    def _has(self, offer: KvOffer, request: Pull) -> bool:
        kv = self.context.kv
        if request.group >= len(kv.layout.groups):
            return False
        group = kv.layout.groups[request.group]
        end = offer.end(group.part)
        if request.first_token > end:
            return False
        if request.first_slot + request.num_slots > kv.num_slots(request.group):
            return False
        block_size = spec_of(self.context.kv.tables, group).block_size
        table = offer.place.table(self.context.kv.tables, group)
        if not request.num_slots:
            return True
        held = table.tokens(block_size)
        return held.start <= request.first_token and end <= held.stop

    def _table(self, offer: KvOffer, request: Pull) -> TableBlocks:
        """Returns the blocks that hold the requested tokens."""
        group = self.context.kv.layout.groups[request.group]
        block_size = spec_of(self.context.kv.tables, group).block_size
        table = offer.place.table(self.context.kv.tables, group)
        return table.trim(request.first_token, offer.end(group.part), block_size)

    async def _send_data(
        self, offer: KvOffer, request: Pull, connector: KvConnector
    ) -> AsyncGenerator[bytes, None]:
        """Yields the frames of all requested tokens as they are computed.

        Returns when the first tokens are known.
        """
        layout = self.context.kv.layout
        index = 0
        burst = 0
        group = layout.groups[request.group]
        table = self._table(offer, request)
        sent = dict.fromkeys(range(len(group.layers)), request.first_token)
        slots = range(request.first_slot, request.first_slot + request.num_slots)
        num_reports = 0
        last_frame = self.context.clock()
        while min(sent.values()) < offer.end(group.part) or offer.first_tokens is None:
            await self._wait_for_more(offer, num_reports)
            num_reports = offer.num_reports
            began = self.context.clock()
            ready = {
                index: max(sent[index], offer.ready(layer, group.part))
                for index, layer in enumerate(group.layers)
            }
            spans = plan_frames(layout, request.group, slots, sent, ready, connector.frame_bytes)
            sent = ready
            if not spans and began - last_frame >= _ALIVE_SHARE * self.stall_seconds:
                last_frame = began
                yield encode(offer.key, Alive())
            for span in spans:
                # No decode waits for these frames until the prefill is done. Spread over half of
                # the time that the next chunk will take, they delay neither frames that a decode
                # waits for nor the steps of the decode worker.
                pause = min(offer.interval / 2 / len(spans), _MAX_PAUSE)
                if pause > _MIN_PAUSE and offer.first_tokens is None:
                    with suppress(TimeoutError):
                        await offer.wait(lambda: offer.first_tokens is not None, pause)
                    began = self.context.clock()
                    burst += 1
                await connector.ready()
                offer.check()
                payload = await connector.offer(request.stream, table, span)
                age = self.context.clock() - began
                box = {name: getattr(span, name) for name in _SPAN_FIELDS}
                frame = Data(index=index, num_bytes=span.size(layout), burst=burst, age=age, **box)
                index += 1
                yield encode(offer.key, frame, payload)
            if spans:
                burst += 1
                last_frame = self.context.clock()

    async def _wait_for_more(self, offer: KvOffer, num_reports: int) -> None:
        """Returns when the prefill is done or makes progress after its first `num_reports`."""

        def more() -> bool:
            return offer.first_tokens is not None or offer.num_reports > num_reports

        try:
            await offer.wait(more, self.stall_seconds)
        except TimeoutError as error:
            raise TransferError("KV cache made no progress") from error
        offer.check()

    def _acknowledge(self, offer: KvOffer, message: Message) -> None:
        if not isinstance(message, Ack) or self.lease_seconds is None:
            raise TransferError("KV pull out of order")
        if not offer.withdrawn:
            self._release(offer)

    def _start_lease(self, offer: KvOffer) -> None:
        """Starts the lease of a finished prefill that has no open stream."""
        if (
            self.lease_seconds is None
            or offer.first_tokens is None
            or offer.num_streams
            or offer.withdrawn
        ):
            return
        if offer.expiry:
            offer.expiry.cancel()
        offer.expiry = asyncio.get_running_loop().call_later(
            self.lease_seconds, self._release, offer
        )

    def _release(self, offer: KvOffer) -> None:
        self._forget(offer)
        self.on_release(offer.sequence_id)

    def _forget(self, offer: KvOffer) -> None:
        self.context.leases.close(*offer.entry)
        offer.withdrawn = True
        if offer.expiry:
            offer.expiry.cancel()
        del self._offers[offer.key.transfer_id], self._by_sequence[offer.sequence_id]
        offer.changed.set()


def plan_frames(
    layout: KvLayout,
    group: int,
    slots: range,
    sent: Mapping[int, int],
    ready: Mapping[int, int],
    frame_bytes: int,
) -> list[KvSpan]:
    """Divides the tokens from sent[layer] to ready[layer], in each layer of a group, into spans.

    The keys of `sent` and `ready` are the indices of the layers within the group. A span has about
    frame_bytes of these KV slots. It grows in tokens first, then in layers. Without slots the list
    is empty.
    """
    if not slots:
        return []
    spans = []
    token_bytes = len(slots) * layout.groups[group].part.slot_bytes  # of one token in one layer
    chunk = max(1, frame_bytes // token_bytes)
    for (start, end), run in itertools.groupby(sent, lambda layer: (sent[layer], ready[layer])):
        layers = list(run)
        for first_token in range(start, end, chunk):
            num_tokens = min(chunk, end - first_token)
            width = max(1, frame_bytes // (token_bytes * num_tokens))
            spans += [
                KvSpan(
                    group=group,
                    first_layer=layers[first],
                    num_layers=len(layers[first : first + width]),
                    first_token=first_token,
                    num_tokens=num_tokens,
                    first_slot=slots.start,
                    num_slots=len(slots),
                )
                for first in range(0, len(layers), width)
            ]
    return spans


def _commit(offer: KvOffer, num_frames: int) -> Commit:
    offer.check()
    assert offer.first_tokens is not None
    return Commit(
        num_frames=num_frames,
        num_tokens=offer.num_tokens,
        prefix_hash=offer.prefix_hash,
        tokens=list(offer.first_tokens.tokens),
        logprobs=list(offer.first_tokens.logprobs),
    )
