"""The side of a transfer that holds KV cache and sends it while the prefill still runs.

Everything here runs in one event loop, and reads of KV memory are synchronous: once `withdraw` has returned, no byte of
the blocks is read any more and they may be reused.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from ..engine.plan import KvLayout, KvSpan, KvStore
from .shared import SLICE_BYTES, Ledger
from .wire import FRAME_BYTES, Ack, Commit, Data, Message, Open, Pull, TransferError, TransferKey, decode, encode

# Seconds between two frames that nobody waits for yet: shorter ones would cost more than they spread.
_LEAST_PAUSE: Final = 0.001
_MOST_PAUSE: Final = 0.05

_OFFER_SECONDS: Final = 2.0  # how long a puller may be ahead of the offer

FrameHook = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


@dataclass(slots=True, eq=False)
class Export:
    """KV cache on offer: the blocks of one PREFILL sequence, whose tokens become readable as they are computed."""

    key: TransferKey
    sequence_id: int
    blocks: tuple[int, ...]
    num_tokens: int
    prefix_hash: bytes
    entry: tuple[int, int]  # of the ledger
    num_ready: int = 0
    progressed: float = field(default_factory=time.monotonic)  # when num_ready last grew
    interval: float = 0.0  # seconds that the last growth took
    first_token: int | None = None  # known when the prefill is done
    withdrawn: bool = False
    streams: int = 0  # open pulls; each pins the cache
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None

    def notify(self) -> None:
        """Wakes the streams that wait for more tokens, the commit or the end."""
        self.changed.set()

    async def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Returns when the condition holds or the export has ended. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition() and not self.withdrawn:
                self.changed.clear()
                await self.changed.wait()


class Exporter:
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
        frame_hook: FrameHook | None = None,
    ) -> None:
        self._kv = kv
        self._epoch = epoch
        self._lease_seconds = lease_seconds
        self._stall_seconds = stall_seconds
        self._on_release = on_release
        self._frame_hook = frame_hook
        self._ledger = Ledger(kv)
        self._exports: dict[bytes, Export] = {}
        self._offered = asyncio.Event()
        self._by_sequence: dict[int, Export] = {}

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
        export = Export(key, sequence_id, blocks, num_tokens, prefix_hash, self._ledger.open())
        self._exports[transfer_id] = self._by_sequence[sequence_id] = export
        self._offered.set()

    def progress(self, sequence_id: int, num_ready: int) -> None:
        """The first num_ready tokens are computed."""
        export = self._by_sequence.get(sequence_id)
        if export is not None:
            export.num_ready = num_ready
            now = time.monotonic()
            export.interval, export.progressed = now - export.progressed, now
            export.notify()

    def complete(self, sequence_id: int, first_token: int) -> None:
        """The prefill is done. Without an open stream the lease begins to run."""
        export = self._by_sequence.get(sequence_id)
        if export is not None:
            export.first_token = first_token
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
        key, opening = _read(await _receive(incoming, self._stall_seconds))
        if not isinstance(opening, Open):
            raise TransferError("KV pull out of order")
        export = await self._find(key, opening)
        export.streams += 1
        if export.expiry:
            export.expiry.cancel()
        try:
            if opening.host:
                offer = self._ledger.offer(*export.entry, opening.host)
                yield encode(key, offer, np.asarray(export.blocks, "<i4").tobytes())
            # The puller may queue for blocks for as long as it likes: its stream is the pin, and a dead peer ends it.
            _, request = _read(await _receive(incoming, None), key)
            if not isinstance(request, Pull) or not self._has(export, request):
                raise TransferError("KV pull out of order")
            num_frames = 0
            async with aclosing(self._send_data(export, request)) as frames:
                async for frame in frames:
                    num_frames += 1
                    yield frame
            yield encode(key, self._commit(export, num_frames))
            last = await _receive(incoming, self._stall_seconds)
            if last is not None:
                self._acknowledge(export, _read(last, key)[1])
        finally:
            export.streams -= 1
            self._arm(export)

    def _has(self, export: Export, request: Pull) -> bool:
        end = request.first_slot + request.num_slots
        return request.first_token <= export.num_tokens and end <= self._kv.num_slots

    def _acknowledge(self, export: Export, message: Message) -> None:
        if not isinstance(message, Ack) or self._lease_seconds is None:
            raise TransferError("KV pull out of order")
        if not export.withdrawn:
            self._forget(export)
            self._on_release(export.sequence_id)

    async def _send_data(self, export: Export, request: Pull) -> AsyncGenerator[bytes, None]:
        """All tokens that were asked for, as soon as each is computed; returns when the first token is known."""
        sent, index, burst = request.first_token, 0, 0
        slots = range(request.first_slot, request.first_slot + request.num_slots)
        while sent < export.num_tokens or export.first_token is None:
            await self._wait_for_more(export, sent)
            began, ready = time.monotonic(), export.num_ready
            layout, size = self._kv.layout, SLICE_BYTES if request.shared else FRAME_BYTES
            spans = plan_frames(layout, slots, sent, ready, size)
            for span in spans:
                # Until the prefill is done nobody waits for them: spread over half of the time that its next chunk will
                # take, they hold up neither the frames that somebody waits for nor the steps of the decode worker.
                pause = min(export.interval / 2 / len(spans), _MOST_PAUSE)
                if pause > _LEAST_PAUSE and export.first_token is None:
                    with suppress(TimeoutError):
                        await export.wait(lambda: export.first_token is not None, pause)
                    began, burst = time.monotonic(), burst + 1
                if export.withdrawn:
                    raise TransferError("KV cache withdrawn")
                payload = b"" if request.shared else self._kv.read(export.blocks, span)
                frame = Data(
                    index=index,
                    num_bytes=span.size(layout),
                    burst=burst,
                    age=time.monotonic() - began,
                    **asdict(span),
                )
                index += 1
                yield encode(export.key, frame, payload)
            sent, burst = max(sent, ready), burst + 1

    async def _wait_for_more(self, export: Export, sent: int) -> None:
        try:
            await export.wait(lambda: export.num_ready > sent or export.first_token is not None, self._stall_seconds)
        except TimeoutError as error:
            raise TransferError("KV cache made no progress") from error
        if export.withdrawn:
            raise TransferError("KV cache withdrawn")

    def _commit(self, export: Export, num_frames: int) -> Commit:
        if export.withdrawn or export.first_token is None:
            raise TransferError("KV cache withdrawn")
        return Commit(
            num_frames=num_frames,
            num_tokens=export.num_tokens,
            prefix_hash=export.prefix_hash,
            first_token=export.first_token,
        )

    async def _find(self, key: TransferKey, opening: Open) -> Export:
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

    def _arm(self, export: Export) -> None:
        """Starts the lease of a finished prefill that nobody reads."""
        if self._lease_seconds is None or export.first_token is None or export.streams or export.withdrawn:
            return
        if export.expiry:
            export.expiry.cancel()
        export.expiry = asyncio.get_running_loop().call_later(self._lease_seconds, self._expire, export)

    def _expire(self, export: Export) -> None:
        self._forget(export)
        self._on_release(export.sequence_id)

    def _forget(self, export: Export) -> None:
        if not export.withdrawn:
            self._ledger.close(*export.entry)
        export.withdrawn = True
        if export.expiry:
            export.expiry.cancel()
        self._exports.pop(export.key.transfer_id, None)
        self._by_sequence.pop(export.sequence_id, None)
        export.notify()


def plan_frames(layout: KvLayout, slots: range, start: int, end: int, frame_bytes: int) -> list[KvSpan]:
    """Cuts these KV slots of all layers of tokens [start, end) into frames of about frame_bytes, long in tokens before
    wide in layers. Without slots there are none."""
    if not slots:
        return []
    spans = []
    token_bytes = len(slots) * layout.bytes_per_slot  # in one layer
    chunk = max(1, frame_bytes // token_bytes)
    for first_token in range(start, end, chunk):
        num_tokens = min(chunk, end - first_token)
        width = max(1, frame_bytes // (token_bytes * num_tokens))
        for first_layer in range(0, layout.num_layers, width):
            spans.append(
                KvSpan(
                    first_layer=first_layer,
                    num_layers=min(width, layout.num_layers - first_layer),
                    first_token=first_token,
                    num_tokens=num_tokens,
                    first_slot=slots.start,
                    num_slots=len(slots),
                )
            )
    return spans


async def _receive(incoming: AsyncIterator[bytes], timeout: float | None) -> bytes | None:
    """The puller's next frame; None if it has ended the stream. Raises TransferError if nothing comes."""
    try:
        async with asyncio.timeout(timeout):
            return await anext(incoming, None)
    except TimeoutError as error:
        raise TransferError("KV puller fell silent") from error


def _read(frame: bytes | None, expected: TransferKey | None = None) -> tuple[TransferKey, Message]:
    """Raises TransferError if there is no frame, it cannot be read or names another transfer."""
    if frame is None:
        raise TransferError("KV puller fell silent")
    key, message, _ = decode(frame)
    if expected is not None and key != expected:
        raise TransferError("KV frame of another transfer")
    return key, message
