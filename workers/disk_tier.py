"""Keeps a worker's KV cache on disk: writes what it computes, behind its steps, and brings back what a prompt needs."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final, Self

from .cache_reports import CacheReports
from .engine.events import Admitted
from .engine_thread import EngineThread
from .kv_cache.block_files import BlockFiles
from .kv_cache.layout import KvLayout, KvSpan
from .kv_cache.store import KvStore
from .threads import in_thread

logger = logging.getLogger(__name__)

_LOAD_SECONDS: Final = 5.0  # for the blocks of a prompt; the rest of them is computed
_RETRY_SECONDS: Final = 60.0  # after which a disk that was slow or has failed is tried again
_COMMAND_SECONDS: Final = 30.0  # timeout of a command to the engine, which runs it between two steps
_NUM_LEASED: Final = 4  # blocks that are being written at once: few, since others may wait for them
_READ_BYTES: Final = 8 << 20  # at once: the event loop copies them, while others wait for it
_WEIGHT: Final = 0.3  # of the newest batch in the measured speed


class DiskTier:
    """Keeps every block of the prefix cache in a file, as long as there is room, see `BlockFiles`.

    Blocks are written as soon as they are computed, a few at a time, leased meanwhile; those that leave the KV cache
    before their turn are not. A prompt's blocks are read back if that is predicted to be faster than computing them. No
    failure of the disk fails a request.

    Lives in one event loop, but for `count`."""

    def __init__(self, files: BlockFiles, kv: KvStore) -> None:
        self.on_change: Callable[[Iterable[bytes], Iterable[bytes]], object] = lambda stored, evicted: None
        self._files = files
        self._kv = kv
        self._spans = block_spans(kv.layout, kv.block_size)
        self._block_bytes = sum(span.size(kv.layout) for span in self._spans)
        self._num_read = max(1, _READ_BYTES // self._block_bytes)  # blocks
        self._unwritten: dict[bytes, None] = {}  # in order
        self._writing: asyncio.Task[None] | None = None
        self._closing = False
        self._no_writes_before = self._no_reads_before = 0.0  # time.monotonic()
        self._bytes_per_second = 0.0  # of reading, with checks and copies; 0 if unknown
        self._measured = 0.0  # time.monotonic()

    @classmethod
    def open(cls, folder: str, role: str, kv: KvStore, max_bytes: int) -> Self:
        """Raises ValueError as `BlockFiles.open` does."""
        described = kv.layout.digest + kv.block_size.to_bytes(4)
        block_bytes = sum(span.size(kv.layout) for span in block_spans(kv.layout, kv.block_size))
        kind = blake2b(described, digest_size=16).digest()
        return cls(BlockFiles.open(Path(folder), role, kind=kind, block_bytes=block_bytes, max_bytes=max_bytes), kv)

    def report(self) -> None:
        """Calls `on_change` with the hashes that came and went since the last call; those that are there at first."""
        stored, evicted = self._files.take_changes()
        if stored or evicted:
            self.on_change(stored, evicted)

    def count(self, chain: Sequence[bytes], compute_seconds: float) -> int:
        """See `PrefixSource.count`."""
        now, speed = time.monotonic(), self._bytes_per_second
        if now < self._no_reads_before:
            return 0
        is_known = speed > 0 and compute_seconds > 0 and now < self._measured + _RETRY_SECONDS
        if is_known and self._block_bytes / speed >= compute_seconds:
            return 0
        return sum(1 for _ in itertools.takewhile(self._files.__contains__, chain))

    async def load(self, event: Admitted) -> int:
        """Fills the blocks that a sequence is importing. Returns how many tokens these are, from the first on: fewer if
        a file is missing or damaged, or time is up."""
        num_filled, started = 0, time.monotonic()
        blocks = event.blocks[event.num_cached // self._kv.block_size :]
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                while num_filled < len(event.importing):
                    wanted = event.importing[num_filled : num_filled + self._num_read]
                    payloads = await in_thread(partial(self._read, wanted), "tandem-disk-read")
                    for payload in payloads:
                        self._fill(blocks[num_filled], payload)
                        num_filled += 1
                    if len(payloads) < len(wanted):
                        break
        except TimeoutError:
            logger.warning("KV cache on disk: reading takes too long; none is read for %g seconds", _RETRY_SECONDS)
            self._no_reads_before = time.monotonic() + _RETRY_SECONDS
        finally:
            self.report()
        if num_filled:
            self._measure(num_filled * self._block_bytes / max(time.monotonic() - started, 1e-6))
        return num_filled * self._kv.block_size

    def keep(self, digests: Iterable[bytes], thread: EngineThread) -> None:
        """Has blocks written that have just entered the KV cache of the engine in `thread`."""
        if self._closing or time.monotonic() < self._no_writes_before:
            return
        self._unwritten |= dict.fromkeys(digest for digest in digests if digest not in self._files)
        if self._unwritten and self._writing is None:
            self._writing = asyncio.create_task(self._write_all(thread))

    async def close(self) -> None:
        """Ends writing, after the block that is being written, while the engine's thread still runs."""
        self._closing = True
        self._unwritten.clear()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_COMMAND_SECONDS)
        self._files.close()

    async def _write_all(self, thread: EngineThread) -> None:
        try:
            while self._unwritten:
                await self._write_some(thread)
        except (OSError, TimeoutError, RuntimeError) as error:  # of the disk; of an engine that does not answer
            logger.warning(
                "KV cache on disk: writing failed; none is written for %g seconds: %s", _RETRY_SECONDS, error
            )
            self._no_writes_before = time.monotonic() + _RETRY_SECONDS
            self._unwritten.clear()
        finally:
            self._writing = None

    async def _write_some(self, thread: EngineThread) -> None:
        digests = list(itertools.islice(self._unwritten, _NUM_LEASED))
        for digest in digests:
            del self._unwritten[digest]
        leased: list[tuple[int, bytes]] = []
        try:
            await thread.call(lambda engine: leased.extend(engine.lease_cached(digests)), _COMMAND_SECONDS)
            await thread.settle(_COMMAND_SECONDS)
            for block, digest in leased:
                if self._closing:
                    break
                parts = [self._kv.read([block], span) for span in self._spans]
                await in_thread(partial(self._files.write, digest, parts), "tandem-disk-write")
        finally:  # in the engine's thread behind the other command, even if this one waited too long for it
            thread.post(lambda engine: engine.unlease_cached([block for block, _ in leased]))
            self.report()

    def _read(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Returns the blocks of hashes up to the first that cannot be had."""
        found: list[memoryview] = []
        for digest in digests:
            if (payload := self._files.read(digest)) is None:
                break
            found.append(payload)
        return found

    def _fill(self, block: int, payload: memoryview) -> None:
        """Writes a block to the KV cache; `payload` is all of it, span after span."""
        start = 0
        for span in self._spans:
            end = start + span.size(self._kv.layout)
            self._kv.write([block], span, payload[start:end])
            start = end

    def _measure(self, bytes_per_second: float) -> None:
        weight = _WEIGHT if self._bytes_per_second else 1.0
        self._bytes_per_second += (bytes_per_second - self._bytes_per_second) * weight
        self._measured = time.monotonic()


def reports_of(disk: DiskTier | None, thread: EngineThread) -> CacheReports:
    """Returns the reports of a worker's prefix cache; has what comes into it kept on the disk, if there is one."""
    if disk is None:
        return CacheReports()
    reports = CacheReports(lambda stored: disk.keep(stored, thread))
    disk.on_change = partial(reports.change, "disk")
    disk.report()
    return reports


def block_spans(layout: KvLayout, block_size: int) -> list[KvSpan]:
    """Returns the spans of a block with all KV heads of all layers: one for each run of equal layers."""
    spans = []
    for _, run in itertools.groupby(range(layout.num_layers), key=lambda layer: layout.places[layer][0]):
        layers = list(run)
        spans.append(
            KvSpan(
                first_layer=layers[0],
                num_layers=len(layers),
                first_token=0,
                num_tokens=block_size,
                first_slot=0,
                num_slots=layout.layers[layers[0]].num_kv_heads,
            )
        )
    return spans
