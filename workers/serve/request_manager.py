"""Manages the requests of routers at one worker, from the submit to the last output.

Lives in the worker's event loop. Knows nothing of servers.

One file because everything that a request holds is freed here, in whichever thread or at whichever
peer the request ends.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Full
from typing import Final

from ...proto import worker_pb2
from ...proto.errors import InvalidArgument, Unavailable
from ...proto.hashing import hash_prompt
from ...proto.metrics import NULL_METRICS, RECOMPUTED, RESTORED, SUSPENDS, Metrics
from ..engine.engine import Engine
from ..engine.events import (
    Admitted,
    CacheChanged,
    Event,
    Failed,
    NewTokens,
    Preempted,
    PrefillFinished,
    Progress,
    Suspended,
)
from ..engine.plan import FirstTokens
from ..engine.sequence import Task
from ..kv_cache.tables import SequenceKv
from ..tp.adapters import AdapterCache
from ..tp.kv_group import KvGroup
from ..transfer.frames import FetchResult, FetchTarget, TransferError
from .cache_reports import CacheReports
from .cache_reset import CacheAge
from .engine_thread import EngineRunner
from .grammars import GrammarCompiler
from .load_reports import LoadReports
from .prefix_transfer import PrefixImporter
from .session import RouterSession, WorkerRequest
from .submit import WorkerLimits, check_first_tokens, parse_submit
from .watchdog import CANARY_ID, Canary

logger = logging.getLogger(__name__)

_LEAVING: Final = "worker is going away"
# Timeout of loading a request's adapter and compiling its grammar, including the wait for others.
_PREPARE_SECONDS: Final = 60.0


@dataclass(eq=False, kw_only=True)
class RequestManager:
    """Holds the sessions of routers and the requests that have not ended."""

    thread: EngineRunner
    kv: KvGroup
    limits: WorkerLimits
    grammars: GrammarCompiler
    adapters: AdapterCache
    kv_handle: Callable[[int], worker_pb2.KvHandle]  # of a new transfer of this number of tokens
    load: Callable[[], worker_pb2.WorkerLoad]
    # Called on a defect, after which the worker cannot be used.
    failed: Callable[[BaseException], None]
    canary: Canary
    reports: CacheReports
    importer: PrefixImporter
    age: CacheAge
    metrics: Metrics = NULL_METRICS
    clock: Callable[[], float] = time.monotonic  # the engine's
    is_leaving: bool = field(init=False, default=False)  # new requests are refused
    # Tokens of interrupted requests that this worker has computed again.
    num_recomputed_tokens: int = field(init=False, default=0)
    load_reports: LoadReports = field(init=False)
    _requests: set[WorkerRequest] = field(init=False, default_factory=set)
    # Request and choice by sequence id.
    _sequences: dict[int, tuple[WorkerRequest, int]] = field(init=False, default_factory=dict)
    _next_id: int = field(init=False, default=0)
    # Set by the end of each request.
    _ended: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.load_reports = LoadReports(self.load, self.reports.sessions)

    def __len__(self) -> int:
        return len(self._requests)

    def leave(self) -> None:
        """Refuses new requests from now on, and makes every session report it at once."""
        self.is_leaving = True
        self.load_reports.report_all()

    def retire_sessions(self) -> None:
        """Makes the present sessions refuse new requests, and report a draining worker at once."""
        for session in self.reports.sessions:
            session.retire()

    @property
    def num_retired(self) -> int:
        """Returns the number of requests of retired sessions."""
        return sum(len(each.requests) for each in self.reports.sessions if each.is_retired)

    async def wait_idle(self, seconds: float) -> None:
        """Waits until all requests have ended, for at most `seconds`."""
        await self._wait_until(lambda: not self._requests, seconds)

    async def wait_retired(self, seconds: float) -> None:
        """Waits until all requests of retired sessions have ended, for at most `seconds`."""
        await self._wait_until(lambda: not self.num_retired, seconds)

    async def _wait_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_done():
                    self._ended.clear()
                    await self._ended.wait()

    async def serve(
        self,
        commands: AsyncIterator[worker_pb2.SessionRequest],
        send: Callable[[worker_pb2.SessionResponse], Awaitable[None]],
    ) -> None:
        """Serves one router until its stream ends, which also ends the requests of the stream.

        Executes the router's commands. Sends the outputs of its requests, the load, and the hashes
        of the prefix cache: first all hashes, then changes.
        """
        session = RouterSession()
        first = worker_pb2.SessionResponse()
        self.load_reports.add_to(first, session)
        # Before the first await, so that no drain, stop or new role escapes the session.
        self.reports.add(session)
        try:
            # Before any command is read. If the worker dies in its first step, the router knows
            # that it was alive.
            await send(first)
            await self._serve(session, commands, send)
        finally:
            self.reports.sessions.discard(session)
            for request in list(session.requests.values()):
                self.end(request)

    async def _serve(
        self,
        session: RouterSession,
        commands: AsyncIterator[worker_pb2.SessionRequest],
        send: Callable[[worker_pb2.SessionResponse], Awaitable[None]],
    ) -> None:
        """Executes a router's commands and sends what its session queues, until either ends."""
        reader = asyncio.create_task(self._read(session, commands))
        try:
            while (message := await session.take()) is not None:
                if session.reports_load:
                    self.load_reports.add_to(message, session)
                if message.ListFields():
                    await send(message)
        finally:
            reader.cancel()
            (error,) = await asyncio.gather(reader, return_exceptions=True)
            if isinstance(error, Exception):
                logger.error("a session has failed", exc_info=error)

    async def _read(
        self, session: RouterSession, commands: AsyncIterator[worker_pb2.SessionRequest]
    ) -> None:
        """Executes a router's commands until it ends the stream."""
        try:
            async for command in commands:
                if command.HasField("cancel"):
                    self.cancel(session, command.cancel)
                elif command.HasField("submit"):
                    self.submit(session, command.submit)
                elif command.HasField("suspend"):
                    self.suspend(session, command.suspend)
        finally:
            session.close()

    def submit(self, session: RouterSession, submit: worker_pb2.Submit) -> None:
        """Accepts a submit or reports its failure to the session."""
        key = (submit.request_id, submit.attempt)
        if self.is_leaving or session.is_retired:
            session.put_failure(key, worker_pb2.FAILURE_KIND_GONE, _LEAVING)
            return
        try:
            if key in session.requests:
                raise InvalidArgument("request_id: already in use")
            spec = parse_submit(submit, self._next_id, self.limits)
        except (InvalidArgument, Unavailable) as error:
            is_invalid = isinstance(error, InvalidArgument)
            kind = worker_pb2.FAILURE_KIND_INVALID if is_invalid else worker_pb2.FAILURE_KIND_UNABLE
            session.put_failure(key, kind, str(error))
            return
        first = submit.first_choice
        num_choices = spec.beam.num_best if spec.beam else spec.num_choices
        choices = set(range(first, first + num_choices))
        request = WorkerRequest(submit, spec, session, key, choices)
        request.computed_after = 0 if self._is_outdated(request) else self.age.done
        self._next_id += spec.num_choices
        self._requests.add(request)
        self._sequences |= {
            spec.id + number: (request, first + number) for number in range(spec.num_choices)
        }
        session.requests[key] = request
        self.load_reports.changed()
        submitted = self.clock()
        if spec.task is Task.DECODE:
            request.fetch = self.kv.fetch(spec.id, submit.kv, hash_prompt(spec.tokens, spec.salt))
            request.fetch.add_done_callback(partial(self._fetched, request))
        if submit.HasField("adapter") or spec.sampling.grammar:
            request.preparing = asyncio.create_task(self._prepare(request, submitted))
            request.preparing.add_done_callback(self._check_task)
        else:
            self._post(request, submitted)
        if spec.is_recovery:
            self.thread.expedite()

    def cancel(self, session: RouterSession, cancel: worker_pb2.Cancel) -> None:
        """Ends a request or one of its choices; ignores requests that have ended."""
        request = session.requests.get((cancel.request_id, cancel.attempt))
        if request is None:
            return
        if not cancel.HasField("choice"):
            self.end(request)
        elif cancel.choice in request.choices:
            number = cancel.choice - self._sequences[request.spec.id][1]
            self._end_choice(request, cancel.choice)
            if request.choices and cancel.choice not in request.suspended:
                self.thread.post(lambda engine: engine.cancel_choice(request.spec.id, number))

    def suspend(self, session: RouterSession, suspend: worker_pb2.Suspend) -> None:
        """Suspends all choices of a request, or refuses the request if it has not begun.

        Ignores requests that have ended.
        """
        request = session.requests.get((suspend.request_id, suspend.attempt))
        if request is None:
            return
        if request.fetch is not None and not request.fetch.done():
            self._refuse(request, worker_pb2.FAILURE_KIND_GONE, _LEAVING)
        else:
            # A fetch that has just ended is acknowledged, so only this worker has the KV cache.
            # `_fetched` must commit it first.
            asyncio.get_running_loop().call_soon(self.thread.post, partial(self._suspend, request))

    def end(self, request: WorkerRequest) -> None:
        """Removes a request in any state; frees its blocks once no transfer uses them."""
        if request not in self._requests:
            return
        self._requests.discard(request)
        request.session.requests.pop(request.key, None)
        if request.preparing is not None:
            request.preparing.cancel()
        for number in range(request.spec.num_choices):
            del self._sequences[request.spec.id + number]
            self._free(request.spec.id + number)
        self._ended.set()

    def release(self, sequence_id: int) -> None:
        """Ends a finished prefill or a suspended choice after its lease.

        The lease was acknowledged or has expired.
        """
        request, choice = self._sequences.get(sequence_id, (None, 0))
        if request is not None and choice in request.suspended:
            self._end_choice(request, choice)
        elif request is not None:
            self.end(request)

    def fail_all(self, failed: bool = False) -> None:
        """Ends every request, so that routers may submit it elsewhere, and closes the sessions.

        `failed` means that the engine has failed, maybe because of one of the requests.
        """
        self.leave()
        kind = worker_pb2.FAILURE_KIND_WORKER if failed else worker_pb2.FAILURE_KIND_GONE
        for request in list(self._requests):
            self._refuse(request, kind, "the engine has failed" if failed else _LEAVING)
        for session in self.reports.sessions:
            session.close()

    def deliver(self, events: Sequence[Event]) -> None:
        """Turns the events of a step into outputs; each session sends its share as one message."""
        self.load_reports.changed()
        try:
            for event in events:
                if isinstance(event, CacheChanged):
                    self.reports.change("memory", event.stored, event.evicted)
                    continue
                request, choice = self._sequences.get(event.id, (None, 0))
                if request is None:  # the canary, or a request that has ended since the step
                    if event.id == CANARY_ID:
                        self.canary.observe(event)
                elif not isinstance(event, NewTokens):
                    self._deliver_event(request, choice, event)
                elif choice in request.choices:  # without a call, because most events are tokens
                    if max(event.token_ids) >= self.limits.vocab_size:
                        self._not_finite(request, "the model has no such token")
                        continue
                    request.session.put_tokens(request.key, choice, event)
                    if event.finish is not None:
                        self._end_choice(request, choice)
        except Exception as error:
            # A defect. The events after it are lost, so no request may wait for them.
            self.failed(error)

    def _deliver_event(self, request: WorkerRequest, choice: int, event: Event) -> None:
        """Handles an event without tokens: sends its output, or continues a KV transfer."""
        match event:
            case Admitted() if event.import_hashes:
                self._import_prefix(request, event)
            case Admitted():
                request.session.put(request.key, admitted=self._admitted(request, event))
            case Progress():
                self.kv.progress(event.id, event.num_computed, event.num_ahead, event.num_layers)
            case PrefillFinished():
                if request.spec.beam is not None:
                    tokens = worker_pb2.Tokens(prefill_seconds=event.prefill_seconds)
                    request.session.put(request.key, tokens=tokens)
                self.kv.complete(event.id, event.first_tokens)
            case Suspended() if choice in request.choices:
                self._suspended(request, choice, event)
            case Failed() if event.is_not_finite:
                self._not_finite(request, event.reason)
            case Failed():
                self._refuse(request, worker_pb2.FAILURE_KIND_INVALID, event.reason)
            case Preempted() if request.spec.beam is not None:
                self._refuse(request, worker_pb2.FAILURE_KIND_PREEMPTED, "preempted")
            case Preempted() if choice in request.choices:
                request.session.put_failure(
                    request.key, worker_pb2.FAILURE_KIND_PREEMPTED, "preempted", choice
                )
                self._end_choice(request, choice)

    def _import_prefix(self, request: WorkerRequest, event: Admitted) -> None:
        """Starts the import of cached blocks from disk or another worker; `_loaded` ends it."""
        loading = self.kv.load(
            event.id, self.importer.load(event, request.spec, request.submit.prefix_holder)
        )
        loading.add_done_callback(partial(self._loaded, request, event, self.clock()))

    def _not_finite(self, request: WorkerRequest, reason: str) -> None:
        """Ends a request for which the model computed NaN, and runs the canary.

        The canary tells whether this worker is broken.
        """
        self._refuse(request, worker_pb2.FAILURE_KIND_NOT_FINITE, reason)
        self.canary.run()

    def _admitted(self, request: WorkerRequest, event: Admitted) -> worker_pb2.Admitted:
        """Starts the transfers of an admitted sequence and returns its message."""
        message = worker_pb2.Admitted(
            queue_seconds=event.queue_seconds, cached_tokens=event.num_cached
        )
        spec = request.spec
        self.metrics.add(RESTORED, event.num_loaded, tier="host")
        if spec.task is not Task.DECODE and spec.first_index > 0:
            self.num_recomputed_tokens += len(spec.tokens) - event.num_cached
            self.metrics.add(RECOMPUTED, len(spec.tokens) - event.num_cached)
        if spec.task is Task.DECODE:
            self.kv.set_target(
                spec.id, FetchTarget(SequenceKv(event.tables, event.state), event.num_cached)
            )
        elif spec.task is Task.PREFILL:
            message.kv.CopyFrom(
                self._offer(request, spec.id, SequenceKv(event.tables, event.state), spec.tokens)
            )
        return message

    def _suspended(self, request: WorkerRequest, choice: int, event: Suspended) -> None:
        """Offers the KV cache of a suspended choice, which is completely computed."""
        request.suspended[choice] = event.id
        self.metrics.add(SUSPENDS)
        handle = self._offer(request, event.id, SequenceKv(event.tables, event.state), event.tokens)
        self.kv.progress(event.id, len(event.tokens))
        self.kv.complete(event.id, FirstTokens(tokens=(event.first_token,)))
        request.session.put(request.key, choice, suspended=worker_pb2.Suspended(kv=handle))

    def _offer(
        self, request: WorkerRequest, sequence_id: int, place: SequenceKv, tokens: tuple[int, ...]
    ) -> worker_pb2.KvHandle:
        """Offers the KV cache of `tokens` to other workers and returns its handle."""
        handle = self.kv_handle(len(tokens))
        handle.computed_after = request.computed_after
        self.kv.offer(sequence_id, handle, place, hash_prompt(tokens, request.spec.salt))
        return handle

    def _end_choice(self, request: WorkerRequest, choice: int) -> None:
        request.choices.discard(choice)
        if not request.choices:
            self.end(request)
        elif choice in request.suspended:
            self._free(request.suspended[choice])

    def _free(self, sequence_id: int) -> None:
        """Cancels a sequence in the engine as soon as no transfer uses its blocks."""
        self.kv.stop(sequence_id, partial(self._cancel, sequence_id))

    def _cancel(self, sequence_id: int) -> None:
        self.thread.post(lambda engine: engine.cancel(sequence_id))
        self.load_reports.changed()

    def _suspend(self, request: WorkerRequest, engine: Engine) -> None:
        """Suspends the sequences of a request, in the engine's thread.

        Refuses the request if no sequence has begun.
        """
        first = request.spec.id
        ids = range(first, first + request.spec.num_choices)
        num_begun = sum(engine.suspend(sequence_id) for sequence_id in ids)
        if not num_begun:
            self.thread.call_in_loop(
                partial(self._refuse, request, worker_pb2.FAILURE_KIND_GONE, _LEAVING)
            )

    def _post(self, request: WorkerRequest, submitted: float) -> None:
        """Gives a request to the engine. What was computed before a reset enters no cache.

        A reset that begins later finds the request in the engine.
        """
        if self._is_outdated(request):
            request.spec = replace(request.spec, enters_cache=False)
        self.thread.post(partial(self._enqueue, request, submitted))

    def _is_outdated(self, request: WorkerRequest) -> bool:
        """Returns True if the KV cache that a request fetches is older than the last reset."""
        return request.spec.task is Task.DECODE and not self.age.allows(request.submit.kv)

    def _enqueue(self, request: WorkerRequest, submitted: float, engine: Engine) -> None:
        """Submits a request to the engine, in its thread between two steps.

        The wait for the thread counts as queueing.
        """
        try:
            engine.submit(request.spec, submitted)
        except Full:
            kind = worker_pb2.FAILURE_KIND_FULL
            message = "queue full"
        except ValueError as error:
            spec = request.spec
            # Another worker has begun the request, or should compute it.
            is_foreign = spec.first_index > 0 or spec.task is not Task.COLOCATED
            kind = worker_pb2.FAILURE_KIND_INVALID
            if is_foreign or self.limits.is_fallback:
                kind = worker_pb2.FAILURE_KIND_UNABLE
            message = str(error)
        else:
            return
        self.thread.call_in_loop(partial(self._refuse, request, kind, message))

    async def _prepare(self, request: WorkerRequest, submitted: float) -> None:
        """Loads a request's adapter, compiles its grammar, and submits it to the engine.

        This may take seconds. Only an invalid grammar is the request's fault: the service offers
        the adapter, and a timeout is the worker's fault.
        """
        missing = "adapter: is not loaded"
        sampling = request.spec.sampling
        try:
            async with asyncio.timeout(_PREPARE_SECONDS):
                if request.submit.HasField("adapter"):
                    number = await self.load_adapter(request.submit.adapter)
                    request.spec = replace(request.spec, adapter=number)
                if sampling.grammar:
                    missing = "grammar: is not compiled"
                    request.grammar = await self.grammars.compile(
                        sampling.grammar, sampling.grammar_owner, request.submit.tenant
                    )
        except TimeoutError:
            message = f"{missing} after {_PREPARE_SECONDS:g} seconds"
            self._refuse(request, worker_pb2.FAILURE_KIND_UNABLE, message)
        except Unavailable as error:
            self._refuse(request, worker_pb2.FAILURE_KIND_UNABLE, error.message)
        except InvalidArgument as error:
            self._refuse(request, worker_pb2.FAILURE_KIND_INVALID, error.message)
        except Full as error:
            self._refuse(request, worker_pb2.FAILURE_KIND_FULL, str(error))
        else:
            self._post(request, submitted)

    async def load_adapter(self, adapter: worker_pb2.Adapter) -> int:
        """Loads an adapter, unless it is loaded, and returns its number.

        The adapter stays loaded while a request uses it. Raises Unavailable or queue.Full.
        """
        in_use = {request.submit.adapter.fingerprint for request in self._requests}
        return await self.adapters.load(adapter, in_use)

    def _check_task(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self.failed(error)

    def _fetched(self, request: WorkerRequest, task: "asyncio.Task[FetchResult]") -> None:
        """Commits the fetched KV cache of a request, or refuses the request at once."""
        if task.cancelled():
            return
        try:
            first_tokens, received = task.result()
            check_first_tokens(request.spec, first_tokens, self.limits.vocab_size)
        except TransferError as error:
            logger.warning("KV fetch failed: %s", error)
            self._refuse(request, worker_pb2.FAILURE_KIND_TRANSFER, "KV transfer failed")
        except Exception as error:  # a defect, after which the worker cannot be used
            self.failed(error)
        else:
            if request in self._requests:
                request.session.put(request.key, kv_received=received)
                self.thread.post(lambda engine: engine.commit_import(request.spec.id, first_tokens))

    def _loaded(
        self, request: WorkerRequest, event: Admitted, began: float, task: "asyncio.Task[int]"
    ) -> None:
        """Starts a sequence with its imported blocks as soon as no transfer writes to them."""
        if task.cancelled() or request not in self._requests:
            return
        # An error is a defect here, because failures of the disk or of another worker raise none.
        if error := task.exception():
            self.failed(error)
        else:
            self.kv.stop(event.id, partial(self._start, request, event, began, task.result()))

    def _start(
        self, request: WorkerRequest, event: Admitted, began: float, num_tokens: int
    ) -> None:
        if request not in self._requests:
            return
        self.metrics.add(RESTORED, num_tokens, tier=event.prefix_source)
        message = self._admitted(request, replace(event, num_cached=event.num_cached + num_tokens))
        message.restore_seconds = self.clock() - began
        request.session.put(request.key, admitted=message)
        self.thread.post(lambda engine: engine.commit_prefix(event.id, num_tokens))

    def _refuse(self, request: WorkerRequest, kind: "worker_pb2.FailureKind", message: str) -> None:
        """Ends a request with a failure, unless it has ended."""
        if request in self._requests:
            request.session.put_failure(request.key, kind, message)
            self.end(request)
