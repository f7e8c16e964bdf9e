"""Estimates the speed of workers from observed times.

Knows nothing of requests. The caller provides the clock.
"""

import math
from collections.abc import Callable
from typing import Final

from ...proto.costs import LinearCost, LinearFit

_HALF_LIFE: Final = 60.0
"""Seconds until a worker's estimate has moved half-way to the estimate of the best worker.

So a worker that was slow, and therefore unused, is tried again.
"""

_REFRESH: Final = 1.0
"""Seconds for which the best worker and the aged estimates are cached."""


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
        self._costs: dict[str, LinearCost] = {}  # valid as long as `_best`
        self._best = neutral
        self._best_until = -math.inf

    @property
    def known(self) -> bool:
        """Returns True if there is any observation."""
        return bool(self._fits)

    def observe(self, worker_id: str, amount: float, seconds: float) -> None:
        """Adds an observation: the worker took `seconds` for work of `amount`."""
        if worker_id not in self._fits:
            self._best_until = -math.inf
        self._fits.setdefault(worker_id, LinearFit()).observe(amount, seconds, self._neutral)
        self._observed[worker_id] = self._clock()
        self._costs.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        """Removes the observations of a worker that has left or restarted."""
        if self._fits.pop(worker_id, None) is not None:
            del self._observed[worker_id]
            self._best_until = -math.inf

    def best(self) -> LinearCost:
        """Returns the cost on the fastest worker."""
        now = self._clock()
        if now >= self._best_until:
            costs = [fit.cost(self._neutral) for fit in self._fits.values()]
            self._best = min(
                costs, key=lambda cost: cost.seconds(self._typical), default=self._neutral
            )
            self._best_until = now + _REFRESH
            self._costs.clear()
        return self._best

    def cost(self, worker_id: str) -> LinearCost:
        """Returns the current estimate for one worker."""
        best = self.best()  # clears `_costs` when it is outdated
        cost = self._costs.get(worker_id)
        if cost is None:
            cost = self._aged(worker_id, best) if worker_id in self._fits else best
            self._costs[worker_id] = cost
        return cost

    def _aged(self, worker_id: str, best: LinearCost) -> LinearCost:
        own = self._fits[worker_id].cost(best)
        weight = 0.5 ** ((self._clock() - self._observed[worker_id]) / _HALF_LIFE)
        return LinearCost(
            fixed=best.fixed + weight * (own.fixed - best.fixed),
            each=best.each + weight * (own.each - best.each),
        )
