"""Keeps a worker's KV cache on disk: writes computed blocks and loads them for later prompts."""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Self

from ...proto import worker_pb2
from ..engine.engine import Engine
from ..engine.events import Admitted
from ..host.threads import in_thread
from ..kv_cache.store import KvStore
from ..tp.kv_group import KvGroup
from ..tp.rank_client import RankClient
from ..tp.rank_disk import RankDisk
from .cache_reports import CacheReports
from .engine_thread import EngineThread

logger = logging.getLogger(__name__)

# For a group of ranks; the other ranks wait `collective_seconds` for rank 0.
_OPEN_SECONDS: Final = 20.0
# After this time no further blocks of a prompt are read: the engine computes the rest. A disk whose
# single read takes this long hangs.
_LOAD_SECONDS: Final = 5.0
_LOAD_SHARE: Final = 0.8  # of _LOAD_SECONDS: the longest predicted read
_RETRY_SECONDS: Final = 60.0  # pause before a disk that hangs or has failed is tried again
# Timeout of a command to the engine, which runs it between two steps.
_COMMAND_SECONDS: Final = 30.0
_NUM_LEASED: Final = 4  # blocks written at once; few, because sequences may wait for them
_MAX_TRIED: Final = 256  # blocks that one command looks up in the KV cache, at 1 us each
_MAX_UNWRITTEN: Final = 4_096  # waiting blocks; a busy worker writes this number within a minute
_READ_BYTES: Final = 8 << 20  # bytes of a read; the event loop copies them and serves nobody else
_WEIGHT: Final = 0.3  # of the newest batch in the measured speed


class DiskTier:
    """Keeps blocks of the prefix cache on disk, one file per block and rank; see `RankDisk`.

    A block is here if every rank has its part. Each rank evicts files from its own folder and
    reports its changes to rank 0. The bound of a folder is an equal share of the worker's bound.

    Blocks are written as soon as they are computed, a few at a time, and are leased meanwhile. If
    the disk is slower than the engine, the blocks of the newest step come first, because they stay
    in the KV cache for longest. Blocks that leave the KV cache before their turn are not written.
    If too many blocks wait, the oldest are not written either. A prompt's blocks are read back if
    that is predicted to be faster than computing them. No failure of a disk fails a request.

    Lives in one event loop, except `count`.
    """

    def __init__(
        self,
        disk: RankDisk,
        block_size: int,
        clients: Sequence[RankClient] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a tier of the disk of rank 0 and the `clients` of the other ranks; see `open`."""
        self.on_change: Callable[[Iterable[bytes], Iterable[bytes]], object] = (
            lambda stored, evicted: None
        )
        self._disk = disk
        self._clock = clock
        self._clients = clients
        # The hashes that each other rank has.
        self._elsewhere: list[set[bytes]] = [set() for _ in clients]
        for client, known in zip(clients, self._elsewhere, strict=True):
            client.disk_changed = partial(self._changed, known)
        self._block_size = block_size
        self._num_read = max(1, _READ_BYTES // disk.block_bytes)  # blocks
        # The blocks of the newest step first; within a step in their order.
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._writing: asyncio.Task[None] | None = None
        self._num_pauses = 0  # while it is above 0, no block is written
        self._no_writes_before = 0.0  # a time of the clock
        self._no_reads_before = 0.0  # a time of the clock
        # Speed of reading a rank's part, with checks and copies; 0 if unknown.
        self._bytes_per_second = 0.0
        self._measured = 0.0  # the time of the last measurement

    @classmethod
    async def open(
        cls, folder: str, role: str, kv: KvStore, max_bytes: int, clients: Sequence[RankClient] = ()
    ) -> Self:
        """Opens the folders of all ranks, which share max_bytes.

        Raises ValueError as `BlockFiles.open` does, and if a rank of a group takes too long.
        """
        share = max_bytes // (len(clients) + 1)
        try:
            async with asyncio.timeout(_OPEN_SECONDS if clients else None):
                opening = partial(RankDisk.open, folder, role, kv, max_bytes=share)
                tier = cls(await in_thread(opening, "tandem-disk-open"), kv.block_size, clients)
                command = worker_pb2.OpenDisk(
                    folder=folder, role=role, max_bytes=share, number=tier._disk.files.number
                )
                try:
                    await asyncio.gather(*(client.ask(open_disk=command) for client in clients))
                except BaseException:
                    tier._disk.files.close()
                    raise
                return tier
        except TimeoutError:
            raise ValueError(
                f"kv_disk: {folder}: takes more than {_OPEN_SECONDS:g} seconds to open"
            ) from None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._disk.files and all(digest in known for known in self._elsewhere)

    def report(self) -> None:
        """Calls `on_change` with the hashes stored and evicted since the last call.

        The first call includes the hashes that were on disk at the start.
        """
        self._report(*self._disk.files.take_changes())

    def count(self, chain: Sequence[bytes], compute_seconds: float) -> int:
        """Returns the number of leading blocks worth loading; see `PrefixSource.count`."""
        now = self._clock()
        speed = self._bytes_per_second
        most = len(chain)
        if now < self._no_reads_before:
            return 0
        if speed > 0 and now < self._measured + _RETRY_SECONDS:
            read_seconds = self._disk.block_bytes / speed
            if 0 < compute_seconds <= read_seconds:
                return 0
            most = max(int(_LOAD_SHARE * _LOAD_SECONDS / read_seconds), 1)
        return sum(1 for _ in itertools.takewhile(self.__contains__, itertools.islice(chain, most)))

    async def load(self, event: Admitted, group: KvGroup) -> int:
        """Fills the blocks that a sequence imports, on every rank; returns the number of tokens.

        These are the first tokens of the blocks. They are fewer if a file is missing or damaged, or
        if time is up. If the disk hangs, other ranks may still write to the blocks until
        `KvGroup.stop`.
        """
        num_filled = 0
        started = self._clock()
        deadline = started + _LOAD_SECONDS
        blocks = event.tables[0].blocks[event.num_cached // self._block_size :]
        try:
            while num_filled < len(event.import_hashes) and self._clock() < deadline:
                wanted = event.import_hashes[num_filled : num_filled + self._num_read]
                targets = blocks[num_filled : num_filled + len(wanted)]
                command = worker_pb2.DiskBlocks(hashes=wanted, blocks=targets)
                async with asyncio.timeout(_LOAD_SECONDS):
                    parts = group.read_disk(event.id, command)
                    num_read = min(await asyncio.gather(self._disk.read(wanted, targets), *parts))
                num_filled += num_read
                if num_read < len(wanted):
                    break
        except TimeoutError:
            logger.warning(
                "KV cache on disk: a read takes more than %g seconds; no block is read for %g "
                "seconds",
                _LOAD_SECONDS,
                _RETRY_SECONDS,
            )
            self._no_reads_before = self._clock() + _RETRY_SECONDS
        finally:
            self.report()
        if num_filled:
            self._measure(num_filled * self._disk.block_bytes / max(self._clock() - started, 1e-6))
        return num_filled * self._block_size

    def keep(self, digests: Iterable[bytes], thread: EngineThread) -> None:
        """Schedules writes of blocks that have just entered the KV cache, in this order.

        The engine in `thread` owns the KV cache.
        """
        if self._num_pauses or self._clock() < self._no_writes_before:
            return
        new = [digest for digest in digests if digest not in self]
        for digest in reversed(new):
            self._unwritten[digest] = None
            self._unwritten.move_to_end(digest, last=False)
        while len(self._unwritten) > _MAX_UNWRITTEN:
            self._unwritten.popitem()
        if self._unwritten and self._writing is None:
            self._writing = asyncio.create_task(self._write_all(thread))

    def forget(self, digests: Iterable[bytes]) -> None:
        """Cancels the writes of blocks that have left the KV cache."""
        for digest in digests:
            self._unwritten.pop(digest, None)

    async def close(self) -> None:
        """Stops after the block that is being written; the engine's thread must still run."""
        await self._pause()
        self._disk.files.close()

    @asynccontextmanager
    async def emptied(self) -> AsyncIterator[None]:
        """Removes all blocks, on every rank; writes no block until the end of the context.

        Raises TimeoutError if a write does not end, and OSError if a disk refuses it.
        """
        try:
            await self._pause()
            if self._writing is not None:
                raise TimeoutError("the disk does not end the write of a block")
            try:
                await self._on_all_ranks(self._disk.clear(), clear_disk=True)
            finally:
                self.report()
            yield
        finally:
            self._num_pauses -= 1

    async def _pause(self) -> None:
        """Begins a pause of all writes; waits for the block that is being written."""
        self._num_pauses += 1
        self._unwritten.clear()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_COMMAND_SECONDS)

    async def _write_all(self, thread: EngineThread) -> None:
        try:
            while self._unwritten:
                await self._write_some(thread)
        # The disk has failed, or the engine does not answer.
        except (OSError, TimeoutError, RuntimeError) as error:
            logger.warning(
                "KV cache on disk: writing failed; no block is written for %g seconds: %s",
                _RETRY_SECONDS,
                error,
            )
            self._no_writes_before = self._clock() + _RETRY_SECONDS
            self._unwritten.clear()
        finally:
            self._writing = None

    async def _write_some(self, thread: EngineThread) -> None:
        digests = list(itertools.islice(self._unwritten, _MAX_TRIED))
        tried: list[bytes] = []
        leased: list[tuple[int, bytes]] = []

        def lease(engine: Engine) -> None:
            for digest in digests:
                tried.append(digest)
                leased.extend(engine.lease_cached([digest]))
                if len(leased) == _NUM_LEASED:
                    return

        try:
            await thread.call(lease, _COMMAND_SECONDS)
            self.forget(tried)
            await thread.settle(_COMMAND_SECONDS)
            for block, digest in leased:
                if self._num_pauses:
                    break
                await self._write(digest, block)
        finally:
            # The engine runs this after `lease`, even if the call of `lease` has timed out.
            thread.post(lambda engine: engine.unlease_cached([block for block, _ in leased]))
            self.report()

    async def _write(self, digest: bytes, block: int) -> None:
        """Writes a block on every rank; raises OSError if a disk refuses it.

        Returns or raises only after all ranks have read the block, so that another sequence's data
        cannot get into a file.
        """
        command = worker_pb2.DiskBlocks(hashes=[digest], blocks=[block])
        await self._on_all_ranks(self._disk.write(digest, block), write_disk=command)

    async def _on_all_ranks(self, own: Coroutine[Any, Any, None], **command: Any) -> None:
        """Runs `own` here and a command on the other ranks; raises an error after their ends."""
        parts = [client.ask(**command) for client in self._clients]
        for result in await asyncio.gather(own, *parts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _changed(self, known: set[bytes], changes: worker_pb2.DiskChanges) -> None:
        """Applies the changes on the disk of another rank to its hashes, `known`."""
        known |= set(changes.stored)
        known -= set(changes.evicted)
        self._report(changes.stored, changes.evicted)

    def _report(self, stored: Iterable[bytes], evicted: Sequence[bytes]) -> None:
        complete = [digest for digest in stored if digest in self]
        if complete or evicted:
            self.on_change(complete, evicted)

    def _measure(self, bytes_per_second: float) -> None:
        weight = _WEIGHT if self._bytes_per_second else 1.0
        self._bytes_per_second += (bytes_per_second - self._bytes_per_second) * weight
        self._measured = self._clock()


def reports_of(disk: DiskTier | None, thread: EngineThread) -> CacheReports:
    """Returns the reports of a worker's prefix cache; with a disk, also keeps its blocks there."""
    if disk is None:
        return CacheReports()
    reports = CacheReports(
        on_stored=lambda stored: disk.keep(stored, thread), on_evicted=disk.forget
    )
    disk.on_change = partial(reports.change, "disk")
    disk.report()
    return reports
