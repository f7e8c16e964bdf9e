"""Executes one request from its first attempt to the end of its last choice, whatever happens to
workers.

Prompt and emitted tokens stay here. After an interruption the choices continue on one of two ways:
*handoff*, while the prefill worker still holds the KV cache, gives that to another decode worker;
*replay* prefills prompt + emitted tokens, mostly hits in a prefix cache, and continues at the next
index. While no worker can take them they are parked. Several choices share an attempt until one of
them, or their worker, is lost; then each continues in an attempt of its own. Knows token ids, not
text. Only `run` awaits.

One file because whatever interrupts the request changes the same few fields of its choices between
two deltas.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from ...proto import worker_pb2
from ...proto.errors import Cancelled, InternalError, Overloaded, TandemError, Unavailable
from ..deadline import before, deadline_passed
from ..request import TokenDelta, TokenRequest
from ..scheduling.admission import Admission
from ..scheduling.policy import Placement
from ..scheduling.registry import WorkerRegistry
from .attempt import Attempt, Interruption, Parked, Submitter
from .causes import Cause
from .output_buffer import OutputBuffer, Wakeup
from .poison_guard import PoisonGuard
from .request_timer import RequestTimer
from .submit import refusal, rest_of
from .worker_client import SuspendedChoice, WorkerKey

logger = logging.getLogger(__name__)

MAX_TRANSFERS_LOST: Final = 2
"""Of one choice; after so many a single worker prefills and decodes it."""

PARK_SECONDS: Final = 30.0
"""How long a request waits by default until a worker can take it, once it has been interrupted."""

AVOID_SECONDS: Final = 2.0
"""How long a request avoids a worker that failed it: by then it is gone from the registry, or has
room again.
"""

_GIVEN_UP: Final = "the request was given up after two workers were lost"
_NOT_FINITE: Final = "the request was given up: the model's output was not finite, twice"


class RequestExecution:
    """Call `run`; or `start`, then `deltas` whenever something may have come and at `wake_at`,
    until `done`, and in the end `end`, whatever happened.
    """

    def __init__(
        self,
        request: TokenRequest,
        ended: Collection[int],
        *,
        send: Submitter,
        registry: WorkerRegistry,
        timer: RequestTimer,
        poison_guard: PoisonGuard | None = None,
        park_seconds: float = PARK_SECONDS,
        wake: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ended`: choices that are no longer wanted; the caller may add to it. `poison_guard` is
        shared by all requests of the router. `wake` is called when parked choices may be able to
        continue, and by `fail`; it has to set the event that `run` is given.
        """
        self._request = request
        self._num_choices = request.submit.num_choices
        self._ended = ended
        self._send = send
        self._registry = registry
        self._timer = timer
        self._poison_guard = poison_guard or PoisonGuard()
        self._park_seconds = park_seconds
        self._wake = wake
        self._clock = clock
        self._emitted = [list(ids or ()) for ids in request.emitted or [()] * self._num_choices]
        self._finished: set[int] = set()
        self._has_prompt_logprobs = any(self._emitted)  # they come with the first token
        self._attempts: list[Attempt] = []
        self._num_attempts = 0
        self._parked: list[Parked] = []
        self._unsubscribe: Callable[[], object] | None = None
        self._error: Exception | None = None  # for the caller
        self._output = OutputBuffer()
        self._avoided: dict[str, float] = {}  # worker ids, until when
        self._give_up: dict[
            int, float
        ] = {}  # by choice that was interrupted since its last token, when
        self._num_transfers_lost = [0] * self._num_choices
        self._num_crashes = 0
        # Once a worker has reported that the model's output was not finite: that worker, the
        # attempts under way then, and the workers of its attempt, to which others are preferred
        # from then on.
        self._not_finite_at: WorkerKey | None = None
        self._doubted: list[Attempt] = []
        self._doubtful: set[str] = set()

    @property
    def done(self) -> bool:
        return not self._attempts and not self._parked

    @property
    def wake_at(self) -> float | None:
        """When `deltas` is to be called at the latest, by the clock; None if only when something
        has come.
        """
        turn = self._poison_guard.waits_until(self)
        if not self._parked:
            return turn if math.isfinite(turn) else None
        return min([turn, *self._avoided.values(), *(each.until for each in self._parked)])

    async def run(self, admission: Admission, wake: Wakeup) -> AsyncGenerator[TokenDelta, None]:
        """Waits for admission, then yields all deltas, see TokenSource. `wake` is set whenever
        something has come.

        The request goes on while the caller does not take them: it ends, and gives back its slot,
        when its workers have ended it.
        """
        deadline = self._request.deadline
        async with AsyncExitStack() as scope:
            scope.callback(self._timer.stop)
            if self._poison_guard.blocked_prompts.is_blocked(self._request):
                raise InternalError(_GIVEN_UP)
            release = await before(
                deadline, scope.enter_async_context(admission.slot(self._request))
            )
            scope.callback(self.end)
            scope.callback(wake.close)
            if deadline is not None:  # one timer for a request costs less than one for each token
                timer = asyncio.get_running_loop().call_later(
                    deadline - time.monotonic(), self.fail, deadline_passed()
                )
                scope.callback(timer.cancel)
            self.start()
            wake.watch(partial(self._go_on, release))
            while True:
                self._collect()
                is_over, error = (
                    self.done,
                    self._error,
                )  # what comes while the caller is away is for the next turn
                for delta in self._output.take():
                    if delta.choice not in self._ended:
                        yield delta
                if error is not None:
                    raise error
                if is_over:
                    return
                await wake.sleep(None if self.wake_at is None else self.wake_at - self._clock())

    def _go_on(self, release: Callable[[], None]) -> None:
        """Takes what has come in the place of a caller that does not; `release` gives back the
        slot.
        """
        self._collect()
        try:
            self._output.check_size()
        except Cancelled as error:
            self._error = error
        if self.done or self._error is not None:
            self.end()
            release()

    def _collect(self) -> None:
        """Moves what has come to the output_buffer; an error ends the request after it."""
        try:
            if self._error is None:
                for delta in self.deltas():
                    self._output.put(delta)
        except Exception as error:  # a defect, too: it is the caller's, who may be away
            self._error = error

    def fail(self, error: TandemError) -> None:
        """Ends `run` with an error, after what has come until now."""
        self._error = error
        self._wake()

    def start(self) -> None:
        """Starts the first attempt; of each choice alone if the request was begun elsewhere.
        Without a worker it waits for one whose session has broken, as for seconds they all may; if
        there is none, raises Unavailable.
        """
        emitted = self._request.emitted
        choices = (
            [choice for choice, ids in enumerate(emitted) if ids is not None] if emitted else [None]
        )
        if not (waiting := [choice for choice in choices if not self._start(choice)]):
            return
        if not self._registry.has_lost:
            raise Unavailable(self._registry.absence)
        indices = [choice for choice in waiting if choice is not None] or range(self._num_choices)
        until = self._clock() + self._park_seconds
        self._parked.append(Parked(frozenset(indices), None, Cause.GONE, "", "", until))
        self._watch_workers()

    def deltas(self) -> Iterator[TokenDelta]:
        """Yields what has come since the last call. Raises a TandemError if the request cannot be
        continued.
        """
        self._unpark()
        for attempt in self._attempts:  # grows meanwhile, by those that replay
            while True:
                for delta in attempt.poll():
                    if delta.choice in self._ended:
                        attempt.drop(delta.choice)
                    elif fresh := self._fresh(delta):
                        self._emitted[fresh.choice] += fresh.ids
                        self._timer.tokens(len(fresh.ids), fresh.choice)
                        if self._give_up and (attempt.is_proven or fresh.finish_reason):
                            self._give_up.pop(fresh.choice, None)
                        yield fresh
                if not attempt.interruptions:
                    break
                interruptions, attempt.interruptions = attempt.interruptions, []
                for interruption in interruptions:
                    self._park(interruption, attempt)
                self._unpark()
            if not attempt.choices:
                attempt.end()
        self._attempts = [attempt for attempt in self._attempts if attempt.choices]
        if self in self._poison_guard:
            self._end_trials()

    def end(self) -> None:
        """Lets the workers free whatever they still hold for the request. Idempotent."""
        self._poison_guard.leave(self)
        for parked in self._parked:
            if parked.suspended is not None:
                parked.suspended.cancel()
        self._parked.clear()
        self._watch_workers()
        for attempt in self._attempts:
            attempt.end()

    def _start(self, choice: int | None) -> bool:
        """Starts an attempt, of one choice or, if None, of all. Returns False if no worker can take
        it.
        """
        if choice is None:
            part = self._request
            lost = max(self._num_transfers_lost)
        else:
            part = rest_of(self._request, choice, self._emitted[choice])
            lost = self._num_transfers_lost[choice]
        find = partial(
            self._registry.place, part, whole=lost >= MAX_TRANSFERS_LOST, is_resumed=part.is_resumed
        )
        placement = None
        for avoided in self._avoid_first():
            if (placement := self._poison_guard.place(self, find, avoided)) is not None:
                break
        if placement is None:
            return False
        self._begin_attempt(part, placement)
        return True

    def _begin_attempt(
        self,
        part: TokenRequest,
        placement: Placement,
        source: SuspendedChoice | None = None,
    ) -> None:
        self._num_attempts += 1
        submit = worker_pb2.Submit()
        submit.CopyFrom(part.submit)
        submit.attempt = self._num_attempts
        if self._has_prompt_logprobs:
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

    def _fresh(self, delta: TokenDelta) -> TokenDelta | None:
        """Returns the delta without what the caller has already: prompt logprobs and, of a beam
        search that started again, tokens.
        """
        if delta.prompt_logprobs:
            if self._has_prompt_logprobs:
                delta = replace(delta, prompt_logprobs=())
            self._has_prompt_logprobs = True
        if not self._request.has_beam_search:
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
        """Returns whether the attempt's decode worker may get the KV cache: usually at once, while
        the prompt is still computed; of a candidate only then, as it would keep others waiting.
        """
        if self not in self._poison_guard:
            return True
        return attempt.is_computed and self._poison_guard.may_start(self, attempt.placement.decode)

    def _end_trials(self) -> None:
        """Ends the solo run of a candidate that has proved itself at a worker; once it decodes
        everywhere, it is none.
        """
        self._poison_guard.keep(
            self, {worker for each in self._attempts if (worker := each.tried_at) is not None}
        )
        if not self._parked and all(attempt.is_proven for attempt in self._attempts):
            self._poison_guard.leave(self)

    def _park(self, interruption: Interruption, attempt: Attempt) -> None:
        """Lets interrupted choices wait until they can continue, which may be at once. Raises the
        request's error if it was interrupted too often.
        """
        cause, choices = interruption.cause, interruption.choices
        logger.warning(
            "%s: %s on %s", self._request.request_id, interruption.message, interruption.worker[0]
        )
        self._timer.interrupted(cause.name.lower(), interruption.worker[0])
        if cause is Cause.INVALID:
            raise refusal(interruption.message)
        if cause is Cause.NOT_FINITE:
            self._doubt(interruption.worker, attempt)
        if cause.avoids_worker:
            self._avoided[interruption.worker[0]] = self._clock() + AVOID_SECONDS
        for choice in choices:
            self._num_transfers_lost[choice] += cause is Cause.TRANSFER
        if cause.counts_crash:
            self._blame(interruption, attempt)
        self._poison_guard.look_elsewhere(self)
        until = min(
            [
                self._give_up.setdefault(choice, self._clock() + self._park_seconds)
                for choice in choices
            ]
        )
        for each in self._parked:
            each.choices -= choices  # whose prefill worker is lost now, too
        source = attempt if interruption.can_hand_off else None
        parked = Parked(
            choices,
            source,
            cause,
            interruption.message,
            interruption.worker[0],
            until,
            interruption.suspended,
        )
        self._parked.append(parked)
        if not interruption.can_hand_off:
            attempt.abandon(choices)
        self._watch_workers()

    def _doubt(self, worker: WorkerKey, attempt: Attempt) -> None:
        """Prefers workers other than those of an attempt in which the model's output was not
        finite: one of them may be at fault. Raises InternalError if a second worker reports the
        same, since then the request is at fault; also for a second report of the one worker that
        there is, which by then has found itself sound.
        """
        if self._not_finite_at is None:
            self._not_finite_at, self._doubted = worker, list(self._attempts)
            placement = attempt.placement
            self._doubtful = {placement.decode, *filter(None, (placement.prefill,))}
        elif worker != self._not_finite_at or attempt not in self._doubted:
            raise InternalError(_NOT_FINITE)

    def _blame(self, interruption: Interruption, attempt: Attempt) -> None:
        """Suspects the request of a crash. Raises InternalError, and has it refused for a while, if
        nothing else can be at fault.
        """
        self._num_crashes += 1
        if interruption.choices - set(self._ended) and self._poison_guard.count_crash(
            self, interruption.worker, self._wake, is_proven=attempt.is_proven
        ):
            self._poison_guard.blocked_prompts.block(self._request)
            raise InternalError(_GIVEN_UP)

    def _unpark(self) -> None:
        """Continues parked choices as far as workers can take them. Raises Unavailable or
        Overloaded for those that have waited too long.
        """
        if not self._parked:
            return
        self._avoid()  # forgets those whose time is over, at which `wake_at` may have been
        may_ask = self._poison_guard.may_ask(self)
        parked, self._parked = self._parked, []
        for each in parked:
            if may_ask or each.attempt is not None or each.suspended is not None:
                each.choices = self._continue(each)
            if not each.choices:
                continue
            if not any(self._emitted) and self not in self._poison_guard:
                if each.cause is Cause.FULL:
                    raise Overloaded("every worker's queue is full")  # the caller may try elsewhere
                if each.cause is Cause.UNABLE:
                    raise _cannot_serve(each.message)
            if self._clock() >= each.until:
                if (
                    self not in self._poison_guard
                    or self._registry.place(self._request, self._avoid()) is None
                ):
                    raise (
                        _cannot_serve(each.message)
                        if each.cause is Cause.UNABLE
                        else Unavailable(self._registry.absence)
                    )
                each.until = (
                    self._clock() + self._park_seconds
                )  # it waits for its turn, not for a worker
                self._give_up |= dict.fromkeys(each.choices, each.until)
            self._parked.append(each)
        self._watch_workers()

    def _continue(self, parked: Parked) -> frozenset[int]:
        """Continues choices: handoff if that is possible, else replay. Returns those that no worker
        can take now.
        """
        if parked.attempt is not None:
            if self._hand_off(parked, parked.attempt):
                return frozenset()
            if (
                parked.attempt.holds_kv
                and self._registry.place(parked.attempt.part, self._avoid()) is None
            ):
                return parked.choices
            parked.attempt.abandon(parked.choices)
            parked.attempt = None
        choices = parked.choices - set(self._ended)
        if (suspended := parked.suspended) is not None:
            if (
                choices
                and suspended.failure is None
                and self._registry.place(self._request, self._avoid()) is None
            ):
                return choices
            if choices and self._take_over(suspended):
                return frozenset()
            suspended.cancel()
            parked.suspended = None
        is_untouched = len(choices) == self._num_choices and not any(self._emitted)
        if choices and (self._request.has_beam_search or is_untouched):
            return frozenset() if self._start(None) else choices
        return frozenset(choice for choice in sorted(choices) if not self._start(choice))

    def _hand_off(self, parked: Parked, attempt: Attempt) -> bool:
        """Gives the KV cache of the attempt to another decode worker; to the same one if there is
        no other and it may not be at fault. Returns False, having done nothing, without a decode
        worker.
        """
        if not attempt.holds_kv:
            return False
        avoided, prefill = self._avoid(), attempt.placement.prefill
        others = avoided | self._doubtful | {parked.last_worker}
        placement = self._registry.place(attempt.part, others, prefill=prefill)
        if (
            placement := placement or self._registry.place(attempt.part, avoided, prefill=prefill)
        ) is None:
            return False
        self._num_attempts += 1
        self._timer.dispatched(placement, self._num_attempts, "handoff")
        attempt.hand_off(placement, self._num_attempts)
        return True

    def _take_over(self, suspended: SuspendedChoice) -> bool:
        """Gives the KV cache of a suspended choice to another decode worker, with its last token as
        the first. Returns False, having done nothing, if that is not possible.
        """
        emitted = self._emitted[suspended.choice]
        known = len(self._request.submit.token_ids) + len(emitted) - 1
        if suspended.failure is not None or not emitted or suspended.kv.num_tokens != known:
            return False
        part = rest_of(self._request, suspended.choice, emitted[:-1])
        worker_id = suspended.worker[0]
        if (
            placement := self._registry.place(part, self._avoid() | {worker_id}, prefill=worker_id)
        ) is None:
            return False
        self._begin_attempt(part, placement, suspended)
        return True

    def _avoid(self) -> set[str]:
        """Returns the workers to avoid now."""
        now = self._clock()
        self._avoided = {worker: until for worker, until in self._avoided.items() if until > now}
        return set(self._avoided)

    def _avoid_first(self) -> list[set[str]]:
        """Returns which workers to avoid: at first also the doubtful ones and, if no other is left,
        these not.
        """
        avoided = self._avoid()
        return [avoided | self._doubtful, avoided] if self._doubtful else [avoided]

    def _watch_workers(self) -> None:
        """Has `wake` called whenever workers may have become free, as long as choices are parked."""
        if self._parked and self._unsubscribe is None:
            self._unsubscribe = self._registry.subscribe(self._wake)
        elif not self._parked and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None


def _cannot_serve(reason: str) -> Unavailable:
    return Unavailable(f"no worker can serve the request now: {reason}")
