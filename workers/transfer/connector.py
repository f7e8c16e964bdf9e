"""Declares what a transport of KV cache implements, and what the transports of one rank share.

A transport is one class in one file, registered in `registry`. Two ranks that first meet choose one
from the capabilities of both, in the order that the config gives; gRPC needs no connector of its
own (`grpc_connector`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self, TypeVar

from ...proto.metrics import NULL_METRICS, Metrics
from ..kv_cache.layout import KvSpan
from ..kv_cache.store import KvStore
from .frames import FRAME_BYTES, Announce, BlockTable, Data, TransferError, TransportError
from .leases import LeaseTable

CONNECT_SECONDS: Final = 5.0
"""How long any one step of connecting may take, and any message of a two-sided transport."""

MEMORY_SIZES: Final[dict[str, type]] = dict.fromkeys(
    ("num_blocks", "block_size", "tp", "rank"), int
)
"""The fields of `KvStore` that say how its memory is laid out, for the description of a one-sided
transport.
"""

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class TransferContext:
    """Holds what the transports of one rank use. Lives in one event loop."""

    kv: KvStore
    transports: tuple[str, ...] = ()  # that may be used beside gRPC, in order of preference
    host: str = "127.0.0.1"  # the interface to bind
    device: str = "cpu"  # of the rank
    metrics: Metrics = NULL_METRICS
    leases: LeaseTable = field(init=False)
    _resources: dict[str, asyncio.Future[Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.leases = LeaseTable(shared=self.kv.shared_fd is not None)

    async def resource(self, name: str, make: Callable[[], T]) -> T:
        """Returns what a transport needs once for all connections of the rank, made in a thread
        when first asked for. Raises what `make` raises.
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
    """Holds one side of a connection between two ranks over one transport: the sender's, made by
    `listen`, or the receiver's, made by `connect`. A subclass implements both sides: the sender
    offers spans of its KV cache, the receiver fetches them.

    One-sided transports read the sender's memory while it does nothing: they set `one_sided`, offer
    nothing, and `verify` that no block was reused meanwhile.
    """

    one_sided: ClassVar[bool] = False
    frame_bytes: ClassVar[int] = FRAME_BYTES

    def __init__(self, context: TransferContext, name: str) -> None:
        self.context = context
        self.name = name  # of the transport

    # --- to choose
    # ----------------------------------------------------------------------------------------------

    @classmethod
    def capabilities(cls, context: TransferContext, name: str) -> dict[str, Any] | None:
        """Returns what the other side must know of this one, for msgpack; None if this rank cannot
        use the transport.
        """
        return {}

    @classmethod
    def reaches(cls, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> bool:
        """Whether two ranks with these capabilities can use the transport. The receiver's come from
        outside.
        """
        return True

    # --- to connect
    # ----------------------------------------------------------------------------------------------

    @classmethod
    async def listen(
        cls, context: TransferContext, name: str, announce: Callable[[Announce], None]
    ) -> Self:
        """Opens the sender's side. A two-sided transport calls `announce` for each message that it
        sends, before it. Raises OSError, ValueError or TransferError if there is no such transport
        from here.
        """
        return cls(context, name)

    def description(self) -> dict[str, Any]:
        """Returns what the receiver's `connect` needs, for msgpack."""
        return {}

    @classmethod
    async def connect(
        cls, context: TransferContext, name: str, description: dict[str, Any]
    ) -> Self:
        """Opens the receiver's side. The description comes from outside. Raises OSError, ValueError
        or TransferError.
        """
        return cls(context, name)

    async def run(self) -> None:
        """Does the sender's work until it is cancelled. Raises TransferError when the transport
        breaks.
        """
        await asyncio.Event().wait()

    def close(self) -> None:
        """Ends this side: calls under way and later ones raise TransportError. Idempotent."""

    # --- to transfer
    # ----------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Returns when `offer` may be called, before anything else is awaited. Raises
        TransportError.
        """

    def offer(self, stream: int, blocks: Sequence[int], span: KvSpan) -> bytes | memoryview:
        """Makes a span ready to be fetched, or nothing if one-sided; returns the payload of its
        Data frame. Reads KV memory before it returns or never. Raises TransportError.
        """
        return b""

    def open_stream(self, stream: int) -> AbstractContextManager[None]:
        """Prepares the receiver's side for a transfer, for as long as the context lasts."""
        return nullcontext()

    async def deliver(self, announcement: Announce) -> None:
        """Receives a message that the sender announces. Raises TransferError; then the transport is
        broken.
        """
        raise TransferError("KV announcement out of order")

    async def fetch(
        self, stream: int, blocks: Sequence[int], data: Data, payload: memoryview
    ) -> memoryview:
        """Returns the bytes of a data frame's span; `blocks` is the sender's block table if
        one-sided. The caller checks the length. Raises TransferError, ValueError for a span out of
        range, TransportError if it was the transport's fault.
        """
        raise NotImplementedError

    async def verify(self, table: BlockTable) -> None:
        """Raises TransferError unless the sender's blocks were the transfer's own until now. For
        one-sided transports, after the last fetch.
        """


def checked(description: Mapping[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """Returns a description from outside whose fields have exactly these names and types, integers
    not negative. Raises TransportError.
    """
    good = description.keys() == types.keys() and all(
        type(description[name]) is types[name] for name in types
    )
    if not good or any(type(value) is int and value < 0 for value in description.values()):
        raise TransportError("KV transport with an impossible description")
    return dict(description)
