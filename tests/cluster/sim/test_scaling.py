"""Tests the scaling policy on a whole service in virtual time, against failures of others.

The failures: pools that oscillate (vllm-project/aibrix, ai-dynamo), a queue that does not count in
a burst, a target that no number of workers reaches and that keeps a pool large for ever, a
scale-down that cuts streams, and a fight with an operator who sets the number of workers.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tandem.cluster.config import PoolRole, RouterConfig
from tandem.cluster.scaling.config import ScalingConfig
from tandem.cluster.sim.result import SimulationResult
from tandem.cluster.sim.service import Fault, Resize, SimulatedService
from tandem.cluster.sim.simulate import simulate
from tandem.cluster.traces.read import TracedRequest
from tandem.tests.cluster.sim.services import COSTS, pool, service, traffic

SCALING: dict[str, Any] = {
    "max_replicas": 6,
    "up_delay_seconds": 3.0,
    "down_delay_seconds": 60.0,
    "window_seconds": 10.0,
}
TPOT_SECONDS = 0.04
START_SECONDS = 10.0
SHORT = (4, 12)
PATIENT = RouterConfig(max_queue_seconds=86_400)  # refuses nothing


def scaled(tpot_seconds: float = TPOT_SECONDS, **fields: Any) -> SimulatedService:
    prefill, decode = (
        pool(scaling=ScalingConfig(tpot_seconds=tpot, **SCALING), start_seconds=START_SECONDS)
        for tpot in (None, tpot_seconds)
    )
    return replace(service(exact=False, **fields), prefill=prefill, decode=decode)


def check_complete(result: SimulationResult, requests: list[TracedRequest]) -> None:
    assert [each.record.failure for each in result.requests] == [None] * len(requests)
    lengths = [each.output_length for each in requests]
    assert [each.record.output_tokens for each in result.requests] == lengths


def sizes(result: SimulationResult, role: PoolRole, start: float, end: float) -> list[int]:
    """Returns the numbers of workers of a pool from `start` to `end`."""
    changes = [*result.sizes[role], (result.seconds, 0)]
    return [number for (at, number), (until, _) in pairwise(changes) if until > start and at < end]


def last_request(at: float) -> list[TracedRequest]:
    """A request that keeps the simulation running until then."""
    return traffic(1.0, 5.0, start=at, outputs=(2, 3))[:1]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_random_arrivals_at_a_constant_rate_do_not_make_pools_oscillate(rate: float) -> None:
    requests = traffic(rate, 240.0)
    result = simulate(scaled(), requests, COSTS)
    check_complete(result, requests)
    for role in ("prefill", "decode"):
        settled = sizes(result, role, 120.0, 240.0)
        assert max(settled) - min(settled) <= 1, settled
        assert len(settled) <= 3, settled


@pytest.mark.slow
def test_requests_that_wait_in_a_burst_count() -> None:
    requests = [*traffic(0.5, 60.0, outputs=SHORT), *traffic(8.0, 40.0, outputs=SHORT, start=60.0)]
    result = simulate(scaled(router=PATIENT), requests, COSTS)
    fixed = simulate(service(exact=False, router=PATIENT), requests, COSTS)
    check_complete(result, requests)
    assert result.queue_seconds["prefill"] > 0  # in the router, where no worker sees them
    ready = 60.0 + SCALING["up_delay_seconds"] + START_SECONDS
    assert max(sizes(result, "prefill", 60.0, ready + 10.0)) >= 2
    assert result.summary().figures["p90_ttft_ms"] < fixed.summary().figures["p90_ttft_ms"] / 2


def test_a_target_that_no_number_of_workers_reaches_does_not_keep_the_pool_large() -> None:
    requests = [*traffic(2.0, 60.0), *last_request(200.0)]
    result = simulate(scaled(tpot_seconds=COSTS.decode.fixed / 2), requests, COSTS)
    check_complete(result, requests)
    assert max(sizes(result, "decode", 30.0, 60.0)) == SCALING["max_replicas"]
    assert sizes(result, "decode", 190.0, 200.0) == [1]


def test_scaling_down_cuts_no_stream_and_computes_none_again() -> None:
    requests = traffic(1.0, 10.0, outputs=(800, 1000))
    shrink = Resize(time=20.0, role="decode", workers=1)
    result = simulate(service(decode=3, exact=False, resizes=(shrink,)), requests, COSTS)
    check_complete(result, requests)
    ends = [each.ended for each in result.workers if each.role == "decode" and each.ended]
    assert sorted(ends)[1] < min(each.record.ended for each in result.requests)
    causes = [each.cause for one in result.requests for each in one.timeline.interruptions]
    assert set(causes) == {"suspended"}
    # Each stream keeps the worker of its prompt and moves its KV cache.
    assert all(each.timeline.kv_transfer_bytes > 0 for each in result.requests)
    longest = max(max(each.record.gaps) for each in result.requests)
    assert longest < 1.5


def test_an_operator_who_starts_more_workers_than_needed_causes_one_change_back() -> None:
    requests = [*traffic(0.5, 150.0, outputs=SHORT), *last_request(200.0)]
    edit = Resize(time=100.0, role="decode", workers=4)
    result = simulate(scaled(resizes=(edit,)), requests, COSTS)
    check_complete(result, requests)
    assert sizes(result, "decode", 20.0, 99.0) == [1]
    assert sizes(result, "decode", 170.0, 200.0) == [1]


@pytest.mark.slow
def test_an_operator_who_stops_needed_workers_gets_them_back_after_the_delay() -> None:
    requests = traffic(3.7, 70.0, inputs=(800, 1600), outputs=SHORT)
    edit = Resize(time=40.0, role="prefill", workers=1)
    result = simulate(scaled(router=PATIENT, resizes=(edit,)), requests, COSTS)
    check_complete(result, requests)
    before = sizes(result, "prefill", 38.0, 39.0)[-1]
    assert before > 1
    back = 40.0 + SCALING["up_delay_seconds"] + START_SECONDS + SCALING["window_seconds"]
    assert max(sizes(result, "prefill", 41.0, back)) >= before


def test_a_worker_that_dies_is_replaced_once() -> None:
    requests = [*traffic(0.5, 60.0, outputs=SHORT), *last_request(90.0)]
    decode = pool(2, scaling=ScalingConfig(**SCALING), start_seconds=START_SECONDS)
    fault = Fault(time=30.0, role="decode", restart_seconds=START_SECONDS)
    result = simulate(replace(scaled(), decode=decode, faults=(fault,)), requests, COSTS)
    check_complete(result, requests)
    assert sizes(result, "decode", 20.0, 80.0) == [2, 1, 2]
