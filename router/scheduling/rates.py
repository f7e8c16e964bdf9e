"""How fast workers are, from what they were seen to do. Knows nothing of requests; the clock is the caller's."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 0.95
"""What an observation leaves of the weight of those before: about the last twenty count."""

_TRUSTED: Final = 5
"""Observations after which one that takes far longer than predicted is cut to `_OUTLIER` times the prediction: a single
stall, such as a first compilation, must not turn requests away for long."""

_OUTLIER: Final = 4.0
_SPREAD: Final = 0.1
"""Amounts that differ by less than this part of their mean say little about what each costs."""

_HALF_LIFE: Final = 60.0
"""Seconds after which half of a worker's own rate has given way to its best peer's: whom nobody used since it was slow
is tried again."""

_REFRESH: Final = 1.0
"""Seconds for which the best peer is not sought anew, and no line ages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Seconds that a piece of work takes: `fixed`, and `each` for every unit of its amount."""

    fixed: float
    each: float

    def seconds(self, amount: float) -> float:
        return self.fixed + self.each * amount


class LinearFit:
    """A line through (amount, seconds) by least squares, later observations weighing more.

    Pulled towards the slope of a prior as far as the amounts do not differ enough to tell the slope from the fixed
    part; neither is ever negative.
    """

    def __init__(self) -> None:
        self._count = 0
        self._weight = 0.0
        self._amount = self._seconds = self._square = self._product = 0.0  # weighted sums

    def observe(self, amount: float, seconds: float, prior: LinearCost) -> None:
        """Work of `amount` took `seconds`."""
        if self._count >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * self.line(prior).seconds(amount))
        self._count += 1
        self._weight = self._weight * _MEMORY + 1
        self._amount = self._amount * _MEMORY + amount
        self._seconds = self._seconds * _MEMORY + seconds
        self._square = self._square * _MEMORY + amount * amount
        self._product = self._product * _MEMORY + amount * seconds

    def line(self, prior: LinearCost) -> LinearCost:
        """The fit; the prior itself before the first observation."""
        if not self._count:
            return prior
        amount, seconds = self._amount / self._weight, self._seconds / self._weight
        pull = (_SPREAD * amount) ** 2
        if not pull:  # nothing, or too little for a number
            return LinearCost(fixed=seconds, each=prior.each)
        variance = max(self._square / self._weight - amount * amount, 0.0)
        covariance = self._product / self._weight - amount * seconds
        each = min(max((covariance + pull * prior.each) / (variance + pull), 0.0), seconds / amount)
        return LinearCost(fixed=seconds - each * amount, each=each)


class Rates:
    """The lines of workers that do the same kind of work.

    Who has not been measured is taken to be as fast as the fastest that has: so it is tried, and then measured. If
    nobody has been, `neutral` is everybody's line. `typical` is the amount at which lines are compared.
    """

    def __init__(self, neutral: LinearCost, *, typical: float, clock: Callable[[], float]) -> None:
        self._neutral = neutral
        self._typical = typical
        self._clock = clock
        self._fits: dict[str, LinearFit] = {}
        self._seen: dict[str, float] = {}
        self._lines: dict[str, LinearCost] = {}  # as long as the best peer stays
        self._best = neutral
        self._best_until = -math.inf

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self._fits)

    def observe(self, worker_id: str, amount: float, seconds: float) -> None:
        """Work of `amount` took the worker `seconds`."""
        if worker_id not in self._fits:
            self._best_until = -math.inf
        self._fits.setdefault(worker_id, LinearFit()).observe(amount, seconds, self._neutral)
        self._seen[worker_id] = self._clock()
        self._lines.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or has begun anew."""
        if self._fits.pop(worker_id, None) is not None:
            del self._seen[worker_id]
            self._best_until = -math.inf

    def best(self) -> LinearCost:
        """The line of the fastest worker."""
        now = self._clock()
        if now >= self._best_until:
            lines = [fit.line(self._neutral) for fit in self._fits.values()]
            self._best = min(lines, key=lambda line: line.seconds(self._typical), default=self._neutral)
            self._best_until = now + _REFRESH
            self._lines.clear()
        return self._best

    def line(self, worker_id: str) -> LinearCost:
        """What is believed of one worker now."""
        best, line = self.best(), self._lines.get(worker_id)
        if line is None:
            line = self._lines[worker_id] = self._aged(worker_id, best) if worker_id in self._fits else best
        return line

    def _aged(self, worker_id: str, best: LinearCost) -> LinearCost:
        own = self._fits[worker_id].line(best)
        weight = 0.5 ** ((self._clock() - self._seen[worker_id]) / _HALF_LIFE)
        return LinearCost(
            fixed=best.fixed + weight * (own.fixed - best.fixed), each=best.each + weight * (own.each - best.each)
        )


class DrainRate:
    """How fast a queue empties, measured while somebody waits in it: only then does its owner work as fast as it can.

    Counts the last ten seconds or so, and the time that has passed since the last departure. Before enough have left,
    by Little's law: the work under way, divided by how long work has been under way on average.
    """

    _SECONDS: Final = 10.0
    _TRUSTED: Final = 8
    _NEWS: Final = 0.1  # the weight of the last request in a moving mean

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None  # when somebody left, or when the queue began to fill; None while it is empty
        self._tokens = 0.0
        self._elapsed = 0.0
        self._count = 0
        self._under_way = 0  # tokens of work
        self._residence = 0.0  # seconds, a mean

    def fill(self) -> None:
        """Somebody waits. Idempotent."""
        if self._last is None:
            self._last = self._clock()

    def clear(self) -> None:
        """Nobody waits any more."""
        self._last = None

    def begin(self, num_tokens: int) -> None:
        """Work of so many tokens is under way."""
        self._under_way += num_tokens

    def finish(self, num_tokens: int, seconds: float) -> None:
        """It is not any more, after so long."""
        self._under_way -= num_tokens
        self._residence += (self._NEWS if self._residence else 1.0) * (seconds - self._residence)

    def drain(self, num_tokens: int) -> None:
        """Work of so many tokens has left the queue to be done."""
        now = self._clock()
        passed = now - (now if self._last is None else self._last)
        memory = math.exp(-passed / self._SECONDS)
        self._tokens = self._tokens * memory + num_tokens
        self._elapsed = self._elapsed * memory + passed
        self._last = now
        self._count += 1

    def seconds(self, num_tokens: int) -> float:
        """How long so many tokens take to leave; 0 as long as too little is known."""
        if self._count < self._TRUSTED:
            return num_tokens * self._residence / self._under_way if self._under_way else 0.0
        waiting = self._clock() - self._last if self._last is not None else 0.0
        return num_tokens * (self._elapsed + waiting) / self._tokens
