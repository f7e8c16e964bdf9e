"""One router's Session stream to one worker, shared by all requests it has there."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from ..proto import worker_pb2, worker_pb2_grpc
from ..proto.channel import peer_channel

logger = logging.getLogger(__name__)

AttemptKey = tuple[str, int]  # request id, attempt


class LinkBroken(Exception):
    """The stream to the worker has ended; whatever was asked of it is lost there."""


class Attempt:
    """One submit and the worker's answers to it, in order."""

    def __init__(self, link: "WorkerLink", key: AttemptKey) -> None:
        self._link = link
        self._key = key
        self._outputs: asyncio.Queue[worker_pb2.Output | None] = asyncio.Queue()
        self.admitted = False  # the worker has begun with it

    async def next(self) -> worker_pb2.Output:
        """The next answer. Raises LinkBroken when none can come any more."""
        output = await self._outputs.get()
        if output is None:
            self._outputs.put_nowait(None)
            raise LinkBroken
        return output

    def put(self, output: worker_pb2.Output | None) -> None:
        """An answer from the link; None is its end."""
        self.admitted |= output is not None and output.HasField("admitted")
        self._outputs.put_nowait(output)

    def end(self) -> None:
        """No more answers are wanted: the worker frees what it still holds. Idempotent, at once, and safe when the
        link is broken, since the worker then has freed it by itself."""
        self._link.end(self._key)


class WorkerLink:
    """Opens with the first submit; once broken it stays so, and the dispatcher makes another."""

    def __init__(self, address: str, on_load: Callable[[worker_pb2.Load], None]) -> None:
        self._on_load = on_load
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._broken = False
        self._commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self._channel = peer_channel(address)
        self._task = asyncio.create_task(self._run())

    @property
    def broken(self) -> bool:
        return self._broken

    def submit(self, submit: worker_pb2.Submit) -> Attempt:
        """Sends a submit. Its failures come out of the attempt."""
        key = (submit.request_id, submit.attempt)
        attempt = self._attempts[key] = Attempt(self, key)
        if self.broken:
            attempt.put(None)
        self._commands.put_nowait(worker_pb2.SessionRequest(submit=submit))
        return attempt

    def end(self, key: AttemptKey) -> None:
        """Forgets an attempt and tells the worker, unless the worker ended it itself."""
        if self._attempts.pop(key, None) is not None:
            cancel = worker_pb2.Cancel(request_id=key[0], attempt=key[1])
            self._commands.put_nowait(worker_pb2.SessionRequest(cancel=cancel))

    async def close(self) -> None:
        """Ends the stream; the worker cancels all that came over it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._break()  # a task that is cancelled before it has begun runs no `finally`
        await self._channel.close()

    async def _run(self) -> None:
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        call: grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse] = stub.Session()
        writer = asyncio.create_task(self._write(call))
        try:
            while isinstance(response := await call.read(), worker_pb2.SessionResponse):
                self._on_load(response.load)
                for output in response.outputs:
                    self._route(output)
        except grpc.aio.AioRpcError as error:
            logger.warning("session broke: %s", error.code().name)
        finally:
            self._break()  # before the first await: a submit that comes now must not wait for ever
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._channel.close()

    def _break(self) -> None:
        self._broken = True
        for attempt in self._attempts.values():
            attempt.put(None)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]
    ) -> None:
        """A write that fails ends the stream, which `_run` then sees."""
        while True:
            await call.write(await self._commands.get())

    def _route(self, output: worker_pb2.Output) -> None:
        """Answers to attempts that have ended meanwhile are dropped: that is the fence against late ones."""
        key = (output.request_id, output.attempt)
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        if output.HasField("failure") or (output.HasField("tokens") and output.tokens.finish_reason):
            del self._attempts[key]
        attempt.put(output)
