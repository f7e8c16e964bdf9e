"""Connects rank 0 to the other ranks of its group, by one Control stream to each.

Both sides send heartbeats.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import PeerStream, patient_channel
from ...proto.identity import PeerIdentity
from ..host.threads import settle
from ..transfer.frames import TransferError

HEARTBEAT_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 0.1

EXPECTED_ERRORS: Final[dict[str, type[Exception]]] = {
    "fetch_kv": TransferError,
    "open_disk": ValueError,
    "write_disk": OSError,
    "clear_disk": OSError,
}
"""The error that a command may raise on the rank; every other error ends the rank."""

T = TypeVar("T")


class RankLost(RuntimeError):
    """Reports that a rank of the group has died, failed or gone silent.

    The group cannot be used any more.
    """


async def next_or_heartbeat(queue: asyncio.Queue[T], heartbeat: T) -> T:
    """Returns the queue's next message, or `heartbeat` after HEARTBEAT_SECONDS without one."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HEARTBEAT_SECONDS):
            return await queue.get()
    return heartbeat


async def unless_silent(message: Awaitable[T], silence_seconds: float) -> T:
    """Returns the peer's next message. Raises TimeoutError after `silence_seconds` without one.

    A time in which this process itself was stopped counts only in part, because messages that the
    peer has sent are then still unread.
    """
    task = asyncio.ensure_future(message)
    loop = asyncio.get_running_loop()
    silent = 0.0
    try:
        while silent < silence_seconds:
            began = loop.time()
            if (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
                return task.result()
            silent += min(loop.time() - began, 2 * _LOOK_SECONDS)
        raise TimeoutError
    finally:
        task.cancel()


class RankClient:
    """Holds the stream to one other rank.

    A lost rank stays lost, and every pending answer raises RankLost.
    """

    def __init__(
        self,
        address: str,
        identity: PeerIdentity,
        on_lost: Callable[[RankLost], None],
        *,
        silence_seconds: float,
        num_plans: Callable[[], int] = lambda: 0,
    ) -> None:
        """Connects to the rank.

        `on_lost` is called once, unless `close` comes first. `num_plans` returns the number of
        plans that the ranks must launch before they execute a command that is sent now.
        """
        self._num_plans = num_plans
        self._silence_seconds = silence_seconds
        self.disk_changed: Callable[[worker_pb2.DiskChanges], object] = lambda changes: None
        # Its result is the rank's KV endpoint.
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_lost = on_lost
        self._commands: asyncio.Queue[worker_pb2.RankControlRequest] = asyncio.Queue()
        # By call id: the command and the future of its answer.
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._last_call = 0
        self._lost = False
        self._channel = patient_channel(address, identity)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def send(self, command: worker_pb2.RankControlRequest) -> None:
        """Queues a command."""
        command.num_plans = self._num_plans()
        self._commands.put_nowait(command)

    def ask(self, sequence_id: int = 0, **command: Any) -> "asyncio.Future[Any]":
        """Queues a command that has an answer; returns the future of the answer.

        The commands and their answers are:

        - `fetch_kv=`: a KvReceived, or TransferError if the rank's part could not be fetched
        - `stop_kv=`: True, once the rank neither reads nor writes the sequence's blocks
        - `load_adapter=`: the text of `LoadOnRank`
        - `open_disk=`: True, or ValueError with a text for the user
        - `read_disk=`: the number of blocks that are filled
        - `write_disk=`: True, or OSError if the disk refuses the block
        - `clear_disk=`: True, or OSError if the disk refuses it

        The answer to a fetch or a read that `stop_kv` ends is cancelled.
        """
        self._last_call += 1
        self.send(
            worker_pb2.RankControlRequest(
                call_id=self._last_call, sequence_id=sequence_id, **command
            )
        )
        (name,) = command
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._lost:
            answer.set_exception(RankLost("a rank is lost"))
        else:
            self._calls[self._last_call] = (name, answer)
        return answer

    async def close(self) -> None:
        """Ends the stream, which also ends the rank."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(RankLost("closed"))
        await self._channel.close()

    async def _run(self) -> None:
        stub = worker_pb2_grpc.RankStub(self._channel)  # type: ignore[no-untyped-call]
        call: PeerStream[worker_pb2.RankControlRequest, worker_pb2.RankControlResponse]
        call = stub.Control(self._outgoing())
        try:
            while True:
                # No timeout until `ready`: a rank may not answer while it loads a model. If it
                # dies, the stream breaks anyway.
                read = call.read()
                event = await (
                    unless_silent(read, self._silence_seconds) if self.ready.done() else read
                )
                if not isinstance(event, worker_pb2.RankControlResponse):
                    raise RankLost("a rank has ended")
                self._handle(event)
        finally:
            call.cancel()

    async def _outgoing(self) -> AsyncIterator[worker_pb2.RankControlRequest]:
        while True:
            yield await next_or_heartbeat(self._commands, worker_pb2.RankControlRequest())

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        lost = RankLost(f"a rank is lost ({type(error).__name__})")
        lost.__cause__ = error
        self._fail_all(lost)
        self._on_lost(lost)

    def _handle(self, event: worker_pb2.RankControlResponse) -> None:
        match event.WhichOneof("event"):
            case None:  # a heartbeat
                return
            case "ready":
                self.ready.set_result(event.ready)
            case "disk_changes":
                self.disk_changed(event.disk_changes)
            case kind:
                if call := self._calls.pop(event.call_id, None):
                    _answer(*call, kind, event)

    def _fail_all(self, error: RankLost) -> None:
        self._lost = True
        for answer in (self.ready, *(answer for _, answer in self._calls.values())):
            _settle(answer, None, error)
        self._calls.clear()


def _answer(
    name: str, answer: "asyncio.Future[Any]", kind: str, event: worker_pb2.RankControlResponse
) -> None:
    """Sets the answer to the command `name`; `kind` is the field that is set in the event."""
    if kind == "cancelled":
        answer.cancel()
    elif kind == "error":
        _settle(answer, None, EXPECTED_ERRORS[name](event.error))
    else:
        _settle(answer, getattr(event, kind), None)


def _settle(answer: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    settle(answer, result, error)
    if not answer.cancelled():
        # Marks the exception as retrieved, because the answer may never be awaited.
        answer.exception()
