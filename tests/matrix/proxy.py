"""Forwards TCP connections to a worker, and delays, cuts or swallows what goes over them."""

import asyncio
from contextlib import suppress
from typing import Final

_CHUNK: Final = 1 << 16


class Proxy:
    """Listens on `address`, and forwards each connection to `target`."""

    def __init__(self) -> None:
        self.address = ""
        self.target = ""
        self.num_bytes = 0  # that were passed on
        self.num_kept = 0  # reads that `swallow` has kept
        self.delay_seconds = 0.0  # of each chunk
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Binds a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        """Ends all connections and the port."""
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Breaks every connection; later ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    def swallow(self) -> None:
        """Keeps every connection and passes nothing on, until `heal` or `resume`."""
        self._flows.clear()

    def resume(self) -> None:
        """Passes on what was kept since `swallow`."""
        self._flows.set()

    def heal(self) -> None:
        """Breaks what was swallowed, so that no half of a stream arrives, and forwards again."""
        self.delay_seconds = 0.0
        if not self._flows.is_set():
            self.cut()
            self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(far_writer)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, target, (writer, far_writer)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        try:
            with suppress(OSError):
                while data := await source.read(_CHUNK):
                    if self.delay_seconds:
                        await asyncio.sleep(self.delay_seconds)
                    self.num_kept += not self._flows.is_set()
                    await self._flows.wait()
                    target.write(data)
                    self.num_bytes += len(data)
                    await target.drain()
        finally:
            for writer in both:
                writer.transport.abort()
                self._writers.discard(writer)
