"""Connects simulated workers with routers and with each other, in one process.

A worker is reached by its address until it is killed; then its streams break as those of a dead
process do.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from ...proto import worker_pb2
from ...proto.identity import PeerIdentity
from ..local.session import LocalChannel, LocalSession, Serve
from .transfers import KvOffers


class Peer(Protocol):
    """Describes a worker that others can reach."""

    @property
    def offers(self) -> KvOffers: ...

    @property
    def methods(self) -> Mapping[str, Serve]:
        """Returns the functions that serve its streams, by the name of the method."""
        ...


class RouterTime:
    """Simulates the processor time of one router, which does one thing after another."""

    def __init__(self, seconds_per_token: float) -> None:
        self.busy_seconds = 0.0
        self._seconds_per_token = seconds_per_token
        self._free_at = 0.0

    async def spend(self, seconds: float) -> None:
        """Waits until the router has done earlier work and this one."""
        if seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, loop.time()) + seconds
        await asyncio.sleep(self._free_at - loop.time())

    async def receive(self, message: worker_pb2.SessionResponse) -> None:
        """Spends the time for the tokens of a message."""
        if self._seconds_per_token:
            num_tokens = sum(len(output.tokens.ids) for output in message.outputs)
            await self.spend(num_tokens * self._seconds_per_token)


class Fabric:
    """Holds the workers that can be reached, by address."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._streams: dict[str, list[SimulatedStream]] = {}

    def add(self, address: str, peer: Peer) -> None:
        """Makes a worker reachable."""
        self._peers[address] = peer

    def kill(self, address: str) -> None:
        """Ends the streams and offers of a worker, and makes it unreachable."""
        peer = self._peers.pop(address)
        for stream in self._streams.pop(address, ()):
            stream.fail()
        peer.offers.close()

    def offers(self, address: str) -> KvOffers | None:
        """Returns the offers of a worker; None if it cannot be reached."""
        peer = self._peers.get(address)
        return None if peer is None else peer.offers

    def channel(self, address: str, router: RouterTime | None = None) -> "SimulatedChannel":
        """Returns a channel to a worker, for a router or for another worker."""
        return SimulatedChannel(partial(self._open, address, router))

    def connect(self, router: RouterTime) -> Callable[[str, PeerIdentity], "SimulatedChannel"]:
        """Returns the function by which a router's dispatcher opens channels."""
        return lambda address, _: self.channel(address, router)

    def _open(self, address: str, router: RouterTime | None, method: str) -> "SimulatedStream":
        peer = self._peers.get(address)
        serve = None if peer is None else peer.methods[method]
        stream = SimulatedStream(serve, router)
        if serve is not None:
            streams = self._streams.setdefault(address, [])
            streams[:] = [each for each in streams if not each.has_ended]
            streams.append(stream)
        return stream


class SimulatedChannel(LocalChannel):
    """A channel to a worker, for the stub of one stream."""

    def __init__(self, open_stream: Callable[[str], "SimulatedStream"]) -> None:
        self._open_stream = open_stream
        self._session = None

    def stream_stream(
        self, _method: str, *_: object, **__: object
    ) -> "Callable[[], SimulatedStream]":
        """Returns the function that opens a stream, as stubs expect it."""
        return partial(self._open_method, _method.rpartition("/")[2])

    def _open_method(self, name: str) -> "SimulatedStream":
        self._session = stream = self._open_stream(name)
        return stream


class SimulatedStream(LocalSession):
    """A stream that breaks when its worker is killed, and whose reader takes the router's time."""

    def __init__(self, serve: Serve | None, router: RouterTime | None) -> None:
        """Without `serve`, the worker cannot be reached."""
        self._is_broken = serve is None
        self._router = router
        super().__init__(serve or _end)

    @property
    def has_ended(self) -> bool:
        return self._serving.done()

    async def read(self) -> Any:
        """Returns the worker's next message. Raises AioRpcError if the stream is broken."""
        message = None if self._is_broken else await super().read()
        if self._is_broken:
            raise _lost()
        if message is not None and self._router is not None:
            await self._router.receive(message)
        return message

    def fail(self) -> None:
        """Breaks the stream, because the worker was killed."""
        self._is_broken = True
        self.cancel()
        if self._responses.empty():
            self._responses.put_nowait(None)  # wakes the reader


async def _end(*_: object) -> None:
    """Serves a stream to a worker that cannot be reached."""


def _lost() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "worker killed"
    )
