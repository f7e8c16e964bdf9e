"""Moves KV cache through a process group of the two ranks: gloo between host memories, NCCL between
GPUs.

Two-sided: the sender sends each span as one message; all transfers of a connection share its pair
of ranks, in the order in which the messages are announced over the connection's stream.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import distributed

from ..kv_cache.layout import KvSpan
from .connector import CONNECT_SECONDS, KvConnector, TransferContext, checked
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

_MAX_WAITING: Final = 8  # spans of all transfers that wait for the pair


class CollectiveConnector(KvConnector):
    """Connects two ranks by a pair; the transport's name is the backend's."""

    def __init__(self, context: TransferContext, name: str, pair: P2pGroup) -> None:
        super().__init__(context, name)
        self.pair = pair
        self._announce: Callable[[Announce], None] = lambda announcement: None
        self._waiting: deque[memoryview] = deque()  # to be sent
        self._changed = asyncio.Event()
        self._arrived: dict[
            int, asyncio.Queue[memoryview | None]
        ] = {}  # by stream; None: no more will
        layout = context.kv.layout  # a span has one token of one layer at least
        tokens = (
            geometry.num_heads * layout.bytes_per_slot(i)
            for i, geometry in enumerate(layout.layers)
        )
        self._max_bytes = max(FRAME_BYTES, *tokens)

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any] | None:
        """Returns nothing but that this torch has the backend, and the rank a GPU for NCCL."""
        able = name == "gloo" or (
            distributed.is_nccl_available() and context.device.startswith("cuda")
        )
        return {} if able else None

    @classmethod
    async def listen(
        cls, context: TransferContext, name: str, announce: Callable[[Announce], None]
    ) -> "CollectiveConnector":
        """Binds the rank's interface. Raises OSError if there is none."""
        device = context.device if name == "nccl" else "cpu"
        connector = cls(
            context,
            name,
            P2pGroup.listen(context.host, backend=name, device=device, timeout=CONNECT_SECONDS),
        )
        connector._announce = announce
        return connector

    def description(self) -> dict[str, Any]:
        """Returns the address, which holds a secret."""
        return {"address": self.pair.address}

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> "CollectiveConnector":
        """Joins the pair. Raises TransferError."""
        address = checked(description, {"address": str})["address"]
        device = context.device if name == "nccl" else "cpu"
        pair = await P2pGroup.join(
            address, host=context.host, backend=name, device=device, timeout=CONNECT_SECONDS
        )
        return cls(context, name, pair)

    async def run(self) -> None:
        """Sends what was offered."""
        await self.pair.accept()
        while True:
            await self._until(lambda: bool(self._waiting))
            await self.pair.send(self._waiting[0])
            self._waiting.popleft()
            self._changed.set()

    def close(self) -> None:
        """Ends the pair. Idempotent."""
        self.pair.close()
        self._waiting.clear()
        self._changed.set()
        for arrived in self._arrived.values():
            arrived.put_nowait(None)

    async def ready(self) -> None:
        """Returns when fewer than _MAX_WAITING spans wait. Raises TransportError."""
        await self._until(lambda: len(self._waiting) < _MAX_WAITING)

    def offer(self, stream: int, blocks: Sequence[int], span: KvSpan) -> bytes:
        """Queues the span for the pair. Raises TransportError."""
        self._check()
        data = self.context.kv.read(blocks, span)
        # Announced ahead, so that the receiver asks for one message while the next announcement is
        # on its way.
        self._announce(Announce(stream=stream, num_bytes=data.nbytes, checksum=checksum_of(data)))
        self._waiting.append(data)
        self._changed.set()
        return b""

    @contextmanager
    def open_stream(self, stream: int) -> Iterator[None]:
        """Keeps what arrives for the stream; what arrives for any other is dropped."""
        self._arrived[stream] = asyncio.Queue()
        if self.pair.broken:
            self._arrived[stream].put_nowait(None)
        try:
            yield
        finally:
            del self._arrived[stream]

    async def deliver(self, announcement: Announce) -> None:
        """Receives the message, and gives it to its stream."""
        if not 0 < announcement.num_bytes <= self._max_bytes:
            raise TransferError(
                f"KV message of {announcement.num_bytes} bytes, at most {self._max_bytes} are "
                "expected"
            )
        data = await self.pair.receive(announcement.num_bytes)
        if checksum_of(data) != announcement.checksum:
            raise TransferError("KV message with a wrong checksum")
        if announcement.stream in self._arrived:  # else the transfer was cancelled
            self._arrived[announcement.stream].put_nowait(data)

    async def fetch(
        self, stream: int, blocks: Sequence[int], data: Data, payload: memoryview
    ) -> memoryview:
        """Returns the stream's next message."""
        found = await self._arrived[stream].get()
        if found is None:
            raise TransportError("KV pair broke")
        return found

    async def _until(self, condition: Callable[[], bool]) -> None:
        self._check()
        while not condition():
            self._changed.clear()
            await self._changed.wait()
            self._check()

    def _check(self) -> None:
        if self.pair.broken:
            self._changed.set()  # wakes the streams that wait for the pair
            raise TransportError(CONNECTION_LOST)
