"""Measures the steps of an engine over a grid of batches, contexts and prompts.

The engine is the one that would serve: its scheduler makes the plans, and its executor runs them. A
decode begins at any context without a prefill, because the KV cache of its prompt counts as
imported. A prefill begins at any context, because such an import enters the prefix cache.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from ...workers.engine.config import Budgets, EngineConfig
from ...workers.engine.engine import Engine
from ...workers.engine.events import Admitted, Event, NewTokens
from ...workers.engine.plan import (
    DelegatingExecutor,
    Executor,
    FirstTokens,
    OnLayers,
    Samples,
    SamplingParams,
    StepPlan,
)
from ...workers.engine.sequence import SequenceSpec, Task
from ..sim.cost import StepSample, StepWork

DECODE_STEPS: Final = 4
"""Measured decode steps of a scenario, after one that is not measured."""

_MAX_OUTPUT: Final = 64  # the most tokens that a sequence decodes
_MAX_STEPS: Final = 1000
_SHORT: Final = 32  # tokens of the shortest context
_LARGEST_SHARE: Final = 0.9  # of the KV cache, for one scenario
_MAX_ROUNDS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Describes steps to measure: decodes, or a prompt, or a prompt that joins decodes."""

    batch: int = 0  # sequences that decode
    context: int = 0  # tokens that each of them has
    prompt: int = 0  # prompt tokens to compute
    prompt_context: int = 0  # tokens of the prompt that are cached

    @property
    def num_tokens(self) -> int:
        """Returns the most tokens of KV cache that the steps take."""
        return self.batch * (self.context + _MAX_OUTPUT) + self.prompt_context + self.prompt


def list_scenarios(
    budgets: Budgets, *, context_tokens: int, capacity_tokens: int
) -> list[Scenario]:
    """Returns the grid for a worker, the scenarios of the shortest contexts first.

    The longest sequence has `context_tokens`. Leaves out scenarios that take more than 90 % of
    `capacity_tokens`, the KV cache.
    """
    longest = max(context_tokens - _MAX_OUTPUT, _SHORT)  # of a decode
    contexts = sorted({min(each, longest) for each in (_SHORT, 512, 2048, longest)})
    most = budgets.max_sequences
    batches = sorted({min(each, most) for each in (1, 4, 16, most)})
    chunk = min(budgets.chunk_tokens, context_tokens)
    prompts = sorted({min(each, chunk) for each in (16, 128, chunk)})
    # Nothing is decoded after a prompt that is alone, so it may end with the longest sequence.
    prompt_contexts = sorted(
        {min(each, context_tokens - chunk) for each in (0, 512, 2048, context_tokens)}
    )
    mixed_prompts = (8, 2 * budgets.mixed_chunk_tokens)
    found = [
        *(Scenario(batch=batch, context=each) for each in contexts for batch in batches),
        *(
            Scenario(prompt=prompt, prompt_context=each)
            for each in prompt_contexts
            for prompt in prompts
        ),
        *(
            Scenario(batch=batch, context=contexts[-1] // 4, prompt=prompt, prompt_context=each)
            for batch in sorted({min(each, most - 1) for each in (1, 8, 32)} - {0})
            for prompt in mixed_prompts
            for each in (0, max(context_tokens - prompt, 0))
        ),
    ]
    bound = _LARGEST_SHARE * capacity_tokens
    fitting = [
        each
        for each in found
        if each.num_tokens <= bound and each.prompt_context + each.prompt <= context_tokens
    ]
    return sorted(fitting, key=lambda each: max(each.context, each.prompt_context))


def measure_grid(
    executor: Executor,
    config: EngineConfig,
    scenarios: Sequence[Scenario],
    vocab_size: int,
    seconds: float,
    least: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepSample]:
    """Measures scenarios, in rounds, until `seconds` have passed by `clock`.

    Returns the median of the rounds for each step of each scenario. The first round may take twice
    the time, and as long as it needs for `least` steps of a slow model; scenarios that it does not
    reach are not measured.
    """
    end = clock() + seconds
    found: dict[tuple[Scenario, int], list[StepSample]] = {}
    for number in range(_MAX_ROUNDS):
        latest = end + seconds if number == 0 else end
        for scenario in scenarios:
            if clock() >= latest and len(found) >= least:
                break
            run = _ScenarioRun(executor, config, vocab_size, number, clock)
            for index, sample in enumerate(run.measure(scenario)):
                found.setdefault((scenario, index), []).append(sample)
        if clock() >= end:
            break
    return [_median(samples) for samples in found.values()]


def _median(samples: Sequence[StepSample]) -> StepSample:
    """Returns the sample of the median time, the shorter one of two."""
    return sorted(samples, key=lambda each: each.seconds)[(len(samples) - 1) // 2]


class StepRecorder(DelegatingExecutor):
    """Remembers the work of the step whose samples were collected last."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.collected: StepWork | None = None
        self._launched: deque[StepWork] = deque()

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        collect = super().launch(plan, on_layers)
        self._launched.append(StepWork.of(plan))

        def finish() -> Samples:
            samples = collect()
            self.collected = self._launched.popleft()
            return samples

        return finish


class _ScenarioRun:
    """Runs one scenario on an engine of its own."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        vocab_size: int,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self._recorder = StepRecorder(executor)
        # The time of a mixed step is measured, so no prediction may bound it.
        budgets = replace(
            config.budgets, prefix_caching=True, speculative=None, mixed_step_factor=None
        )
        self._engine = Engine(self._recorder, replace(config, budgets=budgets))
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._clock = clock
        self._ids = count()
        self._running: list[int] = []

    def measure(self, scenario: Scenario) -> list[StepSample]:
        """Returns the measured steps, in order. Leaves no sequences on the executor."""
        cached: tuple[int, ...] = ()
        if scenario.prompt and scenario.prompt_context:
            cached = self._tokens(scenario.prompt_context)
            self._import([cached])
            self._clear()
        if scenario.batch:
            self._import([self._tokens(scenario.context) for _ in range(scenario.batch)])
            self._step()  # not measured: the ranks register the sequences
        if scenario.prompt:
            found = self._compute(cached + self._tokens(scenario.prompt))
        else:
            steps = [sample for _ in range(DECODE_STEPS) for sample in self._step()[0]]
            found = [_median(steps)] if steps else []
        self._clear()
        return found

    def _compute(self, prompt: tuple[int, ...]) -> list[StepSample]:
        """Computes a prompt and returns the steps that had tokens of it."""
        found: list[StepSample] = []
        number = self._submit(Task.COLOCATED, prompt, 1)
        for _ in range(_MAX_STEPS):
            samples, events = self._step()
            found += [each for each in samples if each.work.prompt_tokens]
            if any(isinstance(each, NewTokens) and each.id == number for each in events):
                return found
        raise RuntimeError(f"a prompt of {len(prompt)} tokens is not computed")

    def _import(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Starts to decode after prompts whose KV cache counts as imported."""
        missing = {self._submit(Task.DECODE, prompt, _MAX_OUTPUT) for prompt in prompts}
        for _ in range(_MAX_STEPS):
            admitted = {each.id for each in self._step()[1] if isinstance(each, Admitted)}
            for number in missing & admitted:
                self._engine.commit_import(number, FirstTokens(tokens=(0,)))
            missing -= admitted
            if not missing:
                return
        raise RuntimeError(f"{len(missing)} of {len(prompts)} sequences are not admitted")

    def _submit(self, task: Task, tokens: tuple[int, ...], max_tokens: int) -> int:
        """Submits a sequence and returns its id."""
        number = next(self._ids)
        spec = SequenceSpec(
            id=number,
            task=task,
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0),
        )
        self._engine.submit(spec)
        self._running.append(number)
        return number

    def _step(self) -> tuple[list[StepSample], list[Event]]:
        """Runs a step; returns it, unless no step ended with it, and its events."""
        self._recorder.collected = None
        begin = self._clock()
        events = self._engine.step()
        seconds = self._clock() - begin
        work = self._recorder.collected
        has_work = work is not None and work.sequences
        return [StepSample(work, seconds)] if work is not None and has_work else [], events

    def _clear(self) -> None:
        """Ends all sequences."""
        for number in self._running:
            self._engine.cancel(number)
        self._running.clear()
        while self._engine.has_work:
            self._engine.step()

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self._vocab_size), k=count))
