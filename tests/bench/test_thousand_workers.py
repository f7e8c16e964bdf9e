"""Tests the parts of the benchmark of 1,000 workers with a few workers."""

import pytest

from tandem.tests.bench.thousand_workers.memory import measure_memory
from tandem.tests.bench.thousand_workers.placement import run
from tandem.tests.bench.thousand_workers.sessions import measure_router


def test_a_bounded_placement_caches_about_as_much_as_a_full_scan() -> None:
    bounded, full = (run(60, 30, (), full_scan=full_scan) for full_scan in (False, True))
    assert bounded.simulated.num_requests == full.simulated.num_requests == 180
    assert bounded.simulated.hit_rate == pytest.approx(full.simulated.hit_rate, abs=0.02)
    assert 0 < bounded.percentile(50) <= bounded.percentile(99)


def test_the_sessions_of_a_router_are_measured() -> None:
    found = measure_router(num_workers=4, changed_blocks=8, seconds=0.2)
    assert 0 < found["event_loop_share"] <= found["core_share"]


def test_memory_is_sampled_over_virtual_time() -> None:
    samples: list[tuple[int, float, float]] = []
    measure_memory(4, 60, 30, lambda *sample: samples.append(sample))
    assert [second for second, _, _ in samples] == [30, 60, 30, 60]
