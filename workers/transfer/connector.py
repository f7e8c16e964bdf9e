"""Declares the interface of KV cache transports, and the context that one rank's transports share.

A transport is one class in one file, registered in `registry`. When two ranks first meet, they
choose one from the capabilities of both, in the order that the config gives. gRPC needs no
connection of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self, TypeVar

from ...proto.metrics import NULL_METRICS, Metrics
from ..kv_cache.layout import KvSpan
from ..kv_cache.memory import KvMemory, plan_memory
from ..kv_cache.store import KvStore
from ..kv_cache.tables import TableBlocks
from .frames import FRAME_BYTES, Announce, BlockTable, Data, TransferError, TransportError
from .leases import LeaseTable

if TYPE_CHECKING:
    from ..host.streams import DeviceData

CONNECT_SECONDS: Final = 5.0
"""The timeout of each step of connecting, and of each message of a two-sided transport."""

MEMORY_SIZES: Final[dict[str, type]] = {
    "num_blocks": int,
    "block_size": int,
    "tp": int,
    "rank": int,
}
"""The fields of `KvStore` that define its memory layout; one-sided transports describe them."""

MEMORY_FIELDS: Final[dict[str, type]] = {**MEMORY_SIZES, "block_bytes": int}
"""The fields of `memory_description`."""

# Frames that a rank copies at once within its GPU's memory, of which no part is kept for them.
# With `IpcConnector.frame_bytes` they are 256 MiB.
_DEVICE_FRAMES: Final = 4

T = TypeVar("T")


class DeviceKvStore(KvStore, Protocol):
    """Reads and writes the KV cache memory of a rank on a GPU, also without host memory."""

    def gather(self, table: TableBlocks, span: KvSpan) -> "Awaitable[DeviceData]":
        """Does the same as `read`, but leaves the copy on the device."""
        ...

    def scatter(self, table: TableBlocks, span: KvSpan, data: "DeviceData") -> None:
        """Does the same as `write`, from a copy that is on the device."""
        ...

    def export(self) -> bytes:
        """Returns a description of the memory for `attach_device`. Raises OSError."""
        ...

    def attach_device(
        self, description: bytes, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> "Callable[[TableBlocks, KvSpan], Awaitable[DeviceData]]":
        """Returns a function that does the same as `gather` with another process's memory.

        Arguments as of `KvStore.attach`. Raises OSError if this device cannot open the memory, and
        ValueError as `attach`.
        """
        ...


@dataclass(eq=False, kw_only=True)
class TransferContext:
    """Holds the resources that the transports of one rank share. Lives in one event loop."""

    kv: KvStore
    transports: tuple[str, ...] = ()  # allowed besides gRPC, in order of preference
    host: str = "127.0.0.1"  # the interface to bind
    device: str = "cpu"  # of the rank
    metrics: Metrics = NULL_METRICS
    clock: Callable[[], float] = time.monotonic
    leases: LeaseTable = field(init=False)
    device_frames: asyncio.Semaphore = field(
        init=False, default_factory=lambda: asyncio.Semaphore(_DEVICE_FRAMES)
    )
    _resources: dict[str, asyncio.Future[Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        is_shared = self.kv.shared_fd is not None or self.device != "cpu"
        self.leases = LeaseTable(shared=is_shared)

    async def resource(self, name: str, make: Callable[[], T]) -> T:
        """Returns a transport's resource that exists once per rank, shared by all connections.

        The first call makes it in a thread. Raises the exceptions of `make`; the next call then
        tries again.
        """
        making = self._resources.get(name)
        if making is None or (making.done() and making.exception()):
            making = self._resources[name] = asyncio.ensure_future(asyncio.to_thread(make))
        resource: T = await asyncio.shield(making)  # other connections may wait for it too
        return resource

    async def close(self) -> None:
        """Closes the resources that were made."""
        made = await asyncio.gather(*self._resources.values(), return_exceptions=True)
        for resource in made:
            if not isinstance(resource, BaseException):
                resource.close()
        self._resources.clear()


class KvConnector:
    """Holds one side of a connection between two ranks over one transport.

    `listen` makes the sender's side, `connect` the receiver's side. A subclass implements both: the
    sender offers spans of its KV cache, the receiver fetches them.

    One-sided transports read the sender's memory without its help. They set `one_sided`, transfer
    nothing in `offer`, and check in `verify` that no block was reused meanwhile.
    """

    one_sided: ClassVar[bool] = False
    frame_bytes: ClassVar[int] = FRAME_BYTES

    def __init__(self, context: TransferContext, name: str) -> None:
        self.context = context
        self.name = name  # of the transport
        # Tokens of a base block of the sender; only the receiver's side of a one-sided transport
        # reads it.
        self.sender_block_size = 0

    # --- choosing a transport

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any] | None:
        """Returns a msgpack value that the other side needs to choose a transport.

        Returns None if this rank cannot use the transport.
        """
        return {}

    @classmethod
    def reaches(cls, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> bool:
        """Returns True if two ranks with these capabilities can use the transport.

        The receiver's capabilities come from outside and are not trusted.
        """
        return True

    # --- connecting

    @classmethod
    async def listen(
        cls, context: TransferContext, name: str, announce: Callable[[Announce], None]
    ) -> Self:
        """Opens the sender's side.

        A two-sided transport calls `announce` before each message that it sends. Raises OSError,
        ValueError or TransferError if the transport does not work here.
        """
        return cls(context, name)

    def description(self) -> dict[str, Any]:
        """Returns the argument of the receiver's `connect`, for msgpack."""
        return {}

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> Self:
        """Opens the receiver's side. Raises OSError, ValueError or TransferError.

        The description comes from outside and is not trusted.
        """
        return cls(context, name)

    async def run(self) -> None:
        """Does the sender's work until cancelled. Raises TransferError if the transport breaks."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Closes this side; current and later calls raise TransportError. Idempotent."""

    # --- transferring

    async def ready(self) -> None:
        """Returns when `offer` may be called, before any other await. Raises TransportError."""

    async def offer(self, stream: int, table: TableBlocks, span: KvSpan) -> bytes | memoryview:
        """Makes a span ready to be fetched; returns the payload of its Data frame.

        A one-sided transport does nothing here. The others call `KvStore.read` before their first
        await, because the blocks may have another owner afterwards. Raises TransportError.
        """
        return b""

    def open_stream(self, stream: int) -> AbstractContextManager[None]:
        """Prepares the receiver's side for a transfer, until the context ends."""
        return nullcontext()

    async def deliver(self, announcement: Announce) -> None:
        """Receives a message that the sender has announced.

        Raises TransferError; the transport is then broken.
        """
        raise TransferError("KV announcement out of order")

    async def fetch(
        self, stream: int, table: TableBlocks, data: Data, payload: memoryview
    ) -> "memoryview | DeviceData":
        """Returns the bytes of a data frame's span; the caller checks their length.

        `table` has the sender's blocks if the transport is one-sided. Raises TransferError,
        ValueError for a span out of range, MemoryError if the bytes do not fit into the memory of a
        GPU, and TransportError if the transport failed.
        """
        raise NotImplementedError

    async def verify(self, table: BlockTable) -> None:
        """Raises TransferError if the sender's blocks have left the transfer's ownership until now.

        Only one-sided transports implement it. It is called after the last fetch.
        """


class GrpcConnector(KvConnector):
    """Carries KV cache over gRPC, as payload of the transfer's own frames.

    It needs no connection, is always available, and is the fallback of all other transports.
    """

    async def offer(self, stream: int, table: TableBlocks, span: KvSpan) -> memoryview:
        """Returns the span's bytes, which become the payload of its frame."""
        return await self.context.kv.read(table, span)

    async def fetch(
        self, stream: int, table: TableBlocks, data: Data, payload: memoryview
    ) -> memoryview:
        """Returns the payload."""
        return payload


def memory_description(kv: KvStore) -> dict[str, Any]:
    """Returns the layout of this rank's memory, for the receiver of a one-sided transport."""
    sizes = {name: getattr(kv, name) for name in MEMORY_SIZES}
    return {**sizes, "block_bytes": plan_memory(kv.layout, **sizes).block_bytes}


def described_memory(kv: KvStore, description: Mapping[str, Any]) -> KvMemory:
    """Returns the layout of a sender's memory with MEMORY_FIELDS.

    Raises ValueError if the sender has another layout, as another version of the service may have.
    """
    memory = plan_memory(kv.layout, **{name: description[name] for name in MEMORY_SIZES})
    if memory.block_bytes != description["block_bytes"]:
        raise ValueError(
            f"KV transport: the sender's blocks have {description['block_bytes']} bytes; this "
            f"process expects {memory.block_bytes}"
        )
    return memory


def checked(description: Mapping[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """Returns a description from outside after a check of its fields' names and types.

    Integers must not be negative. Raises TransportError if the check fails.
    """
    good = description.keys() == types.keys() and all(
        type(description[name]) is types[name] for name in types
    )
    if not good or any(type(value) is int and value < 0 for value in description.values()):
        raise TransportError("KV transport: fields or types of the description are wrong")
    return dict(description)
