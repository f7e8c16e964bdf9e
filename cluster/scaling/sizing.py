"""Computes how many workers a pool needs. Pure: knows no clock, no Ray and no workers.

Needs are absolute, never a change of what there is, so workers that still start are not asked for
twice. Then, as with Kubernetes' HorizontalPodAutoscaler, the number rises to the least that was
needed throughout the delay, and falls to
the most: what is needed for a moment changes nothing, and after a rise there is no fall before its
delay is over.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .config import ScalingConfig

_SPREAD: Final = 0.1
"""Numbers of sequences that differ by less than this part of their mean say little about the cost
of one more.
"""

_TOLERANCE: Final = 0.1
"""The part by which there may be too few workers, as in Kubernetes: a load that varies a little
about the bound between two numbers must not change them.
"""

_ROUNDING: Final = 1e-9

Need = tuple[float, int]
"""From which time on so many workers were needed; until the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDemand:
    """What is asked of the workers that compute prompts, in tokens that no prefix cache holds."""

    arriving: float  # a second
    waiting: float  # in the queues of routers
    worker_rate: float  # a second, that one worker computes; 0: not known

    def workers(self, config: ScalingConfig) -> float:
        """Returns how many workers it takes: for what arrives, and for what waits within the time
        to catch up.
        """
        wanted = self.arriving + self.waiting / config.catch_up_seconds
        return wanted / (self.worker_rate * config.utilization) if self.worker_rate > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeDemand:
    """What is asked of the workers that decode, with what waits for them in the queues of routers."""

    sequences: float
    kv_tokens: float
    worker_sequences: float  # that one worker runs within the target; see `sequences_within`
    worker_kv_tokens: float

    def workers(self, config: ScalingConfig) -> float:
        """Returns how many workers it takes, for the sequences or for their KV cache."""
        amounts = ((self.sequences, self.worker_sequences), (self.kv_tokens, self.worker_kv_tokens))
        return max(
            asked / (each * config.utilization) if each > 0 else 0.0 for asked, each in amounts
        )


def sequences_within(
    tpot_seconds: float | None, max_sequences: int, steps: Sequence[tuple[float, float]]
) -> float:
    """Returns how many sequences a worker decodes with steps of at most `tpot_seconds`; 1 if even
    those of one take longer.

    `steps` are numbers of sequences, at least 1, with the seconds of a step. A step costs something
    fixed, to read the
    weights, and something for each sequence: a line through them, by least squares. Where the
    numbers hardly differ nothing tells the two parts apart; then all of it is taken to be for the
    sequences, which asks for too many workers
    rather than too few. Without steps: `max_sequences`.
    """
    if tpot_seconds is None or not steps:
        return max_sequences
    amount = sum(number for number, _ in steps) / len(steps)
    seconds = sum(taken for _, taken in steps) / len(steps)
    variance = sum((number - amount) ** 2 for number, _ in steps) / len(steps)
    covariance = sum((number - amount) * (taken - seconds) for number, taken in steps) / len(steps)
    pull = (_SPREAD * amount) ** 2
    each = min(
        max((covariance + pull * seconds / amount) / (variance + pull), 0.0), seconds / amount
    )
    fixed = seconds - each * amount
    if each * max_sequences + fixed <= tpot_seconds:
        return max_sequences
    return max((tpot_seconds - fixed) / each, 1.0) if each > 0 else 1.0


def bounded(workers: float, current: int, fewest: int, most: int) -> int:
    """Returns the whole number of workers that are enough, within the bounds. `current`, how many
    there shall be by now, is also enough for a little more.
    """
    if math.isnan(workers) or current < workers <= current * (1 + _TOLERANCE):
        workers = current
    return min(max(math.ceil(min(workers, most) - _ROUNDING), fewest), most)


def settle(
    now: float, needed: int, past: Sequence[Need], current: int, config: ScalingConfig
) -> tuple[int, list[Need]]:
    """Returns how many workers there shall be, and the `past` for the next call. `current`: how
    many there shall be by now; `needed`: how many would be enough at this moment.
    """
    needs = [*past] if past and past[-1][1] == needed else [*past, (now, needed)]
    least = _within(needs, now - config.up_delay_seconds)
    most = _within(needs, now - config.down_delay_seconds)
    longest = now - max(config.up_delay_seconds, config.down_delay_seconds)
    while len(needs) > 1 and needs[1][0] <= longest:
        del needs[0]
    if least and min(least) > current:
        return min(least), needs
    if most and max(most) < current:
        return max(most), needs
    return current, needs


def _within(needs: Sequence[Need], start: float) -> list[int]:
    """Returns what was needed from `start` on; [] if the needs do not reach back that far."""
    if needs[0][0] > start:
        return []
    begun = max(index for index, (time, _) in enumerate(needs) if time <= start)
    return [number for _, number in needs[begun:]]
