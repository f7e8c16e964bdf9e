"""One router's Session stream to one worker, shared by all requests it has there."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import peer_channel

logger = logging.getLogger(__name__)

AttemptKey = tuple[str, int]  # request id, attempt


class WorkerStream:
    """One submit and the worker's answers to it, in order, until somebody takes them.

    Tokens of one choice that wait are one answer: who reads slowly gets fewer and longer ones, and never do more
    answers wait than the submit has choices, but for the few that are not tokens.
    """

    def __init__(self, link: "WorkerClient", submit: worker_pb2.Submit, wake: asyncio.Event) -> None:
        """`wake` is set whenever there is something new."""
        self.admitted = False  # the worker has begun with it
        self._broken = False
        self._link = link
        self._key = (submit.request_id, submit.attempt)
        self._wake = wake
        first, count = submit.first_choice, max(submit.num_choices, 1)
        self._only = first if count == 1 else None
        self._is_beam = submit.HasField("beam_search")
        self._open = set(range(first, first + count))  # choices that the worker has not ended
        self._waiting: list[worker_pb2.Output] = []
        self._growing: dict[int, worker_pb2.Output] = {}  # by choice: what waits and can take more tokens

    @property
    def broken(self) -> bool:
        """The link has ended, and no answer waits."""
        return self._broken and not self._waiting

    def take(self) -> list[worker_pb2.Output]:
        """All answers that wait now; nothing is merged into them any more."""
        taken, self._waiting = self._waiting, []
        self._growing.clear()
        return taken

    def put(self, output: worker_pb2.Output) -> bool:
        """An answer from the link. Returns whether the worker holds nothing for the attempt any more."""
        if self._only is not None:
            output.choice = self._only
        kind = output.WhichOneof("event")
        if kind == "tokens":
            if output.choice not in self._open:  # was cancelled meanwhile
                return False
            if output.tokens.finish_reason:
                self._open.discard(output.choice)
            self._add_tokens(output)
        else:
            self._growing.clear()  # order counts
            self._waiting.append(output)
            if kind == "admitted":
                self.admitted = True
            elif kind == "failure":
                self._close(output)
        self._wake.set()
        return not self._open

    def break_off(self) -> None:
        """The link's last word."""
        self._broken = True
        self._wake.set()

    def end(self) -> None:
        """No more answers are wanted: the worker frees what it still holds. Idempotent, at once, and safe when the
        link is broken, since the worker then has freed it by itself."""
        self._link.end(self._key)

    def end_choice(self, choice: int) -> None:
        """Of one choice no more answers are wanted; the others go on, unless it was the last."""
        if choice not in self._open:
            return
        self._open.discard(choice)
        if self._open:
            self._link.cancel_choice(self._key, choice)
        else:
            self.end()

    def _add_tokens(self, output: worker_pb2.Output) -> None:
        waiting = self._growing.get(output.choice)
        if waiting is None or not _merge(waiting.tokens, output.tokens):
            self._waiting.append(output)
            self._growing[output.choice] = output

    def _close(self, output: worker_pb2.Output) -> None:
        if output.failure.kind == worker_pb2.FAILURE_KIND_PREEMPTED and not self._is_beam:
            self._open.discard(output.choice)
        else:
            self._open.clear()


class WorkerClient:
    """Opens with the first submit; once broken it stays so, and the dispatcher makes another."""

    def __init__(
        self,
        address: str,
        on_report: Callable[[worker_pb2.SessionResponse], None],
        on_break: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_report` sees every message of the worker before the requests do; `on_break` is called once."""
        self._on_report = on_report
        self._on_break = on_break
        self._attempts: dict[AttemptKey, WorkerStream] = {}
        self._broken = False
        self._commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self._channel = peer_channel(address)
        self._task = asyncio.create_task(self._run())

    @property
    def broken(self) -> bool:
        return self._broken

    def submit(self, submit: worker_pb2.Submit, wake: asyncio.Event) -> WorkerStream:
        """Sends a submit. Its failures come out of the attempt, which sets `wake` when there is something to take."""
        attempt = WorkerStream(self, submit, wake)
        self._attempts[submit.request_id, submit.attempt] = attempt
        if self.broken:
            attempt.break_off()
        self._commands.put_nowait(worker_pb2.SessionRequest(submit=submit))
        return attempt

    def end(self, key: AttemptKey) -> None:
        """Forgets an attempt and tells the worker, unless the worker ended it itself."""
        if self._attempts.pop(key, None) is not None:
            self._cancel(worker_pb2.Cancel(request_id=key[0], attempt=key[1]))

    def cancel_choice(self, key: AttemptKey, choice: int) -> None:
        """Tells the worker that one of several choices is not wanted any more."""
        if key in self._attempts:
            self._cancel(worker_pb2.Cancel(request_id=key[0], attempt=key[1], choice=choice))

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
                self._on_report(response)
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
        if not self._broken:
            self._broken = True
            self._on_break()
        for attempt in self._attempts.values():
            attempt.break_off()

    async def _write(
        self, call: grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]
    ) -> None:
        """A write that fails ends the stream, which `_run` then sees."""
        while True:
            await call.write(await self._commands.get())

    def _cancel(self, cancel: worker_pb2.Cancel) -> None:
        self._commands.put_nowait(worker_pb2.SessionRequest(cancel=cancel))

    def _route(self, output: worker_pb2.Output) -> None:
        """Answers to attempts that have ended meanwhile are dropped: that is the fence against late ones."""
        key = (output.request_id, output.attempt)
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.put(output):
            self._attempts.pop(key, None)


def _merge(waiting: worker_pb2.Tokens, more: worker_pb2.Tokens) -> bool:
    """Appends the tokens that follow; returns False, having done nothing, where they do not: a gap stays one."""
    if more.first_index != waiting.first_index + len(waiting.ids) or waiting.finish_reason:
        return False
    waiting.ids.extend(more.ids)
    waiting.logprobs.extend(more.logprobs)
    waiting.prompt_logprobs.extend(more.prompt_logprobs)
    waiting.prefill_seconds = waiting.prefill_seconds or more.prefill_seconds
    waiting.finish_reason = more.finish_reason
    waiting.score = more.score
    return True
