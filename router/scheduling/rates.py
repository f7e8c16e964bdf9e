"""Estimates the speed of workers from observed times.

Knows nothing of requests. The caller provides the clock.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 0.95
"""Each observation multiplies the weight of the earlier ones by this: about the last 20 count."""

_TRUSTED: Final = 5
"""After this number of observations, a longer time is cut to `_OUTLIER` times the prediction.

A single stall, such as a first compilation, must not redirect requests for long.
"""

_OUTLIER: Final = 4.0
_SPREAD: Final = 0.1
"""Amounts that differ by less than this share of their mean tell little about the unit cost."""

_HALF_LIFE: Final = 60.0
"""Seconds until a worker's estimate has moved half-way to the estimate of the best worker.

So a worker that was slow, and therefore unused, is tried again.
"""

_REFRESH: Final = 1.0
"""Seconds for which the best worker and the aged estimates are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Predicts the seconds of work as `fixed` plus `each` for every unit of its amount."""

    fixed: float
    each: float

    def seconds(self, amount: float) -> float:
        return self.fixed + self.each * amount


class LinearFit:
    """Fits a LinearCost to (amount, seconds) by least squares; later observations weigh more.

    If the amounts differ too little to separate the slope from the fixed part, the slope is pulled
    towards the slope of a prior, scaled to the observed speed. So prompts of one length also yield
    a time per token. Neither part is ever negative.
    """

    def __init__(self) -> None:
        self._count = 0
        self._weight = 0.0
        # Weighted sums.
        self._amount = 0.0
        self._seconds = 0.0
        self._square = 0.0
        self._product = 0.0

    def observe(self, amount: float, seconds: float, prior: LinearCost) -> None:
        """Adds an observation: work of `amount` took `seconds`."""
        if self._count >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * self.cost(prior).seconds(amount))
        self._count += 1
        self._weight = self._weight * _MEMORY + 1
        self._amount = self._amount * _MEMORY + amount
        self._seconds = self._seconds * _MEMORY + seconds
        self._square = self._square * _MEMORY + amount * amount
        self._product = self._product * _MEMORY + amount * seconds

    def cost(self, prior: LinearCost) -> LinearCost:
        """Returns the fit, or the prior before the first observation."""
        if not self._count:
            return prior
        amount = self._amount / self._weight
        seconds = self._seconds / self._weight
        pull = (_SPREAD * amount) ** 2
        if not pull:  # the amounts are 0, or too small to be squared
            return LinearCost(fixed=seconds, each=prior.each)
        variance = max(self._square / self._weight - amount * amount, 0.0)
        covariance = self._product / self._weight - amount * seconds
        expected = prior.seconds(amount)
        likely = prior.each * seconds / expected if expected else 0.0
        each = min(max((covariance + pull * likely) / (variance + pull), 0.0), seconds / amount)
        return LinearCost(fixed=seconds - each * amount, each=each)


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
