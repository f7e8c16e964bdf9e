"""Keeps one rank's part of KV cache blocks on disk.

It knows neither the other ranks nor which blocks are worth keeping.
"""

import errno
import logging
import struct
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final, Self

from ..host.threads import in_thread
from ..kv_cache.block_files import BlockFiles
from ..kv_cache.layout import KvSpan
from ..kv_cache.store import KvStore
from ..kv_cache.tables import TableBlocks

logger = logging.getLogger(__name__)

_PART: Final = struct.Struct(">II")  # number of ranks, rank


class RankDisk:
    """Moves whole blocks between a rank's KV cache and its files. Lives in one event loop.

    See `BlockFiles` for the files. They serve only this layout, block size, degree of tensor
    parallelism and rank: files of others have other names and another checksum.
    """

    def __init__(self, files: BlockFiles, kv: KvStore) -> None:
        self.files = files
        self.block_bytes = _block_bytes(kv)
        self._kv = kv

    @classmethod
    def open(cls, folder: str, role: str, kv: KvStore, *, max_bytes: int, number: int = 0) -> Self:
        """Opens this rank's folder below `folder`; the one of this number, if possible.

        May take long: call it in a thread. Raises ValueError as `BlockFiles.open` does.
        """
        described = kv.layout.digest + kv.block_size.to_bytes(4)
        if kv.tp > 1:
            described += _PART.pack(kv.tp, kv.rank)
        files = BlockFiles.open(
            Path(folder),
            f"{role}-rank{kv.rank}" if kv.rank else role,
            kind=blake2b(described, digest_size=16).digest(),
            block_bytes=_block_bytes(kv),
            max_bytes=max_bytes,
            number=number,
        )
        return cls(files, kv)

    async def write(self, digest: bytes, block: int) -> None:
        """Writes a block to a file, unless the file exists; one call at a time.

        The block may have another owner after the first await. Raises OSError if the disk refuses
        it, or if a GPU has no memory for the copy.
        """
        try:
            reads = [self._kv.read(TableBlocks((block,)), span) for span in _spans(self._kv)]
            parts = [await read for read in reads]
        except MemoryError as error:
            raise OSError(errno.ENOMEM, str(error)) from error
        await in_thread(partial(self.files.write, digest, parts), "tandem-disk-write")

    async def read(self, digests: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Fills blocks of the KV cache; returns the number filled, counted from the first block.

        The number is smaller than requested if a file is missing or damaged, or if a GPU has no
        memory for a copy. After a cancel nothing is written.
        """
        payloads = await in_thread(partial(self._read, digests), "tandem-disk-read")
        for index, payload in enumerate(payloads):
            try:
                self._fill(blocks[index], payload)
            except MemoryError as error:
                logger.warning("KV cache on disk: a block is computed instead: %s", error)
                return index
        return len(payloads)

    async def clear(self) -> None:
        """Removes all files while no block is written; raises OSError if the disk refuses it."""
        await in_thread(self.files.clear, "tandem-disk-clear")

    def _read(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Returns the blocks of the hashes, up to the first block that is missing or damaged."""
        found: list[memoryview] = []
        for digest in digests:
            if (payload := self.files.read(digest)) is None:
                break
            found.append(payload)
        return found

    def _fill(self, block: int, payload: memoryview) -> None:
        """Writes a block to the KV cache; `payload` has all of its spans, one after the other."""
        start = 0
        for span in _spans(self._kv):
            end = start + span.size(self._kv.layout)
            self._kv.write(TableBlocks((block,)), span, payload[start:end])
            start = end


def _block_bytes(kv: KvStore) -> int:
    return sum(span.size(kv.layout) for span in _spans(kv))


def _spans(kv: KvStore) -> list[KvSpan]:
    """Returns the spans of a block, one for each group, with all KV slots of the rank."""
    return [
        KvSpan(
            group=number,
            first_layer=0,
            num_layers=len(group.layers),
            first_token=0,
            num_tokens=kv.block_size,
            first_slot=0,
            num_slots=kv.num_slots(number),
        )
        for number, group in enumerate(kv.layout.token_groups)
    ]
