"""Reads KV cache of another process on the same host, from host memory or from a GPU's memory.

The receiver opens the sender's memory and copies from it, without any help of the sender.
"""

import asyncio
import mmap
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

from ..kv_cache.layout import KvSpan
from ..kv_cache.store import KvRead
from ..kv_cache.tables import TableBlocks
from .connector import (
    MEMORY_FIELDS,
    MEMORY_SIZES,
    DeviceKvStore,
    KvConnector,
    TransferContext,
    checked,
    described_memory,
    memory_description,
)
from .frames import Announce, BlockTable, Data
from .leases import ENTRY_BYTES, TABLE_BYTES, TOKEN_BYTES, check_entry, entry_offset

if TYPE_CHECKING:
    from ..host.streams import DeviceData

# `token` is the beginning of the sender's lease table.
_DESCRIPTION: Final = {"token": bytes, "pid": int, "leases_fd": int, **MEMORY_FIELDS}


class SharedMemoryConnector(KvConnector):
    """Connects two ranks of one host."""

    one_sided = True
    memory_types: ClassVar[Mapping[str, type]] = {"kv_fd": int}
    """The fields of the description that describe the KV memory."""
    _read: KvRead
    _leases: mmap.mmap

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any] | None:
        """Returns the host's id and whether this rank's memory can be mapped by a receiver."""
        return {"host": host_id(), "shares": context.kv.shared_fd is not None}

    @classmethod
    def reaches(cls, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> bool:
        """Returns True if both ranks are on one host."""
        return bool(sender["shares"] and sender["host"] and sender["host"] == receiver.get("host"))

    def description(self) -> dict[str, Any]:
        """Returns where other processes find the KV memory and the lease table."""
        leases = self.context.leases
        table = {"token": leases.token, "pid": os.getpid(), "leases_fd": leases.fd}
        return {**table, **memory_description(self.context.kv), **self.describe_memory()}

    def describe_memory(self) -> dict[str, Any]:
        """Returns where other processes find the KV memory."""
        return {"kv_fd": self.context.kv.shared_fd}

    def attach(self, found: Mapping[str, Any], sizes: dict[str, int]) -> None:
        """Opens the described KV memory. Raises OSError or ValueError."""
        self._read = self.context.kv.attach(_map(found["pid"], found["kv_fd"]), **sizes)

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> Self:
        """Opens the sender's memory.

        Raises OSError or ValueError if this process cannot open it, or if it is other memory than
        the sender described.
        """
        found = checked(description, {**_DESCRIPTION, **cls.memory_types})
        connector = cls(context, name)
        connector._leases = _map(found["pid"], found["leases_fd"])
        if (
            len(connector._leases) != TABLE_BYTES
            or connector._leases[:TOKEN_BYTES] != found["token"]
        ):
            raise ValueError("KV transport: the lease table is not the one that was described")
        described_memory(context.kv, found)
        sizes = {name: found[name] for name in MEMORY_SIZES}
        connector.sender_block_size = found["block_size"]
        # In a thread, because a GPU takes milliseconds to open memory.
        await asyncio.to_thread(connector.attach, found, sizes)
        return connector

    async def fetch(
        self, stream: int, table: TableBlocks, data: Data, payload: memoryview
    ) -> "memoryview | DeviceData":
        """Copies the span from the sender's memory."""
        return self._read(table, data)

    async def verify(self, table: BlockTable) -> None:
        start = entry_offset(table)
        check_entry(self._leases[start : start + ENTRY_BYTES], table)


class IpcConnector(SharedMemoryConnector):
    """Connects two ranks on GPUs of one host by CUDA's interprocess handles.

    The copies run on streams of the receiver, and no byte passes through host memory.
    """

    frame_bytes: ClassVar[int] = 64 * 2**20
    memory_types: ClassVar[Mapping[str, type]] = {"memory": bytes}
    _exported: bytes  # of the sender
    _gather: "Callable[[TableBlocks, KvSpan], Awaitable[DeviceData]]"

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any] | None:
        """Returns the host's id; None for a rank without a GPU."""
        return None if context.device == "cpu" else {"host": host_id(), "shares": True}

    @classmethod
    async def listen(
        cls, context: TransferContext, name: str, announce: Callable[[Announce], None]
    ) -> Self:
        """Exports this rank's memory. Raises OSError if the device cannot share it."""
        connector = cls(context, name)
        connector._exported = cast(DeviceKvStore, context.kv).export()
        return connector

    def describe_memory(self) -> dict[str, Any]:
        return {"memory": self._exported}

    def attach(self, found: Mapping[str, Any], sizes: dict[str, int]) -> None:
        kv = cast(DeviceKvStore, self.context.kv)
        self._gather = kv.attach_device(found["memory"], **sizes)

    async def fetch(
        self, stream: int, table: TableBlocks, data: Data, payload: memoryview
    ) -> "DeviceData":
        """Copies the span from the sender's memory to memory of this rank's GPU."""
        async with self.context.device_frames:
            return await self._gather(table, data)


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
