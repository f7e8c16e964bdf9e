"""The puller's side of a connection: tries the ways that both sides have with a sample, and keeps the fastest.

A way that fails its trial is not taken; a connection that breaks is made anew when it is next wanted. Neither is an
error of any transfer: there is always gRPC.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, TypeVar

import grpc.aio

from ..kv_cache.store import SAMPLE_BYTES, KvStore
from .inlets import Inlet, Source, open_inlet
from .shared import host_id
from .transports import CONNECT_SECONDS, NUM_SAMPLES, Means
from .wire import (
    CONNECT_METHOD,
    PAIR_GONE,
    Choice,
    Hello,
    Message,
    Sample,
    Sent,
    TransferError,
    TransferKey,
    TransportError,
    Trial,
    Try,
    Welcome,
    checksum_of,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

CONNECT_WAIT_SECONDS: Final = 0.5  # how long transfers wait for a new connection's choice, before they go over gRPC
RECONNECT_SECONDS: Final = 2.0  # between two tries to connect with one endpoint
REVIEW_SECONDS: Final = 60.0  # how long gRPC is taken because other ways have failed their trials

_M = TypeVar("_M", bound=Message)

KvCall = grpc.aio.StreamStreamCall[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A rank to which this one is connected."""

    endpoint: str
    transport: str
    bytes_per_second: float  # measured when they connected


class Connections:
    """This rank's connections to those from which it pulls, by endpoint."""

    def __init__(self, kv: KvStore, *, means: Means, channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._kv = kv
        self._means = means
        self._channel = channel
        self._open: dict[str, Connection] = {}
        self._tried: dict[str, float] = {}  # when, in the last RECONNECT_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def peers(self) -> list[Peer]:
        """Those that are connected, in the order of their endpoints."""
        return [
            Peer(endpoint=place, transport=one.transport, bytes_per_second=one.rates[one.transport])
            for place, one in sorted(self._open.items())
            if one.transport
        ]

    def want(self, endpoint: str) -> None:
        """Begins to connect, unless that was tried just now."""
        now = time.monotonic()
        self._tried = {place: tried for place, tried in self._tried.items() if now - tried < RECONNECT_SECONDS}
        known = self._open.get(endpoint)
        if endpoint in self._tried or (known and not (known.may_improve and now - known.began > REVIEW_SECONDS)):
            return
        if known:
            self.drop(known)
        self._tried[endpoint] = now
        call: KvCall = self._channel(endpoint).stream_stream(CONNECT_METHOD)()
        connection = self._open[endpoint] = Connection(endpoint, call, self._kv, self._means)
        connection.awaited = not known
        connection.task.add_done_callback(lambda task: self.drop(connection))
        self._tasks.add(connection.task)
        connection.task.add_done_callback(self._tasks.discard)

    async def get(self, endpoint: str) -> "Connection | None":
        """The connection that was wanted, as soon as it has chosen its way; None if that is gRPC or not known in
        time."""
        connection = self._open.get(endpoint)
        if connection is None:
            return None
        seconds = CONNECT_WAIT_SECONDS - (time.monotonic() - connection.began)
        if connection.awaited and not connection.settled.is_set() and seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await connection.settled.wait()
        return connection if connection.transport not in ("", "grpc") else None

    def drop(self, connection: "Connection") -> None:
        """Ends it: what it carries fails. Idempotent."""
        connection.task.cancel()
        if self._open.get(connection.endpoint) is connection:
            del self._open[connection.endpoint]

    async def close(self) -> None:
        """Ends all of them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Connection:
    """One connection, which lives as long as its task."""

    def __init__(self, endpoint: str, call: KvCall, kv: KvStore, means: Means) -> None:
        self.endpoint = endpoint
        self.began = time.monotonic()
        self.awaited = True  # transfers wait for the choice, for a while
        self.transport = ""  # as soon as it is chosen and until the end
        self.rates: dict[str, float] = {}  # bytes per second, by transport
        self.settled = asyncio.Event()  # there is a choice or there will be none
        self._call = call
        self._kv = kv
        self._means = means
        self._usable = means.usable()
        self._num_refused = 0
        self._key = TransferKey(transfer_id=secrets.token_bytes(16), epoch=0)
        self._checksum = 0
        self._inlets: dict[str, Inlet] = {}
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._end)  # also of one that was dropped before it began

    @property
    def may_improve(self) -> bool:
        """Whether there could have been a better way than gRPC."""
        return self.transport == "grpc" and self._num_refused > 0

    @property
    def pair(self) -> bytes:
        """Its id."""
        return self._key.transfer_id

    def source(self) -> Source:
        """Of a transfer that is about to begin. Raises TransportError if the connection has ended."""
        if self.transport not in self._inlets:
            raise TransportError(PAIR_GONE)
        return self._inlets[self.transport].source()

    async def _run(self) -> None:
        try:
            for name in await self._greet():
                await self._try(name)
            await self._choose()
            while True:
                sent, _ = await self._hear(Sent, None)
                if self.transport not in self._inlets:
                    raise TransferError("KV connect out of order")
                await self._inlets[self.transport].deliver(sent)
        except TransferError as error:
            logger.info("the KV connection to %s has ended: %s", self.endpoint, error)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self.transport = ""
        self.settled.set()
        self._call.cancel()
        for inlet in self._inlets.values():
            inlet.close()

    async def _greet(self) -> list[str]:
        """Brings the sample over gRPC; returns the transports that there may be."""
        layout = asdict(self._kv.layout)
        await self._say(Hello(layout=layout, host=host_id(), transports=self._usable))
        welcome, _ = await self._hear(Welcome, CONNECT_SECONDS)
        began, parts, count = time.monotonic(), list[memoryview](), 1
        while len(parts) < count:
            sample, payload = await self._hear(Sample, CONNECT_SECONDS)
            if sample.index != len(parts) or sample.count > SAMPLE_BYTES:
                raise TransferError("KV sample out of order")
            parts.append(payload)
            count = sample.count
        self._checksum = welcome.checksum
        self._check(memoryview(b"".join(parts)))
        self.rates["grpc"] = _rate(began)
        return [name for name in self._usable if name in welcome.transports]

    async def _try(self, name: str) -> None:
        """Keeps a way by which the sample comes right and in time."""
        await self._say(Try(transport=name))
        trial, _ = await self._hear(Trial, CONNECT_SECONDS)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                inlet = await open_inlet(name, trial.info, self._means, self._kv)
                self._inlets[name] = inlet
                self.rates[name] = max([await self._measure(inlet) for _ in range(NUM_SAMPLES)])
        except (TransferError, TimeoutError, OSError, ValueError) as error:
            logger.warning("KV cache from %s cannot go by %s: %s", self.endpoint, name, error or "no answer")
            self._num_refused += 1
            if name in self._inlets:
                self._inlets.pop(name).close()

    async def _measure(self, inlet: Inlet) -> float:
        began = time.monotonic()
        sample = await inlet.sample()
        rate = _rate(began)
        self._check(sample)
        return rate

    def _check(self, sample: memoryview) -> None:
        if sample.nbytes != SAMPLE_BYTES or checksum_of(sample) != self._checksum:
            raise TransportError("KV sample came wrong")

    async def _choose(self) -> None:
        chosen = fastest(self.rates)
        for name in self._inlets.keys() - {chosen}:
            self._inlets.pop(name).close()
        await self._say(Choice(transport=chosen))
        self.transport = chosen
        self.settled.set()
        speeds = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in self.rates.items())
        logger.info("KV cache from %s goes by %s: %s", self.endpoint, chosen, speeds)

    async def _say(self, message: Message) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._call.write(encode(self._key, message))
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise TransferError("KV stream broke") from error

    async def _hear(self, kind: type[_M], timeout: float | None) -> tuple[_M, memoryview]:
        """The exporter's next message, which is of this kind. Raises TransferError."""
        try:
            # A read that is given up ends the call.
            async with asyncio.timeout(timeout):
                frame = await self._call.read()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise TransferError("KV stream broke") from error
        if not isinstance(frame, bytes):
            raise TransferError("KV stream broke")
        key, message, payload = decode(frame)
        if kind is Welcome:
            self._key = TransferKey(transfer_id=self._key.transfer_id, epoch=key.epoch)
        if key != self._key or not isinstance(message, kind):
            raise TransferError("KV connect out of order")
        return message, payload


def fastest(rates: Mapping[str, float]) -> str:
    """The transport to take, by bytes per second."""
    return max(rates, key=lambda name: rates[name])


def _rate(began: float) -> float:
    return SAMPLE_BYTES / max(time.monotonic() - began, 1e-9)
