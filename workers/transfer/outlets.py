"""The exporter's ends of the ways that KV cache may take."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from ..kv_cache.layout import KvSpan
from ..kv_cache.store import KvStore
from .collective import Pair
from .shared import LeaseTable, Memory, Remote
from .transports import CONNECT_SECONDS, NUM_SAMPLES, Means
from .wire import FRAME_BYTES, PAIR_GONE, SLICE_BYTES, Sent, TransportError, checksum_of

_MOST_WAITING: Final = 8  # frames of all streams that wait for a pair


class Carrier(Protocol):
    """How the bytes of one transfer leave."""

    @property
    def frame_bytes(self) -> int:
        """To aim at."""
        ...

    async def ready(self) -> None:
        """Returns when `carry` may be called, before anything else is awaited. Raises TransportError."""
        ...

    def carry(self, blocks: Sequence[int], span: KvSpan) -> bytes | memoryview:
        """Reads what has to be read, now or never; returns the payload for the stream. Raises TransportError."""
        ...


@dataclass(frozen=True, slots=True)
class Inline:
    """On the stream itself."""

    kv: KvStore

    @property
    def frame_bytes(self) -> int:
        return FRAME_BYTES

    async def ready(self) -> None:
        pass

    def carry(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        return self.kv.read(blocks, span)


class LeftToThePuller:
    """Not at all: the way is one-sided."""

    @property
    def frame_bytes(self) -> int:
        return SLICE_BYTES

    async def ready(self) -> None:
        pass

    def carry(self, blocks: Sequence[int], span: KvSpan) -> bytes:
        return b""


class Outlet(Protocol):
    """One way from an exporter to one puller."""

    one_sided: bool  # transfers begin with an Offer

    def info(self) -> dict[str, Any]:
        """What the inlet needs to know."""
        ...

    async def run(self) -> None:
        """What the exporter has to do for it: for ever, or nothing. Raises TransferError when it breaks."""
        ...

    def carrier(self, kv: KvStore, stream: int) -> Carrier: ...

    def close(self) -> None:
        """Idempotent."""
        ...


class SharedOutlet:
    """Memory that the puller reads by itself, mapped or by NIXL."""

    one_sided = True

    def __init__(self, memory: Memory | Remote) -> None:
        self._memory = memory

    def info(self) -> dict[str, Any]:
        return asdict(self._memory)

    async def run(self) -> None:
        pass

    def carrier(self, kv: KvStore, stream: int) -> Carrier:
        return LeftToThePuller()

    def close(self) -> None:
        pass


class PairOutlet:
    """Sends the bytes of all transfers through one pair, in the order in which it says Sent."""

    one_sided = False

    def __init__(self, name: str, means: Means, sample: bytes, say: Callable[[Sent], None]) -> None:
        """Raises OSError if there is no such interface."""
        device = means.pair_device(name)
        self.pair = Pair.listen(means.host, backend=name, device=device, timeout=CONNECT_SECONDS)
        self._sample = sample
        self._say = say
        self._waiting: deque[memoryview] = deque()
        self._changed = asyncio.Event()

    def info(self) -> dict[str, Any]:
        return {"address": self.pair.address}

    async def run(self) -> None:
        await self.pair.accept()
        for _ in range(NUM_SAMPLES):
            await self.pair.send(self._sample)
        while True:
            await self._until(lambda: bool(self._waiting))
            await self.pair.send(self._waiting[0])
            self._waiting.popleft()
            self._changed.set()

    def carrier(self, kv: KvStore, stream: int) -> Carrier:
        return _PairCarrier(self, kv, stream)

    async def room(self) -> None:
        """Returns when another message may be put. Raises TransportError."""
        await self._until(lambda: len(self._waiting) < _MOST_WAITING)

    def put(self, stream: int, data: memoryview) -> None:
        """The data must stay as they are. Raises TransportError."""
        self._check()
        # Said ahead, so that the puller asks for one message while it still hears of the next.
        self._say(Sent(stream=stream, num_bytes=data.nbytes, checksum=checksum_of(data)))
        self._waiting.append(data)
        self._changed.set()

    def close(self) -> None:
        self.pair.close()
        self._waiting.clear()
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        self._check()
        while not condition():
            self._changed.clear()
            await self._changed.wait()
            self._check()

    def _check(self) -> None:
        if self.pair.broken:
            self._changed.set()  # nobody waits for it any more
            raise TransportError(PAIR_GONE)


@dataclass(frozen=True, slots=True)
class _PairCarrier:
    outlet: PairOutlet
    kv: KvStore
    stream: int

    @property
    def frame_bytes(self) -> int:
        return SLICE_BYTES

    async def ready(self) -> None:
        await self.outlet.room()

    def carry(self, blocks: Sequence[int], span: KvSpan) -> bytes:
        self.outlet.put(self.stream, self.kv.read(blocks, span))
        return b""


async def open_outlet(
    name: str, means: Means, ledger: LeaseTable, sample: bytes, say: Callable[[Sent], None]
) -> SharedOutlet | PairOutlet:
    """Raises ValueError or OSError if there is no such way from here."""
    if name == "nixl":
        try:
            return SharedOutlet(await asyncio.to_thread(ledger.serve, means.nixl_devices()))
        except RuntimeError as error:
            raise OSError(str(error)) from error
    if name != "shared":
        return PairOutlet(name, means, sample, say)
    memory = ledger.describe()
    if memory is None:
        raise ValueError("the memory is not shared")
    return SharedOutlet(memory)
