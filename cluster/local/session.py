"""Connects the router's part and a worker of one process, without a port and without copies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from ...proto import worker_pb2

Serve = Callable[
    [
        AsyncIterator[worker_pb2.SessionRequest],
        Callable[[worker_pb2.SessionResponse], Awaitable[None]],
    ],
    Awaitable[None],
]
"""Serves one router, as `RequestManager.serve` does."""


class LocalChannel:
    """A channel to a worker of this process, for the stub of one session."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._session: LocalSession | None = None

    def stream_stream(self, _method: str, *_: object, **__: object) -> "Callable[[], LocalSession]":
        """Returns the function that opens the session, as stubs expect it."""
        return self._open

    def unary_unary(self, _method: str, *_: object, **__: object) -> None:
        """Returns None: a router calls no other methods of a worker."""

    async def close(self) -> None:
        """Ends the session. Idempotent."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> "LocalSession":
        self._session = LocalSession(self._serve)
        return self._session


class LocalSession:
    """A session with a worker of this process, in the form of grpc.aio's bidirectional call."""

    def __init__(self, serve: Serve) -> None:
        self._commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        # One message: output that follows before it is read is joined in the next one.
        self._responses: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue(1)
        self._serving = asyncio.create_task(self._run(serve))

    async def read(self) -> worker_pb2.SessionResponse | None:
        """Returns the worker's next message; None after the end of the session."""
        return await self._responses.get()

    async def write(self, request: worker_pb2.SessionRequest) -> None:
        self._commands.put_nowait(request)

    def cancel(self) -> None:
        """Ends the session; the worker cancels all its requests. Idempotent."""
        self._serving.cancel()

    async def close(self) -> None:
        """Ends the session, and waits for the worker."""
        self.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _run(self, serve: Serve) -> None:
        try:
            await serve(self._read_commands(), self._responses.put)
        except Exception:  # a defect; without an end the reader would wait for ever
            await self._responses.put(None)
            raise
        await self._responses.put(None)

    async def _read_commands(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        while True:
            yield await self._commands.get()
