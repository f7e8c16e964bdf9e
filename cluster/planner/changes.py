"""Changes a planned service: workers that die, and pools that follow the load."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...proto.errors import InvalidArgument
from ..config import PoolRole
from ..scaling.config import ScalingConfig
from ..sim.result import SimulationResult
from ..sim.service import Fault, SimulatedPool, SimulatedService
from .workload import PlannedWorkload

Change = Callable[[SimulatedService, PlannedWorkload], SimulatedService]
"""Returns a changed service for a workload."""

_OPTION: Final = "--faults"
_RULE: Final = re.compile(r"kill (prefill|decode) (every|at) (\d+(?:\.\d+)?)s")
_LEAST_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class FaultRule:
    """Describes workers of a role that die: one at a time, or one at every multiple of it."""

    role: PoolRole
    seconds: float
    repeats: bool

    def times(self, end: float) -> list[float]:
        """Returns the times of the deaths before `end`."""
        count = int(end / self.seconds) if self.repeats else int(self.seconds < end)
        return [self.seconds * (number + 1) for number in range(count)]


def parse_faults(text: str) -> list[FaultRule]:
    """Parses rules with commas, such as `kill decode every 60s, kill prefill at 30s`.

    Raises InvalidArgument.
    """
    found: list[FaultRule] = []
    for part in text.split(","):
        match = _RULE.fullmatch(" ".join(part.split()))
        if match is None:
            raise InvalidArgument(
                f"must be such as 'kill decode every 60s' or 'kill prefill at 30s', got {part!r}",
                _OPTION,
            )
        seconds = float(match[3])
        if seconds < _LEAST_SECONDS:
            raise InvalidArgument(f"must be at least {_LEAST_SECONDS:g}s, got {match[3]}s", _OPTION)
        role: PoolRole = "prefill" if match[1] == "prefill" else "decode"
        found.append(FaultRule(role, seconds, match[2] == "every"))
    return found


def with_faults(rules: Sequence[FaultRule], start_seconds: float) -> Change:
    """Returns the change by which workers die while requests arrive, and start again."""

    def change(service: SimulatedService, workload: PlannedWorkload) -> SimulatedService:
        end = workload.requests[-1].time
        faults = [
            Fault(time=time, role=rule.role, restart_seconds=start_seconds)
            for rule in rules
            if rule.role in service.pools
            for time in rule.times(end)
        ]
        return replace(service, faults=tuple(faults))

    return change


def autoscaled(start_seconds: float) -> Change:
    """Returns the change by which each pool begins with a worker, and grows to its usual size."""

    def scaled(pool: SimulatedPool) -> SimulatedPool:
        scaling = ScalingConfig(max_replicas=pool.workers)
        return replace(pool, workers=1, scaling=scaling, start_seconds=start_seconds)

    def change(service: SimulatedService, workload: PlannedWorkload) -> SimulatedService:
        prefill = service.prefill
        return replace(
            service,
            decode=scaled(service.decode),
            prefill=scaled(prefill) if prefill is not None and prefill.workers else None,
        )

    return change


def mean_workers(result: SimulationResult) -> dict[PoolRole, float]:
    """Returns the mean number of workers of each role over the whole simulation."""
    found: dict[PoolRole, float] = {}
    for each in result.workers:
        seconds = (result.seconds if each.ended is None else each.ended) - each.started
        found[each.role] = found.get(each.role, 0.0) + seconds / result.seconds
    return found
