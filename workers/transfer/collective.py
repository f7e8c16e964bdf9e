"""Sends KV cache through a process group of two ranks: gloo for host memory, NCCL for GPU memory.

With NCCL the bytes never enter host memory, and their checksums are computed on the GPUs. The
transport is two-sided: the sender sends each span as one message. All transfers of a connection
share its process group. Their messages go in the order in which the connection's stream announces
them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from torch import distributed

from ..host.streams import DeviceData
from ..kv_cache.layout import KvSpan
from ..kv_cache.tables import TableBlocks
from .connector import CONNECT_SECONDS, DeviceKvStore, KvConnector, TransferContext, checked
from .frames import (
    CONNECTION_LOST,
    FRAME_BYTES,
    Announce,
    Data,
    TransferError,
    TransportError,
    checksum_of,
)
from .p2p_group import P2pGroup

_MAX_WAITING: Final = 8  # spans of all transfers that wait to be sent


class CollectiveConnector(KvConnector):
    """Connects two ranks by a process group; the transport has the name of the torch backend."""

    def __init__(self, context: TransferContext, name: str, group: P2pGroup) -> None:
        super().__init__(context, name)
        self.group = group
        self._announce: Callable[[Announce], None] = lambda announcement: None
        self._num_reading = 0  # spans that are copied from the KV cache
        self._waiting: deque[memoryview | DeviceData] = deque()  # to be sent
        self._changed = asyncio.Event()
        # Messages by stream; None marks the end.
        self._arrived: dict[int, asyncio.Queue[memoryview | DeviceData | None]] = {}
        # A span has at least one token of one layer, even if that is larger than FRAME_BYTES.
        layout = context.kv.layout
        tokens = (group.part.num_heads * group.part.slot_bytes for group in layout.groups)
        self._max_bytes = max(FRAME_BYTES, *tokens)

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any] | None:
        """Returns {} if the backend can be used, else None. NCCL also needs a rank on a GPU."""
        able = name == "gloo" or (
            distributed.is_nccl_available() and context.device.startswith("cuda")
        )
        return {} if able else None

    @classmethod
    async def listen(
        cls, context: TransferContext, name: str, announce: Callable[[Announce], None]
    ) -> "CollectiveConnector":
        """Binds the rank's interface. Raises OSError if this machine has no such interface."""
        device = context.device if name == "nccl" else "cpu"
        connector = cls(
            context,
            name,
            P2pGroup.listen(context.host, backend=name, device=device, timeout=CONNECT_SECONDS),
        )
        connector._announce = announce
        return connector

    def description(self) -> dict[str, Any]:
        """Returns the group's address, which contains a secret."""
        return {"address": self.group.address}

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> "CollectiveConnector":
        """Joins the sender's process group. Raises TransferError."""
        address = checked(description, {"address": str})["address"]
        device = context.device if name == "nccl" else "cpu"
        group = await P2pGroup.join(
            address, host=context.host, backend=name, device=device, timeout=CONNECT_SECONDS
        )
        return cls(context, name, group)

    async def run(self) -> None:
        """Sends the spans that were offered, one at a time."""
        await self.group.accept()
        while True:
            await self._until(lambda: bool(self._waiting))
            await self.group.send(self._waiting[0])
            self._waiting.popleft()
            self._changed.set()

    def close(self) -> None:
        """Closes the process group. Idempotent."""
        self.group.close()
        self._waiting.clear()
        self._changed.set()
        for arrived in self._arrived.values():
            arrived.put_nowait(None)

    async def ready(self) -> None:
        """Returns when fewer than _MAX_WAITING spans wait. Raises TransportError."""
        await self._until(lambda: self._num_reading + len(self._waiting) < _MAX_WAITING)

    async def offer(self, stream: int, table: TableBlocks, span: KvSpan) -> bytes:
        """Queues the span for sending. Raises TransportError."""
        self._check()
        self._num_reading += 1
        try:
            data, checksum = await self._read(table, span)
        finally:
            self._num_reading -= 1
            self._changed.set()
        self._check()
        # Announced before it is sent: the next announcement travels while the receiver still
        # receives this message.
        self._announce(Announce(stream=stream, num_bytes=data.nbytes, checksum=checksum))
        self._waiting.append(data)
        return b""

    async def _read(self, table: TableBlocks, span: KvSpan) -> tuple[memoryview | DeviceData, int]:
        """Copies a span for the process group; returns it and its checksum."""
        if self.name == "nccl":
            kept = await cast(DeviceKvStore, self.context.kv).gather(table, span)
            return kept, kept.checksum
        data = await self.context.kv.read(table, span)
        return data, checksum_of(data)

    @contextmanager
    def open_stream(self, stream: int) -> Iterator[None]:
        """Keeps the messages that arrive for this stream; messages of other streams are dropped."""
        self._arrived[stream] = asyncio.Queue()
        if self.group.broken:
            self._arrived[stream].put_nowait(None)
        try:
            yield
        finally:
            del self._arrived[stream]

    async def deliver(self, announcement: Announce) -> None:
        """Receives the announced message and passes it to its stream."""
        if not 0 < announcement.num_bytes <= self._max_bytes:
            raise TransferError(
                f"KV message has {announcement.num_bytes} bytes; must be from 1 to "
                f"{self._max_bytes}"
            )
        data: memoryview | DeviceData
        if self.name == "nccl":
            data = await self.group.receive_on_device(announcement.num_bytes)
            checksum = data.checksum
        else:
            data = await self.group.receive(announcement.num_bytes)
            checksum = checksum_of(data)
        if checksum != announcement.checksum:
            raise TransferError("KV message has a wrong checksum")
        if announcement.stream in self._arrived:  # otherwise the transfer was cancelled
            self._arrived[announcement.stream].put_nowait(data)

    async def fetch(
        self, stream: int, table: TableBlocks, data: Data, payload: memoryview
    ) -> memoryview | DeviceData:
        """Returns the stream's next message."""
        found = await self._arrived[stream].get()
        if found is None:
            raise TransportError("KV process group broke")
        return found

    async def _until(self, condition: Callable[[], bool]) -> None:
        self._check()
        while not condition():
            self._changed.clear()
            await self._changed.wait()
            self._check()

    def _check(self) -> None:
        if self.group.broken:
            self._changed.set()  # wakes all other waiters, which then raise this error as well
            raise TransportError(CONNECTION_LOST)
