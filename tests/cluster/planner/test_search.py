"""Tests the search of splits: knees, saturation, and what is refused before a simulation."""

from collections.abc import Mapping

import pytest

from tandem.cluster.planner.changes import unchanged, with_faults
from tandem.cluster.planner.profile import Profile
from tandem.cluster.planner.search import (
    PlannedRun,
    Planner,
    RateResult,
    list_splits,
    request_seconds,
)
from tandem.cluster.planner.site import MeasuredSite, Split
from tandem.cluster.planner.workload import Objective, PlannedWorkload
from tandem.cluster.sim.cost import StepCosts, StepSample
from tandem.cluster.sim.result import SimulationResult
from tandem.cluster.traces.read import TracedRequest
from tandem.proto.errors import InvalidArgument
from tandem.tests.profiles import make_profile

OBJECTIVE = Objective(limits={"ttft": 1000.0})


def profile_of(costs: StepCosts) -> Profile:
    """Returns a profile of one worker whose steps have these costs."""
    profile = make_profile(1)
    (worker,) = profile.workers
    works = [StepSample.of_row(row).work for row in worker.grid]
    grid = tuple(StepSample(work, costs.seconds(work)).as_row() for work in works)
    return profile.model_copy(update={"workers": (worker.model_copy(update={"grid": grid}),)})


def test_a_service_that_keeps_up_is_not_saturated_although_its_batches_are_slow() -> None:
    """A token takes 6 ms alone and 20 ms in the batches of this load, which stay below 20."""
    costs = StepCosts(
        fixed=5e-3,
        each_sequence=1e-3,
        each_context_token=1e-9,
        each_prompt_token=1e-5,
        each_prompt_context=1e-9,
    )
    workload = PlannedWorkload.poisson(1.7, 16, 512, 24, seed=0)
    planner = Planner(MeasuredSite(profile_of(costs)), workload, OBJECTIVE)
    found = planner.run(PlannedRun(Split(0, 1), 1.7))
    assert found.attainment == 1.0
    assert max(each.timeline.queue_seconds for each in found.result.requests) < 0.1
    assert not found.is_saturated


def test_the_longest_request_is_not_the_one_with_the_longest_prompt() -> None:
    lengths = [(2000, 2), (16, 500)]
    workload = PlannedWorkload(
        [
            TracedRequest(
                time=float(number),
                input_length=num_input,
                output_length=num_output,
                block_hashes=(),
                block_tokens=1,
            )
            for number, (num_input, num_output) in enumerate(lengths)
        ]
    )
    service, costs = MeasuredSite(make_profile(1)).service(Split(0, 1))
    alone = PlannedWorkload(workload.requests[1:])
    assert request_seconds(service, costs, alone) > 499 * costs.decode.fixed
    assert request_seconds(service, costs, workload) > 499 * costs.decode.fixed


class KnownKnees(Planner):
    """Knows the knee of each split; counts the simulations that it is asked for."""

    def __init__(self, rate: float, knees: Mapping[Split, float], profile: Profile) -> None:
        workload = PlannedWorkload.poisson(rate, 128, 8, 20, seed=0)
        super().__init__(MeasuredSite(profile), workload, OBJECTIVE)
        self.knees = knees
        self.num_runs = 0

    def run(self, planned: PlannedRun) -> RateResult:
        split, rate = planned.split, planned.rate
        self.num_runs += 1
        result = SimulationResult(
            requests=(), workers=(), seconds=1.0, router_busy_share=0.0, queue_seconds={}
        )
        attainment = 1.0 if rate <= self.knees.get(split, 0.0) else 0.0
        return RateResult(rate=rate, attainment=attainment, is_saturated=False, result=result)


@pytest.mark.parametrize("knee", [0.04, 0.1, 0.4, 0.9])
def test_a_knee_below_the_rate_is_found_however_high_the_bound_is(knee: float) -> None:
    split = Split(0, 1)
    planner = KnownKnees(1.0, {split: knee}, make_profile(1))
    plan = planner.plan(split)
    assert plan.bound > 17.0
    assert plan.knee == pytest.approx(knee, rel=0.031)


def test_a_split_that_is_not_measured_is_refused_before_any_simulation() -> None:
    planner = KnownKnees(1.0, {}, make_profile(1, 2))
    with pytest.raises(InvalidArgument, match=r"3 workers .* not measured"):
        planner.search(list_splits(3, [1]))
    assert planner.num_runs == 0


def test_lengths_outside_the_measured_grid_are_refused() -> None:
    workload = PlannedWorkload.poisson(1.0, 4096, 8, 10, seed=0)
    planner = Planner(MeasuredSite(make_profile(1)), workload, OBJECTIVE)
    with pytest.raises(InvalidArgument, match="outside the measured grid"):
        planner.run(PlannedRun(Split(0, 1), 0.1, lengths=1.1))


def test_the_usual_change_is_simulated_once() -> None:
    workload = PlannedWorkload.poisson(1.0, 16, 2, 10, seed=0)
    planner = Planner(MeasuredSite(make_profile(1)), workload, OBJECTIVE)
    usual = planner.run(PlannedRun(Split(0, 1), 2.0))
    assert planner.run(PlannedRun(Split(0, 1), 2.0, change=unchanged)) is usual
    assert planner.run(PlannedRun(Split(0, 1), 2.0, change=with_faults([], 1.0))) is not usual
