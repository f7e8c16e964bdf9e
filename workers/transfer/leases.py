"""Shows other processes which offers of KV cache still own their blocks.

A one-sided reader copies blocks while their owner does nothing. Whether a block was reused
meanwhile shows here: an offer has an entry that holds its number for as long as it owns its blocks.
The reader checks it after its last copy.
"""

import mmap
import os
import secrets
import struct
import weakref
from typing import Final

from .frames import BlockTable, TransferError

TOKEN_BYTES: Final = 16  # random, at the beginning: identifies the table
TABLE_BYTES: Final = 64 * 1024
ENTRY_BYTES: Final = 8
_ENTRY: Final = struct.Struct("<Q")
_NUM_ENTRIES: Final = (TABLE_BYTES - TOKEN_BYTES) // ENTRY_BYTES


class LeaseTable:
    """Holds the leases of one sender, in a file without a name that other processes of the host can
    map.
    """

    def __init__(self, *, shared: bool) -> None:
        """Without `shared` memory no other process can read the table, and it has no entries."""
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
        """Takes an entry; returns it and the number that it holds from now on, which is 0 if there
        is none left.
        """
        if not self._free:
            return 0, 0
        entry = self._free.pop()
        self._count += 1
        _ENTRY.pack_into(self.memory, TOKEN_BYTES + entry * ENTRY_BYTES, self._count)
        return entry, self._count

    def close(self, entry: int, number: int) -> None:
        """Gives the entry back. Call it before the blocks may be reused."""
        if number:
            _ENTRY.pack_into(self.memory, TOKEN_BYTES + entry * ENTRY_BYTES, 0)
            self._free.append(entry)


def entry_offset(table: BlockTable) -> int:
    """Returns where in the lease table an offer's ENTRY_BYTES are. Raises TransferError if there is
    no such entry.
    """
    if table.entry >= _NUM_ENTRIES:
        raise TransferError(f"KV block table with lease entry {table.entry} of {_NUM_ENTRIES}")
    return TOKEN_BYTES + table.entry * ENTRY_BYTES


def check_entry(content: bytes | memoryview, table: BlockTable) -> None:
    """Raises TransferError unless the offer owned its blocks when the entry was read."""
    if _ENTRY.unpack(content) != (table.number,):
        raise TransferError("KV cache withdrawn")
