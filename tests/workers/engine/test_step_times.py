"""Tests that chunks beside decodes are limited by time, for models of any speed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.tests.workers.engine.drive import spec
from tandem.tests.workers.engine.null import NullExecutor
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import NewTokens
from tandem.workers.engine.plan import CpuShare, OnLayers, Samples, StepPlan
from tandem.workers.step_cost import LEAST_CHUNK


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Holds the seconds of a model's steps."""

    fixed: float = 0.01
    row: float = 0.0005
    token: float = 0.0005
    prompt: float = 0.0  # of any step with prompt tokens

    def seconds(self, num_rows: int, num_tokens: int = 0) -> float:
        prompts = self.prompt + self.token * num_tokens if num_tokens else 0.0
        return self.fixed + self.row * num_rows + prompts


@dataclass(frozen=True, kw_only=True)
class Step:
    """Describes one step: decodes, prompt tokens, and the prompts that ran or waited before it."""

    num_rows: int  # decodes, and chunks of one prompt token
    num_tokens: int
    num_prompts: int
    num_decodes: int = field(default=0, compare=False)  # without such chunks


class TimedExecutor(NullExecutor):
    """Lets time pass as a model of some speed."""

    def __init__(self, speed: Speed) -> None:
        super().__init__()
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self._speed = speed

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        collect = super().launch(plan, on_layers)
        num_tokens = plan.num_prompt_tokens
        self.plans.append(plan)

        def finish() -> Samples:
            self.now += self._speed.seconds(plan.num_tokens - num_tokens, num_tokens)
            return collect()

        return finish


@dataclass
class Run:
    """Drives an engine on a model of some speed, and records its steps."""

    speed: Speed
    budgets: Budgets
    steps: list[Step] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)  # times of first tokens

    num_blocks: int = 100_000

    def __post_init__(self) -> None:
        self.executor = TimedExecutor(self.speed)
        self.engine = Engine(
            self.executor,
            EngineConfig(num_blocks=self.num_blocks, budgets=self.budgets),
            clock=lambda: self.executor.now,
        )
        self._num_sequences = 0

    def submit(self, num_tokens: int, max_tokens: int) -> int:
        """Submits a sequence; returns its id."""
        number = self._num_sequences
        self._num_sequences += 1
        self.engine.submit(spec(number, (number,) * num_tokens, max_tokens=max_tokens))
        return number

    def step(self) -> Step:
        running = self.engine.requests.running
        num_prompts = sum(sequence.num_unscheduled > 1 for sequence in running)
        num_prompts += len(self.engine.requests.waiting)
        num_decodes = sum(sequence.num_unscheduled == 1 for sequence in running)
        for event in self.engine.step():
            if isinstance(event, NewTokens):
                self.first.setdefault(event.id, self.executor.now)
        plan = self.executor.plans[-1]
        num_tokens = plan.num_prompt_tokens
        step = Step(
            num_rows=plan.num_tokens - num_tokens,
            num_tokens=num_tokens,
            num_prompts=num_prompts,
            num_decodes=num_decodes,
        )
        self.steps.append(step)
        return step

    def until_first_tokens(self, numbers: list[int]) -> None:
        while not all(number in self.first for number in numbers):
            self.step()


SPEEDS = st.builds(
    lambda fixed, row, token: Speed(fixed=fixed, row=fixed * row, token=fixed * token),
    st.floats(0.001, 0.2),
    st.floats(0, 0.1),
    st.floats(0.0005, 0.5),
)


def budgets(factor: float | None = 2.0, most: int = 4096) -> Budgets:
    return Budgets(
        chunk_tokens=512,
        mixed_chunk_tokens=most,
        mixed_step_factor=factor,
        burst_chunks=True,
        max_sequences=64,
        prefix_caching=False,
    )


@given(
    SPEEDS,
    st.sampled_from([1.5, 2.0, 4.0]),
    st.sampled_from([1, 7, 40, 4096]),
    st.integers(1, 12),
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_mixed_steps_are_within_the_factor_and_prompts_progress(
    speed: Speed,
    factor: float,
    most: int,
    streams: int,
    prompts: list[int],
    is_burst: bool,
    has_bursts: bool,
) -> None:
    run = Run(speed, replace(budgets(factor, most), burst_chunks=has_bursts))
    run.until_first_tokens([run.submit(20, 4000) for _ in range(streams)])
    for _ in range(10):
        run.step()
    run.steps.clear()
    numbers = []
    for length in prompts:
        numbers.append(run.submit(length, 4000))
        if not is_burst:
            run.until_first_tokens(numbers)
    run.until_first_tokens(numbers)
    for step in run.steps:
        in_burst = has_bursts and step.num_prompts >= max(step.num_decodes, 2)
        if in_burst and step.num_rows + step.num_tokens <= run.budgets.chunk_tokens:
            continue
        assert step.num_tokens <= run.budgets.chunk_beside(step.num_rows, step.num_prompts)
        if step.num_tokens > LEAST_CHUNK:
            allowed = factor * speed.seconds(step.num_rows + step.num_prompts)
            # The lines are not exact while few different steps are measured.
            assert speed.seconds(step.num_rows, step.num_tokens) <= 1.25 * allowed
    least = min(LEAST_CHUNK, run.budgets.chunk_beside(1, 1))
    num_chunks = sum(-(-length // least) for length in prompts)
    assert len(run.steps) <= 9 / 8 * num_chunks + len(prompts) + 2


@pytest.mark.parametrize("factor", [2.0, 3.0])
@pytest.mark.parametrize("token", [2e-5, 2e-4, 2e-3])
def test_a_long_prompt_gets_its_share_of_the_time(factor: float, token: float) -> None:
    """A step of 10 ms leaves it the rest of `factor` times 10 ms."""
    speed = Speed(token=token, row=0.0)
    alone = Run(speed, budgets(factor))
    alone.until_first_tokens([alone.submit(3000, 1)])
    beside = Run(speed, budgets(factor))
    beside.until_first_tokens([beside.submit(20, 4000) for _ in range(4)])
    for _ in range(10):
        beside.step()
    started = beside.executor.now
    number = beside.submit(3000, 1)
    beside.until_first_tokens([number])
    share = (factor - 1) / factor
    assert beside.first[number] - started <= 1.15 * alone.executor.now / share


def test_a_prompt_keeps_its_share_beside_more_decodes_than_a_new_role_has() -> None:
    run = Run(Speed(token=2e-4), budgets())
    run.until_first_tokens([run.submit(20, 4000) for _ in range(30)])
    number = run.submit(4000, 1)
    for _ in range(8):
        run.step()
    run.engine.take_role(replace(run.budgets, max_sequences=2), CpuShare())
    run.steps.clear()
    run.until_first_tokens([number])
    chunks = [step.num_tokens for step in run.steps if step.num_tokens][:-1]
    share = run.speed.seconds(30) / run.speed.token
    assert len(chunks) >= 10
    assert all(0.8 * share <= tokens <= 1.2 * share for tokens in chunks)


def test_the_fixed_time_of_prompts_stays_a_third_of_their_time() -> None:
    """As on GPUs, where steps with prompts are not captured: no chunk is within the factor."""
    speed = Speed(fixed=0.005, row=0.0, prompt=0.015, token=2e-5)
    run = Run(speed, budgets())
    run.until_first_tokens([run.submit(n, 4000) for n in (500, 20, 100, 300)])
    for length in (600, 1000, 1500):
        run.until_first_tokens([run.submit(length, 4000)])
    run.steps.clear()
    run.until_first_tokens([run.submit(6000, 1)])
    whole = [step.num_tokens for step in run.steps if step.num_tokens][:-1]
    assert len(whole) >= 2
    assert all(tokens * speed.token >= 1.5 * speed.prompt for tokens in whole)


def test_before_the_first_mixed_step_decodes_are_measured_alone() -> None:
    run = Run(Speed(token=0.004), budgets(most=40))
    run.until_first_tokens([run.submit(20, 100)])
    number = run.submit(100, 100)
    assert run.step() == Step(num_rows=1, num_tokens=0, num_prompts=1)
    assert run.step() == Step(num_rows=1, num_tokens=LEAST_CHUNK, num_prompts=1)
    run.until_first_tokens([number])
    without = Run(Speed(token=0.004), budgets(None, most=40))
    without.until_first_tokens([without.submit(20, 100)])
    without.submit(100, 100)
    assert without.step() == Step(num_rows=1, num_tokens=16, num_prompts=1)


def test_the_first_prompts_of_a_burst_do_not_wait_for_the_rest() -> None:
    run = Run(Speed(row=0.0, token=0.001), budgets(most=40))
    run.until_first_tokens([run.submit(30, 1), run.submit(60, 1)])
    for length in (200, 100):
        run.until_first_tokens([run.submit(length, 1)])
    numbers = [run.submit(100, 50) for _ in range(6)]
    step = run.step()
    assert 1.9 <= run.speed.seconds(0, step.num_tokens) / run.speed.seconds(0, 100) <= 2.02
    assert list(run.first)[-2:] == numbers[:2]
    run.until_first_tokens(numbers)
    without = Run(run.speed, budgets(None, most=40))
    for _ in range(6):
        without.submit(100, 50)
    assert without.step().num_tokens == 512


def test_a_burst_is_computed_in_whole_chunks_until_more_streams_decode_than_wait() -> None:
    run = Run(Speed(row=0.0, token=0.001), budgets(most=40))
    run.until_first_tokens([run.submit(30, 4000)])
    for length in (200, 100):
        run.until_first_tokens([run.submit(length, 1)])
    run.steps.clear()
    run.until_first_tokens([run.submit(100, 4000) for _ in range(9)])
    assert run.steps[0] == Step(num_rows=1, num_tokens=511, num_prompts=9)
    assert run.steps[1].num_rows == 6
    assert all(step.num_tokens <= 11 for step in run.steps[1:])


@pytest.mark.parametrize(
    ("max_sequences", "num_blocks", "max_tokens"), [(4, 100_000, 400), (64, 90, 380)]
)
def test_prompts_that_wait_for_a_stream_to_end_are_no_burst(
    max_sequences: int, num_blocks: int, max_tokens: int
) -> None:
    """One prompt has the last sequence, or the last blocks, which three streams hold."""
    limits = replace(budgets(), max_sequences=max_sequences)
    run = Run(Speed(row=0.0, token=0.001), limits, num_blocks=num_blocks)
    run.until_first_tokens([run.submit(20, max_tokens) for _ in range(3)])
    run.until_first_tokens([run.submit(100, 1)])
    run.steps.clear()
    first, *_ = [run.submit(300, 20) for _ in range(8)]
    run.until_first_tokens([first])
    assert run.steps[0].num_prompts == 8
    chunks = [step.num_tokens for step in run.steps if step.num_tokens]
    assert max(chunks) <= 12


def test_a_long_prompt_alone_gets_whole_chunks() -> None:
    run = Run(Speed(token=0.01), budgets())
    run.until_first_tokens([run.submit(100, 1)])
    run.steps.clear()
    run.until_first_tokens([run.submit(1500, 1)])
    assert [step.num_tokens for step in run.steps] == [512, 512, 476]
