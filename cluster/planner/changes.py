"""Changes a planned service: workers that die, and pools that follow the load."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...proto.errors import InvalidArgument
from ..config import PoolRole
from ..scaling.config import ScalingConfig
from ..sim.result import SimulationResult
from ..sim.service import Fault, SimulatedPool, SimulatedService

Change = Callable[[SimulatedService, float], SimulatedService]
"""Returns a changed service. The number is the time of the last arrival, in seconds."""

_OPTION: Final = "--faults"
_RULE: Final = re.compile(r"kill (prefill|decode) (every|at) (\d+(?:\.\d+)?)s")
_LEAST_SECONDS: Final = 1.0
_MOST_SECONDS: Final = 86_400.0
_DEATHS: Final = 2  # the least deaths of a repeated rule in each simulation
_MOST_TPOT_SECONDS: Final = 60.0  # of `ScalingConfig.tpot_seconds`; a higher target is left out
_LEAST_TPOT_SECONDS: Final = 0.0001


@dataclass(frozen=True, slots=True)
class FaultRule:
    """Describes when workers of a role die: one worker at each time."""

    role: PoolRole
    seconds: float  # the time of the first death
    repeats: bool  # False: the first death is the only one; True: the next follow at its multiples

    def times(self, end: float) -> list[float]:
        """Returns the times of the deaths before `end`."""
        count = math.ceil(end / self.seconds) - 1
        if not self.repeats:
            count = min(count, 1)
        return [self.seconds * (number + 1) for number in range(count)]


def parse_faults(texts: Iterable[str]) -> list[FaultRule]:
    """Parses rules, such as `kill decode every 60s`; commas separate the rules of a text.

    Raises InvalidArgument.
    """
    found: list[FaultRule] = []
    for part in (part for text in texts for part in text.split(",")):
        match = _RULE.fullmatch(" ".join(part.split()))
        if match is None:
            raise InvalidArgument(
                f"must be such as 'kill decode every 60s' or 'kill prefill at 30s', got {part!r}",
                _OPTION,
            )
        seconds = float(match[3])
        if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            raise InvalidArgument(
                f"must have a time from {_LEAST_SECONDS:g}s to {_MOST_SECONDS:g}s, got {part!r}",
                _OPTION,
            )
        role: PoolRole = "prefill" if match[1] == "prefill" else "decode"
        found.append(FaultRule(role, seconds, match[2] == "every"))
    return found


def least_seconds(rules: Iterable[FaultRule], start_seconds: float) -> float:
    """Returns for how long requests must arrive, so that workers die and start again meanwhile."""
    last_deaths = [(_DEATHS if each.repeats else 1) * each.seconds for each in rules]
    return max(last_deaths) + start_seconds if last_deaths else 0.0


def unchanged(service: SimulatedService, arrivals_end: float) -> SimulatedService:
    """Returns the same service."""
    return service


def chain(*changes: Change) -> Change:
    """Returns a change that applies several changes, in order."""

    def change(service: SimulatedService, arrivals_end: float) -> SimulatedService:
        for each in changes:
            service = each(service, arrivals_end)
        return service

    return change


def with_faults(rules: Sequence[FaultRule], start_seconds: float) -> Change:
    """Returns a change that kills workers while requests arrive.

    Each is ready again `start_seconds` later.
    """

    def change(service: SimulatedService, arrivals_end: float) -> SimulatedService:
        faults = [
            Fault(time=time, role=rule.role, restart_seconds=start_seconds)
            for rule in rules
            if rule.role in service.pools
            for time in rule.times(arrivals_end)
        ]
        return replace(service, faults=tuple(faults))

    return change


def autoscaled(start_seconds: float, tpot_ms: float | None = None) -> Change:
    """Returns a change that lets each pool begin with one worker and grow to its usual size.

    A new worker is ready after `start_seconds`. `tpot_ms`: the TPOT of the objective, which becomes
    the target of the decode pool.
    """
    tpot_seconds = None if tpot_ms is None else max(tpot_ms / 1000, _LEAST_TPOT_SECONDS)
    if tpot_seconds is not None and tpot_seconds > _MOST_TPOT_SECONDS:
        tpot_seconds = None

    def scaled(pool: SimulatedPool, tpot_seconds: float | None) -> SimulatedPool:
        scaling = ScalingConfig(max_replicas=pool.workers, tpot_seconds=tpot_seconds)
        return replace(pool, workers=1, scaling=scaling, start_seconds=start_seconds)

    def change(service: SimulatedService, arrivals_end: float) -> SimulatedService:
        prefill = service.prefill
        return replace(
            service,
            decode=scaled(service.decode, tpot_seconds),
            prefill=None if prefill is None else scaled(prefill, None),
        )

    return change


def mean_workers(result: SimulationResult) -> dict[PoolRole, float]:
    """Returns the mean number of workers of each role over the whole simulation.

    A worker that starts counts as well: it has its device already.
    """
    found: dict[PoolRole, float] = {}
    for each in (*result.workers, *result.starts):
        seconds = each.end_before(result.seconds) - each.started
        found[each.role] = found.get(each.role, 0.0) + seconds / result.seconds
    return found
