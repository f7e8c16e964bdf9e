"""Measures a grid on the real engine, whose executor takes the time of known costs."""

from collections.abc import Callable
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.planner.grid import Scenario, list_scenarios, measure_grid
from tandem.cluster.sim.cost import LEAST_SAMPLES, StepCosts, StepWork, fit_steps
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.plan import Executor, OnLayers, Samples, StepPlan

COSTS = StepCosts(
    fixed=5e-3,
    each_sequence=2e-4,
    each_context_token=3e-7,
    each_prompt_token=4e-4,
    each_prompt_context=2e-8,
)
BUDGETS = Budgets(chunk_tokens=128, mixed_chunk_tokens=40, max_sequences=16)


class PricedExecutor(Executor):
    """Executes a plan in the time that it costs, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sequences: set[int] = set()

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self.sequences.update(each.sequence_id for each in plan.sequences)
        self.sequences.difference_update(plan.dropped)
        if plan.sequences:
            self.now += COSTS.seconds(StepWork.of(plan))
        samples = Samples(tokens=[0] * sum(each.num_samples for each in plan.sequences))
        return lambda: samples


@pytest.mark.parametrize("overlap", [False, True])
def test_the_measured_grid_gives_the_costs_of_the_executor(overlap: bool) -> None:
    executor = PricedExecutor()
    config = EngineConfig(num_blocks=4096, budgets=BUDGETS, overlap=overlap)
    scenarios = list_scenarios(BUDGETS, context_tokens=1024, capacity_tokens=4096 * 16)
    samples = measure_grid(executor, config, scenarios, 100, 5.0, 1, lambda: executor.now)
    assert not executor.sequences
    if overlap:  # the time of a step passes in `launch`, so it belongs to the step before
        samples = [each for each in samples if not each.work.prompt_tokens]
        assert {each.work.sequences for each in samples} == {1, 4, 16}
        return
    fit = fit_steps(samples)
    assert astuple(fit.costs)[:-2] == pytest.approx(astuple(COSTS)[:-2], rel=1e-6, abs=1e-12)
    assert fit.costs.measured is not None
    assert fit.costs.measured.sequences >= 16
    assert fit.costs.measured.context_tokens > 16 * 800
    assert fit.costs.measured.prompt_tokens == 128
    assert fit.costs.measured.prompt_context > 128 * 800
    mixed = [each.work for each in samples if each.work.prompt_tokens and each.work.sequences > 1]
    assert {each.prompt_tokens for each in mixed} >= {8, 14 + 15 + 1}


@pytest.mark.parametrize("least", [1, LEAST_SAMPLES])
def test_a_slow_model_is_measured_until_it_has_the_least_steps(least: int) -> None:
    """Its first step takes longer than the whole time."""
    executor = PricedExecutor()
    config = EngineConfig(num_blocks=4096, budgets=BUDGETS)
    scenarios = list_scenarios(BUDGETS, context_tokens=1024, capacity_tokens=4096 * 16)
    samples = measure_grid(executor, config, scenarios, 100, 1e-3, least, lambda: executor.now)
    assert least <= len(samples) < len(scenarios)
    if least == LEAST_SAMPLES:
        assert fit_steps(samples).costs.measured is not None


@given(
    context_tokens=st.integers(64, 10_000),
    chunk_tokens=st.sampled_from([128, 512, 2048]),
    data=st.data(),
)
def test_the_grid_has_prompts_as_long_as_the_longest_sequence_and_none_longer(
    context_tokens: int, chunk_tokens: int, data: st.DataObject
) -> None:
    budgets = replace(BUDGETS, chunk_tokens=chunk_tokens)
    scenarios = list_scenarios(
        budgets, context_tokens=context_tokens, capacity_tokens=10 * context_tokens
    )
    assert max(each.prompt_context + each.prompt for each in scenarios) <= context_tokens
    prompts = [each for each in scenarios if each.prompt and not each.batch]
    measured = [StepWork.of_prompt(each.prompt_context, each.prompt) for each in prompts]
    num_input = data.draw(st.integers(1, context_tokens - 1))
    chunk = min(chunk_tokens, num_input)
    served = StepWork.of_prompt(num_input - chunk, chunk)
    for name in ("prompt_tokens", "prompt_context", "context_tokens"):
        assert getattr(served, name) <= max(getattr(each, name) for each in measured)
    assert max(each.context for each in scenarios) == max(context_tokens - 64, 32)


def test_a_scenario_takes_at_most_its_part_of_the_kv_cache() -> None:
    scenarios = list_scenarios(BUDGETS, context_tokens=8192, capacity_tokens=20_000)
    assert max(each.num_tokens for each in scenarios) <= 18_000
    assert max(each.context for each in scenarios) == 8192 - 64
    assert Scenario(batch=16, context=512) in scenarios
    assert Scenario(batch=16, context=2048) not in scenarios
