"""Admits a request to the workers, lets it wait here, or refuses it.

Requests wait here and not at the workers, because here their order can still be chosen
(fair_queue.py): workers get as much as keeps them busy (worker_state.py). A request that could not
be served in time is refused at once, while the caller may still try elsewhere. The wait until its
prompt begins is the longer one of two predictions, each of which counts the prompts that the
workers have, of whichever router: that they compute what waits here before it as fast as they
report, and that this leaves the queue as fast as others did before. The first one is right from the
first request of a burst on, the second one knows what else makes requests wait, such as sequences
of decode workers.

A short prompt, which decode workers may compute, passes those that wait for prefill workers, and
delays none of them: for the first there is room beside it, but for its prompt.

No request waits while there is free capacity, and none waits for the requests of other routers
alone: without an active request of this router the first one is always admitted. Routers share
nothing, so several may admit into the same free capacity between two reports of a worker; the
worker's own queue takes the excess.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from ...proto.errors import InvalidArgument, Overloaded, TandemError
from ...proto.metrics import NULL_METRICS, REFUSALS, Metrics
from ..fair_queue import FairQueue, QueueEntry
from ..request import TokenRequest
from .capacity import NO_CAPACITY, Capacity, DrainRate, required_capacity
from .registry import WorkerRegistry

WAIT_TOLERANCE: Final = 10.0
"""How many times `max_queue_seconds` a request may wait that was let into the queue, if the
prediction was wrong: a late refusal costs the caller most, so that prediction is not enforced to
the second.
"""

QUEUE_SECONDS_HELP: Final = (
    "Seconds that a new request may be predicted to wait, in the router and at a worker, until "
    "that begins with its"
    " prompt; beyond that it is refused at once. One that was let into the queue is refused after "
    f"{WAIT_TOLERANCE:g}"
    " times as long."
)
"""What `max_queue_seconds` means, for every page that describes it."""

_MIN_RETRY_SECONDS: Final = 1.0
_MAX_RETRY_SECONDS: Final = 60.0


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting(QueueEntry):
    """A request that waits."""

    request: TokenRequest
    needed: Capacity
    admitted: "asyncio.Future[None]"


class Admission:
    """Gives requests slots, as many as the workers have capacity for. Lives in one event loop;
    every operation is O(log n).
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
        """`max_queued_tokens` counts prompts and what they are expected to generate.
        `max_queue_seconds`: see QUEUE_SECONDS_HELP.
        """
        self._metrics = metrics
        self.num_active = 0  # requests that hold a slot
        self.queue: FairQueue[_Waiting] = FairQueue(
            max_tokens=max_queued_tokens, max_requests=max_queued_requests
        )
        self._short: dict[
            _Waiting, None
        ] = {}  # of the queue, those that may pass the others; the oldest first
        self._registry = registry
        self._max_queue_seconds = max_queue_seconds
        self._clock = clock
        self._drain = DrainRate(clock)
        self._running: Counter[str] = (
            Counter()
        )  # by tenant, in parts per million of the largest worker
        self._shares: dict[str, int] = {}  # by request that runs, the same
        self._refusal: TandemError | None = None  # of every request, once the router stops
        registry.subscribe(self._admit_waiting)

    def check_early(
        self, needed: Capacity, tenant: str, priority: int = 0, deadline: float | None = None
    ) -> None:
        """Raises Overloaded if a request that needs about so much would be refused now; costs
        microseconds, so that it can be asked before a prompt is tokenized.
        """
        self._check_stopped()
        if not self._fits_now(needed):
            entry = QueueEntry(
                tenant=tenant, priority=priority, num_tokens=max(needed.kv_tokens, 1)
            )
            self._check_wait(entry, deadline)
            if self.queue.displaced_by(entry) is None:
                raise self._overloaded("the queue is full", entry, "full")

    @asynccontextmanager
    async def slot(self, request: TokenRequest) -> AsyncIterator[Callable[[], None]]:
        """Holds a slot while the request runs; waits for one if there is none. Yields what gives it
        back earlier.

        Raises InvalidArgument for more sequences than any worker runs at once, and Overloaded, with
        the time after
        which another try may be worth it: at once if the queue is full or the predicted wait too
        long, later if the wait turns out too long or another request displaces this one. Cancelling
        a request that waits removes it from the queue. Once stopped, raises what `stop` was given.
        """
        self._check_stopped()
        required = required_capacity(request)
        needed = self._limit_to_worker(required)
        if not self._fits_now(needed):
            entry = _Waiting(
                tenant=request.tenant,
                priority=request.submit.priority,
                num_tokens=required.kv_tokens,
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
        """Returns with a slot taken."""
        deadline = entry.request.deadline
        self._check_wait(entry, deadline)
        displaced = self.queue.push(entry)
        if displaced is None:
            raise self._overloaded("the queue is full", entry, "full")
        self._drain.fill()
        if self._registry.may_skip_prefill(entry.needed.prompt_tokens):
            self._short[entry] = None
        for other in displaced:
            self._short.pop(other, None)
            if not other.admitted.done():
                other.admitted.set_exception(self._overloaded("the queue is full", other, "full"))
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
        """Refuses all requests that wait, and from now on every other, too."""
        self._refusal = error
        while (entry := self.queue.first()) is not None:
            self._discard(entry)
            if not entry.admitted.done():
                entry.admitted.set_exception(error)

    def _check_stopped(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # which would grow with each

    def _expire(self, entry: _Waiting) -> None:
        if not entry.admitted.done():
            entry.admitted.set_exception(
                self._overloaded("the request waited too long", entry, "waited")
            )
            self._remove(entry)

    def _remove(self, entry: _Waiting) -> None:
        """Removes a request from the queue without a slot; a later one may fit."""
        self._discard(entry)
        self._admit_waiting()

    def _discard(self, entry: _Waiting) -> None:
        self.queue.remove(entry)
        self._short.pop(entry, None)

    def _admit_waiting(self) -> None:
        """Gives slots to the requests that are next while they fit."""
        while (entry := self._next()) is not None:
            if entry.admitted.cancelled():  # its task has not run since
                self._discard(entry)
                continue
            if entry is self.queue.first():
                self.queue.pop()  # unlike `remove` charges the tenant
            self._discard(entry)
            self._take(entry.request)
            self._drain.depart(entry.num_tokens)
            entry.admitted.set_result(None)
        if not self.queue:
            self._drain.clear()

    def _next(self) -> _Waiting | None:
        """Returns a request of the queue that need not wait any more, or no longer waits."""
        for entry, fits in (
            (self.queue.first(), self._fits),
            (next(iter(self._short), None), self._passes),
        ):
            if entry is not None and (entry.admitted.cancelled() or fits(entry.needed)):
                return entry
        return None

    def _take(self, request: TokenRequest) -> None:
        self.num_active += 1
        self._registry.reserve(request)
        self._count_running(
            request.tenant, self._shares.setdefault(request.request_id, self._share(request))
        )

    def _give_back(self, request: TokenRequest) -> None:
        self.num_active -= 1
        self._registry.release(request.request_id)
        self._count_running(request.tenant, -self._shares.pop(request.request_id, 0))
        self._admit_waiting()

    def _count_running(self, tenant: str, share: int) -> None:
        self._running[tenant] += share
        if self._running[tenant] <= 0:
            del self._running[tenant]
        self.queue.set_running(tenant, self._running.get(tenant, 0))

    def _share(self, request: TokenRequest) -> int:
        """Returns what a request takes of the largest worker's sequences or of its KV cache,
        whichever part is larger (dominant resource fairness, Ghodsi et al., 2011).
        """
        needed, largest = required_capacity(request), self._registry.largest()
        if largest is None:
            return 1
        part = max(
            needed.sequences / max(largest.sequences, 1),
            needed.kv_tokens / max(largest.kv_tokens, 1),
        )
        return max(round(1e6 * part), 1)

    def _fits(self, needed: Capacity) -> bool:
        """Without a worker there is nothing to wait for: the placement of the request fails at
        once.
        """
        free = self._registry.free(needed.prompt_tokens)
        if not self.num_active or free is None:
            return True
        return (
            needed.sequences <= free.sequences
            and needed.kv_tokens <= free.kv_tokens
            and free.prompt_tokens > 0
        )

    def _fits_now(self, needed: Capacity) -> bool:
        """Returns whether a new request need not wait."""
        return self._passes(needed) and not self._short if self.queue else self._fits(needed)

    def _passes(self, needed: Capacity) -> bool:
        """Returns whether a request may pass all that wait."""
        first = self.queue.first()
        both = needed if first is None else needed + first.needed._replace(prompt_tokens=0)
        return self._registry.may_skip_prefill(needed.prompt_tokens) and self._fits(both)

    def _limit_to_worker(self, required: Capacity) -> Capacity:
        """Returns what is enough to begin: the KV cache of a whole worker, if that is less. Raises
        InvalidArgument for more sequences than any worker runs.
        """
        largest = self._registry.largest()
        if largest is None:
            return required
        if required.sequences > largest.sequences:
            raise InvalidArgument(
                f"{required.sequences} sequences; a worker runs at most {largest.sequences}", "n"
            )
        return required._replace(kv_tokens=min(required.kv_tokens, largest.kv_tokens))

    def _check_wait(self, entry: QueueEntry, deadline: float | None) -> None:
        """Raises Overloaded if the entry is predicted to wait longer than it may."""
        predicted, slack = self._predict_wait(entry), self._slack(deadline)
        if predicted > min(self._max_queue_seconds, slack) or slack <= 0:
            raise self._overloaded(
                f"the queue is about {predicted:.1f} seconds long", entry, "predicted"
            )

    def _predict_wait(self, entry: QueueEntry) -> float:
        """Returns the seconds after which a worker would begin with the prompt of a new entry."""
        num_tokens, at_workers = self.queue.tokens_ahead(entry), self._registry.prefill_queue()
        prompts = at_workers.seconds(self._drain.prompt_tokens(num_tokens))
        free = self._registry.free() or NO_CAPACITY
        return max(prompts, at_workers.fixed + self._drain.seconds(num_tokens, free))

    def _slack(self, deadline: float | None) -> float:
        """Returns the seconds after which even a request that is next would miss its deadline."""
        return (
            math.inf
            if deadline is None
            else deadline - self._clock() - self._registry.least_prefill_seconds()
        )

    def _overloaded(self, message: str, entry: QueueEntry, reason: str) -> Overloaded:
        self._metrics.add(REFUSALS, reason=reason)
        seconds = min(max(self._predict_wait(entry), _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
        return Overloaded(message, seconds)
