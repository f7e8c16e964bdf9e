"""Joins a router's part and a worker of one process: messages pass as they are, without a port."""

import asyncio
from collections.abc import AsyncIterator, Callable

from ...proto import worker_pb2
from ...workers.serve.worker import Worker


class LocalChannel:
    """A channel to a worker of this process, for the stub of one session."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._session: LocalSession | None = None

    def stream_stream(self, _method: str, *_: object, **__: object) -> "Callable[[], LocalSession]":
        """Returns what opens the session, as stubs expect it."""
        return self._open

    def unary_unary(self, _method: str, *_: object, **__: object) -> None:
        """Returns nothing: a router calls no other methods of a worker."""

    async def close(self) -> None:
        """Ends the session. Idempotent."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> "LocalSession":
        self._session = LocalSession(self._worker)
        return self._session


class LocalSession:
    """A session with a worker of this process, as grpc.aio has a call with streams both ways."""

    def __init__(self, worker: Worker) -> None:
        self._commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        # One message: what follows while it is not read is joined in the next.
        self._responses: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue(1)
        self._serving = asyncio.create_task(self._serve(worker))

    async def read(self) -> worker_pb2.SessionResponse | None:
        """Returns the worker's next message; None when it has ended the session."""
        return await self._responses.get()

    async def write(self, request: worker_pb2.SessionRequest) -> None:
        self._commands.put_nowait(request)

    def cancel(self) -> None:
        """Ends the session; the worker cancels all that came over it. Idempotent."""
        self._serving.cancel()

    async def close(self) -> None:
        """Ends the session, and waits until the worker has done so."""
        self.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self, worker: Worker) -> None:
        try:
            await worker.serve_session(self._read_commands(), self._responses.put)
        except Exception:  # a defect: nobody may wait for what will not come
            await self._responses.put(None)
            raise
        await self._responses.put(None)

    async def _read_commands(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        while True:
            yield await self._commands.get()
