"""The side of a transfer that holds KV cache and sends it while the prefill still runs.

Everything here runs in one event loop, and reads of KV memory are synchronous: once `withdraw` has returned, no byte of
the blocks is read any more and they may be reused.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from ..engine.plan import FirstTokens
from ..kv_cache.layout import KvLayout, KvSpan
from ..kv_cache.store import KvStore
from .accept import Acceptor, read, receive
from .outlets import Carrier, Inline
from .shared import LeaseTable
from .transports import Means
from .wire import Ack, Commit, Data, Message, Offer, Open, Pull, TransferError, TransferKey, encode

# Seconds between two frames that nobody waits for yet: shorter ones would cost more than they spread.
_LEAST_PAUSE: Final = 0.001
_MOST_PAUSE: Final = 0.05

_OFFER_SECONDS: Final = 2.0  # how long a puller may be ahead of the offer

FrameHook = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


@dataclass(slots=True, eq=False)
class KvExport:
    """KV cache on offer: the blocks of one PREFILL sequence, whose tokens become readable as they are computed."""

    key: TransferKey
    sequence_id: int
    blocks: tuple[int, ...]
    num_tokens: int
    prefix_hash: bytes
    entry: tuple[int, int]  # of the ledger
    num_ready: int = 0
    num_ahead: int = 0  # ready in the first num_layers layers
    num_layers: int = 0
    progressed: float = field(default_factory=time.monotonic)  # when more was last ready
    interval: float = 0.0  # seconds that the last growth took
    opening: FirstTokens | None = None  # known when the prefill is done
    withdrawn: bool = False
    streams: int = 0  # open pulls; each pins the cache
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None

    def ready(self, layer: int) -> int:
        """How many tokens have their KV cache in this layer."""
        return self.num_ahead if layer < self.num_layers else self.num_ready

    def notify(self) -> None:
        """Wakes the streams that wait for more tokens, the commit or the end."""
        self.changed.set()

    async def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Returns when the condition holds or the export has ended. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition() and not self.withdrawn:
                self.changed.clear()
                await self.changed.wait()


class KvSender:
    """The KV cache that this rank offers, by transfer id.

    `on_release(sequence_id)` is called exactly once for each export that a reader acknowledged or whose lease ran out;
    the engine may then free the blocks. After `withdraw` it is not called. With `lease_seconds` None it is never
    called, and exports end by `withdraw` alone: rank 0 decides for its group.
    """

    def __init__(
        self,
        kv: KvStore,
        *,
        epoch: int,
        lease_seconds: float | None,
        stall_seconds: float,
        on_release: Callable[[int], None],
        means: Means,
        frame_hook: FrameHook | None = None,
    ) -> None:
        self._kv = kv
        self._epoch = epoch
        self._lease_seconds = lease_seconds
        self._stall_seconds = stall_seconds
        self._on_release = on_release
        self._frame_hook = frame_hook
        self._ledger = LeaseTable(kv)
        self.acceptor = Acceptor(kv, epoch=epoch, means=means, ledger=self._ledger)
        self._exports: dict[bytes, KvExport] = {}
        self._offered = asyncio.Event()
        self._by_sequence: dict[int, KvExport] = {}

    @property
    def num_exports(self) -> int:
        return len(self._exports)

    @property
    def num_streams(self) -> int:
        return sum(export.streams for export in self._exports.values())

    def offer(
        self, sequence_id: int, transfer_id: bytes, blocks: tuple[int, ...], num_tokens: int, prefix_hash: bytes
    ) -> None:
        """Opens an export. The transfer id is 128 random bits, the same on every rank of the group."""
        key = TransferKey(transfer_id=transfer_id, epoch=self._epoch)
        export = KvExport(key, sequence_id, blocks, num_tokens, prefix_hash, self._ledger.open())
        self._exports[transfer_id] = self._by_sequence[sequence_id] = export
        self._offered.set()

    def progress(self, sequence_id: int, num_ready: int, num_ahead: int = 0, num_layers: int = 0) -> None:
        """The first num_ready tokens are computed; the first num_ahead in the first num_layers layers."""
        export = self._by_sequence.get(sequence_id)
        if export is not None:
            export.num_ready, export.num_ahead, export.num_layers = num_ready, num_ahead, num_layers
            now = time.monotonic()
            export.interval, export.progressed = now - export.progressed, now
            export.notify()

    def complete(self, sequence_id: int, opening: FirstTokens) -> None:
        """The prefill is done. Without an open stream the lease begins to run."""
        export = self._by_sequence.get(sequence_id)
        if export is not None:
            export.opening = opening
            export.notify()
            self._arm(export)

    def withdraw(self, sequence_id: int) -> None:
        """Ends an export from this side; its streams end with an error. Idempotent."""
        export = self._by_sequence.get(sequence_id)
        if export is not None:
            self._forget(export)

    async def serve(self, incoming: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """Answers one Pull stream. Raises TransferError for every way it can fail."""
        async with aclosing(self._converse(aiter(incoming))) as frames:
            async for frame in self._frame_hook(frames) if self._frame_hook else frames:
                yield frame

    async def _converse(self, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        key, opening = read(await receive(incoming, self._stall_seconds))
        if not isinstance(opening, Open):
            raise TransferError("KV pull out of order")
        export = await self._find(key, opening)
        export.streams += 1
        if export.expiry:
            export.expiry.cancel()
        try:
            # The puller may queue for blocks for as long as it likes: its stream is the pin, and a dead peer ends it.
            _, request = read(await receive(incoming, None), key)
            if not isinstance(request, Pull) or not self._has(export, request):
                raise TransferError("KV pull out of order")
            carrier, offer = self._carrier(export, request)
            if offer:
                yield encode(key, offer, np.asarray(export.blocks, "<i4").tobytes())
            num_frames = 0
            async with aclosing(self._send_data(export, request, carrier)) as frames:
                async for frame in frames:
                    num_frames += 1
                    yield frame
            yield encode(key, self._commit(export, num_frames))
            last = await receive(incoming, self._stall_seconds)
            if last is not None:
                self._acknowledge(export, read(last, key)[1])
        finally:
            export.streams -= 1
            self._arm(export)

    def _has(self, export: KvExport, request: Pull) -> bool:
        end = request.first_slot + request.num_slots
        return request.first_token <= export.num_tokens and end <= self._kv.num_slots

    def _carrier(self, export: KvExport, request: Pull) -> tuple[Carrier, Offer | None]:
        """How the bytes leave, and what has to be said before. Raises TransportError if the pair is gone."""
        if request.transport == "grpc":
            return Inline(self._kv), None
        outlet = self.acceptor.outlet(request.pair, request.transport)
        carrier = outlet.carrier(self._kv, request.stream)
        if not outlet.one_sided:
            return carrier, None
        line, number = export.entry
        return carrier if number else Inline(self._kv), Offer(line=line, number=number)

    def _acknowledge(self, export: KvExport, message: Message) -> None:
        if not isinstance(message, Ack) or self._lease_seconds is None:
            raise TransferError("KV pull out of order")
        if not export.withdrawn:
            self._forget(export)
            self._on_release(export.sequence_id)

    async def _send_data(self, export: KvExport, request: Pull, carrier: Carrier) -> AsyncGenerator[bytes, None]:
        """All tokens that were asked for, as soon as each is computed; returns when the opening is known."""
        index, burst = 0, 0
        sent = [request.first_token] * self._kv.layout.num_layers
        slots = range(request.first_slot, request.first_slot + request.num_slots)
        while min(sent) < export.num_tokens or export.opening is None:
            await self._wait_for_more(export, sent)
            began, ready = time.monotonic(), [max(tokens, export.ready(layer)) for layer, tokens in enumerate(sent)]
            layout = self._kv.layout
            spans = plan_frames(layout, slots, sent, ready, carrier.frame_bytes)
            for span in spans:
                # Until the prefill is done nobody waits for them: spread over half of the time that its next chunk will
                # take, they hold up neither the frames that somebody waits for nor the steps of the decode worker.
                pause = min(export.interval / 2 / len(spans), _MOST_PAUSE)
                if pause > _LEAST_PAUSE and export.opening is None:
                    with suppress(TimeoutError):
                        await export.wait(lambda: export.opening is not None, pause)
                    began, burst = time.monotonic(), burst + 1
                await carrier.ready()
                if export.withdrawn:
                    raise TransferError("KV cache withdrawn")
                payload = carrier.carry(export.blocks, span)
                frame = Data(
                    index=index,
                    num_bytes=span.size(layout),
                    burst=burst,
                    age=time.monotonic() - began,
                    **asdict(span),
                )
                index += 1
                yield encode(export.key, frame, payload)
            sent, burst = ready, burst + 1

    async def _wait_for_more(self, export: KvExport, sent: list[int]) -> None:
        def more() -> bool:
            return any(export.ready(layer) > tokens for layer, tokens in enumerate(sent))

        try:
            await export.wait(lambda: more() or export.opening is not None, self._stall_seconds)
        except TimeoutError as error:
            raise TransferError("KV cache made no progress") from error
        if export.withdrawn:
            raise TransferError("KV cache withdrawn")

    def _commit(self, export: KvExport, num_frames: int) -> Commit:
        if export.withdrawn or export.opening is None:
            raise TransferError("KV cache withdrawn")
        return Commit(
            num_frames=num_frames,
            num_tokens=export.num_tokens,
            prefix_hash=export.prefix_hash,
            tokens=list(export.opening.tokens),
            logprobs=list(export.opening.logprobs),
        )

    async def _find(self, key: TransferKey, opening: Open) -> KvExport:
        if opening.layout != asdict(self._kv.layout):
            raise TransferError("KV layouts differ")
        if self._lease_seconds is None:
            # Rank 0 tells this rank and the router at the same time, so a puller may be here first.
            with suppress(TimeoutError):
                async with asyncio.timeout(_OFFER_SECONDS):
                    while key.transfer_id not in self._exports:
                        self._offered.clear()
                        await self._offered.wait()
        export = self._exports.get(key.transfer_id)
        if export is None or export.key != key:
            raise TransferError("KV cache gone")
        return export

    def _arm(self, export: KvExport) -> None:
        """Starts the lease of a finished prefill that nobody reads."""
        if self._lease_seconds is None or export.opening is None or export.streams or export.withdrawn:
            return
        if export.expiry:
            export.expiry.cancel()
        export.expiry = asyncio.get_running_loop().call_later(self._lease_seconds, self._expire, export)

    def _expire(self, export: KvExport) -> None:
        self._forget(export)
        self._on_release(export.sequence_id)

    def _forget(self, export: KvExport) -> None:
        if not export.withdrawn:
            self._ledger.close(*export.entry)
        export.withdrawn = True
        if export.expiry:
            export.expiry.cancel()
        self._exports.pop(export.key.transfer_id, None)
        self._by_sequence.pop(export.sequence_id, None)
        export.notify()


def plan_frames(
    layout: KvLayout, slots: range, sent: Sequence[int], ready: Sequence[int], frame_bytes: int
) -> list[KvSpan]:
    """Cuts these KV slots of the tokens from sent[layer] up to ready[layer], for every layer, into frames of about
    frame_bytes, long in tokens before wide in layers. Without slots there are none."""
    if not slots:
        return []
    spans = []
    token_bytes = len(slots) * layout.bytes_per_slot  # in one layer
    chunk = max(1, frame_bytes // token_bytes)
    for (start, end), group in itertools.groupby(range(layout.num_layers), lambda layer: (sent[layer], ready[layer])):
        layers = list(group)
        for first_token in range(start, end, chunk):
            num_tokens = min(chunk, end - first_token)
            width = max(1, frame_bytes // (token_bytes * num_tokens))
            spans += [
                KvSpan(
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
