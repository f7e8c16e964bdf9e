"""Computes from the reports of routers and workers how many workers prompts and sequences need."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .reports import (
    DECODES,
    KV_TOKENS,
    MAX_KV_TOKENS,
    MAX_SEQUENCES,
    PREFILL_SECONDS,
    PREFILL_TOKENS,
    SEQUENCES,
    STEP_SECONDS,
    WAITING_KV_TOKENS,
    WAITING_PREFILL_TOKENS,
    WAITING_SEQUENCES,
)
from .sizing import Targets, decode_workers, prefill_workers, sequences_within

_LEAST_SECONDS: Final = 1e-3


class Sample(Protocol):
    """A value that a member has reported, in Serve's form."""

    @property
    def timestamp(self) -> float: ...
    @property
    def value(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Value:
    """Holds a sample where Serve does not."""

    timestamp: float
    value: float


Reports = Mapping[str, Mapping[Any, Sequence[Sample]]]
"""By metric and member, the values of the last window, the oldest first."""


def prompt_need(routers: Reports, targets: Targets) -> float | None:
    """Returns the number of workers for the prompts of all routers.

    Returns None until a router has reported twice, and while prompts wait but none was sent: then
    the speed of a worker is unknown.
    """
    tokens = [each for each in _series(routers, PREFILL_TOKENS) if len(each) > 1]
    seconds = sum(_growth(each) for each in _series(routers, PREFILL_SECONDS))
    waiting = _last(routers, WAITING_PREFILL_TOKENS)
    if not tokens or (waiting > 0 and seconds <= 0):
        return None
    return prefill_workers(
        targets,
        arriving=sum(
            _growth(each) / max(each[-1].timestamp - each[0].timestamp, _LEAST_SECONDS)
            for each in tokens
        ),
        waiting=waiting,
        worker_rate=sum(map(_growth, tokens)) / seconds if seconds > 0 else 0.0,
    )


def sequence_need(routers: Reports, workers: Reports, targets: Targets) -> float | None:
    """Returns the number of workers for the sequences of all routers.

    Counts the workers that have the role of decode, in whatever pool. Returns None without reports
    of one.
    """
    found = _of_decode(workers)
    num_workers = len([each for each in _series(found, MAX_SEQUENCES) if each])
    if not num_workers:
        return None
    most = max(round(_last(found, MAX_SEQUENCES) / num_workers), 1)
    return decode_workers(
        targets,
        sequences=_last(found, SEQUENCES) + _last(routers, WAITING_SEQUENCES),
        kv_tokens=_last(found, KV_TOKENS) + _last(routers, WAITING_KV_TOKENS),
        worker_sequences=sequences_within(targets.tpot_seconds, most, list(_steps(found))),
        worker_kv_tokens=_last(found, MAX_KV_TOKENS) / num_workers,
    )


def _of_decode(workers: Reports) -> Reports:
    """Returns the reports of the workers whose last one tells that they decode."""
    roles = workers.get(DECODES, {})
    decoding = {member for member, series in roles.items() if series and series[-1].value}
    return {
        figure: {member: series for member, series in found.items() if member in decoding}
        for figure, found in workers.items()
    }


def _series(reports: Reports, figure: str) -> Iterable[Sequence[Sample]]:
    return reports.get(figure, {}).values()


def _growth(series: Sequence[Sample]) -> float:
    return series[-1].value - series[0].value if series else 0.0


def _last(reports: Reports, figure: str) -> float:
    """Returns the sum of the last values of all members."""
    return sum(each[-1].value for each in _series(reports, figure) if each)


def _steps(workers: Reports) -> Iterable[tuple[float, float]]:
    """Yields the numbers of sequences in the window, each with the seconds of a step then."""
    for member, numbers in workers.get(SEQUENCES, {}).items():
        seconds = {
            each.timestamp: each.value for each in workers.get(STEP_SECONDS, {}).get(member, ())
        }
        for each in numbers:
            if each.value >= 1 and seconds.get(each.timestamp, 0.0) > 0:
                yield each.value, seconds[each.timestamp]
