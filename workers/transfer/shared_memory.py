"""Reads KV cache of another process of this host: the receiver maps the sender's memory and copies
out of it.
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

# The token is what the lease table begins with.
_DESCRIPTION: Final = {"token": bytes, "pid": int, "kv_fd": int, "leases_fd": int, **MEMORY_SIZES}


class SharedMemoryConnector(KvConnector):
    """Connects two ranks of one host."""

    one_sided = True
    _read: KvRead
    _leases: mmap.mmap

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any]:
        """Returns the host, and whether this rank's memory can be mapped: a sender's must be."""
        return {"host": host_id(), "shares": context.kv.shared_fd is not None}

    @classmethod
    def reaches(cls, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> bool:
        """Whether both are of one host."""
        return bool(sender["shares"] and sender["host"] and sender["host"] == receiver.get("host"))

    def description(self) -> dict[str, Any]:
        """Returns where the memory and the lease table lie."""
        kv, leases = self.context.kv, self.context.leases
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
        """Maps the sender's memory. Raises OSError or ValueError if this process cannot, or it is
        another one.
        """
        found = checked(description, _DESCRIPTION)
        connector = cls(context, name)
        connector._leases = _map(found["pid"], found["leases_fd"])
        if (
            len(connector._leases) != TABLE_BYTES
            or connector._leases[:TOKEN_BYTES] != found["token"]
        ):
            raise ValueError("another KV cache memory")
        sizes = {name: found[name] for name in MEMORY_SIZES}
        connector._read = context.kv.attach(_map(found["pid"], found["kv_fd"]), **sizes)
        return connector

    async def fetch(
        self, stream: int, blocks: Sequence[int], data: Data, payload: memoryview
    ) -> memoryview:
        """Copies the span out of the sender's memory."""
        return self._read(blocks, data)

    async def verify(self, table: BlockTable) -> None:
        """See `KvConnector.verify`."""
        start = entry_offset(table)
        check_entry(self._leases[start : start + ENTRY_BYTES], table)


def host_id() -> str:
    """Returns what is equal for processes that may map each other's files by their ids: those of
    one running kernel and one namespace of process ids. Empty where that is not known.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists():
        return ""
    return f"{boot.read_text().strip()} {os.readlink(namespace)}"


def _map(pid: int, fd: int) -> mmap.mmap:
    """Maps a file of another process, to read. Raises OSError or ValueError."""
    file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("no KV cache memory")
        return mmap.mmap(file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(file)
