"""gRPC calls whose other side is an exporter of the same process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import cast

import grpc.aio

from tandem.workers.transfer.export import Exporter
from tandem.workers.transfer.wire import Message, TransferError, decode


class Call:
    """A Pull stream between a puller and an exporter."""

    def __init__(self, exporter: Exporter) -> None:
        self.said: list[Message] = []  # by the puller
        self.cancelled = False
        self._to_exporter: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._answers: asyncio.Queue[object] = asyncio.Queue()
        self.error: TransferError | None = None  # in which the exporter ended the stream
        self.serving = asyncio.create_task(self._serve(exporter))

    async def _serve(self, exporter: Exporter) -> None:
        try:
            async with aclosing(exporter.serve(self._incoming())) as frames:
                async for frame in frames:
                    self._answers.put_nowait(frame)
        except TransferError as error:
            self.error = error
        self._answers.put_nowait(grpc.aio.EOF)

    async def _incoming(self) -> AsyncIterator[bytes]:
        while (frame := await self._to_exporter.get()) is not None:
            yield frame

    async def write(self, frame: bytes) -> None:
        if self.serving.done():
            raise asyncio.InvalidStateError
        self.said.append(decode(frame)[1])
        self._to_exporter.put_nowait(frame)

    async def read(self) -> object:
        return await self._answers.get()

    async def code(self) -> None:
        await asyncio.wait([self.serving])

    async def done_writing(self) -> None:
        self._to_exporter.put_nowait(None)

    def cancel(self) -> None:
        self.cancelled = True
        self.serving.cancel()


class Calls:
    """Makes the channels to exporters and keeps the calls over them, by endpoint."""

    def __init__(self, exporters: Mapping[str, Exporter]) -> None:
        self.made: list[tuple[str, Call]] = []
        self._exporters = exporters

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, _Channel(lambda: self._open(endpoint)))

    def _open(self, endpoint: str) -> Call:
        call = Call(self._exporters[endpoint])
        self.made.append((endpoint, call))
        return call


class _Channel:
    def __init__(self, start: Callable[[], Call]) -> None:
        self._start = start

    def stream_stream(self, method: str) -> Callable[[], Call]:
        return self._start
