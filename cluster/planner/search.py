"""Finds the split of a service's workers that meets an objective at a rate, on the simulator.

For each split, arithmetic gives a bound on the rate. A binary search below it finds the knee: the
highest rate at which the objective is met. Splits that cannot be the best are not searched.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple

from ...proto.errors import InvalidArgument
from ..sim.cost import ServiceCosts, StepCosts, StepWork
from ..sim.result import SimulationResult
from ..sim.service import SimulatedService
from .changes import Change, unchanged
from .simulations import SimulationArguments, Simulations
from .site import Site, Split, check_workload
from .workload import Objective, PlannedWorkload

_PRECISION: Final = 0.03
"""The relative width of the interval in which the binary search ends."""

_DRAIN_SHARE: Final = 0.1
_DRAIN_SECONDS: Final = 1.0
"""A service is saturated if its end is later than that of a request that arrives last and waits for
nothing, by more than this share of the time of the arrivals plus these seconds.
"""

_MOST_KEPT: Final = 100_000
"""The maximum of simulated requests whose results are kept, so that they can be used again."""

MAX_REQUESTS: Final = 1_000_000  # of a simulation
_MOST_WORKERS: Final = 256  # of a pool, as in the configuration of a service


class PlannedRun(NamedTuple):
    """Describes a simulation of a split at a rate in requests/s.

    The factors change all lengths and the time of steps. `change`: in place of the planner's own.
    """

    split: Split
    rate: float
    lengths: float = 1.0
    step_time: float = 1.0
    change: Change | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateResult:
    """Holds the simulation of a split at one rate."""

    rate: float
    attainment: float
    is_saturated: bool
    result: SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Holds what a split reaches."""

    split: Split
    num_devices: int
    bound: float  # requests/s that no service of this split can exceed
    # The highest requests/s at which the objective is met; 0: it is met at no rate. None: not
    # searched, because other numbers of devices matter, or not above the knee of another split of
    # its kind.
    knee: float | None
    at_rate: RateResult | None  # at the given rate; None: the arithmetic bound is below it

    def meets(self, objective: Objective) -> bool:
        """Returns True if the objective is met at the given rate."""
        return (
            self.at_rate is not None
            and not self.at_rate.is_saturated
            and self.at_rate.attainment >= objective.attainment
        )


class Planner:
    """Simulates splits of one workload on one site."""

    def __init__(
        self,
        site: Site,
        workload: PlannedWorkload,
        objective: Objective,
        *,
        seed: int = 0,
        change: Change = unchanged,
        least_seconds: float = 0.0,
        simulations: Simulations | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`change` changes every simulated service; `report` gets a line before each search.

        The requests are repeated until they arrive for at least `least_seconds`, at any rate.
        `simulations`: by default one after another, in this process.
        """
        self.site = site
        self.workload = workload
        self.objective = objective
        self._seed = seed
        self._change = change
        self._least_seconds = least_seconds
        self._simulations = simulations or Simulations()
        self._report = report
        self._services: dict[Split, tuple[SimulatedService, ServiceCosts]] = {}
        self._results: dict[PlannedRun, RateResult] = {}  # the oldest first

    def search(self, splits: Iterable[Split]) -> list[SplitPlan]:
        """Returns the plans of the splits, those with the fewest devices first.

        Ends with the number of devices at which a split meets the objective: more devices would do
        so as well. Searches the knees of these splits; if no split meets it, those of all splits.
        Raises InvalidArgument for a split that cannot be simulated, before it simulates any split
        of the same number of devices.
        """
        ordered = sorted(splits, key=self.site.num_devices)
        found: list[SplitPlan] = []
        for _, group in groupby(ordered, key=self.site.num_devices):
            listed = list(group)
            for split in listed:
                self._service(split)
            rate = self.workload.rate
            self.expect([PlannedRun(each, rate) for each in listed if rate < self._bound(each)])
            plans = [self._at_given_rate(split) for split in listed]
            if any(each.meets(self.objective) for each in plans):
                return [*found, *self._with_knees(plans)]
            found += plans
        return self._with_knees(found)

    def plan(self, split: Split) -> SplitPlan:
        """Returns the knee of a split, and its result at the workload's rate."""
        return self._with_knee(self._at_given_rate(split), least=0.0)

    def run(self, planned: PlannedRun) -> RateResult:
        """Simulates a run, or returns its result if that is still known.

        Raises InvalidArgument for a split that cannot be simulated, and for lengths that are not
        measured.
        """
        planned = self._complete(planned)
        found = self._results.get(planned)
        if found is None:
            arguments = self._arguments(planned)
            result = self._simulations.run(planned, arguments)
            found = self._results[planned] = self._judge(planned.rate, arguments, result)
            while sum(len(each.result.requests) for each in self._results.values()) > _MOST_KEPT:
                del self._results[next(iter(self._results))]
        return found

    def expect(self, runs: Sequence[PlannedRun]) -> None:
        """Lets other processes begin with runs whose results are needed soon, in this order.

        They begin at the end, so that this process and they meet in the middle. Leaves out runs for
        which `run` raises InvalidArgument.
        """
        if not self._simulations.num_others:
            return
        missing: dict[Hashable, SimulationArguments] = {}
        for each in reversed(runs):
            planned = self._complete(each)
            if planned not in self._results:
                with suppress(InvalidArgument):
                    missing[planned] = self._arguments(planned)
        self._simulations.expect(missing)

    def _at_given_rate(self, split: Split) -> SplitPlan:
        """Returns a plan without knee. Simulates nothing if the bound is below the given rate."""
        bound = self._bound(split)
        rate = self.workload.rate
        if rate < bound:
            self._report(f"simulating {split}")
        return SplitPlan(
            split=split,
            num_devices=self.site.num_devices(split),
            bound=bound,
            knee=None,
            at_rate=self.run(PlannedRun(split, rate)) if rate < bound else None,
        )

    def _with_knees(self, plans: Sequence[SplitPlan]) -> list[SplitPlan]:
        """Returns the plans with the best knee of each kind: with disaggregation, and without it.

        Begins with the highest bounds. A plan gets no knee if another one of its kind has a knee
        that is not lower.
        """
        best = {True: 0.0, False: 0.0}
        found: dict[Split, SplitPlan] = {}
        for plan in sorted(plans, key=lambda each: each.bound, reverse=True):
            disaggregates = bool(plan.split.prefill)
            searched = self._with_knee(plan, least=best[disaggregates])
            best[disaggregates] = max(best[disaggregates], searched.knee or 0.0)
            found[plan.split] = searched
        return [found[each.split] for each in plans]

    def _with_knee(self, plan: SplitPlan, *, least: float) -> SplitPlan:
        """Returns a plan with its knee, or without one if it is not above `least`.

        The knee is 0 if the objective is not met at `_PRECISION` of the highest possible rate, or
        of the rate of the longest request if that runs alone.
        """
        low, high = 0.0, plan.bound
        if plan.meets(self.objective):
            low = self.workload.rate
        elif plan.at_rate is not None:
            high = self.workload.rate
        if self._least_seconds:
            high = min(high, MAX_REQUESTS / self._least_seconds)
        if least and high <= least:
            return plan
        # The given rate, and so `high`, may be far above what one request at a time needs.
        service, costs = self._service(plan.split)
        lowest = _PRECISION * min(high, 1 / request_seconds(service, costs, self.workload))
        self._report(f"searching the knee of {plan.split} below {high:.3g} requests/s")
        if least > low:
            if not self._is_met(plan.split, least):
                return plan
            low = least
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            # The next rate is above or below the middle: other processes begin there.
            rates = (middle, (middle + high) / 2, (low + middle) / 2)
            ahead = rates[: 1 + self._simulations.num_others]
            self.expect([PlannedRun(plan.split, each) for each in ahead])
            if self._is_met(plan.split, middle):
                low = middle
            elif not low and middle < lowest:  # out of reach at any rate
                break
            else:
                high = middle
        return replace(plan, knee=low)

    def _is_met(self, split: Split, rate: float) -> bool:
        outcome = self.run(PlannedRun(split, rate))
        return not outcome.is_saturated and outcome.attainment >= self.objective.attainment

    def _complete(self, planned: PlannedRun) -> PlannedRun:
        """Returns a run with a change, so that equal runs are equal keys."""
        return planned._replace(change=planned.change or self._change)

    def _arguments(self, planned: PlannedRun) -> SimulationArguments:
        """Returns the simulation of a run that `_complete` has returned."""
        service, costs = self._service(planned.split)
        workload = self.workload.at_rate(planned.rate).lasting(self._least_seconds)
        if planned.lengths != 1.0:
            workload = workload.with_lengths(planned.lengths)
            check_workload(planned.split, service, costs, workload)
        if planned.step_time != 1.0:
            costs = costs.scaled(planned.step_time)
        assert planned.change is not None
        changed = planned.change(service, workload.requests[-1].time)
        return SimulationArguments(changed, workload.requests, costs, self._seed)

    def _judge(
        self, rate: float, arguments: SimulationArguments, result: SimulationResult
    ) -> RateResult:
        service, requests, costs, _ = arguments
        arrivals_end = requests[-1].time
        longest = request_seconds(service, costs, PlannedWorkload(requests))
        allowed = longest + _DRAIN_SECONDS + _DRAIN_SHARE * arrivals_end
        if service.faults:  # the last requests may wait for a worker that starts again
            allowed += service.router.park_seconds
        return RateResult(
            rate=rate,
            attainment=result.summary(self.objective.limits).figures["slo_attainment"],
            is_saturated=result.seconds - arrivals_end > allowed,
            result=result,
        )

    def _bound(self, split: Split) -> float:
        return rate_bound(*self._service(split), self.workload)

    def _service(self, split: Split) -> tuple[SimulatedService, ServiceCosts]:
        """Returns a service with a split's workers, and its costs.

        Raises InvalidArgument for a split, or for lengths, that cannot be simulated.
        """
        if split not in self._services:
            service, costs = self.site.service(split)
            check_workload(split, service, costs, self.workload)
            self._services[split] = service, costs
        return self._services[split]


def rate_bound(service: SimulatedService, costs: ServiceCosts, workload: PlannedWorkload) -> float:
    """Returns requests/s that no service exceeds, by the work of its workers and its router.

    Counts the time of each prompt token that cannot be cached, without the fixed time of its steps,
    and decodes in full batches. Workers of either pool may compute a short prompt
    (`router.local_prefill_tokens`).
    """
    prefill_seconds = short_seconds = decode_seconds = 0.0
    most = service.decode.budgets.max_sequences
    decode = costs.decode
    of_batch = decode.fixed + decode.seconds_of_experts(most)
    for each in workload.requests:
        unique = _uncached_tokens(each.input_length, len(each.block_hashes))
        if service.prefill is None or unique <= service.router.local_prefill_tokens:
            short_seconds += unique * decode.each_prompt_token
        else:
            prefill_seconds += unique * costs.prefill.each_prompt_token
        context = each.input_length + each.output_length / 2
        decode_seconds += (each.output_length - 1) * (
            of_batch / most + decode.each_sequence + decode.each_context_token * context
        )
    count = len(workload.requests)
    router = costs.router_seconds_per_request + costs.router_seconds_per_token * (
        sum(each.output_length for each in workload.requests) / count
    )
    num_prefill = service.prefill.workers if service.prefill else 0
    num_decode = service.decode.workers
    all_seconds = prefill_seconds + short_seconds + decode_seconds
    return 1 / max(
        prefill_seconds / num_prefill / count if num_prefill else 0.0,
        decode_seconds / num_decode / count,
        all_seconds / (num_prefill + num_decode) / count,
        router,
    )


def _uncached_tokens(input_length: int, num_hashes: int) -> int:
    """Returns the least prompt tokens that are computed: one if all blocks may be cached."""
    return 1 if num_hashes else input_length


def request_seconds(
    service: SimulatedService, costs: ServiceCosts, workload: PlannedWorkload
) -> float:
    """Returns about the seconds of the longest request that waits for nothing.

    Its prompt is computed alone, and its tokens in batches that are full.
    """
    pool = service.decode
    prefill = costs.prefill if service.prefill else costs.decode
    most = pool.budgets.max_sequences
    context = min(most * workload.longest, service.engine_config(pool).capacity_tokens)
    decode_seconds = costs.decode.seconds(StepWork(sequences=most, context_tokens=context))
    lengths = {(each.input_length, each.output_length) for each in workload.requests}
    return max(
        _prompt_seconds(prefill, num_input, pool.budgets.chunk_tokens)
        + (num_output - 1) * decode_seconds
        for num_input, num_output in lengths
    )


def _prompt_seconds(costs: StepCosts, num_tokens: int, chunk_tokens: int) -> float:
    """Returns about the seconds of the steps of a prompt, as if its last chunk had all its work."""
    num_chunks = -(-num_tokens // chunk_tokens)
    prompt = StepWork.of_prompt(0, num_tokens)
    each_chunk = costs.fixed + costs.seconds_of_experts(chunk_tokens)
    return (num_chunks - 1) * each_chunk + costs.seconds(prompt)


def other_kind(plans: Sequence[SplitPlan], chosen: SplitPlan) -> SplitPlan | None:
    """Returns the best plan of the other kind on the same number of devices; None without one.

    The kinds: with disaggregation, and without it.
    """
    others = [
        each
        for each in plans
        if each.num_devices == chosen.num_devices
        and bool(each.split.prefill) != bool(chosen.split.prefill)
    ]
    return best_knee(others) if others else None


def list_splits(num_devices: int, tps: Sequence[int]) -> list[Split]:
    """Returns all splits on at most `num_devices` devices, with pools that can be configured."""
    return [
        Split(prefill, workers - prefill, tp)
        for tp in tps
        for workers in range(1, num_devices // tp + 1)
        for prefill in range(workers)
        if max(prefill, workers - prefill) <= _MOST_WORKERS
    ]


def best_knee(plans: Iterable[SplitPlan]) -> SplitPlan:
    """Returns the plan with the highest knee, or the highest bound without any knee."""
    return max(plans, key=lambda each: (each.knee or 0.0, each.bound))


def choose(plans: Sequence[SplitPlan], objective: Objective) -> SplitPlan | None:
    """Returns the cheapest plan that meets the objective; of equal ones the highest knee."""
    meeting = [each for each in plans if each.meets(objective)]
    if not meeting:
        return None
    least = min(each.num_devices for each in meeting)
    return best_knee(each for each in meeting if each.num_devices == least)
