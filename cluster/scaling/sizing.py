"""Computes how many workers a pool needs. Pure: knows no clock, no Ray and no workers.

Needs are absolute numbers, not changes, so workers that still start are not requested twice. As in
Kubernetes' HorizontalPodAutoscaler, the number rises to the minimum of the needs during the delay,
and falls to their maximum: a need of a moment changes nothing, and after a rise there is no fall
before its delay has passed.
"""

import math
from collections.abc import Sequence
from typing import Final

from .config import ScalingConfig

_SPREAD: Final = 0.1
"""The spread of the numbers of sequences, as part of their mean, that shows the cost of one."""

_TOLERANCE: Final = 0.1
"""The accepted shortage of workers, as in Kubernetes.

A load that varies a little around the bound between two numbers must not change them.
"""

_ROUNDING: Final = 1e-9

Need = tuple[float, int]
"""A time, and the number of workers needed from then until the next one."""


def prefill_workers(
    config: ScalingConfig, *, arriving: float, waiting: float, worker_rate: float
) -> float:
    """Returns the number of workers for arriving and for waiting prompts.

    The waiting prompts are to be computed within catch_up_seconds. All amounts are in tokens that
    no prefix cache holds: `arriving` a second, `waiting` in the queues of routers, `worker_rate` a
    second of one worker; 0: unknown.
    """
    wanted = arriving + waiting / config.catch_up_seconds
    return wanted / (worker_rate * config.utilization) if worker_rate > 0 else 0.0


def decode_workers(
    config: ScalingConfig,
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
    return max(asked / (each * config.utilization) if each > 0 else 0.0 for asked, each in amounts)


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
    pull = (_SPREAD * amount) ** 2
    each = min(
        max((covariance + pull * seconds / amount) / (variance + pull), 0.0), seconds / amount
    )
    fixed = seconds - each * amount
    if each * max_sequences + fixed <= tpot_seconds:
        return max_sequences
    return max((tpot_seconds - fixed) / each, 1.0) if each > 0 else 1.0


def bounded(workers: float, current: int, fewest: int, most: int) -> int:
    """Returns the smallest sufficient whole number of workers, within the bounds.

    `current`, the present number, is also sufficient for slightly more.
    """
    if math.isnan(workers) or current < workers <= current * (1 + _TOLERANCE):
        workers = current
    return min(max(math.ceil(min(workers, most) - _ROUNDING), fewest), most)


def settle(
    now: float, needed: int, past: Sequence[Need], current: int, config: ScalingConfig
) -> tuple[int, list[Need]]:
    """Returns the new number of workers, and the `past` for the next call.

    `current`: the present number. `needed`: the number that would suffice at this moment.
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
    """Returns the needs from `start` on; empty if they do not reach back to `start`."""
    if needs[0][0] > start:
        return []
    begun = max(index for index, (time, _) in enumerate(needs) if time <= start)
    return [number for _, number in needs[begun:]]
