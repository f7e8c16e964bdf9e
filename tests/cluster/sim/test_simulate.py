"""Tests the simulator: times that follow from the costs, the same result twice, faults."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tandem.cluster.config import RouterConfig
from tandem.cluster.sim.cost import StepCosts, StepWork
from tandem.cluster.sim.result import SimulationResult
from tandem.cluster.sim.service import Fault
from tandem.cluster.sim.simulate import simulate
from tandem.proto.costs import TableCost, mixed_chunk
from tandem.tests.cluster.sim.services import (
    COSTS,
    STEP,
    TOKEN_BYTES,
    pool,
    service,
    traced,
    traffic,
)


def times(result: SimulationResult) -> list[list[float]]:
    return [list(each.record.chunk_times) for each in result.requests]


def check_complete(result: SimulationResult, lengths: list[int]) -> None:
    assert [each.record.failure for each in result.requests] == [None] * len(lengths)
    assert [each.record.output_tokens for each in result.requests] == lengths


def test_the_times_of_one_request_are_the_sums_of_its_steps() -> None:
    result = simulate(service(), [traced(1.0, 800, 11)], COSTS)
    check_complete(result, [11])
    (request,) = result.requests
    chunks = [(0, 512), (512, 288)]
    prefill = sum(
        STEP.seconds(StepWork(sequences=1) + StepWork.of_prompt(start, count))
        for start, count in chunks
    )
    assert request.record.ttft == pytest.approx(prefill)
    steps = [STEP.seconds(StepWork(sequences=1, context_tokens=800 + n)) for n in range(1, 11)]
    gaps = request.record.gaps
    assert gaps[1:] == pytest.approx(steps[1:])
    # The last quarter of the last chunk's layers moves after the prefill.
    tail = 288 * TOKEN_BYTES / 4 / COSTS.transfer_bytes_per_second
    assert gaps[0] == pytest.approx(tail + COSTS.transfer_seconds + steps[0])
    assert request.timeline.prefill_seconds == pytest.approx(prefill)
    assert request.timeline.kv_transfer_bytes == 800 * TOKEN_BYTES


def test_one_worker_computes_a_prompt_beside_the_decodes() -> None:
    result = simulate(service(prefill=0), [traced(0.0, 16, 40), traced(0.2, 400, 2)], COSTS)
    check_complete(result, [40, 2])
    chunk = mixed_chunk(512, 2)
    work = StepWork(sequences=2, context_tokens=26) + StepWork.of_prompt(0, chunk)
    assert chunk < 400
    assert max(result.requests[0].record.gaps) == pytest.approx(STEP.seconds(work), rel=0.05)


def test_a_decode_worker_computes_a_short_prompt_as_in_a_service() -> None:
    """With the bounds that a service has by default: it does not wait behind a long prompt."""
    bound = RouterConfig().local_prefill_tokens
    requests = [traced(0.0, 2000, 2), traced(0.1, bound, 2), traced(0.2, bound + 1, 2)]
    result = simulate(service(), requests, COSTS)
    long, short, other = result.requests
    assert not short.timeline.kv_transfer_bytes
    assert short.record.chunk_times[0] < long.record.chunk_times[0] < other.record.chunk_times[0]


def test_equal_blocks_are_computed_once() -> None:
    hashes = range(10)
    requests = [traced(0.0, 640, 2, hashes), traced(9.0, 640, 2, hashes), traced(18.0, 640, 2)]
    result = simulate(service(), requests, COSTS)
    first, second, third = (each.record.ttft for each in result.requests)
    assert second < first / 2
    assert third == pytest.approx(first)
    assert [each.timeline.cached_tokens for each in result.requests] == [0, 624, 0]


WINDOWS = (TableCost(96, 5 * 1024), TableCost(16, 29 * 1024, 1024))
"""The block tables of Gemma 3 4B, whose tokens have a quarter of their bytes here."""


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("prefill", [0, 1])
def test_a_model_with_windows_holds_and_moves_what_its_tables_say(
    prefill: int, exact: bool
) -> None:
    small = pool(num_blocks=546)
    windows = replace(
        service(tables=WINDOWS, context_tokens=100_000, exact=exact),
        decode=small,
        prefill=small if prefill else None,
    )
    longest = windows.engine_config(small).capacity_tokens
    assert longest > 4 * 546 * 16
    requests = [traced(0.0, 12_000, 40), traced(60.0, longest - 4, 4)]
    result = simulate(windows, requests, COSTS)
    check_complete(result, [40, 4])
    moved = [each.timeline.kv_transfer_bytes for each in result.requests]
    expected = [each.input_length * 5 * 1024 + 1023 * 29 * 1024 for each in requests]
    assert moved == [prefill * each for each in expected]


def test_the_router_takes_time_for_requests_and_tokens() -> None:
    requests = [traced(0.0, 100, 50)]
    free = simulate(service(), requests, COSTS)
    costs = replace(COSTS, router_seconds_per_request=0.03, router_seconds_per_token=0.001)
    busy = simulate(service(), requests, costs)
    assert busy.requests[0].record.ttft == pytest.approx(free.requests[0].record.ttft + 0.031)
    assert busy.router_busy_share == pytest.approx((0.03 + 50 * 0.001) / busy.seconds, rel=0.01)
    waits = busy.wait_seconds()
    assert waits["tokenize"] == pytest.approx(0.03)
    assert sum(waits.values()) == pytest.approx(busy.requests[0].timeline.end_to_end_seconds)


def test_busy_neighbours_on_the_same_cores_slow_a_step_down() -> None:
    requests = traffic(2.0, 20.0)
    alone = simulate(service(), requests, COSTS).summary().figures
    beside = simulate(service(), requests, replace(COSTS, contention=1.5)).summary().figures
    assert 1.05 * alone["mean_tpot_ms"] < beside["mean_tpot_ms"] < 1.5 * alone["mean_tpot_ms"]
    prompts = simulate(service(), requests, replace(COSTS, prefill_contention=1.5))
    figures = prompts.summary().figures
    assert 1.05 * alone["mean_ttft_ms"] < figures["mean_ttft_ms"]
    assert figures["mean_tpot_ms"] == pytest.approx(alone["mean_tpot_ms"], rel=0.02)


@pytest.mark.parametrize("exact", [True, False])
def test_a_killed_decode_worker_loses_time_and_no_token(exact: bool) -> None:
    requests = traffic(3.0, 20.0)
    lengths = [each.output_length for each in requests]
    pools = service(prefill=1, decode=2, exact=exact)
    fault = Fault(time=8.0, role="decode", restart_seconds=3.0)
    result = simulate(replace(pools, faults=(fault,)), requests, COSTS)
    check_complete(result, lengths)
    interrupted = [each for each in result.requests if each.timeline.interruptions]
    assert interrupted
    assert {each.timeline.interruptions[0].cause for each in interrupted} <= {"crash", "gone"}
    assert [number for _, number in result.sizes["decode"]] == [1, 2, 1, 2]
    assert result.workers[0].ended == pytest.approx(8.0)


def test_a_killed_prefill_worker_loses_no_request() -> None:
    requests = traffic(3.0, 20.0)
    pools = service(prefill=2, decode=1)
    fault = Fault(time=8.0, role="prefill", restart_seconds=None)
    result = simulate(replace(pools, faults=(fault,)), requests, COSTS)
    check_complete(result, [each.output_length for each in requests])


def test_without_a_worker_that_comes_back_requests_fail_with_their_cause() -> None:
    fault = Fault(time=1.0, role="decode", restart_seconds=None)
    result = simulate(service(prefill=0, faults=(fault,)), [traced(0.5, 100, 4000)], COSTS)
    failure = result.requests[0].record.failure
    assert failure is not None
    assert failure.kind == "UNAVAILABLE"


@pytest.mark.slow
def test_a_coarse_worker_measures_as_an_exact_one() -> None:
    requests = traffic(16.0, 15.0)
    exact = simulate(service(prefill=8, decode=8, routers=2), requests, COSTS)
    coarse = simulate(service(prefill=8, decode=8, routers=2, exact=False), requests, COSTS)
    ours, theirs = coarse.summary().figures, exact.summary().figures
    for figure in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2e_ms", "output_throughput"):
        assert ours[figure] == pytest.approx(theirs[figure], rel=0.03), figure
    for role in ("prefill", "decode"):
        assert coarse.busy_share(role) == pytest.approx(exact.busy_share(role), rel=0.03)
        assert coarse.peak_kv(role) == pytest.approx(exact.peak_kv(role), rel=0.25)


def test_a_defect_of_a_worker_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(costs: StepCosts, work: StepWork) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(StepCosts, "seconds", predict)
    with pytest.raises(RuntimeError, match="the simulation has failed") as raised:
        simulate(service(), [traced(0.0, 100, 5)], COSTS)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


SCRIPT = """
import sys
from tandem.cluster.sim.service import Fault
from tandem.cluster.sim.simulate import simulate
from tandem.tests.cluster.sim.services import COSTS, service, traffic

faults = (Fault(time=3.0, role="decode", restart_seconds=2.0),)
pools = service(prefill=2, decode=3, routers=2, faults=faults)
result = simulate(pools, traffic(4.0, 10.0), COSTS, seed=7)
print([list(each.record.chunk_times) for each in result.requests])
print([name for name in ("ray", "torch") if name in sys.modules])
"""


@pytest.mark.io
def test_the_same_seed_gives_the_same_result_in_any_process_without_ray_and_torch() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].splitlines()[1] == "[]"
    requests = traffic(4.0, 10.0)
    pools = service(prefill=2, decode=3, routers=2)
    assert times(simulate(pools, requests, COSTS, seed=7)) == times(
        simulate(pools, requests, COSTS, seed=7)
    )
