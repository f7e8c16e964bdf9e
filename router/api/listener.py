"""Serves an ASGI application over HTTP on one port, with uvicorn in the running event loop."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class HttpListener:
    """Listens from `start` to `stop`."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._server = _Server(config)

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port. With `shares_port` others
        may listen there, too, who say the same.

        Raises OSError if the port is taken."""
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, int(port)), backlog=2_048, reuse_port=shares_port)
        # asyncio does this for its own listeners only; without it each event of a stream waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]), name="http server")
        await self._server.ready.wait()
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self, grace: float) -> None:
        """Accepts no more requests; cancels those that still run after `grace` seconds."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._running
        cancelled = self._server.server_state.tasks
        if cancelled:
            await asyncio.wait(cancelled)


class _Server(uvicorn.Server):
    """Leaves the process's signals alone and sets `ready` when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
