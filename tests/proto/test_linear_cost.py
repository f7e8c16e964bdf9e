"""Tests that few noisy observations give a cost, and that a stall does not."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.costs import LinearCost, LinearFit

NEUTRAL = LinearCost(fixed=0.0, each=2e-4)
PROMPTS = LinearCost(fixed=1e-2, each=2e-4)


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
    fit.observe(1, 0.03, PROMPTS)
    assert fit.cost(PROMPTS).seconds(1) == pytest.approx(0.03)
    assert fit.cost(PROMPTS).seconds(1000) < 1


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


@given(st.floats(0, 1), st.floats(1e-6, 1), st.floats(0, 1e3))
def test_an_amount_takes_the_seconds_that_are_given(
    fixed: float, each: float, seconds: float
) -> None:
    cost = LinearCost(fixed=fixed, each=each)
    assert cost.seconds(cost.amount(seconds)) == pytest.approx(seconds, abs=1e-9)


def test_amounts_without_a_cost_have_no_bound() -> None:
    cost = LinearCost(fixed=1.0, each=0.0)
    assert cost.amount(2.0) == math.inf
    assert cost.amount(0.5) == -math.inf
