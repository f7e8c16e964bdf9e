"""Orders workers by an amount, so that the least ones are found without a scan."""

import math
import random
from bisect import bisect_left, insort
from collections.abc import Collection
from copy import copy
from typing import Final, NamedTuple

NEAR: Final = 1.1
"""Amounts within a tenth of each other count as equal.

Otherwise several routers with the same knowledge would all choose the same worker.
"""

_LOG_NEAR: Final = math.log(NEAR)


class _Position(NamedTuple):
    """The position of a worker, in the order of its fields."""

    step: int  # the amount, as a whole number of tenths on a logarithmic scale
    tie: float  # random
    worker_id: str


class WorkerRanking:
    """Orders workers by an amount above 0.

    Equal workers are in random order, which is drawn again when a worker's step changes. A change
    takes O(log n) comparisons.
    """

    def __init__(self, rng: random.Random) -> None:
        """Begins with the state of `rng`, and draws nothing from it."""
        self._rng = copy(rng)
        self._ordered: list[_Position] = []
        self._positions: dict[str, _Position] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._positions

    def put(self, worker_id: str, amount: float) -> None:
        """Adds a worker, or moves it to its new amount."""
        step = math.floor(math.log(amount) / _LOG_NEAR)
        known = self._positions.get(worker_id)
        if known is not None:
            if known.step == step:
                return
            self._delete(known)
        position = self._positions[worker_id] = _Position(step, self._rng.random(), worker_id)
        insort(self._ordered, position)

    def remove(self, worker_id: str) -> None:
        """Removes a worker. Idempotent."""
        if known := self._positions.pop(worker_id, None):
            self._delete(known)

    def least(self, count: int, avoid: Collection[str] = ()) -> list[str]:
        """Returns the `count` workers with the least amounts that are not in `avoid`."""
        found: list[str] = []
        for position in self._ordered:
            if len(found) == count:
                break
            if position.worker_id not in avoid:
                found.append(position.worker_id)
        return found

    def sample(self, count: int) -> list[str]:
        """Returns `count` random workers; a worker may occur twice."""
        return [each.worker_id for each in self._rng.choices(self._ordered, k=count)]

    def _delete(self, position: _Position) -> None:
        del self._ordered[bisect_left(self._ordered, position)]
