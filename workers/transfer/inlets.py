"""The puller's ends of the ways that KV cache may take."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from ..kv_cache.layout import KvSpan
from ..kv_cache.store import SAMPLE_BYTES, KvStore
from .collective import Pair
from .remote import RemoteMemory
from .shared import Memory, PeerMemory, Remote
from .transports import CONNECT_SECONDS, Means
from .wire import SLICE_BYTES, Data, Offer, Sent, TransferError, TransportError, check_types, checksum_of

_M = TypeVar("_M", Memory, Remote)


class Source(Protocol):
    """Where the bytes of one transfer come from."""

    transport: str
    one_sided: bool  # an Offer comes first
    stream: int

    def offered(self, offer: Offer, table: memoryview) -> "Source":
        """What a one-sided transfer goes on with. Raises TransferError for a table that is none."""
        ...

    async def read(self, data: Data, payload: memoryview) -> memoryview:
        """What the frame is about; the caller checks its length. Raises TransferError, and TransportError if it was the
        way's fault."""
        ...

    async def check(self) -> None:
        """After the Commit. Raises TransferError unless what was read was the transfer's own until now."""
        ...

    def close(self) -> None: ...


class _Source:
    """What most sources have in common."""

    one_sided = False
    stream = 0

    def offered(self, offer: Offer, table: memoryview) -> Source:
        raise TransferError("KV pull out of order")

    async def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Payload(_Source):
    """The stream itself."""

    transport = "grpc"

    async def read(self, data: Data, payload: memoryview) -> memoryview:
        return payload


class Inlet(Protocol):
    """One way to a puller from one exporter."""

    async def sample(self) -> memoryview:
        """The exporter's sample. Raises TransferError."""
        ...

    async def deliver(self, sent: Sent) -> None:
        """Takes what the exporter says it has sent. Raises TransferError; then it is broken."""
        ...

    def source(self) -> Source:
        """Of a transfer that is about to begin, and closes it."""
        ...

    def close(self) -> None:
        """Transfers that want more of it raise TransportError. Idempotent."""
        ...


class _OneSidedInlet:
    """The puller reads for itself."""

    async def deliver(self, sent: Sent) -> None:
        raise TransferError("KV pull out of order")


class SharedInlet(_OneSidedInlet):
    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory

    async def sample(self) -> memoryview:
        return self._memory.sample()

    def source(self) -> Source:
        return _MemorySource(self._memory)

    def close(self) -> None:
        pass  # the memory goes when nobody refers to it: transfers may


class NixlInlet(_OneSidedInlet):
    def __init__(self, memory: RemoteMemory) -> None:
        self._memory = memory

    async def sample(self) -> memoryview:
        return await self._memory.sample()

    def source(self) -> Source:
        return _RemoteSource(self._memory)

    def close(self) -> None:
        self._memory.close()


class _OneSidedSource(_Source, ABC):
    """An export's blocks, where they lie."""

    transport: str
    one_sided = True

    def offered(self, offer: Offer, table: memoryview) -> Source:
        self._offer, self._blocks = offer, _blocks(table)
        return self if offer.number else Payload()

    async def read(self, data: Data, payload: memoryview) -> memoryview:
        try:
            return await self._read(self._blocks, data)
        except ValueError as error:
            raise TransferError("KV frame out of bounds") from error

    @abstractmethod
    async def _read(self, blocks: list[int], span: KvSpan) -> memoryview:
        """As `KvReader.read`."""


class _MemorySource(_OneSidedSource):
    transport = "shared"

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory

    async def _read(self, blocks: list[int], span: KvSpan) -> memoryview:
        return self._memory.kv.read(blocks, span)

    async def check(self) -> None:
        self._memory.check(self._offer)


class _RemoteSource(_OneSidedSource):
    transport = "nixl"

    def __init__(self, memory: RemoteMemory) -> None:
        self._memory = memory

    async def _read(self, blocks: list[int], span: KvSpan) -> memoryview:
        return await self._memory.read(blocks, span)

    async def check(self) -> None:
        await self._memory.check(self._offer)


class PairInlet:
    """Receives the bytes of all transfers, and leads each to its own."""

    def __init__(self, name: str, pair: Pair, largest: int) -> None:
        self.pair = pair
        self._name = name
        self._largest = largest  # message, in bytes
        self._count = itertools.count(1)
        self._arrived: dict[int, asyncio.Queue[memoryview | None]] = {}  # by stream; None: no more will

    async def sample(self) -> memoryview:
        return await self.pair.receive(SAMPLE_BYTES)

    async def deliver(self, sent: Sent) -> None:
        if sent.num_bytes > self._largest:
            raise TransferError("KV message out of bounds")
        data = await self.pair.receive(sent.num_bytes)
        if checksum_of(data) != sent.checksum:
            raise TransferError("KV message with a wrong checksum")
        if sent.stream in self._arrived:  # else it was given up
            self._arrived[sent.stream].put_nowait(data)

    def source(self) -> Source:
        stream = next(self._count)
        arrived = self._arrived[stream] = asyncio.Queue()
        if self.pair.broken:
            arrived.put_nowait(None)
        return _PairSource(self._name, stream, arrived, lambda: self._arrived.pop(stream, None))

    def close(self) -> None:
        self.pair.close()
        for arrived in self._arrived.values():
            arrived.put_nowait(None)


class _PairSource(_Source):
    def __init__(
        self, transport: str, stream: int, arrived: "asyncio.Queue[memoryview | None]", forget: Callable[[], object]
    ) -> None:
        self.transport = transport
        self.stream = stream
        self._arrived = arrived
        self._forget = forget

    async def read(self, data: Data, payload: memoryview) -> memoryview:
        found = await self._arrived.get()
        if found is None:
            raise TransportError("KV pair broke")
        return found

    def close(self) -> None:
        self._forget()


async def open_inlet(name: str, info: dict[str, Any], means: Means, kv: KvStore) -> SharedInlet | NixlInlet | PairInlet:
    """The puller's end of a way, by what the outlet says. Raises TransferError, OSError or ValueError."""
    if not info:
        raise TransportError("the other side has it not")
    if name == "shared":
        return SharedInlet(PeerMemory(_described(Memory, info), kv))
    if name == "nixl":
        return NixlInlet(await RemoteMemory.open(_described(Remote, info), kv, devices=means.nixl_devices()))
    address = info.get("address")
    if not isinstance(address, str):
        raise TransportError("KV pair with an impossible address")
    device = means.pair_device(name)
    pair = await Pair.join(address, host=means.host, backend=name, device=device, timeout=CONNECT_SECONDS)
    return PairInlet(name, pair, max(SLICE_BYTES, kv.layout.num_heads * kv.layout.bytes_per_slot))


def _blocks(table: memoryview) -> list[int]:
    if len(table) % 4:
        raise TransferError("KV pull out of order")
    return [int(block) for block in np.frombuffer(table, "<i4").tolist()]


def _described(kind: type[_M], info: dict[str, Any]) -> _M:
    try:
        memory = kind(**info)
    except TypeError as error:
        raise TransportError("KV cache memory with an impossible description") from error
    check_types(memory)
    return memory
