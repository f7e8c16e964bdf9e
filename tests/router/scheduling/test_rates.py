"""Tests that no worker is avoided for good, and how fast a queue drains."""

import pytest

from tandem.proto.costs import LinearCost
from tandem.router.scheduling.capacity import Capacity, DrainRate
from tandem.router.scheduling.rates import Rates
from tandem.tests.router.pools import Clock

NEUTRAL = LinearCost(fixed=0.0, each=2e-4)


def test_workers_without_recent_observations_are_taken_to_be_as_fast_as_the_best() -> None:
    clock = Clock()
    rates = Rates(NEUTRAL, typical=500, clock=clock)
    assert not rates.known
    assert rates.cost("new") == NEUTRAL
    for amount in (100, 900, 500, 300):
        rates.observe("fast", amount, 1e-3 * amount)
        rates.observe("slow", amount, 1e-2 * amount)
    assert rates.cost("new") == rates.best()
    assert rates.cost("new").each == pytest.approx(1e-3, rel=0.05)
    assert rates.cost("slow").each == pytest.approx(1e-2, rel=0.05)
    clock.now = 600.0
    assert rates.cost("slow").each < 1.1e-3
    rates.forget("fast")
    assert rates.best().each == pytest.approx(1e-2, rel=0.05)
    rates.forget("slow")
    assert rates.best() == NEUTRAL


def test_a_drain_rate_is_measured_since_the_queue_was_last_empty() -> None:
    clock = Clock()
    drain = DrainRate(clock)
    drain.fill()
    for _ in range(20):
        assert drain.seconds(100) in (0.0, pytest.approx(1.0))
        clock.now += 0.5
        drain.depart(50)
    assert drain.seconds(100) == pytest.approx(1.0)
    clock.now += 100  # nothing departs any more
    assert drain.seconds(100) > 5.0
    drain.clear()
    assert drain.seconds(100) == 0.0


def test_before_a_drain_rate_is_measured_it_is_that_of_the_work_in_progress() -> None:
    drain, work = DrainRate(Clock()), Capacity(sequences=1, prompt_tokens=30, kv_tokens=40)
    for _ in range(4):
        drain.begin(work)
    assert drain.seconds(100) == 0.0  # nothing has ended
    for _ in range(2):
        drain.finish(work, 2.0)
    assert drain.seconds(80) == pytest.approx(2.0)
    assert drain.prompt_tokens(80) == pytest.approx(60)
    assert (
        drain.seconds(80, Capacity(sequences=2, kv_tokens=1000)) == 0.0
    )  # there is room for two more like these
    assert drain.seconds(160, Capacity(sequences=2, kv_tokens=1000)) == pytest.approx(1.0)
    assert drain.seconds(160, Capacity(sequences=9, kv_tokens=40)) == pytest.approx(2.0)
