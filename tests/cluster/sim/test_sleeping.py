"""Compares a simulation with the same service in real time, whose steps sleep.

The steps are long against the time of the host, and the simulation gets the host's time as
measured. Three changes of the simulation, each a mistake of other simulators, must be seen.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from tandem.cluster.sim.cost import ServiceCosts, StepCosts
from tandem.cluster.sim.result import SimulatedRequest
from tandem.cluster.sim.service import SimulatedService
from tandem.cluster.sim.simulate import simulate
from tandem.cluster.traces.read import TracedRequest
from tandem.tests.cluster.sim.services import pool, traced
from tandem.tests.cluster.sim.sleeping import SleepingRun, run_sleeping

MODEL_SECONDS = 0.05  # of a step: weights
HOST_SECONDS = 0.02  # of a step: schedule, launch, sample
TOLERANCE = 0.05
MAX_LAG_SHARE = 0.02
SEEDS = 4
SCALES = (1.0, 2.0, 4.0)  # of all times: a busy machine needs longer steps
MORE_SCALES = (4.0, 8.0, 16.0)  # for eight workers on the same cores


def step_costs(host_seconds: float = HOST_SECONDS) -> StepCosts:
    return StepCosts(
        fixed=MODEL_SECONDS + host_seconds,
        each_sequence=0.002,
        each_context_token=1e-5,
        each_prompt_token=2e-4,
        each_prompt_context=0.0,
    )


COSTS = ServiceCosts(prefill=step_costs(), decode=step_costs())


def make_service(workers: int, num_blocks: int = 60) -> SimulatedService:
    """Decode workers that hold few sequences, so that requests wait for their KV cache."""
    return SimulatedService(
        prefill=pool(workers),
        decode=pool(workers, num_blocks=num_blocks),
        token_bytes=1,
        context_tokens=2048,
    )


def make_requests(workers: int, scale: float) -> tuple[list[TracedRequest], list[str]]:
    """One tenant sends many requests at once, another one a few soon after.

    Before them come requests that do not count, for which routers and workers connect.
    """
    warm = [traced(0.3 * scale * n, 110, 2) for n in range(2 * workers)]
    start = 0.3 * (len(warm) + 2)
    many = [
        traced((start + 0.01 * n) * scale, 100 + 7 * n % 30, 20 + n % 5)
        for n in range(12 * workers)
    ]
    few = [traced((start + 0.5 + 0.3 * n) * scale, 110, 18) for n in range(2 * workers)]
    tenants = ["warm"] * len(warm) + ["many"] * len(many) + ["few"] * len(few)
    return warm + many + few, tenants


def figures(requests: Sequence[SimulatedRequest]) -> dict[str, float]:
    assert [each.record.failure for each in requests] == [None] * len(requests)
    requests = [each for each in requests if each.tenant != "warm"]
    found = {
        f"mean TTFT, {tenant}": fmean(r.record.ttft for r in requests if r.tenant == tenant)
        for tenant in ("many", "few")
    }
    found["mean TPOT"] = fmean(each.record.tpot or 0.0 for each in requests)
    begin = min(each.record.started for each in requests)
    found["seconds"] = max(each.record.ended for each in requests) - begin
    return found


def agree(found: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    return all(abs(found[name] / expected[name] - 1) <= TOLERANCE for name in expected)


def compare(workers: int, run: SleepingRun, scale: float) -> tuple[bool, list[str]]:
    """Returns whether the simulation agrees, and which wrong simulations agree too."""
    service, (requests, tenants) = make_service(workers), make_requests(workers, scale)
    measured = figures(run.requests)

    def predict(
        service: SimulatedService, costs: ServiceCosts, seed: int = 0, *, is_fair: bool = True
    ) -> dict[str, float]:
        named = tenants if is_fair else [""] * len(tenants)
        result = simulate(
            service, requests, run.calibrate(costs.scaled(scale)), seed, tenants=named
        )
        pairs = zip(result.requests, tenants, strict=True)
        return figures([replace(each, tenant=tenant) for each, tenant in pairs])

    # The choice among equal workers is random, also in the measured run.
    predictions = [predict(service, COSTS, seed) for seed in range(SEEDS)]
    right = {name: fmean(each[name] for each in predictions) for name in measured}
    without_host = ServiceCosts(prefill=step_costs(0.0), decode=step_costs(0.0))
    larger = make_service(workers, num_blocks=round(1.3 * service.decode.num_blocks))
    wrong = {
        "host time 0": predict(service, without_host),
        "KV capacity +30 %": predict(larger, COSTS),
        "first in, first out": predict(service, COSTS, is_fair=False),
    }
    print(f"measured {measured}\npredicted {right}\nby mistake {wrong}")
    return agree(right, measured), [name for name, each in wrong.items() if agree(each, measured)]


@pytest.mark.io
@pytest.mark.parametrize(
    ("workers", "scales"),
    [
        (2, SCALES),
        pytest.param(4, MORE_SCALES, marks=[pytest.mark.soak, pytest.mark.timeout(1_800)]),
    ],
)
def test_a_service_that_sleeps_agrees_with_its_simulation(
    workers: int, scales: Sequence[float]
) -> None:
    for scale in scales:
        requests, tenants = make_requests(workers, scale)
        sleeping = run_sleeping(make_service(workers), requests, COSTS.scaled(scale), tenants)
        run = asyncio.run(sleeping)
        print(f"times x {scale:g}, late for {run.lag_share:.1%} of the time")
        agrees, unseen = compare(workers, run, scale)
        if agrees and not unseen:
            return
        # The figures of a run that the machine has disturbed may be those of any mistake.
        is_disturbed = run.lag_share > MAX_LAG_SHARE
        assert is_disturbed or not unseen, unseen
    if is_disturbed:
        pytest.skip("the machine is too busy to run a service in real time")
    pytest.fail(f"no agreement within {TOLERANCE:.0%} in {len(scales)} runs")
