"""Whether a request goes to the workers now, waits here, or is refused.

Requests wait here and not at the workers, because here their order can still be chosen (fair_queue.py). Whoever could
not be served in time is told at once, while it may still ask elsewhere. Nobody waits while there is room, and nobody
waits for other routers' requests alone: without a request under way the first is always let through.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from ...proto.errors import InvalidArgument, Overloaded
from ..request import TokenRequest
from .fair_queue import FairQueue, FairQueueFull, QueueEntry
from .rates import DrainRate
from .registry import WorkerRegistry, needed_room
from .worker_state import Capacity, growth_tokens

_OVERTIME: Final = 10.0
"""Times the longest predicted wait: what a request that was let in waits at most, if the prediction was wrong. Late
refusals are the worst, so it is not held to it to the second."""

_MIN_RETRY_SECONDS: Final = 1.0
_MAX_RETRY_SECONDS: Final = 60.0


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting(QueueEntry):
    request: TokenRequest
    needed: Capacity
    admitted: "asyncio.Future[None]"


class Admission:
    """Slots for requests, as many as the view has room for. Lives in one event loop; every operation is O(log n)."""

    def __init__(
        self,
        view: WorkerRegistry,
        *,
        max_queued_tokens: int = 1_048_576,
        max_queued_requests: int = 1_024,
        max_queue_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tokens are those of prompts and of what is expected to be generated. `max_queue_seconds` is the longest wait
        that a newcomer may expect."""
        self._view = view
        self._max_queue_seconds = max_queue_seconds
        self._clock = clock
        self._queue: FairQueue[_Waiting] = FairQueue(max_tokens=max_queued_tokens, max_requests=max_queued_requests)
        self._drain = DrainRate(clock)
        self._num_active = 0
        view.subscribe(self._hand_out)

    @property
    def num_active(self) -> int:
        """Requests that have a slot."""
        return self._num_active

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Work that waits: prompts, and what is expected to be generated."""
        return self._queue.num_tokens

    def check_early(self, estimated_tokens: int, tenant: str, priority: int = 0, deadline: float | None = None) -> None:
        """Raises Overloaded if a request of about so many tokens would be refused now; costs microseconds, so that it
        can be asked before a prompt is tokenised."""
        if self._queue:
            ticket = QueueEntry(tenant=tenant, priority=priority, num_tokens=max(estimated_tokens, 1))
            self._check_wait(ticket, deadline)
            if not self._queue.takes(ticket):
                raise self._full(ticket)

    @asynccontextmanager
    async def slot(self, request: TokenRequest) -> AsyncIterator[None]:
        """Holds a place for the request's whole way; waits for one if there is none.

        Raises InvalidArgument for more sequences than any worker runs at once, and Overloaded, with the time after
        which it may be worth another try: at once if the queue is full or the wait predicted to be too long, later if
        that turns out so or somebody else needs the place more. Cancelling a request that waits takes it out of the
        queue."""
        needed = self._check_size(needed_room(request))
        if self._queue or not self._fits(needed):
            await self._wait(request, needed)
        else:
            self._take(request)
        begun = self._clock()
        try:
            yield
        finally:
            self._drain.finish(_work_of(request), self._clock() - begun)
            self._give(request)

    async def _wait(self, request: TokenRequest, needed: Capacity) -> None:
        """Returns with a slot taken."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(
            tenant=request.tenant,
            priority=request.priority,
            num_tokens=_work_of(request),
            request=request,
            needed=needed,
            admitted=loop.create_future(),
        )
        self._check_wait(waiting, request.deadline)
        try:
            displaced = self._queue.push(waiting)
        except FairQueueFull:
            raise self._full(waiting) from None
        self._drain.fill()
        for other in displaced:
            if not other.admitted.done():
                other.admitted.set_exception(self._full(other))
        overtime = _OVERTIME * self._max_queue_seconds
        timer = loop.call_later(min(overtime, self._slack(request.deadline)), self._expire, waiting)
        self._hand_out()
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise
        finally:
            timer.cancel()

    def _withdraw(self, waiting: _Waiting) -> None:
        """The one who waits is cancelled: before it was admitted, or after and before it could know."""
        if waiting.admitted.cancelled():
            self._leave(waiting)
        elif waiting.admitted.exception() is None:
            self._give(waiting.request)

    def _expire(self, waiting: _Waiting) -> None:
        if not waiting.admitted.done():
            waiting.admitted.set_exception(Overloaded("the request waited too long", self._retry_after(waiting)))
            self._leave(waiting)

    def _leave(self, waiting: _Waiting) -> None:
        """Without a slot. Whoever comes after may fit."""
        self._queue.remove(waiting)
        self._left()
        self._hand_out()

    def _hand_out(self) -> None:
        """Gives slots to those who are next, as long as there is room."""
        while (waiting := self._queue.first()) is not None:
            if waiting.admitted.cancelled():  # its task does not know yet
                self._queue.remove(waiting)
                self._left()
                continue
            if not self._fits(waiting.needed):
                return
            self._queue.pop()
            self._take(waiting.request)
            self._drain.drain(waiting.num_tokens)
            self._left()
            waiting.admitted.set_result(None)

    def _left(self) -> None:
        if not self._queue:
            self._drain.clear()

    def _take(self, request: TokenRequest) -> None:
        self._num_active += 1
        self._drain.begin(_work_of(request))
        self._view.reserve(request)

    def _give(self, request: TokenRequest) -> None:
        self._num_active -= 1
        self._view.unreserve(request.request_id)
        self._hand_out()

    def _fits(self, needed: Capacity) -> bool:
        """Without a decode worker there is nothing to wait for: placing the request says so."""
        room = self._view.room()
        if not self._num_active or room is None:
            return True
        return needed.sequences <= room.sequences and needed.kv_tokens <= room.kv_tokens and room.prompt_tokens > 0

    def _check_size(self, needed: Capacity) -> Capacity:
        """What is enough to begin: all of a worker, if that is less. Raises InvalidArgument for what no worker runs."""
        largest = self._view.largest()
        if largest is None:
            return needed
        if needed.sequences > largest.sequences:
            raise InvalidArgument(f"{needed.sequences} sequences; a worker runs at most {largest.sequences}", "n")
        return replace(needed, kv_tokens=min(needed.kv_tokens, largest.kv_tokens))

    def _check_wait(self, ticket: QueueEntry, deadline: float | None) -> None:
        """Raises Overloaded if the ticket is predicted to wait for longer than it may."""
        predicted = self._drain.seconds(self._queue.tokens_ahead(ticket))
        slack = self._slack(deadline)
        if predicted > min(self._max_queue_seconds, slack) or slack <= 0:
            raise Overloaded(f"the queue is about {predicted:.1f} seconds long", self._retry_after(ticket))

    def _slack(self, deadline: float | None) -> float:
        """Seconds after which it is too late even for a request that goes first then."""
        return math.inf if deadline is None else deadline - self._clock() - self._view.least_prefill_seconds()

    def _full(self, ticket: QueueEntry) -> Overloaded:
        return Overloaded("the queue is full", self._retry_after(ticket))

    def _retry_after(self, ticket: QueueEntry) -> float:
        predicted = self._drain.seconds(self._queue.tokens_ahead(ticket))
        return min(max(predicted, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)


def _work_of(request: TokenRequest) -> int:
    """Tokens of the prompt, and those that it is expected to generate."""
    return len(request.prompt) + growth_tokens(request)
