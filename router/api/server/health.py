"""Answers grpc.health.v1.

The servicer of grpc_health holds a lock while it writes to a watcher. A watcher needs no key; if it
read nothing, the status could never change.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from grpc_health.v1 import health_pb2

from ....proto.errors import NotFound

_Answer = health_pb2.HealthCheckResponse


class HealthStatus:
    """Holds the status of a server and of its services. Lives in one event loop."""

    def __init__(self, services: Collection[str]) -> None:
        """`services`: the names that clients may ask for; "" is the server."""
        self._services = frozenset(services)
        self._is_serving = False
        self._is_over = False
        self._changed = asyncio.Event()  # replaced at each change

    def set(self, serving: bool) -> None:
        """Sets the status of the server and of all services."""
        if not self._is_over and serving != self._is_serving:
            self._is_serving = serving
            self._report()

    def end(self) -> None:
        """Sets the status to not serving for good; watchers get it as their last message."""
        self._is_over = True
        self._is_serving = False
        self._report()

    def check(self, service: str) -> health_pb2.HealthCheckResponse:
        """Returns the status of a service. Raises NotFound."""
        if service not in self._services:
            raise NotFound("service: is not served here")
        return _Answer(status=self._status(service))

    async def watch(
        self,
        service: str,
        write: Callable[[health_pb2.HealthCheckResponse], Awaitable[object]],
    ) -> None:
        """Writes the status of a service, now and after each change, until `end`."""
        last = None
        while True:
            changed = self._changed
            is_over = self._is_over
            status = self._status(service)
            if status != last:
                await write(_Answer(status=status))
                last = status
            if is_over:
                return
            await changed.wait()

    def _status(self, service: str) -> "health_pb2.HealthCheckResponse.ServingStatus":
        if service not in self._services:
            return _Answer.SERVICE_UNKNOWN
        return _Answer.SERVING if self._is_serving else _Answer.NOT_SERVING

    def _report(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
