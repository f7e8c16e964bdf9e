"""Talks to workers: one session of this router with each, shared by all requests that it has there."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import PeerChannel, PeerStream, is_silence
from ...proto.identity import PeerIdentity

logger = logging.getLogger(__name__)

WorkerKey = tuple[str, int]  # worker id, epoch
AttemptKey = tuple[str, int]  # request id, number of the attempt
_LOST: Final = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_WORKER, message="worker lost")
_SILENT: Final = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_GONE, message="worker silent")
"""It is frozen or cut off, which no request can cause; what it says later comes over no session."""
_REPLACED: Final = worker_pb2.Failure(kind=worker_pb2.FAILURE_KIND_GONE, message="worker gone")
"""Somebody else answers at its address, who has got nothing of any request."""

_Call = PeerStream[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


class SessionChannel(Protocol):
    """A channel over which a stub opens the session with a worker."""

    async def close(self) -> None:
        """Ends the session. Idempotent."""


Connect = Callable[[str, PeerIdentity], SessionChannel]
"""Returns a channel to the worker at an address."""


class WorkerStream:
    """Holds the worker's outputs for one submit, in order, until they are taken.

    Tokens of one choice that wait are merged into one output: a slow reader takes fewer and longer
    ones, and no more outputs wait than the submit has choices, but for the few that are not tokens.
    """

    def __init__(
        self, client: "WorkerClient", submit: worker_pb2.Submit, wake: asyncio.Event
    ) -> None:
        """`wake` is set whenever there is something new."""
        self.admitted = False  # the worker has said that it has begun to compute it
        self.received_kv = (
            False  # the worker has fetched the KV cache, so that the prefill worker may free it
        )
        self.failure: worker_pb2.Failure | None = (
            None  # that ended the whole submit: no output follows
        )
        self.may_suspend = submit.task != worker_pb2.TASK_PREFILL and not submit.HasField(
            "beam_search"
        )
        self._computes_prompt = submit.task != worker_pb2.TASK_DECODE
        self._client = client
        self._key = (submit.request_id, submit.attempt)
        self._wake = wake
        first, count = submit.first_choice, max(submit.num_choices, 1)
        self._only_choice = first if count == 1 else None
        self._is_beam = submit.HasField("beam_search")
        self._open = set(range(first, first + count))  # choices that the worker has not ended
        self._suspended: set[int] = (
            set()
        )  # of these, those whose KV cache it holds for another worker
        self._outputs: list[worker_pb2.Output] = []
        self._mergeable: dict[
            int, worker_pb2.Output
        ] = {}  # by choice: of `_outputs`, what can take more tokens

    @property
    def worker(self) -> WorkerKey:
        return self._client.worker

    @property
    def may_have_begun(self) -> bool:
        """Whether the worker may have computed something of it. One that dies in the first step has
        not said so; one that was never heard of may never have come up.
        """
        return self.admitted or (self._computes_prompt and self._client.heard)

    def take(self) -> list[worker_pb2.Output]:
        """Returns all outputs that wait; nothing is merged into them any more."""
        taken, self._outputs = self._outputs, []
        self._mergeable.clear()
        return taken

    def put(self, output: worker_pb2.Output) -> bool:
        """Adds an output of the worker. Returns whether the worker holds nothing for the submit any
        more.
        """
        if self._only_choice is not None:
            output.choice = self._only_choice
        kind = output.WhichOneof("event")
        if kind == "tokens":
            if output.choice not in self._open:  # was cancelled meanwhile
                return False
            if output.tokens.finish_reason:
                self._open.discard(output.choice)
            waiting = self._mergeable.get(output.choice)
            if waiting is None or not _merge(waiting.tokens, output.tokens):
                self._outputs.append(output)
                self._mergeable[output.choice] = output
        elif kind == "failure" and not (
            output.failure.kind == worker_pb2.FAILURE_KIND_PREEMPTED and not self._is_beam
        ):
            self._open.clear()
            self.failure = output.failure
        else:
            self._mergeable.clear()  # the order counts
            self._outputs.append(output)
            self.admitted |= kind == "admitted"
            self.received_kv |= kind == "kv_received"
            if kind == "failure":  # of one choice
                self._open.discard(output.choice)
            elif kind == "suspended" and output.choice in self._open:
                self._suspended.add(output.choice)
        self._wake.set()
        return not self._open

    def fail(self, failure: worker_pb2.Failure = _LOST) -> None:
        """Ends the stream because the session has ended."""
        if self.failure is None:
            self.failure = failure
        self._wake.set()

    def cancel(self) -> None:
        """Lets the worker free what it still holds for the submit, but for suspended choices, which
        are cancelled one by one. Idempotent, returns at once, and is safe after the session has
        ended, since the worker then has freed it.
        """
        self._open &= self._suspended
        if not self._open:
            self._client.cancel(self._key)

    def cancel_choice(self, choice: int) -> None:
        """Cancels one choice; the others go on, unless it was the last. Idempotent."""
        if choice not in self._open:
            return
        self._open.discard(choice)
        self._suspended.discard(choice)
        self._client.cancel(self._key, choice if self._open else None)


class SuspendedChoice:
    """Holds a choice whose KV cache waits at the worker that decoded it; stands in for the stream
    of a prefill.
    """

    may_have_begun = True

    def __init__(self, stream: WorkerStream, choice: int, kv: worker_pb2.KvHandle) -> None:
        self.kv = kv
        self.choice = choice
        self._stream = stream

    @property
    def worker(self) -> WorkerKey:
        return self._stream.worker

    @property
    def failure(self) -> worker_pb2.Failure | None:
        return self._stream.failure

    def take(self) -> list[worker_pb2.Output]:
        """Returns nothing: the worker generates no more for this choice."""
        return []

    def cancel(self) -> None:
        """Lets the worker free the KV cache. Idempotent."""
        self._stream.cancel_choice(self.choice)

    def cancel_choice(self, choice: int) -> None:
        """Does what `cancel` does, for the one choice."""
        self._stream.cancel_choice(choice)


class WorkerClient:
    """Holds the session with one worker, from its making on. Once broken it stays so."""

    heard = False  # the worker has sent something
    was_lost = False  # the session had begun and has ended, and the worker did not end it
    _end = _LOST  # what fails its streams once the session has ended

    def __init__(
        self,
        worker: WorkerKey,
        address: str,
        identity: PeerIdentity,
        on_message: Callable[[worker_pb2.SessionResponse], None],
        on_break: Callable[[], None] = lambda: None,
        can_move: Callable[[], bool] = lambda: False,
        connect: Connect = PeerChannel,
    ) -> None:
        """`on_message` gets every message of the worker before the streams do; `on_break` is called
        once. `can_move` says whether another worker can take over sequences of this one, which
        drains.
        """
        self.worker = worker
        self.broken = False  # the session has ended
        self._on_message = on_message
        self._on_break = on_break
        self._can_move = can_move
        self._drains = False
        self._told: set[AttemptKey] = set()  # submits that the worker was told to suspend
        self._streams: dict[AttemptKey, WorkerStream] = {}
        self._commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self._channel = connect(address, identity)
        self._task = asyncio.create_task(self._run())

    def submit(self, submit: worker_pb2.Submit, wake: asyncio.Event) -> WorkerStream:
        """Sends a submit and returns the stream of its outputs, which sets `wake` when there is
        something to take.
        """
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

    def _suspend_all(self) -> None:
        """Tells a draining worker to suspend what it decodes."""
        for key, stream in self._streams.items():
            if stream.may_suspend and key not in self._told:
                self._told.add(key)
                suspend = worker_pb2.Suspend(request_id=key[0], attempt=key[1])
                self._commands.put_nowait(worker_pb2.SessionRequest(suspend=suspend))
        self._told &= self._streams.keys()

    async def close(self) -> None:
        """Ends the session; the worker cancels all that came over it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._break()  # a task that is cancelled before it has begun runs no `finally`
        await self._channel.close()

    async def _run(self) -> None:
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        call: _Call = stub.Session()
        writer = asyncio.create_task(self._write(call))
        try:
            await self._receive(call)
        except grpc.aio.AioRpcError as error:
            self._end, self.was_lost = _end_of(error), self.heard
            if self.heard:  # else the worker is lost already, and this was a probe
                logger.warning("the session with %s broke: %s", self.worker[0], error.code().name)
        finally:
            self._break()  # before the first await: a submit that comes now must not wait for ever
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._channel.close()

    async def _write(self, call: _Call) -> None:
        """Sends the commands. A write that fails ends the call, which `_run` then sees."""
        while True:
            await call.write(await self._commands.get())

    async def _receive(self, call: _Call) -> None:
        """Routes outputs to their streams until the session ends. Those of a cancelled submit are
        dropped: this is the fence against outputs of an older attempt.
        """
        while isinstance(response := await call.read(), worker_pb2.SessionResponse):
            self.heard = True
            self._on_message(response)
            for output in response.outputs:
                stream = self._streams.get((output.request_id, output.attempt))
                if stream is not None and stream.put(output):
                    del self._streams[output.request_id, output.attempt]
            if response.HasField("load"):
                self._drains = response.load.draining
            if self._drains and self._streams and self._can_move():
                self._suspend_all()

    def _break(self) -> None:
        if not self.broken:
            self.broken = True
            self._on_break()
        for stream in self._streams.values():
            stream.fail(self._end)


def _end_of(error: grpc.aio.AioRpcError) -> worker_pb2.Failure:
    """Returns what fails the streams of a session that has broken so."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return _REPLACED
    return _SILENT if is_silence(error) else _LOST


def _merge(waiting: worker_pb2.Tokens, more: worker_pb2.Tokens) -> bool:
    """Appends the tokens that follow. Returns False, having done nothing, if they do not follow: a
    gap stays one.
    """
    if more.first_index != waiting.first_index + len(waiting.ids) or waiting.finish_reason:
        return False
    waiting.ids.extend(more.ids)
    waiting.logprobs.extend(more.logprobs)
    waiting.prompt_logprobs.extend(more.prompt_logprobs)
    waiting.prefill_seconds = waiting.prefill_seconds or more.prefill_seconds
    waiting.finish_reason = more.finish_reason
    waiting.score = more.score
    if more.num_draft_tokens:
        waiting.num_draft_tokens += more.num_draft_tokens
        waiting.num_accepted_tokens += more.num_accepted_tokens
        waiting.num_drafts += more.num_drafts
    return True
