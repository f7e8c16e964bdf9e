"""KV cache that a worker lets others read by NIXL, from wherever it reaches: as `shared`, but for the mapping.

The exporter's memory is one region, the KV cache and then the tail with the sample and the ledger. Knows nothing of
frames or streams.
"""

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kv_cache.layout import KvSpan
from ..kv_cache.store import LEDGER_BYTES, SAMPLE_BYTES, TAIL_BYTES, KvStore
from .nixl import NixlPeer, NixlReader
from .shared import LINE_BYTES, Remote, check_line, line_start
from .transports import CONNECT_SECONDS
from .wire import Offer

_STAGING_BYTES: Final = 4 * 1024 * 1024  # holds the sample, and SLICE_BYTES where they lie in blocks

_readers: dict[str, NixlReader] = {}  # of this process, by devices: an agent costs half a second and a thread
_opening = threading.Lock()


class RemoteMemory:
    """The reader's side: another worker's cache. One read at a time; others wait for it."""

    def __init__(self, peer: NixlPeer, remote: Remote, kv: KvStore) -> None:
        """Raises ValueError if the memory is of another size."""
        self._peer = peer
        self._head_bytes = kv.layout.bytes_per_slot // 2
        self._shape = (kv.layout.num_layers, 2, remote.num_blocks, remote.num_slots, remote.block_size)
        if min(self._shape) < 1 or math.prod(self._shape) * self._head_bytes != peer.num_bytes - TAIL_BYTES:
            raise ValueError(f"{peer.num_bytes} bytes are not {remote.num_blocks} blocks of {remote.block_size} tokens")
        self._reading = asyncio.Lock()

    @classmethod
    async def open(cls, remote: Remote, kv: KvStore, *, devices: str) -> "RemoteMemory":
        """Raises TransferError if NIXL does not reach it, OSError if there is none, ValueError as above."""
        try:
            reader = await asyncio.to_thread(_reader, devices)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        peer = await reader.connect(remote.description, staging_bytes=_STAGING_BYTES)
        try:
            return cls(peer, remote, kv)
        except ValueError:
            peer.close()
            raise

    async def sample(self) -> memoryview:
        """What the exporter has put before the ledger. Raises TransportError."""
        async with self._reading:
            return memoryview(bytes(await self._peer.read([(self._peer.num_bytes - TAIL_BYTES, SAMPLE_BYTES)])))

    async def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        """As `KvReader.read`. Raises ValueError if something is out of range or too much at once, TransportError if the
        peer is lost."""
        self._check(blocks, span)
        block_size = self._shape[4]
        first_block, offset = divmod(span.first_token, block_size)
        rows = self._rows(blocks[first_block : -(-(span.first_token + span.num_tokens) // block_size)], span)
        piece_bytes = span.num_slots * block_size * self._head_bytes
        num_rows = max(1, _STAGING_BYTES // (rows.shape[1] * piece_bytes))
        order = np.arange(min(num_rows, len(rows)) * rows.shape[1] * span.num_slots * block_size)
        order = order.reshape(-1, rows.shape[1], span.num_slots, block_size).swapaxes(2, 3)
        order = order.reshape(len(order), -1, span.num_slots)[:, offset : offset + span.num_tokens]
        dense = np.empty((len(rows), span.num_tokens, span.num_slots, self._head_bytes), np.uint8)
        async with self._reading:
            for start in range(0, len(rows), num_rows):
                places = rows[start : start + num_rows]
                pieces = np.stack([places.ravel(), np.full(places.size, piece_bytes)], 1)
                heads = np.frombuffer(await self._peer.read(pieces), np.uint8).reshape(-1, self._head_bytes)
                # Of numpy's ways to pick them the one that is fast for few bytes: 30 us for 1 MB, an index 800.
                np.take(heads, order[: len(places)], 0, dense[start : start + num_rows], mode="clip")
        return dense.reshape(-1).data

    async def check(self, offer: Offer) -> None:
        """Raises TransferError unless the export has owned its blocks until now."""
        place = self._peer.num_bytes - LEDGER_BYTES + line_start(offer)
        async with self._reading:
            check_line(await self._peer.read([(place, LINE_BYTES)]), offer)

    def close(self) -> None:
        """Later reads raise TransportError. Idempotent."""
        self._peer.close()

    def _check(self, blocks: Sequence[int], span: KvSpan) -> None:
        num_layers, _, num_blocks, num_slots, block_size = self._shape
        span.check(num_layers=num_layers, num_tokens=len(blocks) * block_size, num_slots=num_slots)
        if min(blocks) < 0 or max(blocks) >= num_blocks:
            raise ValueError(f"a block is not within {num_blocks}")

    def _rows(self, blocks: Sequence[int], span: KvSpan) -> npt.NDArray[np.int64]:
        """Where the span's slots begin in each block, for each layer's keys and values: [2 * num_layers, num_blocks]"""
        _, _, num_blocks, num_slots, block_size = self._shape
        halves = np.arange(2 * span.first_layer, 2 * (span.first_layer + span.num_layers))
        slots = (halves[:, None] * num_blocks + np.asarray(blocks, np.int64)) * num_slots + span.first_slot
        places: npt.NDArray[np.int64] = slots * (block_size * self._head_bytes)
        return places


def _reader(devices: str) -> NixlReader:
    with _opening:
        if devices not in _readers:
            _readers[devices] = NixlReader(timeout=CONNECT_SECONDS, devices=devices)
        return _readers[devices]
