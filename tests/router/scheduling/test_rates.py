"""Tests that few noisy observations are enough, and that no worker is avoided for good."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.scheduling.capacity import Capacity, DrainRate
from tandem.router.scheduling.policy import NEUTRAL_PREFILL
from tandem.router.scheduling.rates import LinearCost, LinearFit, Rates
from tandem.tests.router.pools import Clock

NEUTRAL = LinearCost(fixed=0.0, each=2e-4)


def test_a_cost_is_fitted_under_noise_and_followed_when_it_changes() -> None:
    rng, fit = random.Random(0), LinearFit()
    for fixed, each in ((0.02, 1e-3), (0.005, 3e-4)):
        for _ in range(120):
            amount = rng.randint(10, 2000)
            fit.observe(amount, (fixed + each * amount) * rng.uniform(0.95, 1.05), NEUTRAL)
        cost = fit.cost(NEUTRAL)
        assert cost.each == pytest.approx(each, rel=0.1)
        assert cost.seconds(1000) == pytest.approx(fixed + each * 1000, rel=0.05)


def test_equal_amounts_take_the_shape_of_the_prior() -> None:
    """Otherwise the uncached tenth of a prompt would seem to cost almost as much as all of it."""
    prior = LinearCost(fixed=0.001, each=0.0002)
    fit = LinearFit()
    for _ in range(10):
        fit.observe(20, 0.02, prior)
    cost = fit.cost(prior)
    assert cost.seconds(20) == pytest.approx(0.02)
    assert cost.fixed == pytest.approx(4 * prior.fixed)
    assert cost.each == pytest.approx(4 * prior.each)


def test_a_short_prompt_does_not_say_how_long_the_tokens_of_long_ones_take() -> None:
    """Most of its time is the fixed time of a step: 30 ms for one token are not 30 s for 1,000."""
    fit = LinearFit()
    fit.observe(1, 0.03, NEUTRAL_PREFILL)
    assert fit.cost(NEUTRAL_PREFILL).seconds(1) == pytest.approx(0.03)
    assert fit.cost(NEUTRAL_PREFILL).seconds(1000) < 1


def test_one_stall_changes_the_estimate_little() -> None:
    fit = LinearFit()
    for n in range(30):
        fit.observe(100 + 40 * (n % 10), 1e-3 * (100 + 40 * (n % 10)), NEUTRAL)
    fit.observe(200, 60.0, NEUTRAL)
    assert fit.cost(NEUTRAL).seconds(200) < 0.3


@given(st.lists(st.tuples(st.integers(0, 10**10), st.floats(0, 1e3)), min_size=1, max_size=30))
def test_no_part_is_ever_negative_or_undefined(observations: list[tuple[int, float]]) -> None:
    fit = LinearFit()
    for amount, seconds in observations:
        fit.observe(amount, seconds, NEUTRAL)
        cost = fit.cost(NEUTRAL)
        assert 0 <= cost.each < 1e12
        assert -1e-6 <= cost.fixed < 1e12


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
