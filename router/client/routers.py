"""Chooses the router for a call, and starts the call there.

Of several addresses all calls use one, until it fails.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from ...proto import inference_pb2_grpc
from ...proto.errors import Cancelled, InvalidArgument, TandemError
from . import wire

CANCELLED: Final = "the client cancelled the request"


class RouterStubs:
    """Holds the channel to one router, and the stubs of its services."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        self.health = health_pb2_grpc.HealthStub(channel)


class Routers:
    """Holds the routers of one service. All calls go to one of them until it fails."""

    def __init__(self, addresses: str | Sequence[str], open_channel: Callable[[str], Any]) -> None:
        """Parses the addresses of the routers.

        `addresses`: each HOST:PORT, in one text with commas between them or in several. Raises
        InvalidArgument.
        """
        texts = [addresses] if isinstance(addresses, str) else addresses
        names = [name.strip() for text in texts for name in text.split(",")]
        if not names or not all(names):
            raise InvalidArgument("must be HOST:PORT of each router, one or more", "address")
        self.all = [RouterStubs(open_channel(name)) for name in names]
        self.is_closed = False
        self._waits = set[threading.Event | asyncio.Event]()  # that `close` ends
        # Random, so that clients with the same list use all routers.
        self._current = random.randrange(len(self.all))

    @property
    def current(self) -> RouterStubs:
        return self.all[self._current]

    def leave(self, failed: RouterStubs) -> None:
        """Makes the next router the current one, unless another call has already left `failed`."""
        if self.current is failed:
            self._current = (self._current + 1) % len(self.all)

    def close(self) -> None:
        """Makes the next tries of all calls raise Cancelled, and ends the waits before them.

        The owner of the channels closes them.
        """
        self.is_closed = True
        for event in tuple(self._waits):
            event.set()

    @contextmanager
    def ending(self, event: threading.Event | asyncio.Event) -> Iterator[None]:
        """While this context is open, `close` sets `event`."""
        self._waits.add(event)
        try:
            if self.is_closed:  # since before the event was there
                event.set()
            yield
        finally:
            self._waits.discard(event)


class RoutedCall:
    """Starts the tries of one call, each at the router that is current at that time."""

    def __init__(
        self,
        routers: Routers,
        choose: Callable[[RouterStubs], Any],
        metadata: wire.Metadata,
        retries: wire.Retries,
    ) -> None:
        """Takes the function `choose`, which returns the method of a router's services to call."""
        self._routers = routers
        self._choose = choose
        self._metadata = metadata
        self.retries = retries

    def start(self, request: Message) -> Any:
        """Starts a try. Raises Cancelled if the client was closed, also between two tries."""
        if self._routers.is_closed:
            raise Cancelled("the client is closed")
        self._router = self._routers.current
        return self._choose(self._router)(
            request, timeout=self.retries.timeout, metadata=self._metadata
        )

    def delay(self, error: TandemError) -> float:
        """Returns the seconds until the next try, by Retries; raises `error` without a next try."""
        if error.retry_after is not None:
            self._routers.leave(self._router)
        return self.retries.delay(error)

    def wait(self, seconds: float, cancelled: threading.Event) -> bool:
        """Waits before the next try; returns True if `cancelled` is set or the client is closed."""
        with self._routers.ending(cancelled):
            return cancelled.wait(seconds)

    async def wait_async(self, seconds: float, cancelled: asyncio.Event) -> bool:
        """Waits as `wait` does, in an event loop."""
        with self._routers.ending(cancelled), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await cancelled.wait()
        return cancelled.is_set()


def call(routed: RoutedCall, request: Message) -> Any:
    """Makes a unary call with its retries. Raises a TandemError."""
    while True:
        try:
            return routed.start(request)
        except grpc.RpcError as failure:
            error = wire.error_of(failure)
        routed.wait(routed.delay(error), threading.Event())


def is_task_cancelled() -> bool:
    """Returns True if a CancelledError is that of the current task, which must raise it again.

    grpc.aio also raises one in each task whose call was cancelled, as by closing the channel.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def call_async(routed: RoutedCall, request: Message) -> Any:
    """Makes a unary call with its retries in an event loop. Raises a TandemError."""
    while True:
        try:
            return await routed.start(request)
        except grpc.aio.AioRpcError as failure:
            error = wire.error_of(failure)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            raise Cancelled(CANCELLED) from None
        await routed.wait_async(routed.delay(error), asyncio.Event())
