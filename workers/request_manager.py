"""All that routers have asked of one worker: from the submit over the engine's events to the outputs, and to the end.

Lives in the worker's event loop. Knows nothing of servers and streams.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial

from ..proto import limits, worker_pb2
from ..proto.errors import InvalidArgument
from ..proto.hashing import hash_prompt
from .engine.engine import DoesNotFit, Engine, QueueFull
from .engine.events import (
    Admitted,
    CacheChanged,
    Event,
    Failed,
    KvReceived,
    Preempted,
    PrefillFinished,
    Progress,
    Token,
)
from .engine.plan import FirstTokens
from .engine.sequence import SequenceSpec, Task
from .engine_thread import EngineThread
from .session import RouterSession, WorkerRequest
from .submit import WorkerLimits, parse_submit
from .tp.kv_group import KvGroup
from .transfer.receiver import Target, Want
from .transfer.wire import TransferError, TransferKey

logger = logging.getLogger(__name__)


class RequestManager:
    """The submits that a worker has accepted and not yet ended."""

    def __init__(
        self,
        thread: EngineThread,
        kv: KvGroup,
        room: WorkerLimits,
        *,
        load_grammar: Callable[[str], object] | None,
        handle: Callable[[], worker_pb2.KvHandle],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`handle()` names this worker, for KV cache that others are to pull; `failed(error)` hears of a defect."""
        self._thread = thread
        self._kv = kv
        self._room = room
        self._load_grammar = load_grammar
        self._handle = handle
        self._failed = failed
        self._jobs: dict[int, WorkerRequest] = {}  # by the first sequence id
        self._ids = itertools.count(limits.MAX_CHOICES, limits.MAX_CHOICES)  # with room for a job's choices between
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_pulling(self) -> int:
        """Jobs whose KV cache is on its way here."""
        return sum(job.pulling is not None for job in self._jobs.values())

    async def idle(self, seconds: float) -> None:
        """Returns when all jobs have ended, or after so long."""
        if self._jobs:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()

    def submit(self, session: RouterSession, submit: worker_pb2.Submit) -> None:
        """Accepts a submit, or tells the session why not."""
        key = (submit.request_id, submit.attempt)
        try:
            if key in session.jobs:
                raise InvalidArgument("request_id: already in use")
            spec = parse_submit(submit, next(self._ids), self._room)
        except InvalidArgument as error:
            session.put(key, failure=_failure(worker_pb2.FAILURE_KIND_INVALID, str(error)))
        else:
            self._accept(WorkerRequest(spec, session, key, submit.first_choice), submit)

    def cancel(self, session: RouterSession, cancel: worker_pb2.Cancel) -> None:
        """Ends a job, or one of its choices. Nothing, if it has ended."""
        job = session.jobs.get((cancel.request_id, cancel.attempt))
        if job is None:
            return
        if not cancel.HasField("choice"):
            self.end(job)
        elif cancel.choice in job.choices:
            self._end_choice(job, cancel.choice)
            if job.choices:  # with the last one goes the job, whose transfers have to stop first
                sequence_id, choice = job.spec.id, cancel.choice - job.first_choice
                self._thread.post(lambda engine: engine.cancel_choice(sequence_id, choice))

    def end(self, job: WorkerRequest) -> None:
        """Forgets a job and frees what it holds, wherever it stands. First the transfers stop touching its blocks."""
        self._jobs.pop(job.spec.id, None)
        job.session.jobs.pop(job.key, None)
        if job.checking is not None:
            job.checking.cancel()
        self._kv.stop(job.spec.id, job.pulling, lambda: self._thread.post(partial(_cancel, job.spec)))
        if not self._jobs:
            self._idle.set()

    def end_all(self) -> None:
        for job in list(self._jobs.values()):
            self.end(job)

    def released(self, sequence_id: int) -> None:
        """The lease of a finished prefill has ended."""
        if job := self._jobs.get(sequence_id):
            self.end(job)

    def fail_all(self, kind: "worker_pb2.FailureKind", message: str) -> None:
        """Every job ends and its router hears why."""
        for job in list(self._jobs.values()):
            self._refuse(job, kind, message)

    def deliver(self, events: Sequence[Event]) -> None:
        """Routes one step's events to the sessions, tokens of one choice that come together as one output."""
        for sequence_id, batch in _batches(events):
            if job := self._jobs.get(sequence_id - sequence_id % limits.MAX_CHOICES):
                self._route(job, sequence_id, batch)

    # --- from a submit to the engine --------------------------------------------------------------------------------

    def _accept(self, job: WorkerRequest, submit: worker_pb2.Submit) -> None:
        self._jobs[job.spec.id] = job.session.jobs[job.key] = job
        submitted = time.monotonic()
        if job.spec.task is Task.DECODE:
            job.target = asyncio.get_running_loop().create_future()
            job.pulling = self._start(self._fetch(job, submit.kv))
        if job.spec.sampling.grammar and self._load_grammar is not None:
            job.checking = self._start(self._check(job, submitted, self._load_grammar))
        else:
            self._thread.post(partial(self._enqueue, job.spec, submitted))

    def _start(self, coroutine: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._watch)
        return task

    def _watch(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self._failed(error)

    async def _check(self, job: WorkerRequest, submitted: float, load_grammar: Callable[[str], object]) -> None:
        """Lets a job into the engine whose grammar is good. It may take seconds to read one."""
        try:
            job.grammar = await asyncio.to_thread(load_grammar, job.spec.sampling.grammar)
        except ValueError as error:
            job.checking = None
            self._refuse(job, worker_pb2.FAILURE_KIND_INVALID, f"grammar: {error}")
        else:
            job.checking = None
            self._thread.post(partial(self._enqueue, job.spec, submitted))

    def _enqueue(self, spec: SequenceSpec, submitted: float, engine: Engine) -> None:
        """In the engine's thread, once its step has ended: that wait is queueing, too."""
        try:
            engine.submit(spec, submitted)
        except QueueFull:
            kind, message = worker_pb2.FAILURE_KIND_FULL, "queue full"
        except DoesNotFit as error:
            kind, message = worker_pb2.FAILURE_KIND_INVALID, str(error)
        else:
            return
        self._thread.tell(partial(self._refuse_submit, spec.id, kind, message))

    def _refuse_submit(self, sequence_id: int, kind: "worker_pb2.FailureKind", message: str) -> None:
        if job := self._jobs.get(sequence_id):
            self._refuse(job, kind, message)

    def _refuse(self, job: WorkerRequest, kind: "worker_pb2.FailureKind", message: str) -> None:
        job.session.put(job.key, failure=_failure(kind, message))
        self.end(job)

    async def _fetch(self, job: WorkerRequest, handle: worker_pb2.KvHandle) -> None:
        """Brings the KV cache of a DECODE job, then lets it join the batch."""
        assert job.target is not None
        want = Want(
            key=TransferKey(transfer_id=handle.transfer_id, epoch=handle.epoch),
            num_tokens=len(job.spec.tokens),
            prefix_hash=hash_prompt(job.spec.tokens, job.spec.salt),
        )
        try:
            job.fetched = await self._kv.fetch(job.spec.id, handle, want, job.target)
            self._check_opening(job.spec, job.fetched.opening)
        except TransferError as error:
            logger.warning("%s", error)
            job.pulling = None
            self._refuse(job, worker_pb2.FAILURE_KIND_TRANSFER, "KV transfer failed")
            return
        job.pulling = None
        opening = job.fetched.opening
        self._thread.post(lambda engine: engine.commit_import(job.spec.id, opening))

    def _check_opening(self, spec: SequenceSpec, opening: FirstTokens) -> None:
        """Raises TransferError unless the engine can go on with it."""
        num_tokens = len(opening.tokens)
        if any(token >= self._room.vocab_size for token in opening.tokens):
            raise TransferError("KV commit with an impossible token")
        good = num_tokens >= spec.num_choices if spec.beam else num_tokens == spec.num_choices
        if not good or len(opening.logprobs) != (num_tokens if spec.beam else 0):
            raise TransferError("KV commit with an opening of something else")

    # --- from the engine's events to the session --------------------------------------------------------------------

    def _route(self, job: WorkerRequest, sequence_id: int, batch: Sequence[Event]) -> None:
        match batch[0]:
            case Token():
                self._put_tokens(job, job.choice_of(sequence_id), [e for e in batch if isinstance(e, Token)])
            case Admitted() as event:
                job.session.put(job.key, admitted=self._admitted(job, event))
            case Progress() as event:
                self._kv.progress(job.spec.id, event.num_computed, event.num_ahead, event.num_layers)
            case PrefillFinished() as event:
                if job.spec.beam is not None:
                    job.session.put(job.key, tokens=worker_pb2.Tokens(prefill_seconds=event.prefill_seconds))
                self._kv.complete(job.spec.id, event.opening)
            case KvReceived():
                assert job.fetched is not None
                joined = worker_pb2.Joined(
                    transfer_bytes=job.fetched.num_bytes,
                    transfer_active_seconds=job.fetched.active_seconds,
                    transport=job.fetched.transport,
                )
                job.session.put(job.key, joined=joined)
            case Failed() as event:  # no worker could go on with it
                self._refuse(job, worker_pb2.FAILURE_KIND_INVALID, event.reason)
            case Preempted():
                self._preempted(job, job.choice_of(sequence_id))

    def _put_tokens(self, job: WorkerRequest, choice: int, events: list[Token]) -> None:
        if choice in job.choices:
            job.session.put_tokens(job.key, choice, events)
            if events[-1].finish is not None:
                self._end_choice(job, choice)

    def _preempted(self, job: WorkerRequest, choice: int) -> None:
        if job.spec.beam is not None:
            self._refuse(job, worker_pb2.FAILURE_KIND_PREEMPTED, "preempted")
        elif choice in job.choices:
            job.session.put(job.key, choice, failure=_failure(worker_pb2.FAILURE_KIND_PREEMPTED, "preempted"))
            self._end_choice(job, choice)

    def _end_choice(self, job: WorkerRequest, choice: int) -> None:
        job.choices.discard(choice)
        if not job.choices:
            self.end(job)

    def _admitted(self, job: WorkerRequest, event: Admitted) -> worker_pb2.Admitted:
        message = worker_pb2.Admitted(queue_seconds=event.queue_seconds, cached_tokens=event.num_cached)
        if job.target is not None and not job.target.done():
            job.target.set_result(Target(blocks=event.blocks, num_cached=event.num_cached))
        if job.spec.task is Task.PREFILL:
            handle = self._handle()
            handle.num_tokens = len(job.spec.tokens)
            handle.prefix_hash = hash_prompt(job.spec.tokens, job.spec.salt)
            handle.transfer_id = self._kv.offer(job.spec.id, event.blocks, handle.num_tokens, handle.prefix_hash)
            message.kv.CopyFrom(handle)
        return message


def _cancel(spec: SequenceSpec, engine: Engine) -> None:
    for number in range(spec.num_choices):
        engine.cancel(spec.id + number)


def _failure(kind: "worker_pb2.FailureKind", message: str) -> worker_pb2.Failure:
    return worker_pb2.Failure(kind=kind, message=message)


def _batches(events: Sequence[Event]) -> Iterator[tuple[int, list[Event]]]:
    """Tokens of one sequence that follow each other together, every other event of a sequence by itself."""
    batch: list[Event] = []
    batch_id = 0
    for event in events:
        if isinstance(event, CacheChanged):
            continue
        if not (batch and batch_id == event.id and isinstance(event, Token) and isinstance(batch[0], Token)):
            if batch:
                yield batch_id, batch
            batch, batch_id = [], event.id
        batch.append(event)
    if batch:
        yield batch_id, batch
