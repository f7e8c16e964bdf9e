"""Tests how many workers a pool needs: within bounds, more for more load, after a delay.

At constant load nothing changes.
"""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.scaling.config import ScalingConfig
from tandem.cluster.scaling.policy import DECODE_POOL, PREFILL_POOL
from tandem.cluster.scaling.sizing import (
    Need,
    bounded,
    decode_workers,
    prefill_workers,
    sequences_within,
    settle,
)
from tandem.tests.cluster.scaling.simulation import Arrival, Hardware, Simulation, steady

AMOUNT = st.floats(min_value=0, max_value=1e9)
RATE = st.floats(min_value=1e-3, max_value=1e9)
CONFIG = st.builds(
    ScalingConfig,
    max_replicas=st.integers(1, 256),
    utilization=st.floats(0.05, 1),
    tpot_seconds=st.none() | st.floats(0.001, 1),
    up_delay_seconds=st.floats(0, 100),
    down_delay_seconds=st.floats(0, 100),
)
STEPS = st.lists(st.tuples(st.integers(1, 256).map(float), st.floats(1e-4, 10)), max_size=20)


def test_prompts_take_what_arrives_and_what_waits() -> None:
    config = ScalingConfig(max_replicas=8, utilization=0.5, catch_up_seconds=10)
    assert prefill_workers(config, arriving=1000, waiting=0, worker_rate=500) == 4
    assert prefill_workers(config, arriving=1000, waiting=5000, worker_rate=500) == 6
    assert prefill_workers(config, arriving=0, waiting=0, worker_rate=0) == 0


def test_decode_takes_the_most_of_sequences_and_kv_cache() -> None:
    config = ScalingConfig(max_replicas=8, utilization=0.5)
    worker = {"worker_sequences": 20, "worker_kv_tokens": 1000}
    assert decode_workers(config, sequences=40, kv_tokens=100, **worker) == 4
    assert decode_workers(config, sequences=4, kv_tokens=3000, **worker) == 6


def test_sequences_within_the_target_are_read_off_the_line_through_the_steps() -> None:
    steps = [(number, 0.010 + 0.001 * number) for number in (4.0, 8.0, 16.0)]
    assert sequences_within(0.030, 64, steps) == pytest.approx(20, rel=0.05)
    assert sequences_within(0.200, 64, steps) == 64
    assert sequences_within(0.005, 64, steps) == 1
    assert sequences_within(None, 64, steps) == sequences_within(0.030, 64, []) == 64
    # The fixed part is unknown.
    assert sequences_within(0.030, 64, [(8.0, 0.020)] * 5) == pytest.approx(12)


@given(
    demand=st.fixed_dictionaries({"arriving": AMOUNT, "waiting": AMOUNT, "worker_rate": RATE}),
    config=CONFIG,
    more=AMOUNT,
)
def test_more_prompts_never_take_fewer_workers(
    demand: dict[str, float], config: ScalingConfig, more: float
) -> None:
    for name in ("arriving", "waiting"):
        larger = demand | {name: demand[name] + more}
        assert prefill_workers(config, **larger) >= prefill_workers(config, **demand)


@given(
    demand=st.fixed_dictionaries(
        {
            "sequences": AMOUNT,
            "kv_tokens": AMOUNT,
            "worker_sequences": RATE,
            "worker_kv_tokens": RATE,
        }
    ),
    config=CONFIG,
    more=AMOUNT,
)
def test_more_sequences_never_take_fewer_workers(
    demand: dict[str, float], config: ScalingConfig, more: float
) -> None:
    for name in ("sequences", "kv_tokens"):
        larger = demand | {name: demand[name] + more}
        assert decode_workers(config, **larger) >= decode_workers(config, **demand)


@given(steps=STEPS, tpot=st.floats(1e-4, 10), more=st.floats(0, 10), most=st.integers(1, 1024))
def test_a_looser_target_never_allows_fewer_sequences(
    steps: list[tuple[float, float]], tpot: float, more: float, most: int
) -> None:
    strict, loose = (sequences_within(each, most, steps) for each in (tpot, tpot + more))
    assert 1 <= strict <= loose <= most


@given(
    workers=st.floats(0, 1e12) | st.just(math.inf) | st.just(math.nan),
    current=st.integers(0, 20),
    fewest=st.integers(0, 9),
    extra=st.integers(0, 9),
    more=st.floats(0, 10),
)
def test_the_bounds_hold(
    workers: float, current: int, fewest: int, extra: int, more: float
) -> None:
    found = bounded(workers, current, fewest, fewest + extra)
    assert fewest <= found <= fewest + extra
    assert found <= bounded(workers + more, current, fewest, fewest + extra) or math.isnan(workers)


def test_a_load_about_a_whole_number_of_workers_keeps_their_number() -> None:
    assert [bounded(each, 3, 1, 9) for each in (2.01, 2.9, 3.0, 3.2, 3.31)] == [3, 3, 3, 3, 4]
    assert [bounded(each, 4, 1, 9) for each in (2.9, 3.1, 4.4)] == [3, 4, 4]


def test_a_pool_that_may_be_empty_is_so_for_almost_no_load() -> None:
    assert [bounded(each, 1, 0, 9) for each in (0.0, 0.09, 0.11, 1.0)] == [0, 0, 1, 1]
    assert [bounded(each, 0, 0, 9) for each in (0.0, 0.19, 0.21, 1.2)] == [0, 0, 1, 2]


def delays(config: ScalingConfig) -> dict[str, float]:
    return {"up_delay": config.up_delay_seconds, "down_delay": config.down_delay_seconds}


def settled(
    config: ScalingConfig, needs: Sequence[tuple[float, int]], current: int = 1
) -> list[tuple[float, int]]:
    """Returns the numbers of workers and the time of each change, given the needs at each time."""
    past: Sequence[Need] = []
    found = [(0.0, current)]
    for now, needed in needs:
        current, past = settle(now, needed, past, current, **delays(config))
        if current != found[-1][1]:
            found.append((now, current))
    return found


@given(config=CONFIG, needed=st.integers(1, 20), current=st.integers(1, 20))
def test_a_constant_need_makes_one_change_after_its_delay(
    config: ScalingConfig, needed: int, current: int
) -> None:
    changes = settled(config, [(0.5 * tick, needed) for tick in range(500)], current)[1:]
    delay = config.up_delay_seconds if needed > current else config.down_delay_seconds
    assert [number for _, number in changes] == ([] if needed == current else [needed])
    assert all(delay <= time <= delay + 0.5 for time, _ in changes)


@given(
    config=CONFIG,
    needs=st.lists(st.tuples(st.floats(0.1, 30), st.integers(1, 9)), max_size=60),
    current=st.integers(1, 9),
)
def test_a_need_that_changes_makes_no_change_that_was_not_needed_for_a_whole_delay(
    config: ScalingConfig, needs: list[tuple[float, int]], current: int
) -> None:
    times = itertools.accumulate(seconds for seconds, _ in needs)
    timed = [(time, number) for time, (_, number) in zip(times, needs, strict=True)]
    for (_, before), (now, number) in itertools.pairwise(settled(config, timed, current)):
        delay = config.up_delay_seconds if number > before else config.down_delay_seconds
        held = [needed for time, needed in timed if now - delay < time <= now]
        assert all(needed >= number if number > before else needed <= number for needed in held)


@given(needs=st.lists(st.integers(1, 5), min_size=1, max_size=100))
def test_the_past_is_forgotten_when_no_delay_needs_it(needs: list[int]) -> None:
    config = ScalingConfig(max_replicas=5, up_delay_seconds=2, down_delay_seconds=5)
    past: list[Need] = []
    for now, needed in enumerate(needs):
        _, past = settle(float(now), needed, past, 1, **delays(config))
    assert len(past) <= 7


QUICK = {
    "up_delay_seconds": 5.0,
    "down_delay_seconds": 60.0,
    "window_seconds": 10.0,
    "max_replicas": 8,
}
HARDWARE = Hardware(prefill_rate=1000, step_fixed=0.02, step_each=0.001, start_seconds=10)


def simulated(*arrivals: Arrival) -> Simulation:
    decode = ScalingConfig(tpot_seconds=0.04, **QUICK)  # type: ignore[arg-type]
    return Simulation(HARDWARE, ScalingConfig(**QUICK), decode)  # type: ignore[arg-type]


@pytest.mark.parametrize("per_second", [0.5, 2.0, 4.0])
def test_pools_settle_at_constant_load_and_serve_it_in_time(per_second: float) -> None:
    arrivals = list(steady(per_second, 400, prompt=600, output=200))
    outcome = simulated().run(arrivals)
    for pool in (PREFILL_POOL, DECODE_POOL):
        changes = outcome.targets[pool]
        assert outcome.reversals(pool, 60.0) == 0, changes
        assert all(time < 150 for time, _ in changes), changes
    late = arrivals[len(arrivals) // 2 :]
    assert max(outcome.waits[-len(late) :]) < 1.0
    assert max(outcome.tpots[-len(late) :]) < 0.05


def test_pools_grow_with_a_burst_and_shrink_after_it() -> None:
    burst = [
        *steady(0.5, 100, prompt=600, output=200),
        *steady(4.0, 100, prompt=600, output=200, start=100),
        *steady(0.5, 200, prompt=600, output=200, start=200),
    ]
    outcome = simulated().run(burst, extra_seconds=100)
    for pool in (PREFILL_POOL, DECODE_POOL):
        changes = outcome.targets[pool]
        assert max(number for _, number in changes) >= 3
        assert changes[-1][1] == 1
        assert outcome.reversals(pool, 60.0) == 0
