"""Talks to workers: over one session with each, which all requests of this router share."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import PeerStream, is_silence
from ...proto.identity import PeerIdentity

logger = logging.getLogger(__name__)

WorkerKey = tuple[str, int]  # worker id, epoch
AttemptKey = tuple[str, int]  # request id, number of the attempt
_LOST: Final = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_WORKER, message="worker lost")
_SILENT: Final = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_GONE, message="worker silent")
"""The worker is frozen or cut off, which no request can cause. Its session is not used again."""
_REPLACED: Final = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_GONE, message="worker gone")
"""Another process, which has received no request, answers at the worker's address."""
_STOPPED: Final = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_GONE, message="worker stopped")
"""The worker drained and ended the session. It has answered all submits that it has read."""

_Call = PeerStream[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


class SessionChannel(Protocol):
    """A channel over which a stub opens the session with a worker."""

    async def close(self) -> None:
        """Ends the session. Idempotent."""


Connect = Callable[[str, PeerIdentity], SessionChannel]
"""Returns a channel to the worker at an address."""


class WorkerStream:
    """Holds the worker's outputs for one submit, in order, until `take` returns them."""

    def __init__(
        self, client: "WorkerClient", submit: worker_pb2.Submit, wake: asyncio.Event
    ) -> None:
        """`wake` is set whenever something has come."""
        self.admitted = False  # the worker has begun to compute the request
        self.received_kv = False  # the worker has the KV cache: the prefill worker may free it
        # Set once the whole submit has ended with it: no output follows.
        self.failure: worker_pb2.Failure | None = None
        self._is_beam = submit.HasField("beam_search")
        self.may_suspend = submit.task != worker_pb2.TASK_PREFILL and not self._is_beam
        self._computes_prompt = submit.task != worker_pb2.TASK_DECODE
        self._client = client
        self._key = (submit.request_id, submit.attempt)
        self._wake = wake
        first = submit.first_choice
        count = max(submit.num_choices, 1)
        self._only_choice = first if count == 1 else None
        self._open = set(range(first, first + count))  # choices that the worker has not ended
        self._suspended: set[int] = set()  # open choices that a SuspendedChoice holds
        self._outputs: list[worker_pb2.Output] = []

    @property
    def worker(self) -> WorkerKey:
        return self._client.worker

    @property
    def num_sequences(self) -> int:
        """The number of choices that the worker may compute: not ended and not suspended."""
        return len(self._open - self._suspended)

    @property
    def may_have_begun(self) -> bool:
        """Returns True if the worker may have computed a part of the request.

        A worker that dies in the request's first step has not reported its admission. A worker that
        has never sent anything may not have started.
        """
        return self.admitted or (self._computes_prompt and self._client.heard)

    def take(self) -> list[worker_pb2.Output]:
        """Removes and returns the outputs that have come."""
        taken, self._outputs = self._outputs, []
        return taken

    def put(self, output: worker_pb2.Output) -> bool:
        """Adds an output of the worker. Returns True if the worker has freed the submit."""
        if self._only_choice is not None:
            output.choice = self._only_choice
        kind = output.WhichOneof("event")
        if kind == "tokens":
            if output.choice not in self._open:  # it was cancelled meanwhile
                return False
            if output.tokens.finish_reason:
                self._open.discard(output.choice)
            self._outputs.append(output)
        elif kind == "failure" and (
            self._is_beam or output.failure.kind != worker_pb2.FAILURE_KIND_PREEMPTED
        ):
            self._open.clear()
            self.failure = output.failure
        else:
            self._outputs.append(output)
            self.admitted |= kind == "admitted"
            self.received_kv |= kind == "kv_received"
            if kind == "failure":  # of one choice
                self._open.discard(output.choice)
        self._wake.set()
        return not self._open

    def fail(self, failure: worker_pb2.Failure = _LOST) -> None:
        """Ends the stream because the session has ended."""
        if self.failure is None:
            self.failure = failure
        self._wake.set()

    def cancel(self) -> None:
        """Lets the worker free all that it holds for the submit; returns at once. Idempotent.

        Choices that a SuspendedChoice holds are cancelled one by one instead. After the end of the
        session, when the worker has freed everything, this does nothing.
        """
        self._open &= self._suspended
        if not self._open:
            self._client.cancel(self._key)

    def hold(self, choice: int) -> None:
        """Leaves an open choice, which is suspended, to `cancel_choice` alone."""
        if choice in self._open:
            self._suspended.add(choice)

    def cancel_choice(self, choice: int) -> None:
        """Cancels one choice; with the last open choice, the submit. Idempotent."""
        if choice not in self._open:
            return
        self._open.discard(choice)
        self._suspended.discard(choice)
        self._client.cancel(self._key, choice if self._open else None)


class SuspendedChoice:
    """Holds a choice whose KV cache waits at the worker that decoded it.

    Replaces the prefill worker's stream in the attempt that continues the choice.
    """

    may_have_begun = True

    def __init__(self, stream: WorkerStream, choice: int, kv: worker_pb2.KvHandle) -> None:
        self.kv = kv
        self.choice = choice
        self._stream = stream
        stream.hold(choice)

    @property
    def worker(self) -> WorkerKey:
        return self._stream.worker

    @property
    def failure(self) -> worker_pb2.Failure | None:
        return self._stream.failure

    def take(self) -> list[worker_pb2.Output]:
        """Returns no outputs: the worker generates nothing more for this choice."""
        return []

    def cancel(self) -> None:
        """Lets the worker free the KV cache. Idempotent."""
        self._stream.cancel_choice(self.choice)

    def cancel_choice(self, choice: int) -> None:
        """Lets the worker free the KV cache, as `cancel` does."""
        self._stream.cancel_choice(choice)


class WorkerClient:
    """Holds the session with one worker. A broken session stays broken."""

    heard = False  # the worker has sent something
    # The session had begun, and broke before a drain had freed the worker of its requests.
    was_lost = False
    _is_retired = False
    _end = _LOST  # the failure of its streams once the session has ended

    def __init__(
        self,
        worker: WorkerKey,
        address: str,
        identity: PeerIdentity,
        on_message: Callable[["WorkerClient", worker_pb2.SessionResponse], None],
        on_break: Callable[["WorkerClient"], None],
        room_elsewhere: Callable[[], int],
        connect: Connect,
    ) -> None:
        """Opens the session.

        `on_message` gets every message of the worker before the streams do; `on_break` is called
        once. `room_elsewhere` returns how many further sequences of this worker other workers can
        take over when it drains.
        """
        self.worker = worker
        self.broken = False  # the session has ended
        self._on_message = on_message
        self._on_break = on_break
        self._room_elsewhere = room_elsewhere
        self._drains = False
        self._told: set[AttemptKey] = set()  # submits that the worker was told to suspend
        self._streams: dict[AttemptKey, WorkerStream] = {}
        self._commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self._channel = connect(address, identity)
        self._task = asyncio.create_task(self._run())

    def submit(self, submit: worker_pb2.Submit, wake: asyncio.Event) -> WorkerStream:
        """Sends a submit. Returns the stream of its outputs, which sets `wake` when one comes."""
        stream = self._streams[submit.request_id, submit.attempt] = WorkerStream(self, submit, wake)
        if self.broken:
            stream.fail(self._end)
        self._commands.put_nowait(worker_pb2.SessionRequest(submit=submit))
        return stream

    def cancel(self, key: AttemptKey, choice: int | None = None) -> None:
        """Cancels a submit or one of its choices, unless the worker has ended it itself."""
        if key in self._streams:
            if choice is None:
                del self._streams[key]
            cancel = worker_pb2.Cancel(request_id=key[0], attempt=key[1], choice=choice)
            self._commands.put_nowait(worker_pb2.SessionRequest(cancel=cancel))
            self._end_if_unused()

    def retire(self) -> None:
        """Ends the session as soon as no request uses it. Idempotent."""
        self._is_retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._streams and not self.broken:
            self.broken = True
            self._task.cancel()

    @property
    def num_moving(self) -> int:
        """The number of sequences that the worker was told to suspend and still computes."""
        self._told &= self._streams.keys()
        return sum(self._streams[key].num_sequences for key in self._told)

    def _suspend(self) -> None:
        """Tells a draining worker to suspend the sequences for which other workers have room.

        The rest continues here, because it would only wait in the queue of another worker.
        """
        room = self._room_elsewhere()
        for key, stream in self._streams.items():
            count = stream.num_sequences
            if stream.may_suspend and key not in self._told and 0 < count <= room:
                room -= count
                self._told.add(key)
                suspend = worker_pb2.Suspend(request_id=key[0], attempt=key[1])
                self._commands.put_nowait(worker_pb2.SessionRequest(suspend=suspend))

    async def close(self) -> None:
        """Ends the session; the worker cancels all requests that came over it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._break()  # a task that is cancelled before its first step runs no `finally`
        await self._channel.close()

    async def _run(self) -> None:
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        call: _Call = stub.Session()
        writer = asyncio.create_task(self._write(call))
        try:
            await self._receive(call)
            if self._drains:
                self._end = _STOPPED
        except grpc.aio.AioRpcError as error:
            self._end = _end_of(error)
            self.was_lost = self.heard and (bool(self._streams) or not self._drains)
            if self.heard:  # otherwise this was a probe of a lost worker
                logger.warning("the session with %s broke: %s", self.worker[0], error.code().name)
        finally:
            self._break()  # before the first await, so that no later submit waits for ever
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._channel.close()

    async def _write(self, call: _Call) -> None:
        """Sends the commands. A write that fails ends the call, which ends `_run`."""
        while True:
            await call.write(await self._commands.get())

    async def _receive(self, call: _Call) -> None:
        """Routes outputs to their streams until the session ends.

        Drops outputs of cancelled submits, so no output of an older attempt reaches a request.
        """
        while isinstance(response := await call.read(), worker_pb2.SessionResponse):
            self.heard = True
            self._on_message(self, response)
            if response.HasField("load"):
                self._drains = response.load.draining
            # Before the outputs: sequences that earlier messages suspended now count elsewhere.
            if self._drains and self._streams:
                self._suspend()
            for output in response.outputs:
                stream = self._streams.get((output.request_id, output.attempt))
                if stream is not None and stream.put(output):
                    del self._streams[output.request_id, output.attempt]
            self._end_if_unused()

    def _break(self) -> None:
        if not self.broken:
            self.broken = True
            self._on_break(self)
        for stream in self._streams.values():
            stream.fail(self._end)


def _end_of(error: grpc.aio.AioRpcError) -> worker_pb2.Failure:
    """Returns the failure of the streams of a session that ended with `error`."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return _REPLACED
    return _SILENT if is_silence(error) else _LOST
