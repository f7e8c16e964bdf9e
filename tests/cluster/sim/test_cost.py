"""Tests that costs are recovered from measured steps, and that their limits are named."""

import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.sim.cost import (
    ServiceCosts,
    StepCosts,
    StepSample,
    StepWork,
    fit_steps,
    nonnegative_least_squares,
)
from tandem.workers.engine.plan import SequenceStep, StepPlan

GRID = [
    StepWork(sequences=batch, context_tokens=batch * context)
    for batch in (1, 4, 16, 64)
    for context in (64, 512, 4096)
] + [
    StepWork(
        sequences=batch + 1,
        context_tokens=batch * 512,
    )
    + StepWork.of_prompt(context, tokens)
    for batch in (0, 8)
    for tokens in (16, 128, 512)
    for context in (256, 4096)
]
PLAIN = StepCosts(
    fixed=1e-3,
    each_sequence=1e-4,
    each_context_token=1e-7,
    each_prompt_token=1e-4,
    each_prompt_context=1e-9,
)
COEFFICIENTS = st.one_of(st.just(0.0), st.floats(0.1, 10))
COSTS = st.builds(
    lambda few_tokens, *terms: StepCosts(
        fixed=4e-3 * terms[0] + 1e-3,
        each_sequence=1e-4 * terms[1],
        each_context_token=1e-6 * terms[2],
        each_prompt_token=1e-4 * terms[3],
        each_prompt_context=1e-8 * terms[4],
        each_further_token=1e-5 * terms[5],
        few_tokens=few_tokens,
    ),
    st.sampled_from((12, 32, 128)),
    *[COEFFICIENTS] * 6,
)


def samples_of(costs: StepCosts, noise: float = 0.0) -> list[StepSample]:
    rng = random.Random(0)
    return [StepSample(work, costs.seconds(work) * rng.lognormvariate(0, noise)) for work in GRID]


@settings(max_examples=20, deadline=None)
@given(COSTS)
def test_known_costs_are_recovered(costs: StepCosts) -> None:
    fit = fit_steps(samples_of(costs))
    assert astuple(fit.costs)[:-2] == pytest.approx(astuple(costs)[:-2], rel=1e-6, abs=1e-12)
    if costs.each_further_token:
        assert fit.costs.few_tokens == costs.few_tokens
    assert fit.worst_error < 1e-6
    assert len(fit.errors) == len(GRID)


@settings(max_examples=10, deadline=None)
@given(COSTS)
def test_noise_gives_an_error_of_its_own_size_and_no_negative_cost(costs: StepCosts) -> None:
    fit = fit_steps(samples_of(costs, noise=0.05))
    assert min(astuple(fit.costs)[:-2]) >= 0
    assert 0.02 < fit.mean_error < 0.09
    for work in GRID:
        assert fit.costs.seconds(work) == pytest.approx(costs.seconds(work), rel=0.15)


def test_a_time_that_is_no_sum_of_the_terms_shows_in_the_error() -> None:
    samples = samples_of(PLAIN)
    samples[3] = StepSample(samples[3].work, 2 * samples[3].seconds)
    fit = fit_steps(samples)
    assert fit.errors[3] < -0.3
    assert fit.worst_error == -fit.errors[3]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_no_feasible_point_is_closer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, targets = rng.normal(size=(9, 4)), rng.normal(size=9)
    found = nonnegative_least_squares(rows, targets)
    assert found.min() >= 0
    # The conditions of Karush, Kuhn and Tucker: no direction that stays feasible comes closer.
    gradient = rows.T @ (rows @ found - targets)
    assert gradient.min() > -1e-9
    assert np.abs(gradient * found).max() < 1e-9


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 7 measured steps, got 5"):
        fit_steps([StepSample(work, 1.0) for work in GRID[:5]])


def test_work_outside_the_measured_grid_is_named() -> None:
    fit = fit_steps(samples_of(PLAIN))
    assert not any(fit.costs.outside(work) for work in GRID)
    assert fit.costs.outside(StepWork(sequences=70, context_tokens=10)) == [
        "sequences: 70, measured up to 64"
    ]
    arithmetic = replace(PLAIN, measured=None)
    assert arithmetic.outside(StepWork(sequences=10**9)) == []


def test_scaled_costs_are_longer_by_the_factor() -> None:
    steps = fit_steps(samples_of(PLAIN)).costs
    longer = ServiceCosts(prefill=steps, decode=steps).scaled(1.1)
    for work in GRID:
        assert longer.decode.seconds(work) == pytest.approx(1.1 * steps.seconds(work))
        assert longer.prefill.seconds(work) == longer.decode.seconds(work)


def step(number: int, num_tokens: int, start: int, num_draft: int = 0) -> SequenceStep:
    return SequenceStep(
        sequence_id=number,
        token_ids=(0,) * num_tokens,
        start=start,
        new_blocks=(),
        sampling=None,
        num_samples=1,
        num_draft=num_draft,
    )


def test_the_work_of_a_plan() -> None:
    plan = StepPlan(
        sequences=(step(1, 1, 9), step(2, 3, 20, num_draft=2), step(3, 4, 0), step(4, 2, 100)),
        dropped=(),
    )
    assert StepWork.of(plan) == StepWork(
        sequences=4,
        context_tokens=10 + (21 + 22 + 23) + 10 // 4 + 203 // 2,
        prompt_tokens=6,
        prompt_context=(1 + 2 + 3 + 4) + (101 + 102),
    )


def test_a_prompt_reads_its_context_once_for_every_32_tokens() -> None:
    reads = [StepWork.of_prompt(1000, count).context_tokens for count in (1, 32, 33, 64)]
    assert reads == [1001, 1016, 2 * 1017, 2 * 1032 + 1]


def test_the_first_tokens_cost_nothing_in_addition() -> None:
    costs = replace(PLAIN, each_further_token=1.0, few_tokens=32)
    few = StepWork(sequences=1) + StepWork.of_prompt(0, 31)
    assert costs.seconds(few) == PLAIN.seconds(few)
    more = StepWork(sequences=2) + StepWork.of_prompt(0, 33)
    assert costs.seconds(more) == pytest.approx(3.0 + PLAIN.seconds(more))


def test_tokens_that_choose_the_same_experts_read_them_once() -> None:
    costs = replace(PLAIN, expert_seconds=1.0, chosen_share=0.25)
    prompt = StepWork(sequences=1) + StepWork.of_prompt(0, 500)
    shares = ((StepWork(), 0), (StepWork(sequences=1), 0.25), (StepWork(sequences=2), 0.4375))
    for work, share in (*shares, (prompt, 1)):
        assert costs.seconds(work) - PLAIN.seconds(work) == pytest.approx(share)
    assert costs.scaled(2).seconds(prompt) == pytest.approx(2 * costs.seconds(prompt))
