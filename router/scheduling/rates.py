"""Estimates how fast workers are from observed times. Knows nothing of requests; the clock is the
caller's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 0.95
"""What an observation leaves of the weight of those before it: about the last twenty count."""

_TRUSTED: Final = 5
"""Observations after which one that takes far longer than predicted is cut to `_OUTLIER` times the
prediction: a single stall, such as a first compilation, must not lead requests elsewhere for long.
"""

_OUTLIER: Final = 4.0
_SPREAD: Final = 0.1
"""Amounts that differ by less than this part of their mean say little about the cost of a unit."""

_HALF_LIFE: Final = 60.0
"""Seconds after which half of a worker's own estimate has given way to that of the best worker, so
that a worker that was slow, and therefore unused, is tried again.
"""

_REFRESH: Final = 1.0
"""Seconds for which the best worker is not determined anew and no estimate ages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Seconds that work takes as a linear function of its amount: `fixed`, and `each` for every
    unit.
    """

    fixed: float
    each: float

    def seconds(self, amount: float) -> float:
        return self.fixed + self.each * amount


class LinearFit:
    """Fits a LinearCost to (amount, seconds) by least squares, later observations weighing more.

    As far as the amounts differ too little to tell the slope from the fixed part, the slope is
    pulled towards that of a
    prior made as fast as what was observed: prompts of one length say how long a token takes, too.
    Neither is ever negative.
    """

    def __init__(self) -> None:
        self._count = 0
        self._weight = 0.0
        self._amount = self._seconds = self._square = self._product = 0.0  # weighted sums

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
        """Returns the fit; the prior before the first observation."""
        if not self._count:
            return prior
        amount, seconds = self._amount / self._weight, self._seconds / self._weight
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
    """Holds the costs of one kind of work on every worker that does it.

    A worker without observations is taken to be as fast as the best one, so that it is tried and
    then measured. Without any observation `neutral` is the cost on every worker. `typical` is the
    amount at which costs are compared.
    """

    def __init__(self, neutral: LinearCost, *, typical: float, clock: Callable[[], float]) -> None:
        self._neutral = neutral
        self._typical = typical
        self._clock = clock
        self._fits: dict[str, LinearFit] = {}
        self._observed: dict[str, float] = {}  # when, last
        self._costs: dict[str, LinearCost] = {}  # valid as long as `_best`
        self._best = neutral
        self._best_until = -math.inf

    @property
    def known(self) -> bool:
        """Whether there is any observation."""
        return bool(self._fits)

    def observe(self, worker_id: str, amount: float, seconds: float) -> None:
        """Adds an observation: work of `amount` took the worker `seconds`."""
        if worker_id not in self._fits:
            self._best_until = -math.inf
        self._fits.setdefault(worker_id, LinearFit()).observe(amount, seconds, self._neutral)
        self._observed[worker_id] = self._clock()
        self._costs.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        """Removes what was observed of a worker that has left or restarted."""
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
        """Returns the present estimate for one worker."""
        best, cost = self.best(), self._costs.get(worker_id)
        if cost is None:
            cost = self._costs[worker_id] = (
                self._aged(worker_id, best) if worker_id in self._fits else best
            )
        return cost

    def _aged(self, worker_id: str, best: LinearCost) -> LinearCost:
        own = self._fits[worker_id].cost(best)
        weight = 0.5 ** ((self._clock() - self._observed[worker_id]) / _HALF_LIFE)
        return LinearCost(
            fixed=best.fixed + weight * (own.fixed - best.fixed),
            each=best.each + weight * (own.each - best.each),
        )
