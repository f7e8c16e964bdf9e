"""Describes the loads that are predicted and measured, and predicts their figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem.cluster.planner.profile import Profile
from tandem.cluster.planner.search import PlannedRun, Planner, RateResult
from tandem.cluster.planner.site import MeasuredSite, Split
from tandem.cluster.planner.workload import Objective, PlannedWorkload
from tandem.cluster.traces.read import TracedRequest, TraceScale, read_trace

FIGURES: Final = (
    "mean_ttft_ms",
    "p50_ttft_ms",
    "p90_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p50_tpot_ms",
    "p90_tpot_ms",
    "p99_tpot_ms",
    "goodput",
    "slo_attainment",
    "output_throughput",
)
"""The compared figures, by the names of `tandem bench`."""

_LEAST_REQUESTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Describes one load on one split of the workers."""

    split: Split
    trace: str  # its name
    share: float  # of the predicted knee
    workload: PlannedWorkload

    @property
    def rate(self) -> float:
        return self.workload.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Holds the predicted figures of a case."""

    case: Case
    figures: Mapping[str, float]
    is_saturated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Describes which cases are made of a trace."""

    objective: Objective
    shares: Sequence[float]  # of the predicted knee
    seconds: float  # of each case
    searched: int  # requests with which the knee is searched


def read_fitting(
    path: Path, scale: TraceScale, context_tokens: int
) -> tuple[list[TracedRequest], int]:
    """Returns the requests of a trace that fit into the context, and the number of all others."""
    requests = read_trace(path, scale)
    fitting = [each for each in requests if each.input_length + each.output_length < context_tokens]
    return fitting, len(requests) - len(fitting)


def predict(
    profile: Profile,
    split: Split,
    trace: str,
    requests: Sequence[TracedRequest],
    plan: LoadPlan,
) -> tuple[float, list[Prediction]]:
    """Returns the knee of a split in requests/s, and a prediction for each share of it."""
    site = MeasuredSite(profile)
    planner = Planner(site, PlannedWorkload(requests[: plan.searched]), plan.objective)
    knee = planner.plan(split).knee
    if not knee:
        raise ValueError(f"{split} meets {plan.objective} at no rate; choose a weaker objective")
    found = []
    for share in plan.shares:
        rate = share * knee
        count = max(round(rate * plan.seconds), _LEAST_REQUESTS)
        workload = PlannedWorkload(requests[:count]).at_rate(rate)
        case = Case(split=split, trace=trace, share=share, workload=workload)
        outcome = Planner(site, workload, plan.objective).run(PlannedRun(split, rate))
        found.append(_prediction(case, outcome, plan.objective))
    return knee, found


def _prediction(case: Case, outcome: RateResult, objective: Objective) -> Prediction:
    figures = outcome.result.summary(objective.limits).figures
    return Prediction(
        case=case,
        figures={name: figures[name] for name in FIGURES},
        is_saturated=outcome.is_saturated,
    )
