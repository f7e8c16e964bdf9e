"""Shows other processes which offers of KV cache still own their blocks.

A one-sided reader copies blocks without any help of their owner. This table tells the reader
whether a block was reused meanwhile. An offer has an entry that holds the offer's number for as
long as the offer owns its blocks. The reader checks the entry after its last copy.
"""

import mmap
import os
import secrets
import struct
import weakref
from typing import Final

from .frames import BlockTable, TransferError

TOKEN_BYTES: Final = 16  # random bytes at the start of the table, which identify it
TABLE_BYTES: Final = 64 * 1024
ENTRY_BYTES: Final = 8
_ENTRY: Final = struct.Struct("<Q")
_NUM_ENTRIES: Final = (TABLE_BYTES - TOKEN_BYTES) // ENTRY_BYTES


class LeaseTable:
    """Holds the leases of one sender in an unnamed file that other processes of the host can map.

    If an offer has no entry, its data frames carry the KV even over a one-sided transport.
    """

    def __init__(self, *, shared: bool) -> None:
        """Creates the table.

        Without `shared` no other process can read the table, and it has no entries.
        """
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.fd = -1
        self._free: list[int] = []
        self._count = 0
        if shared:
            self.fd = os.memfd_create("tandem-leases", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, TABLE_BYTES)
            self.memory = mmap.mmap(self.fd, TABLE_BYTES)
            self.memory[:TOKEN_BYTES] = self.token
            self._free = list(range(_NUM_ENTRIES))

    def open(self) -> tuple[int, int]:
        """Takes a free entry; returns it and the number that it now holds.

        Returns (0, 0) if no entry is free.
        """
        if not self._free:
            return 0, 0
        entry = self._free.pop()
        self._count += 1
        _ENTRY.pack_into(self.memory, TOKEN_BYTES + entry * ENTRY_BYTES, self._count)
        return entry, self._count

    def close(self, entry: int, number: int) -> None:
        """Frees the entry. Call this before the blocks may be reused."""
        if number:
            _ENTRY.pack_into(self.memory, TOKEN_BYTES + entry * ENTRY_BYTES, 0)
            self._free.append(entry)


def entry_offset(table: BlockTable) -> int:
    """Returns the offset of an offer's ENTRY_BYTES in the lease table.

    Raises TransferError if the table has no such entry.
    """
    if table.entry >= _NUM_ENTRIES:
        raise TransferError(
            f"KV block table: lease entry {table.entry} is not below {_NUM_ENTRIES}"
        )
    return TOKEN_BYTES + table.entry * ENTRY_BYTES


def check_entry(content: bytes | memoryview, table: BlockTable) -> None:
    """Raises TransferError unless the offer owned its blocks when the entry was read."""
    if _ENTRY.unpack(content) != (table.number,):
        raise TransferError("KV cache withdrawn")
