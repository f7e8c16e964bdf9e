"""Sends the events of a stream, and keep-alives while there is no event.

A request may have no events for minutes: while it waits in the queue, while its prompt is computed,
or while the arguments of a tool call are generated, which are sent as a whole. Proxies and clients
give up a connection that is silent for so long.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, MutableSequence
from contextlib import asynccontextmanager

from starlette.types import Send


class EventSender:
    """Sends one response of server-sent events; its head goes before the first event."""

    def __init__(self, send: Send, headers: MutableSequence[tuple[bytes, bytes]]) -> None:
        """Uses the headers of the time at which the head is sent."""
        self.has_started = False  # the head is sent
        self._send = send
        self._headers = headers
        self._is_sending = False  # an event
        self._keeping_alive = asyncio.Lock()  # while a keep-alive is sent
        self._time = asyncio.get_running_loop().time
        self._sent = self._time()  # when the last bytes were sent

    async def send(self, event: bytes) -> None:
        """Sends an event, which may be empty."""
        # Not always with the lock: it took a sixth of a router's time for a token.
        if self._keeping_alive.locked():
            async with self._keeping_alive:
                pass
        self._is_sending = True
        await self._write(event)
        self._is_sending = False

    async def end(self, event: bytes) -> None:
        """Ends the response with a last event, which may be empty."""
        if not self.has_started:
            await self._start()
        await self._send({"type": "http.response.body", "body": event})

    @asynccontextmanager
    async def kept_alive(
        self, make_event: Callable[[], bytes], seconds: float | None
    ) -> AsyncGenerator[None, None]:
        """Scope in which an event is sent whenever no bytes were sent for `seconds`; None: never.

        Makes each event when it is sent, so that its number follows the earlier events. Has
        one timer, whatever the number of events.
        """
        if seconds is None:
            yield
            return
        keeping = asyncio.create_task(self._keep_alive(make_event, seconds))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        if not keeping.cancelled():
            keeping.result()

    async def _keep_alive(self, make_event: Callable[[], bytes], seconds: float) -> None:
        while True:
            sent = self._sent
            await asyncio.sleep(sent + seconds - self._time())
            if self._sent != sent:
                continue
            if self._is_sending:  # to a client that reads slowly
                self._sent = self._time()
                continue
            async with self._keeping_alive:
                await self._write(make_event())

    async def _write(self, event: bytes) -> None:
        if not self.has_started:
            await self._start()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        if event:
            self._sent = self._time()

    async def _start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self.has_started = True
