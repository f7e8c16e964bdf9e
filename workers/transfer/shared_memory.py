"""Reads KV cache of another process on the same host from mapped memory.

The receiver maps the sender's memory and copies from it.
"""

import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..kv_cache.store import KvRead
from .connector import MEMORY_SIZES, KvConnector, TransferContext, checked
from .frames import BlockTable, Data
from .leases import ENTRY_BYTES, TABLE_BYTES, TOKEN_BYTES, check_entry, entry_offset

# `token` is the beginning of the sender's lease table.
_DESCRIPTION: Final = {"token": bytes, "pid": int, "kv_fd": int, "leases_fd": int, **MEMORY_SIZES}


class SharedMemoryConnector(KvConnector):
    """Connects two ranks of one host."""

    one_sided = True
    _read: KvRead
    _leases: mmap.mmap

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any]:
        """Returns the host's id and whether this rank's memory can be mapped by a receiver."""
        return {"host": host_id(), "shares": context.kv.shared_fd is not None}

    @classmethod
    def reaches(cls, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> bool:
        """Returns True if both ranks are on one host."""
        return bool(sender["shares"] and sender["host"] and sender["host"] == receiver.get("host"))

    def description(self) -> dict[str, Any]:
        """Returns where other processes find the KV memory and the lease table."""
        kv = self.context.kv
        leases = self.context.leases
        files = {
            "token": leases.token,
            "pid": os.getpid(),
            "kv_fd": kv.shared_fd,
            "leases_fd": leases.fd,
        }
        return files | {name: getattr(kv, name) for name in MEMORY_SIZES}

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> "SharedMemoryConnector":
        """Maps the sender's memory.

        Raises OSError or ValueError if this process cannot map it, or if it is other memory than
        the sender described.
        """
        found = checked(description, _DESCRIPTION)
        connector = cls(context, name)
        connector._leases = _map(found["pid"], found["leases_fd"])
        if (
            len(connector._leases) != TABLE_BYTES
            or connector._leases[:TOKEN_BYTES] != found["token"]
        ):
            raise ValueError("KV transport: the lease table is not the one that was described")
        sizes = {name: found[name] for name in MEMORY_SIZES}
        connector._read = context.kv.attach(_map(found["pid"], found["kv_fd"]), **sizes)
        return connector

    async def fetch(
        self, stream: int, blocks: Sequence[int], data: Data, payload: memoryview
    ) -> memoryview:
        """Copies the span from the sender's memory."""
        return self._read(blocks, data)

    async def verify(self, table: BlockTable) -> None:
        start = entry_offset(table)
        check_entry(self._leases[start : start + ENTRY_BYTES], table)


def host_id() -> str:
    """Returns an id that is equal for processes that can map each other's files by process id.

    These are the processes of one running kernel and one namespace of process ids. The id is empty
    if it cannot be determined.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists():
        return ""
    return f"{boot.read_text().strip()} {os.readlink(namespace)}"


def _map(pid: int, fd: int) -> mmap.mmap:
    """Maps another process's file for reading. Raises OSError or ValueError."""
    file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("KV transport: the described file is not KV cache memory")
        return mmap.mmap(file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(file)
