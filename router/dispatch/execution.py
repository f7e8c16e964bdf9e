"""Executes one request from its first attempt to the end of its last choice.

Prompt and emitted tokens stay here. After an interruption the choices continue in one of two ways.
A *handoff*, possible while the prefill worker still holds the KV cache, gives that to another
decode worker. A *replay* prefills prompt and emitted tokens, most of which a prefix cache holds,
and continues at the next index. While no worker can take the choices, they are parked. The choices
share an attempt until one of them, or their worker, is lost; each then continues in its own
attempt. Knows token ids, not text. Only `run` awaits.

One file because every interruption changes the same few fields of the choices between two deltas.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    TandemError,
    Unavailable,
)
from ..deadline import before, deadline_passed, earlier
from ..request import TokenDelta, TokenRequest
from ..scheduling.admission import Admission
from ..scheduling.policy import Placement
from ..scheduling.registry import WorkerRegistry
from .attempt import Attempt, Interruption, Submitter
from .blocked_prompts import BLOCKED_SECONDS
from .causes import Cause
from .output_buffer import OutputBuffer, Wakeup
from .poison_guard import PoisonGuard
from .request_timer import RequestTimer
from .submit import refusal, rest_of
from .worker_client import SuspendedChoice, WorkerKey

logger = logging.getLogger(__name__)

MAX_TRANSFERS_LOST: Final = 2
"""Failed KV transfers of one choice, after which a single worker prefills and decodes it."""

PARK_SECONDS: Final = 30.0
"""The default wait of an interrupted request for a worker that can take it."""

AVOID_SECONDS: Final = 2.0
"""How long a request avoids a worker that failed it. Afterwards the worker has left the registry,
or has room again.
"""

_BLOCKED_TIME: Final = f"{BLOCKED_SECONDS / 60:g} minutes"
_GIVEN_UP: Final = (
    "the request was given up: at least two workers crashed while they computed it; the same "
    f"request is refused for the next {_BLOCKED_TIME}"
)
_BLOCKED: Final = (
    "the request is refused: the same request crashed at least two workers within the last "
    f"{_BLOCKED_TIME}; change the prompt or a parameter other than the seed, or wait"
)
_NOT_FINITE: Final = "the request was given up: the model's output was not finite, twice"


class RequestExecution:
    """Runs one request at workers until all its choices have ended.

    Call `run`; or `start`, then `deltas` whenever something may have come and at `wake_at`, until
    `done`, and `end` in any case.
    """

    def __init__(
        self,
        request: TokenRequest,
        cancelled: Collection[int],
        *,
        send: Submitter,
        registry: WorkerRegistry,
        timer: RequestTimer,
        poison_guard: PoisonGuard,
        park_seconds: float,
        wake: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        """The caller may add unwanted choices to `cancelled` at any time.

        All requests of the router share `poison_guard`. `wake` is called when parked choices may be
        able to continue, and by `fail`; it must set the event that `run` gets.
        """
        self._request = request
        self._num_choices = request.submit.num_choices
        self._is_beam = request.has_beam_search
        self._cancelled = cancelled
        self._send = send
        self._registry = registry
        self._timer = timer
        self._poison_guard = poison_guard
        self._park_seconds = park_seconds
        self._wake = wake
        self._clock = clock
        self._emitted = [list(ids or ()) for ids in request.emitted or [()] * self._num_choices]
        self._finished: set[int] = set()
        # The caller has them, or does not want them; else they come with the first token.
        self._has_prompt_logprobs = not request.submit.HasField("prompt_logprobs")
        self._attempts: list[Attempt] = []
        self._num_attempts = 0
        self._parked: list[Interruption] = []
        self._unsubscribe: Callable[[], object] | None = None
        self._error: Exception | None = None  # for the caller
        self._time_is_over = False  # that the request may take
        self._output = OutputBuffer()
        self._avoided: dict[WorkerKey, float] = {}  # until when
        # When choices fail that were interrupted since their last token.
        self._give_up: dict[int, float] = {}
        self._num_transfers_lost = [0] * self._num_choices
        self._num_crashes = 0
        # Hosts where a worker has crashed, and until when the others there are the last choice.
        self._crash_hosts: dict[str, float] = {}
        # Set when a worker reports that the model's output was not finite: that worker, the
        # attempts at that time, and the workers of its attempt, which are chosen last afterwards.
        self._not_finite_at: WorkerKey | None = None
        self._not_finite_attempts: list[Attempt] = []
        self._not_finite_workers: set[str] = set()

    @property
    def done(self) -> bool:
        return not self._attempts and not self._parked

    @property
    def wake_at(self) -> float | None:
        """The time of the next necessary call of `deltas`; None if only an event needs one."""
        solo_run = self._poison_guard.waits_until(self)
        if not self._parked:
            return solo_run if math.isfinite(solo_run) else None
        return min([solo_run, *self._avoided.values(), *(each.until for each in self._parked)])

    async def run(self, admission: Admission, wake: Wakeup) -> AsyncGenerator[TokenDelta, None]:
        """Waits for admission, then yields all deltas, see TokenSource.

        `wake` is set whenever something has come. The request goes on while the caller is away: it
        ends, and gives back its admission, when its workers have ended it.
        """
        deadline, ends_at = self._request.deadline, self._request.ends_at
        async with AsyncExitStack() as scope:
            scope.callback(self._timer.stop)
            if self._poison_guard.blocked_prompts.is_blocked(self._request):
                raise InternalError(_BLOCKED)
            try:
                release = await before(
                    earlier(deadline, ends_at),
                    scope.enter_async_context(admission.permit(self._request)),
                    self._clock,
                )
            except DeadlineExceeded:
                if earlier(deadline, ends_at) == deadline:
                    raise
                for delta in self._cut(self._first_choices()):
                    yield delta
                return
            scope.callback(self.end)
            scope.callback(wake.close)
            # One timer for a request costs less than one for each token.
            if deadline is not None:
                self._call_at(deadline, scope, self.fail, deadline_passed())
            if ends_at is not None:
                self._call_at(ends_at, scope, self.end_time)
            self.start()
            wake.watch(partial(self._collect_unread, release))
            while True:
                self._collect()
                # Read before the caller gets control: later changes count in the next turn.
                is_over = self.done
                error = self._error
                for delta in self._output.take():
                    if delta.choice not in self._cancelled:
                        yield delta
                if error is not None:
                    raise error
                if is_over:
                    return
                await wake.sleep(None if self.wake_at is None else self.wake_at - self._clock())

    def _call_at(
        self, due: float, scope: AsyncExitStack, call: Callable[..., object], *args: object
    ) -> None:
        """Calls at a time of the clock, unless `scope` has ended before."""
        timer = asyncio.get_running_loop().call_later(due - self._clock(), call, *args)
        scope.callback(timer.cancel)

    def _collect_unread(self, release: Callable[[], None]) -> None:
        """Collects deltas while the caller is away; `release` gives back the admission."""
        self._collect()
        try:
            self._output.check_size()
        except Cancelled as error:
            self._error = error
        if self.done or self._error is not None:
            self.end()
            release()

    def _collect(self) -> None:
        """Moves new deltas to the output buffer; an error ends the request after them."""
        try:
            if self._error is None:
                for delta in self.deltas():
                    self._output.put(delta)
        except Exception as error:  # a defect too: the caller, who may be away, gets it
            self._error = error
        self._timer.stamp()

    def fail(self, error: TandemError) -> None:
        """Ends `run` with an error, after the deltas that have come."""
        self._error = error
        self._wake()

    def end_time(self) -> None:
        """Ends all choices with their output so far, at the next call of `deltas`."""
        self._time_is_over = True
        self._wake()

    def _cut(self, choices: Collection[int]) -> list[TokenDelta]:
        """Ends the request at its workers; returns the last delta of each of these choices."""
        self.end()
        self._attempts.clear()
        return [
            TokenDelta(
                first_index=len(self._emitted[choice]),
                ids=(),
                finish_reason=inference_pb2.FINISH_REASON_TIME,
                choice=choice,
            )
            for choice in sorted(choices)
        ]

    def _open_choices(self) -> set[int]:
        """Returns the choices that run or wait for a worker."""
        running = {choice for attempt in self._attempts for choice in attempt.choices}
        parked = {choice for interruption in self._parked for choice in interruption.choices}
        return (running | parked) - set(self._cancelled)

    def _first_choices(self) -> list[int]:
        """Returns the choices to start: all that have not ended elsewhere."""
        emitted = self._request.emitted or [()] * self._num_choices
        return [choice for choice, ids in enumerate(emitted) if ids is not None]

    def start(self) -> None:
        """Starts the first attempt, or one for each choice if the request began elsewhere.

        If no worker can take the request, it is parked if a worker is lost now or was lost since
        the request arrived, because that worker may return within seconds. Otherwise raises
        Unavailable.
        """
        choices = self._first_choices() if self._request.emitted else [None]
        waiting = [choice for choice in choices if not self._start(choice)]
        self._end_reservation()
        if not waiting:
            return
        if not self._registry.has_lost_since(self._request.arrived):
            raise Unavailable(self._registry.unavailable_message)
        indices = [choice for choice in waiting if choice is not None] or range(self._num_choices)
        until = self._clock() + self._park_seconds
        self._parked.append(Interruption(cause=Cause.GONE, choices=frozenset(indices), until=until))
        self._watch_workers()

    def deltas(self) -> Iterator[TokenDelta]:
        """Yields the deltas since the last call. Raises a TandemError if the request must end."""
        self._unpark()
        for attempt in self._attempts:  # replays are appended meanwhile
            while True:
                for delta in attempt.poll():
                    if delta.choice in self._cancelled:
                        attempt.drop(delta.choice)
                    elif new := self._without_known(delta):
                        self._emitted[new.choice] += new.ids
                        self._timer.tokens(len(new.ids), new.choice)
                        if self._give_up and (attempt.is_proven or new.finish_reason):
                            self._give_up.pop(new.choice, None)
                        yield new
                if not attempt.interruptions:
                    break
                interruptions, attempt.interruptions = attempt.interruptions, []
                for interruption in interruptions:
                    self._park(interruption, attempt)
                self._unpark()
            if not attempt.choices:
                attempt.end()
        if self._parked:
            self._forget_finished()
        self._attempts = [attempt for attempt in self._attempts if attempt.choices]
        if self in self._poison_guard:
            self._end_solo_runs()
        if self._time_is_over:
            yield from self._cut(self._open_choices())

    def end(self) -> None:
        """Lets the workers free all that they hold for the request. Idempotent."""
        self._poison_guard.leave(self)
        for parked in self._parked:
            if parked.suspended is not None:
                parked.suspended.cancel()
        self._parked.clear()
        self._watch_workers()
        for attempt in self._attempts:
            attempt.end()

    def _start(self, choice: int | None) -> bool:
        """Starts an attempt of one choice; None: of all. Returns False if no worker can take it."""
        if choice is None:
            part = self._request
            lost = max(self._num_transfers_lost)
        else:
            part = rest_of(self._request, choice, self._emitted[choice])
            lost = self._num_transfers_lost[choice]
        find = partial(
            self._registry.place,
            part,
            colocated=lost >= MAX_TRANSFERS_LOST,
            is_recovery=part.is_recovery,
        )
        avoided = self._avoided_now()
        now = self._clock()
        if hosts := {host for host, until in self._crash_hosts.items() if until > now}:
            replaceable = self._registry.replaceable(hosts)
            if find(avoided | replaceable):
                avoided |= replaceable
        placement = self._poison_guard.place(self, find, avoided | self._not_finite_workers)
        if placement is None and self._not_finite_workers:
            placement = self._poison_guard.place(self, find, avoided)
        if placement is None:
            return False
        self._begin_attempt(part, placement)
        return True

    def _begin_attempt(
        self, part: TokenRequest, placement: Placement, source: SuspendedChoice | None = None
    ) -> None:
        self._num_attempts += 1
        submit = worker_pb2.Submit()
        submit.CopyFrom(part.submit)
        submit.attempt = self._num_attempts
        if self._has_prompt_logprobs or submit.first_index:  # its prompt has generated tokens, too
            submit.ClearField("prompt_logprobs")
        self._timer.dispatched(placement, self._num_attempts, "suspended" if source else "replay")
        attempt = Attempt(
            part,
            submit,
            placement,
            send=self._send,
            registry=self._registry,
            timer=self._timer,
            may_decode=self._may_decode,
            num_crashes=self._num_crashes,
            source=source,
        )
        self._attempts.append(attempt)
        attempt.start()

    def _end_reservation(self) -> None:
        """Ends the request's reservation if attempts have begun, which count at their workers.

        The registry ends it only for an attempt of the whole request; an attempt of one choice has
        another id. Call it when all choices that can begin now have begun, because waiting requests
        are admitted at once.
        """
        capacity = self._registry.capacity
        if self._attempts and capacity.release(self._request.request_id):
            capacity.notify()

    def _without_known(self, delta: TokenDelta) -> TokenDelta | None:
        """Removes parts that the caller has: prompt log probabilities, tokens of a repeated search.

        Returns None if nothing is left.
        """
        if delta.prompt_logprobs:
            if self._has_prompt_logprobs:
                delta = replace(delta, prompt_logprobs=())
            self._has_prompt_logprobs = True
        if not self._is_beam:
            return delta
        if delta.choice in self._finished:
            return None
        if delta.finish_reason:
            self._finished.add(delta.choice)
        num_known = len(self._emitted[delta.choice]) - delta.first_index
        if num_known <= 0:
            return delta
        return replace(
            delta,
            first_index=delta.first_index + num_known,
            ids=delta.ids[num_known:],
            logprobs=delta.logprobs[num_known:],
        )

    def _may_decode(self, attempt: Attempt) -> bool:
        """Returns True if the attempt's decode worker may get the KV cache.

        Usually it gets it while the prompt is still computed. For a suspect it gets it only
        afterwards, since its solo run there keeps other suspects waiting.
        """
        if self not in self._poison_guard:
            return True
        return attempt.is_prefilled and self._poison_guard.may_start(self, attempt.placement.decode)

    def _end_solo_runs(self) -> None:
        """Ends the solo run at a worker where the request is proven.

        Once it is proven everywhere, it is no suspect any more.
        """
        unproven = {
            worker for each in self._attempts if (worker := each.unproven_worker) is not None
        }
        self._poison_guard.keep(self, unproven)
        if not self._parked and all(attempt.is_proven for attempt in self._attempts):
            self._poison_guard.leave(self)

    def _park(self, interruption: Interruption, attempt: Attempt) -> None:
        """Parks interrupted choices. Raises the request's error if it must not continue."""
        cause, choices, worker = interruption.cause, interruption.choices, interruption.worker
        logger.warning("%s: %s on %s", self._request.request_id, interruption.message, worker[0])
        self._timer.interrupted(cause.name.lower(), worker[0])
        if cause is Cause.INVALID:
            raise refusal(interruption.message)
        if cause is Cause.NOT_FINITE:
            self._count_not_finite(worker, attempt)
        if cause.avoids_worker:
            self._avoided[worker] = self._clock() + AVOID_SECONDS
        for choice in choices:
            self._num_transfers_lost[choice] += cause is Cause.TRANSFER
        if cause is Cause.CRASH:
            self._count_crash(interruption, attempt)
        self._poison_guard.look_elsewhere(self)
        until = self._clock() + self._park_seconds
        interruption.until = min(self._give_up.setdefault(choice, until) for choice in choices)
        if cause is Cause.UNABLE and self._clock() > interruption.until:
            # Workers that take longer to refuse than they are avoided would be asked for ever.
            raise Unavailable(interruption.unable)
        for each in self._parked:
            each.choices -= choices  # their prefill worker is lost now too
        self._parked.append(interruption)
        if interruption.attempt is None:
            attempt.abandon(choices)
        self._watch_workers()

    def _count_not_finite(self, worker: WorkerKey, attempt: Attempt) -> None:
        """Avoids the workers of an attempt whose output was not finite, if there are others.

        One of these workers may be at fault. A report by a second worker shows that the request is
        at fault; so does a second report of the only worker, which has found itself sound
        meanwhile. Raises InternalError then.
        """
        if self._not_finite_at is None:
            self._not_finite_at = worker
            self._not_finite_attempts = list(self._attempts)
            placement = attempt.placement
            self._not_finite_workers = {placement.decode, *filter(None, (placement.prefill,))}
        elif worker != self._not_finite_at or attempt not in self._not_finite_attempts:
            raise InternalError(_NOT_FINITE)

    def _count_crash(self, interruption: Interruption, attempt: Attempt) -> None:
        """Makes the request a suspect after a crash.

        If nothing else can be at fault, blocks requests like it and raises InternalError. For a
        while the request avoids the workers of that host, if others have their roles: after the
        loss of a host, the loss of a second worker there proves nothing.
        """
        self._num_crashes += 1
        host = self._registry.host(interruption.worker[0])
        self._crash_hosts[host] = self._clock() + AVOID_SECONDS
        if interruption.choices - set(self._cancelled) and self._poison_guard.count_crash(
            self, interruption.worker, self._wake, is_proven=attempt.is_proven
        ):
            self._poison_guard.blocked_prompts.block(self._request)
            raise InternalError(_GIVEN_UP)

    def _forget_finished(self) -> None:
        """Removes choices that finished while they were parked in their attempt.

        The first token, which the prefill worker computes, may be the last one, or the caller may
        want no further one.
        """
        for parked in self._parked:
            if parked.attempt is not None:
                parked.choices = parked.choices.intersection(parked.attempt.choices)
        self._parked = [parked for parked in self._parked if parked.choices]
        self._watch_workers()

    def _unpark(self) -> None:
        """Continues the parked choices that workers can take. Raises as `_check_wait`."""
        if not self._parked:
            return
        self._forget_finished()
        self._avoided_now()  # forgets the workers whose time is over, which `wake_at` may count
        may_ask = self._poison_guard.may_ask(self)
        # All stay parked until then, so that `end` frees what they hold if one of them raises.
        for each in self._parked:
            if may_ask or each.attempt is not None or each.suspended is not None:
                each.choices = self._continue(each)
            if each.choices:
                self._check_wait(each)
        self._parked = [each for each in self._parked if each.choices]
        self._end_reservation()
        self._watch_workers()

    def _check_wait(self, parked: Interruption) -> None:
        """Raises Unavailable or Overloaded if choices have waited too long for a worker."""
        is_suspect = self in self._poison_guard
        is_unable = parked.cause is Cause.UNABLE
        error = Unavailable(parked.unable if is_unable else self._registry.unavailable_message)
        if not any(self._emitted) and not is_suspect:
            if parked.cause is Cause.FULL:
                # The caller may try elsewhere.
                raise Overloaded(f"every worker is full: {parked.message}")
            if is_unable:
                raise error
        if self._clock() < parked.until:
            return
        if not is_suspect or self._registry.place(self._request, self._avoided_now()) is None:
            raise error
        # A suspect waits for its solo run, not for a worker.
        parked.until = self._clock() + self._park_seconds
        self._give_up |= dict.fromkeys(parked.choices, parked.until)

    def _continue(self, parked: Interruption) -> frozenset[int]:
        """Continues choices by a handoff or a replay. Returns those that no worker can take now."""
        attempt, suspended = parked.attempt, parked.suspended
        if attempt is not None:
            if self._hand_off(parked, attempt):
                return frozenset()
            if attempt.holds_kv and self._registry.place(attempt.part, self._avoided_now()) is None:
                return parked.choices
            attempt.abandon(parked.choices)
            parked.attempt = None
        choices = parked.choices - set(self._cancelled)
        if suspended is not None:
            if (
                choices
                and suspended.failure is None
                and self._registry.place(self._request, self._avoided_now()) is None
            ):
                return choices
            if choices and self._take_over(suspended):
                return frozenset()
            suspended.cancel()
            parked.suspended = None
        is_untouched = len(choices) == self._num_choices and not any(self._emitted)
        if choices and (self._is_beam or is_untouched):
            return frozenset() if self._start(None) else choices
        return frozenset(choice for choice in sorted(choices) if not self._start(choice))

    def _hand_off(self, parked: Interruption, attempt: Attempt) -> bool:
        """Gives the attempt's KV cache to another decode worker. Returns False if none takes it.

        The same decode worker takes it if there is no other and it is not avoided.
        """
        if not attempt.holds_kv:
            return False
        avoided = self._avoided_now()
        prefill = attempt.placement.prefill
        others = avoided | self._not_finite_workers | {parked.worker[0]}
        placement = self._registry.place(
            attempt.part, others, prefill=prefill
        ) or self._registry.place(attempt.part, avoided, prefill=prefill)
        if placement is None:
            return False
        self._num_attempts += 1
        self._timer.dispatched(placement, self._num_attempts, "handoff")
        attempt.hand_off(placement, self._num_attempts)
        return True

    def _take_over(self, suspended: SuspendedChoice) -> bool:
        """Gives a suspended choice's KV cache to another decode worker. Returns False if it cannot.

        The last token of the choice is the first one of the new attempt.
        """
        emitted = self._emitted[suspended.choice]
        known = len(self._request.submit.token_ids) + len(emitted) - 1
        if suspended.failure is not None or not emitted or suspended.kv.num_tokens != known:
            return False
        part = rest_of(self._request, suspended.choice, emitted[:-1])
        worker_id = suspended.worker[0]
        avoided = self._avoided_now() | {worker_id}
        placement = self._registry.place(part, avoided, prefill=worker_id)
        if placement is None:
            return False
        self._begin_attempt(part, placement, suspended)
        return True

    def _avoided_now(self) -> set[str]:
        """Returns the workers to avoid now, and forgets the others.

        A worker with a new epoch has started again or has another role, and is not avoided.
        """
        now = self._clock()
        self._avoided = {
            worker: until
            for worker, until in self._avoided.items()
            if until > now and not self._has_new_epoch(worker)
        }
        return {worker_id for worker_id, _ in self._avoided}

    def _has_new_epoch(self, worker: WorkerKey) -> bool:
        worker_id, epoch = worker
        info = self._registry.get(worker_id)
        return info is not None and 0 < epoch < info.epoch

    def _watch_workers(self) -> None:
        """Subscribes `wake` to workers that become free, while choices are parked."""
        if self._parked and self._unsubscribe is None:
            self._unsubscribe = self._registry.capacity.subscribe(self._wake)
        elif not self._parked and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
