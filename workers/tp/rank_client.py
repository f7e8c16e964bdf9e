"""Connects rank 0 to the other ranks of its group: one Control stream to each, with heartbeats both
ways.
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

T = TypeVar("T")


class RankLost(RuntimeError):
    """Reports that a rank of the group has died, failed or fallen silent; the group cannot be used
    any more.
    """


async def next_or_heartbeat(queue: asyncio.Queue[T], heartbeat: T) -> T:
    """Returns the queue's next message, or `heartbeat` if there is none within HEARTBEAT_SECONDS."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HEARTBEAT_SECONDS):
            return await queue.get()
    return heartbeat


async def unless_silent(message: Awaitable[T], silence_seconds: float) -> T:
    """Returns the peer's next message. Raises TimeoutError if there is none within
    `silence_seconds`.

    A time in which this process itself was held up counts only in part: what the peer has sent is
    then still unread.
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
    """Holds the stream to one other rank. Once lost it stays lost, and every pending answer raises
    RankLost.
    """

    def __init__(
        self,
        address: str,
        identity: PeerIdentity,
        on_lost: Callable[[RankLost], None],
        *,
        silence_seconds: float,
    ) -> None:
        """`on_lost` is called once, unless `close` comes first."""
        self._silence_seconds = silence_seconds
        self.disk_changed: Callable[[worker_pb2.DiskChanges], object] = lambda changes: None
        self.ready: asyncio.Future[str] = (
            asyncio.get_running_loop().create_future()
        )  # the rank's KV endpoint
        self._on_lost = on_lost
        self._commands: asyncio.Queue[worker_pb2.RankControlRequest] = asyncio.Queue()
        self._answers: dict[tuple[str, int], asyncio.Future[Any]] = {}  # by kind and sequence id
        self._lost = False
        self._channel = patient_channel(address, identity)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def send(self, command: worker_pb2.RankControlRequest) -> None:
        """Queues a command."""
        self._commands.put_nowait(command)

    def ask(self, sequence_id: int, **command: Any) -> "asyncio.Future[Any]":
        """Queues `fetch_kv=`, whose answer is a KvReceived or raises TransferError if the rank's
        part could not be fetched, or `stop_kv=`, whose answer comes when the rank neither reads nor
        writes the sequence's blocks, or `load_adapter=` with the adapter's number instead of the
        sequence's, whose answer is that of `LoadOnRank`, or `open_disk=`, which raises ValueError
        for the user, or `read_disk=`, whose answer is how many blocks are filled, or `write_disk=`,
        which raises OSError if the disk refuses the block.
        """
        self.send(worker_pb2.RankControlRequest(sequence_id=sequence_id, **command))
        (kind,) = command
        answer = self._answers[kind, sequence_id] = asyncio.get_running_loop().create_future()
        if self._lost:
            answer.set_exception(RankLost("a rank is lost"))
        return answer

    async def close(self) -> None:
        """Ends the stream, and with it the rank."""
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
                # A rank that loads a model may not answer for a while; if it dies, the stream
                # breaks all the same.
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
            case "ready":
                self.ready.set_result(event.ready)
            case "kv_received":
                self._answer("fetch_kv", event, event.kv_received)
            case "fetch_failed":
                self._answer("fetch_kv", event, error=TransferError("KV transfer failed"))
            case "adapter_error":
                self._answer("load_adapter", event, event.adapter_error)
            case "disk_changes":
                self.disk_changed(event.disk_changes)
            case "disk_opened":
                error = ValueError(event.disk_opened) if event.disk_opened else None
                self._answer("open_disk", event, error=error)
            case "disk_read":
                self._answer("read_disk", event, event.disk_read)
            case "disk_written":
                refused = OSError(event.disk_written) if event.disk_written else None
                self._answer("write_disk", event, error=refused)
            case "stopped":
                for kind in ("fetch_kv", "read_disk"):
                    self._answers.pop((kind, event.sequence_id), None)
                self._answer("stop_kv", event)

    def _answer(
        self,
        kind: str,
        event: worker_pb2.RankControlResponse,
        result: object = None,
        error: Exception | None = None,
    ) -> None:
        if answer := self._answers.pop((kind, event.sequence_id), None):
            _settle(answer, result, error)

    def _fail_all(self, error: RankLost) -> None:
        self._lost = True
        for answer in (self.ready, *self._answers.values()):
            _settle(answer, None, error)
        self._answers.clear()


def _settle(answer: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    settle(answer, result, error)
    if not answer.cancelled():
        answer.exception()  # marked as retrieved: nobody need wait for it
