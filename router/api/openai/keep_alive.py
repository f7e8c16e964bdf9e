"""Sends the events of a stream, and keep-alives while there is no event.

A request may have no events for minutes: while it waits in the queue, while its prompt is computed,
or while the arguments of a tool call are generated, which are sent as a whole. Proxies and clients
give up a connection that is silent for so long.
"""

import asyncio
from collections.abc import AsyncGenerator, MutableSequence
from contextlib import asynccontextmanager

from starlette.types import Send


class EventSender:
    """Sends one response of server-sent events; its head goes before the first event."""

    def __init__(self, send: Send, headers: MutableSequence[tuple[bytes, bytes]]) -> None:
        """Uses the headers of the time at which the head is sent."""
        self.has_started = False  # the head is sent
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()  # while a part of the response is sent
        self._sent = asyncio.get_running_loop().time()  # when the last bytes were sent

    async def send(self, event: bytes) -> None:
        """Sends an event, which may be empty."""
        async with self._lock:
            await self._write(event)

    async def end(self, event: bytes) -> None:
        """Ends the response with a last event, which may be empty."""
        await self._send({"type": "http.response.body", "body": event})

    @asynccontextmanager
    async def kept_alive(self, event: bytes, seconds: float | None) -> AsyncGenerator[None, None]:
        """Scope in which `event` is sent whenever no bytes were sent for `seconds`; None: never.

        Has one timer, whatever the number of events.
        """
        if seconds is None:
            yield
            return
        keeping = asyncio.create_task(self._keep_alive(event, seconds))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        if not keeping.cancelled():
            keeping.result()

    async def _keep_alive(self, event: bytes, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sent = self._sent
            await asyncio.sleep(sent + seconds - loop.time())
            async with self._lock:  # an event that waits for a slow client goes first
                if self._sent == sent:
                    await self._write(event)

    async def _write(self, event: bytes) -> None:
        if not self.has_started:
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
            self.has_started = True
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        if event:
            self._sent = asyncio.get_running_loop().time()
