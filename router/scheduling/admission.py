"""Admits a request to the workers, queues it, or refuses it.

Requests wait in the router and not at the workers, because only the router can still choose their
order: by priority, fair among tenants, and of a tenant the one that is due first (fair_queue.py).
Workers get only the work that keeps them busy (worker_state.py). A request that cannot be served in
time is refused at once, so that the caller can try elsewhere.

The predicted wait until its prompt begins is the longer one of two predictions. Both count the
prompts that the workers have from all routers. The first assumes that the workers compute the
prompts ahead in the queue at the speed that they report. It is right from the first request of a
burst on. The second assumes that the queue drains as fast as before. It covers all other reasons to
wait, such as full decode workers.

A short prompt, which decode workers may compute, passes the requests that wait for prefill workers.
It delays none of them, because it is admitted only if the decode workers also have room for the
first of these requests. Short prompts wait in the same order as all, in a queue of their own beside
the queue of all. While a short prompt may pass, only this queue and the prompts of decode workers
count for its predicted wait.

The first resumption of a stream whose router was lost is admitted at once, like a stream whose
worker was lost: the service has admitted it before, and its client waits for the next token.

No request waits while there is free capacity, or for requests of other routers alone: without an
active request of this router, the first one is always admitted. While the only workers are lost,
the queue waits until one reports again, or until they have left the directory. Routers share
nothing, so several may admit into the same free capacity between two reports of a worker. Then the
excess waits in the worker's queue.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from ...proto import worker_pb2
from ...proto.errors import InvalidArgument, Overloaded, TandemError, Unavailable
from ...proto.metrics import NULL_METRICS, REFUSALS, Metrics
from ..due_order import QueueEntry
from ..fair_queue import FairQueue
from ..request import TokenRequest
from .capacity import NO_CAPACITY, Capacity, DrainRate, required_capacity
from .registry import WorkerRegistry

WAIT_TOLERANCE: Final = 10.0
"""The maximum wait of a queued request, as a multiple of `max_queue_seconds`.

It is generous, because the prediction may be wrong and a late refusal costs the caller most.
"""

QUEUE_SECONDS_HELP: Final = (
    "The maximum predicted wait of a new request, in seconds, in the router and at a worker, until "
    "the worker begins with its prompt; a request with a longer predicted wait is refused at once. "
    f"A queued request is refused after {WAIT_TOLERANCE:g} times this wait."
)
"""The description of `max_queue_seconds` for every page that describes it."""

_MIN_RETRY_SECONDS: Final = 1.0
_MAX_RETRY_SECONDS: Final = 60.0


@dataclass(eq=False, slots=True, kw_only=True)
class _Entry(QueueEntry):
    """A request that may have to wait."""

    needed: Capacity


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting(_Entry):
    """A request that waits."""

    request: TokenRequest
    admitted: "asyncio.Future[None]"


class Admission:
    """Gives permits to requests while the workers have capacity.

    Used in one event loop; every operation is O(log n).
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        *,
        max_queued_tokens: int = 1_048_576,
        max_queued_requests: int = 1_024,
        max_queue_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics = NULL_METRICS,
    ) -> None:
        """Starts with an empty queue.

        `max_queued_tokens` counts prompts and expected completions. `max_queue_seconds`: see
        QUEUE_SECONDS_HELP.
        """
        self._metrics = metrics
        self.num_active = 0  # requests that hold a permit
        self.queue: FairQueue[_Waiting] = FairQueue(
            max_tokens=max_queued_tokens, max_requests=max_queued_requests
        )
        # The queued requests that may pass the others; the bounds of `queue` bound it too.
        self._short: FairQueue[_Waiting] = FairQueue(
            max_tokens=max_queued_tokens, max_requests=max_queued_requests
        )
        self._queues = (self.queue, self._short)
        self._registry = registry
        self._capacity = registry.capacity
        self._max_queue_seconds = max_queue_seconds
        self._clock = clock
        self._drain = DrainRate(clock)
        # Running share by tenant, in parts per million of the largest worker.
        self._running: Counter[str] = Counter()
        self._shares: dict[str, int] = {}  # the same by running request
        self._refusal: TandemError | None = None  # raised for every request after `stop`
        self._capacity.subscribe(self._admit_waiting)

    def check_early(
        self,
        needed: Capacity,
        tenant: str,
        priority: int = 0,
        deadline: float | None = None,
        first_token_due: float | None = None,
        arrived: float = math.inf,
    ) -> None:
        """Raises Overloaded if a request that needs about this capacity would be refused now.

        Raises Unavailable if no worker could take it, and none was lost since it arrived. Takes
        microseconds, so that it can run before a prompt is tokenized. `deadline`, `first_token_due`
        and `arrived`: see TokenRequest.
        """
        self._check_stopped()
        if self._capacity.free() is None and not self._registry.has_lost_since(arrived):
            raise Unavailable(self._registry.unavailable_message)
        if not self._fits_now(needed):
            entry = _Entry(
                needed=needed,
                tenant=tenant,
                priority=priority,
                num_tokens=max(needed.kv_tokens, 1),
                due=self._due(self._clock(), deadline, first_token_due),
            )
            self._check_wait(entry, deadline)
            if self.queue.displaced_by(entry) is None:
                raise self._overloaded("the queue is full", entry, "full")

    @asynccontextmanager
    async def permit(self, request: TokenRequest) -> AsyncIterator[Callable[[], None]]:
        """Waits for a permit and holds it; yields a function that gives it back earlier.

        Raises InvalidArgument for more sequences than any worker runs at once, and Unavailable if
        no decode worker is listed and the prefill workers do not run so many. Raises Overloaded,
        with the time until a retry may succeed: at once if the queue is full or the predicted wait
        is too long, later if the real wait is too long or another request displaces this one. After
        `stop`, raises the error of `stop`. Cancelling a queued request removes it from the queue.
        """
        self._check_stopped()
        required = required_capacity(request, self._capacity.cost)
        needed = self._limit_to_worker(required)
        is_resumption = request.submit.turn == worker_pb2.TURN_FIRST_OF_PRIORITY
        if not is_resumption and not self._fits_now(needed):
            entry = _Waiting(
                tenant=request.tenant,
                priority=request.submit.priority,
                num_tokens=required.kv_tokens,
                due=self._due(request.arrived, request.deadline, request.first_token_due),
                request=request,
                needed=needed,
                admitted=asyncio.get_running_loop().create_future(),
            )
            await self._wait(entry)
        else:
            self._take(request)
        begun = self._clock()
        self._drain.begin(required)
        with ExitStack() as scope:
            scope.callback(self._give_back, request)
            scope.callback(lambda: self._drain.finish(required, self._clock() - begun))
            yield scope.close

    async def _wait(self, entry: _Waiting) -> None:
        """Waits in the queue until the request has a permit."""
        deadline = entry.request.deadline
        self._check_wait(entry, deadline)
        displaced = self.queue.push(entry)
        if displaced is None:
            raise self._overloaded("the queue is full", entry, "full")
        self._drain.fill()
        for other in displaced:
            self._short.remove(other)
            if not other.admitted.done():
                other.admitted.set_exception(self._overloaded("the queue is full", other, "full"))
        if self._capacity.may_skip_prefill(entry.needed.prompt_tokens):
            self._short.push(entry)
        longest = min(WAIT_TOLERANCE * self._max_queue_seconds, self._slack(deadline))
        timer = asyncio.get_running_loop().call_later(longest, self._expire, entry)
        self._admit_waiting()
        try:
            await entry.admitted
        except asyncio.CancelledError:
            if entry.admitted.cancelled():
                self._remove(entry)
            elif entry.admitted.exception() is None:  # admitted before its task could run
                self._give_back(entry.request)
            raise
        finally:
            timer.cancel()

    def stop(self, error: TandemError) -> None:
        """Refuses all queued requests and every later one with `error`."""
        self._refusal = error
        while (entry := self.queue.first()) is not None:
            self._discard(entry)
            if not entry.admitted.done():
                entry.admitted.set_exception(error)

    def _check_stopped(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # each raise adds to the traceback

    def _expire(self, entry: _Waiting) -> None:
        if not entry.admitted.done():
            entry.admitted.set_exception(
                self._overloaded("the request waited too long", entry, "waited")
            )
            self._remove(entry)

    def _remove(self, entry: _Waiting) -> None:
        """Removes a request without a permit; then a later one may fit."""
        self._discard(entry)
        self._admit_waiting()

    def _discard(self, entry: _Waiting) -> None:
        for queue in self._queues:
            queue.remove(entry)

    def _admit_waiting(self) -> None:
        """Gives permits to the next requests while they fit."""
        while (entry := self._next()) is not None:
            if entry.admitted.cancelled():  # its task has not removed it yet
                self._discard(entry)
                continue
            for queue in self._queues:
                queue.serve(entry)
            self._take(entry.request)
            self._drain.depart(entry.num_tokens)
            entry.admitted.set_result(None)
        if not self.queue:
            self._drain.clear()

    def _next(self) -> _Waiting | None:
        """Returns a queued request that fits now or was cancelled."""
        for entry, fits in (
            (self.queue.first(), self._fits),
            (self._short.first(), self._passes),
        ):
            if entry is not None and (entry.admitted.cancelled() or fits(entry.needed)):
                return entry
        return None

    def _take(self, request: TokenRequest) -> None:
        self.num_active += 1
        self._capacity.reserve(request)
        self._count_running(
            request.tenant, self._shares.setdefault(request.request_id, self._share(request))
        )

    def _give_back(self, request: TokenRequest) -> None:
        self.num_active -= 1
        self._capacity.release(request.request_id)
        self._count_running(request.tenant, -self._shares.pop(request.request_id, 0))
        self._admit_waiting()

    def _count_running(self, tenant: str, share: int) -> None:
        self._running[tenant] += share
        if self._running[tenant] <= 0:
            del self._running[tenant]
        for queue in self._queues:
            queue.set_running(tenant, self._running.get(tenant, 0))

    def _share(self, request: TokenRequest) -> int:
        """Returns the request's dominant share of the largest worker, in parts per million.

        The dominant share is the larger one of its shares of the sequences and of the KV cache
        (dominant resource fairness, Ghodsi et al., 2011).
        """
        needed = required_capacity(request, self._capacity.cost)
        largest = self._capacity.largest()
        if largest is None:
            return 1
        part = max(
            needed.sequences / max(largest.sequences, 1),
            needed.kv_tokens / max(largest.kv_tokens, 1),
        )
        return max(round(1e6 * part), 1)

    def _fits(self, needed: Capacity) -> bool:
        """Returns True if the request fits now; also without a worker, because placing it fails.

        While the only workers are lost, nothing behind a queue fits: they may report again within
        seconds, and the queue would go to them at once and in no order.
        """
        free = self._capacity.free(needed.prompt_tokens)
        if free is None:
            return not (self.queue and self._registry.has_lost)
        if not self.num_active:
            return True
        return _has_room(free, needed) and free.prompt_tokens > 0

    def _fits_now(self, needed: Capacity) -> bool:
        """Returns True if a new request need not wait."""
        if not self.queue:
            return self._fits(needed)
        return self._passes(needed) and not self._short

    def _passes(self, needed: Capacity) -> bool:
        """Returns True if a request may pass all queued requests."""
        return self._capacity.may_skip_prefill(needed.prompt_tokens) and self._fits(
            self._with_first(needed)
        )

    def _with_first(self, needed: Capacity) -> Capacity:
        """Returns the need of a short prompt and of the first queued request at decode workers."""
        first = self.queue.first()
        return needed if first is None else needed + first.needed._replace(prompt_tokens=0)

    def _limit_to_worker(self, required: Capacity) -> Capacity:
        """Limits the required KV cache to the largest worker.

        Raises InvalidArgument for more sequences than any worker runs, and Unavailable if a decode
        worker, of which none is listed now, may run them.
        """
        largest = self._capacity.largest()
        if largest is None:
            return required
        if required.sequences > largest.sequences:
            if self._capacity.pool(worker_pb2.ROLE_DECODE).largest() is None:
                raise Unavailable(
                    "no decode worker is ready; the prefill workers run at most "
                    f"{largest.sequences} sequences of a request"
                )
            raise InvalidArgument(
                f"has {required.sequences} sequences; "
                f"the maximum of a worker is {largest.sequences}",
                "n",
            )
        return required._replace(kv_tokens=min(required.kv_tokens, largest.kv_tokens))

    def _check_wait(self, entry: _Entry, deadline: float | None) -> None:
        """Raises Overloaded if the entry is predicted to wait longer than it may."""
        predicted = self._predict_wait(entry)
        slack = self._slack(deadline)
        if predicted > min(self._max_queue_seconds, slack) or slack <= 0:
            raise self._overloaded(
                f"the queue is about {predicted:.1f} seconds long; the request may wait less",
                entry,
                "predicted",
            )

    def _predict_wait(self, entry: _Entry) -> float:
        """Predicts the seconds until a worker would begin with the prompt of a new entry.

        A short prompt waits only for other short ones, unless decode workers have no room for it.
        """
        free = self._capacity.free() or NO_CAPACITY
        passes = self._capacity.may_skip_prefill(entry.needed.prompt_tokens) and _has_room(
            free, self._with_first(entry.needed)
        )
        num_tokens = (self._short if passes else self.queue).tokens_ahead(entry)
        at_workers = self._capacity.prefill_queue(is_local=passes)
        prompts = at_workers.seconds(self._drain.prompt_tokens(num_tokens))
        return max(prompts, at_workers.fixed + self._drain.seconds(num_tokens, free))

    def _due(self, arrived: float, deadline: float | None, first_token_due: float | None) -> float:
        """Returns the time that orders the requests of a tenant.

        Without `first_token_due`, the first token is due when the longest accepted wait ends, so
        requests of an SLO class cannot pass such a request for long.
        """
        if first_token_due is None:
            first_token_due = arrived + self._max_queue_seconds
        return first_token_due if deadline is None else min(first_token_due, deadline)

    def _slack(self, deadline: float | None) -> float:
        """Returns the longest wait after which the request can still meet its deadline."""
        if deadline is None:
            return math.inf
        return deadline - self._clock() - self._capacity.speeds.min_prefill_seconds()

    def _overloaded(self, message: str, entry: _Entry, reason: str) -> Overloaded:
        self._metrics.add(REFUSALS, reason=reason)
        seconds = min(max(self._predict_wait(entry), _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
        return Overloaded(message, seconds)


def _has_room(free: Capacity, needed: Capacity) -> bool:
    """Returns True if enough sequences and KV cache are free."""
    return needed.sequences <= free.sequences and needed.kv_tokens <= free.kv_tokens
