"""Computes how many workers a pool needs. Pure: knows no clock, no Ray and no workers.

Needs are absolute numbers, not changes, so workers that still start are not requested twice. As in
Kubernetes' HorizontalPodAutoscaler, the number rises to the minimum of the needs during the delay,
and falls to their maximum: a need of a moment changes nothing, and after a rise there is no fall
before its delay has passed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ...proto.costs import LinearCost, fit_line

_PROPORTIONAL: Final = LinearCost(fixed=0.0, each=1.0)
"""The cost of a step if the numbers of sequences do not tell the cost of one: all for them."""

_TOLERANCE: Final = 0.1
"""The accepted shortage of workers, as in Kubernetes.

A load that varies a little around the bound between two numbers must not change them.
"""

_ROUNDING: Final = 1e-9

_SPARE: Final = 0.1
"""The need below which a pool that may be empty becomes empty; it starts again at twice this."""

_GAIN: Final = 0.2
"""The least part of a shortage that a change of the split must remove.

A smaller gain could come from the noise of the measurement, and be undone by the next one.
"""

_CALM: Final = 0.8
"""The shortage below which a split leaves room, so that going there causes no way back."""

_NOISE: Final = 1e-6
"""Differences that come from the rounding of sums; they must not tip a decision to and fro."""

Need = tuple[float, int]
"""A time, and the number of workers needed from then until the next one."""


class Targets(Protocol):
    """The targets of a configuration that decide how many workers a load needs."""

    @property
    def utilization(self) -> float: ...
    @property
    def tpot_seconds(self) -> float | None: ...
    @property
    def catch_up_seconds(self) -> float: ...


def prefill_workers(
    targets: Targets, *, arriving: float, waiting: float, worker_rate: float
) -> float:
    """Returns the number of workers for arriving and for waiting prompts.

    The waiting prompts are to be computed within catch_up_seconds. All amounts are in tokens that
    no prefix cache holds: `arriving` a second, `waiting` in the queues of routers, `worker_rate` a
    second of one worker; 0: unknown.
    """
    wanted = arriving + waiting / targets.catch_up_seconds
    return wanted / (worker_rate * targets.utilization) if worker_rate > 0 else 0.0


def decode_workers(
    targets: Targets,
    *,
    sequences: float,
    kv_tokens: float,
    worker_sequences: float,
    worker_kv_tokens: float,
) -> float:
    """Returns the number of workers for the sequences or the KV cache, the greater one.

    The demand includes requests in the queues of routers. `worker_sequences`: of one worker, within
    the target; see `sequences_within`.
    """
    amounts = ((sequences, worker_sequences), (kv_tokens, worker_kv_tokens))
    return max(asked / (each * targets.utilization) if each > 0 else 0.0 for asked, each in amounts)


def sequences_within(
    tpot_seconds: float | None, max_sequences: int, steps: Sequence[tuple[float, float]]
) -> float:
    """Returns how many sequences a worker decodes with steps of at most `tpot_seconds`, at least 1.

    `steps`: numbers of sequences, at least 1, each with the seconds of a step; without steps the
    result is `max_sequences`. A step has a fixed cost, to read the weights, and a cost for each
    sequence: a line through the steps, by least squares. If the numbers hardly differ, the two
    costs cannot be separated. Then the whole cost counts for the sequences, which requests too many
    workers rather than too few.
    """
    if tpot_seconds is None or not steps:
        return max_sequences
    amount = sum(number for number, _ in steps) / len(steps)
    seconds = sum(taken for _, taken in steps) / len(steps)
    variance = sum((number - amount) ** 2 for number, _ in steps) / len(steps)
    covariance = sum((number - amount) * (taken - seconds) for number, taken in steps) / len(steps)
    line = fit_line(amount, seconds, variance, covariance, _PROPORTIONAL)
    return min(max(line.amount(tpot_seconds), 1.0), max_sequences)


def bounded(workers: float, current: int, fewest: int, most: int) -> int:
    """Returns the smallest sufficient whole number of workers, within the bounds.

    `current`, the present number, is also sufficient for slightly more. A pool that may be empty is
    so for a need of almost nothing.
    """
    if fewest == 0 and workers < (_SPARE if current else 2 * _SPARE):
        return 0
    if math.isnan(workers) or current < workers <= current * (1 + _TOLERANCE):
        workers = current
    return min(max(math.ceil(min(workers, most) - _ROUNDING), fewest), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSplit:
    """Computes how short a number of workers is of either role, by the share that prefill."""

    prefill: float  # workers needed
    decode: float
    num_workers: int

    def shortage(self, num_prefill: int) -> float:
        """Returns the need of the shorter role, divided by its workers; above 1 it is too small.

        Without prefill workers, decode workers compute the prompts as well.
        """
        if num_prefill == 0:
            return (self.prefill + self.decode) / self.num_workers
        return max(
            self.prefill / num_prefill,
            self.decode / max(self.num_workers - num_prefill, _ROUNDING),
        )

    def best(self, current: int, fewest: int, most: int) -> int:
        """Returns the number of prefill workers that is least short, within the bounds.

        Returns `current` unless it is short, and another number either removes a part of the
        shortage or takes only from a role that keeps room.
        """
        best = min(
            range(fewest, most + 1),
            key=lambda number: (self.shortage(number), abs(number - current)),
        )
        shortage = self.shortage(current)
        gains = shortage > self.shortage(best) / (1 - _GAIN) + _NOISE
        keeps_room = self._shortage_of_giver(current, best) <= _CALM + _NOISE
        return best if shortage > 1 + _NOISE and (gains or keeps_room) else current

    def _shortage_of_giver(self, current: int, number: int) -> float:
        """Returns the shortage of the role that has fewer workers after a change to `number`."""
        if number > current:
            return self.decode / max(self.num_workers - number, _ROUNDING)
        return self.prefill / number if number else self.shortage(0)

    def leaves_room(self, num_prefill: int) -> bool:
        """Returns True if no role would be short by far."""
        return self.shortage(num_prefill) <= _CALM + _NOISE


def settle(
    now: float,
    needed: int,
    past: Sequence[Need],
    current: int,
    *,
    up_delay: float,
    down_delay: float,
) -> tuple[int, list[Need]]:
    """Returns the new number of workers, and the `past` for the next call.

    `current`: the present number. `needed`: the number that would suffice at this moment. It must
    be above the present number for `up_delay` seconds, or below it for `down_delay`.
    """
    needs = [*past] if past and past[-1][1] == needed else [*past, (now, needed)]
    least = _within(needs, now - up_delay)
    most = _within(needs, now - down_delay)
    longest = now - max(up_delay, down_delay)
    while len(needs) > 1 and needs[1][0] <= longest:
        del needs[0]
    if least and min(least) > current:
        return min(least), needs
    if most and max(most) < current:
        return max(most), needs
    return current, needs


def _within(needs: Sequence[Need], start: float) -> list[int]:
    """Returns the needs from `start` on; empty if they do not reach back to `start`."""
    if needs[0][0] > start:
        return []
    begun = max(index for index, (time, _) in enumerate(needs) if time <= start)
    return [number for _, number in needs[begun:]]
