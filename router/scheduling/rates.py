"""Estimates the speed of workers from observed times.

Knows nothing of requests. The caller provides the clock.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

from ...proto.costs import LinearCost, LinearFit

_HALF_LIFE: Final = 60.0
"""Seconds until a worker's estimate has moved half-way to the estimate of the best worker.

So a worker that was slow, and therefore unused, is tried again.
"""

_REFRESH: Final = 1.0
"""Seconds for which an aged estimate is cached."""


class Rates:
    """Estimates the costs of one kind of work on each worker.

    A worker without observations is assumed to be as fast as the best one, so that it is tried and
    measured. Without any observation, every worker has the `neutral` cost. `typical` is the amount
    at which costs are compared.
    """

    def __init__(self, neutral: LinearCost, *, typical: float, clock: Callable[[], float]) -> None:
        self._neutral = neutral
        self._typical = typical
        self._clock = clock
        self._fits: dict[str, LinearFit] = {}
        self._observed: dict[str, float] = {}  # time of the last observation
        # Seconds for the typical amount and worker id, the fastest worker first.
        self._ordered: list[tuple[float, str]] = []
        self._seconds: dict[str, float] = {}  # those in `_ordered`
        self._best = neutral
        # By worker: the time until which an aged estimate is cached, and the estimate.
        self._aged: dict[str, tuple[float, LinearCost]] = {}

    def __contains__(self, worker_id: str) -> bool:
        """Returns True if there is an observation of the worker."""
        return worker_id in self._fits

    @property
    def known(self) -> bool:
        """Returns True if there is any observation."""
        return bool(self._fits)

    def observe(self, worker_id: str, amount: float, seconds: float) -> None:
        """Adds an observation: the worker took `seconds` for work of `amount`."""
        fit = self._fits.setdefault(worker_id, LinearFit())
        fit.observe(amount, seconds, self._neutral)
        self._observed[worker_id] = self._clock()
        self._aged.pop(worker_id, None)
        self._remove(worker_id)
        typical = self._seconds[worker_id] = fit.cost(self._neutral).seconds(self._typical)
        insort(self._ordered, (typical, worker_id))
        self._update_best()

    def forget(self, worker_id: str) -> None:
        """Removes the observations of a worker that has left or restarted."""
        if self._fits.pop(worker_id, None) is not None:
            del self._observed[worker_id]
            self._aged.pop(worker_id, None)
            self._remove(worker_id)
            self._update_best()

    def best(self) -> LinearCost:
        """Returns the cost on the fastest worker."""
        return self._best

    def cost(self, worker_id: str) -> LinearCost:
        """Returns the current estimate for one worker."""
        if worker_id not in self._fits:
            return self._best
        now = self._clock()
        until, cost = self._aged.get(worker_id, (now, self._best))
        if now >= until:
            cost = self._age(worker_id, now)
            self._aged[worker_id] = now + _REFRESH, cost
        return cost

    def _age(self, worker_id: str, now: float) -> LinearCost:
        best = self._best
        own = self._fits[worker_id].cost(best)
        weight = 0.5 ** ((now - self._observed[worker_id]) / _HALF_LIFE)
        return LinearCost(
            fixed=best.fixed + weight * (own.fixed - best.fixed),
            each=best.each + weight * (own.each - best.each),
        )

    def _remove(self, worker_id: str) -> None:
        """Removes a worker from the order, if it is there."""
        if (seconds := self._seconds.pop(worker_id, None)) is not None:
            del self._ordered[bisect_left(self._ordered, (seconds, worker_id))]

    def _update_best(self) -> None:
        self._best = self._neutral
        if self._ordered:
            _, fastest = self._ordered[0]
            self._best = self._fits[fastest].cost(self._neutral)
