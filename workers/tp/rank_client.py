"""Rank 0's hold on the other ranks of its group: one stream to each, commands down, events up, a pulse both ways."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import peer_channel
from ..transfer.frames import TransferError

PULSE_SECONDS: Final = 0.2
SILENCE_SECONDS: Final = 0.8
"""Who has said nothing for so long is lost."""

T = TypeVar("T")


class RankLost(RuntimeError):
    """A rank of the group has died, failed or fallen silent; the group is of no use any more."""


class Outbox(Generic[T]):
    """What waits to be said on a stream."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._filled = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[T]:
        """All that was put by now; waits for the first of it, but no longer than for the next pulse."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PULSE_SECONDS):
                await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        return items


class RankClient:
    """The stream to one other rank. Once lost, it stays so; whoever waits for an answer then hears RankLost."""

    def __init__(self, address: str, on_lost: Callable[[RankLost], None]) -> None:
        """`on_lost` is called once, unless the link was closed."""
        self._on_lost = on_lost
        self._outbox: Outbox[worker_pb2.RankCommand] = Outbox()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[worker_pb2.Ready] = loop.create_future()
        self._fetches: dict[int, asyncio.Future[worker_pb2.Fetched]] = {}
        self._stops: dict[int, asyncio.Future[None]] = {}
        self._lost = False
        self._channel = peer_channel(address)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def join(self, join: worker_pb2.Join) -> None:
        """The first command; the answer is `ready`."""
        self._outbox.put(worker_pb2.RankCommand(join=join))

    def export(self, export: worker_pb2.Export) -> None:
        self._outbox.put(worker_pb2.RankCommand(export=export))

    def progress(self, progress: worker_pb2.Progress) -> None:
        self._outbox.put(worker_pb2.RankCommand(progress=progress))

    def complete(self, complete: worker_pb2.Complete) -> None:
        self._outbox.put(worker_pb2.RankCommand(complete=complete))

    def fetch(self, fetch: worker_pb2.Fetch) -> "asyncio.Future[worker_pb2.Fetched]":
        """The answer raises TransferError if the rank's part could not be had."""
        answer = self._fetches[fetch.sequence_id] = self._answer()
        self._outbox.put(worker_pb2.RankCommand(fetch=fetch))
        return answer

    def place(self, place: worker_pb2.Place) -> None:
        self._outbox.put(worker_pb2.RankCommand(place=place))

    def stop(self, sequence_id: int) -> "asyncio.Future[None]":
        """The answer comes when the rank neither reads nor writes anything of the sequence any more."""
        answer = self._stops[sequence_id] = self._answer()
        self._outbox.put(worker_pb2.RankCommand(stop=worker_pb2.Stop(sequence_id=sequence_id)))
        return answer

    async def close(self) -> None:
        """Ends the stream, and with it the rank."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._give_up(RankLost("closed"))
        await self._channel.close()

    def _answer(self) -> "asyncio.Future[T]":
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._lost:
            answer.set_exception(RankLost("a rank is lost"))
        return answer

    async def _run(self) -> None:
        stub = worker_pb2_grpc.RankStub(self._channel)  # type: ignore[no-untyped-call]
        call: grpc.aio.StreamStreamCall[worker_pb2.LeadRequest, worker_pb2.LeadResponse] = stub.Lead()
        writer = asyncio.create_task(self._write(call))
        try:
            while True:
                # A rank that loads a model may be deaf for a while; if it dies, the stream breaks all the same.
                async with asyncio.timeout(SILENCE_SECONDS if self.ready.done() else None):
                    response = await call.read()
                if not isinstance(response, worker_pb2.LeadResponse):
                    raise RankLost("a rank has ended")
                for event in response.events:
                    self._take(event)
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        lost = RankLost(f"a rank is lost ({type(error).__name__})")
        lost.__cause__ = error
        self._give_up(lost)
        self._on_lost(lost)

    async def _write(self, call: grpc.aio.StreamStreamCall[worker_pb2.LeadRequest, worker_pb2.LeadResponse]) -> None:
        """A write that fails ends the stream, which `_run` then sees."""
        while True:
            await call.write(worker_pb2.LeadRequest(commands=await self._outbox.take()))

    def _take(self, event: worker_pb2.RankEvent) -> None:
        match event.WhichOneof("event"):
            case "ready":
                self.ready.set_result(event.ready)
            case "fetched":
                _settle(self._fetches.pop(event.fetched.sequence_id, None), event.fetched)
            case "fetch_failed":
                _fail(self._fetches.pop(event.fetch_failed.sequence_id, None), TransferError("KV transfer failed"))
            case "stopped":
                self._fetches.pop(event.stopped.sequence_id, None)
                _settle(self._stops.pop(event.stopped.sequence_id, None), None)

    def _give_up(self, error: RankLost) -> None:
        self._lost = True
        waiting: list[asyncio.Future[Any]] = [self.ready, *self._fetches.values(), *self._stops.values()]
        for answer in waiting:
            _fail(answer, error)
        self._fetches.clear()
        self._stops.clear()


def _settle(answer: "asyncio.Future[T] | None", result: T) -> None:
    if answer is not None and not answer.done():
        answer.set_result(result)


def _fail(answer: "asyncio.Future[T] | None", error: Exception) -> None:
    if answer is not None and not answer.done():
        answer.set_exception(error)
        answer.exception()  # nobody need be waiting
