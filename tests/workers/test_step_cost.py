"""Tests that measured steps give the prompt tokens for which a step has time."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.costs import LinearCost
from tandem.workers.step_cost import LEAST_CHUNK, StepCost, StepTimes

COSTS = st.builds(LinearCost, fixed=st.floats(1e-4, 1), each=st.floats(1e-6, 1))
FACTORS = st.floats(1.01, 10)


@given(COSTS, COSTS, FACTORS, st.integers(1, 256), st.integers(0, 256))
def test_a_mixed_step_is_within_the_factor_or_as_short_as_is_efficient(
    decode: LinearCost, prompt: LinearCost, factor: float, num_rows: int, num_joining: int
) -> None:
    cost = StepCost(decode=decode, prompt=prompt)
    tokens = cost.tokens_beside(factor, num_rows, num_joining)
    assert tokens >= LEAST_CHUNK
    seconds = decode.seconds(num_rows) + prompt.seconds(tokens)
    is_within = seconds <= 1.0001 * factor * decode.seconds(num_rows + num_joining)
    is_efficient = tokens * prompt.each <= 2.0001 * prompt.fixed
    assert is_within or is_efficient or tokens == LEAST_CHUNK


@given(COSTS, st.floats(0, 0.1), FACTORS, st.integers(1, 4096))
def test_more_prompts_lengthen_the_step_that_ends_the_first_by_the_factor(
    prompt: LinearCost, fixed: float, factor: float, num_tokens: int
) -> None:
    cost = StepCost(decode=LinearCost(fixed=fixed, each=0.01), prompt=prompt)
    alone = fixed + prompt.seconds(num_tokens)
    more = cost.tokens_after(factor, num_tokens)
    efficient = 2 * (fixed + prompt.fixed)
    together = fixed + prompt.seconds(num_tokens + more)
    assert together == pytest.approx(factor * max(alone, efficient), rel=1e-6)


def test_without_measurements_only_the_limits_in_tokens_count() -> None:
    cost = StepTimes().cost()
    assert cost.is_decode_due
    assert cost.tokens_beside(2, 1, 1) == math.inf
    assert cost.tokens_after(2, 10) == math.inf


def test_a_step_without_prompts_is_due_before_the_first_mixed_step_and_again_later() -> None:
    times = StepTimes()
    gaps = []
    for _ in range(9):
        count = 0
        while not times.cost().is_decode_due:
            times.observe(4, 16, 0.02)
            count += 1
        gaps.append(count)
        times.observe(4, 0, 0.01)
    assert gaps == [0, 8, 16, 24, 32, 40, 48, 50, 50]


@pytest.mark.parametrize("each", [1e-5, 3e-4, 3e-3, 3e-2])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_steps_of_any_model_give_its_cost_also_under_noise(each: float, noise: float) -> None:
    """Of a hundred steps, two are stalled; the others vary by `noise`."""
    rng, times = random.Random(1), StepTimes()
    factor, decode = 2.0, LinearCost(fixed=0.01, each=0.0005)
    ratios = []
    for number in range(400):
        num_rows = rng.randint(1, 8)
        most = times.cost().tokens_beside(factor, num_rows, 0)
        num_tokens = int(min(most, 4096)) if number % 2 else 0
        seconds = decode.seconds(num_rows) + each * num_tokens
        if noise:
            seconds *= rng.lognormvariate(0, noise) * (20 if rng.random() < 0.02 else 1)
        times.observe(num_rows, num_tokens, seconds)
        right = max((factor - 1) * decode.seconds(num_rows) / each, LEAST_CHUNK)
        ratios.append(most / right)
    ratios = sorted(ratios[50:])
    middle = ratios[len(ratios) // 2]
    assert 0.7 < middle < (1.15 if noise else 1.05)
    assert ratios[-1] < (6 if noise else 1.2)


def test_a_model_that_becomes_slower_is_followed() -> None:
    times = StepTimes()
    for each, chunk in ((1e-3, 10), (5e-4, 20)):
        for _ in range(100):
            times.observe(4, 0, 0.01)
            times.observe(4, chunk, 0.01 + each * chunk)
        assert times.cost().tokens_beside(2, 4, 0) == pytest.approx(0.01 / each, rel=0.1)
