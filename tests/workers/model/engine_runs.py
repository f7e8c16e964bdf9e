"""Requests that run through the real engine on a real runner, and the logits of their tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tandem.tests.workers.model.helpers import GREEDY, copy_state, prompt, recorded_logits
from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.config import Budgets, EngineConfig, SpeculativeConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Admitted, NewTokens, Suspended
from tandem.workers.engine.plan import FirstTokens, SamplingParams, StepPlan
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.runner import ModelRunner

DRAFTS = SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=2)


PROMPT = tuple(prompt(110, 1))
NUM_TOKENS = 30  # of each answer
STATE_TOKENS = 48  # between the regular resume points of a model with states


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    # By the number of tokens before the sampled one: float32 or bfloat16 [vocab_size].
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Row:
    """Logits after `num_tokens` tokens, of which the last ones are a draft that may be wrong."""

    request: int
    num_tokens: int
    draft: tuple[int, ...]
    logits: torch.Tensor  # [vocab_size]


class RecordedEngine:
    """An engine whose requests are numbered, and whose logits are kept."""

    def __init__(self, runner: ModelRunner, **budgets: Any) -> None:
        self.runner = runner
        overlap = budgets.pop("overlap", False)
        limits = {"chunk_tokens": 64, "mixed_chunk_tokens": 24, "growth_tokens": 32} | budgets
        config = EngineConfig(
            num_blocks=runner.kv.num_blocks,
            block_size=runner.kv.block_size,
            tables=runner.kv.tables,
            num_states=runner.kv.states.num_slots if runner.kv.states else 0,
            state_tokens=STATE_TOKENS if runner.kv.states else 0,
            overlap=overlap,
            budgets=Budgets(**limits),
        )
        self.engine = Engine(runner, config)
        self.answers: dict[int, Answer] = {}
        self.admitted: dict[int, Admitted] = {}
        self.suspended: dict[int, Suspended] = {}
        self._texts: dict[int, list[int]] = {}
        self._rows: list[_Row] = []

    def submit(
        self,
        number: int,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        sampling: SamplingParams = GREEDY,
        task: Task = Task.COLOCATED,
    ) -> None:
        self.engine.submit(
            SequenceSpec(
                id=number,
                task=task,
                tokens=tuple(tokens),
                max_tokens=max_tokens,
                sampling=sampling,
            )
        )
        self.answers[number] = Answer()
        self._texts[number] = list(tokens)

    def step(self) -> None:
        with self._recording():
            events = self.engine.step()
        for event in events:
            if isinstance(event, NewTokens):
                self.answers[event.id].tokens += event.token_ids
            elif isinstance(event, Admitted):
                self.answers[event.id].num_cached = event.num_cached
                self.admitted[event.id] = event
            elif isinstance(event, Suspended):
                self.suspended[event.id] = event
        self.engine.check_integrity()

    def run(self) -> dict[int, Answer]:
        """Steps until there is no work; returns the answers, with the logits of all tokens."""
        while self.engine.has_work:
            self.step()
        for row in self._rows:
            text = [*self._texts[row.request], *self.answers[row.request].tokens]
            first = row.num_tokens - len(row.draft)
            if text[first : row.num_tokens] == list(row.draft):
                self.answers[row.request].logits[row.num_tokens] = row.logits
        return self.answers

    def ask(self, number: int, tokens: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
        """Runs one request alone."""
        self.submit(number, tokens, max_tokens, **fields)
        return self.run()[number]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        launch = self.runner.launch
        with pytest.MonkeyPatch.context() as patch, recorded_logits(patch) as logits:

            def record(plan: StepPlan, *args: Any) -> Any:
                before = len(logits)
                collect = launch(plan, *args)
                sampled = [step for step in plan.sequences if step.num_samples]
                rows = iter(torch.cat(logits[before:]) if sampled else ())
                for step in sampled:
                    first = step.start + len(step.token_ids) - step.num_draft
                    draft = step.token_ids[1:] if step.num_draft else ()
                    for count in range(step.num_draft + 1):
                        number = step.sequence_id
                        row = _Row(number, first + count, draft[:count], next(rows))
                        self._rows.append(row)
                return collect

            patch.setattr(self.runner, "launch", record)
            yield


def move(source: RecordedEngine, target: RecordedEngine, number: int, num_left: int) -> None:
    """Continues a suspended request on another engine, under the same number."""
    event = source.suspended.pop(number)
    target.submit(
        number,
        event.tokens,
        num_left + 1,  # the first is sampled
        task=Task.DECODE,
        sampling=source.engine.requests.sequences[number].spec.sampling,
    )
    target.admitted.pop(number, None)
    while number not in target.admitted:
        target.step()
    target._texts[number].append(event.first_token)
    admitted = target.admitted[number]
    kv, end = target.runner.kv, len(event.tokens)
    for layer, geometry in enumerate(kv.layout.layers):
        seen = max(end + 1 - (geometry.window or end + 1), 0)
        first = max(seen, admitted.num_cached)
        if geometry.keeps_tokens and first < end:
            part = span(kv, first, end - first, layer, 1)
            table = kv.table_of_layer[layer]
            data = read_now(source.runner.kv, event.tables[table], part)
            kv.write(admitted.tables[table], part, data)
    if event.state is not None:
        assert admitted.state is not None
        copy_state(source.runner.kv, event.state, kv, admitted.state)
    target.engine.commit_import(number, FirstTokens(tokens=(event.first_token,)))
    source.engine.cancel(number)


@dataclass(frozen=True)
class ResumedTurn:
    """Requests in order, of which the last one must continue from a resume point."""

    before: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    num_cached: int
    num_tokens: int = NUM_TOKENS  # of the answers before


def resumed_turns(answer: Sequence[int], *, alignment: int, spacing: int) -> dict[str, ResumedTurn]:
    """Returns a turn for each kind of resume point; `answer` is what follows PROMPT.

    Points are multiples of `alignment`, the regular ones of `spacing`.
    """
    shared = PROMPT[:70]
    first, second, third = ((*shared, *prompt(60, seed)) for seed in (2, 3, 4))
    longer = (*PROMPT, *prompt(40, 5))
    next_turn = (*PROMPT, *answer, *prompt(20, 6))
    # The last token of an answer is not in the cache.
    known = len(PROMPT) + len(answer) - 1
    end = (len(PROMPT) - 1) // alignment * alignment
    return {
        "end of the prompt": ResumedTurn((PROMPT,), longer, end),
        "replay after a loss": ResumedTurn((PROMPT,), (*PROMPT, *answer[:9]), end, num_tokens=1),
        "regular": ResumedTurn((first,), second, len(shared) // spacing * spacing),
        "divergence": ResumedTurn((first, second), third, len(shared) // alignment * alignment),
        "newest of the answer": ResumedTurn((PROMPT,), next_turn, known // alignment * alignment),
    }


def run_turn(engine: RecordedEngine, turn: ResumedTurn, num_mates: int, **fields: Any) -> Answer:
    """Runs the requests before one after another, then the last one beside others."""
    for number, tokens in enumerate(turn.before):
        engine.ask(number, tokens, turn.num_tokens, **fields)
    for number in range(100, 100 + num_mates):
        engine.submit(number, prompt(37 * (number - 98), number), NUM_TOKENS, **fields)
    return engine.ask(99, turn.last, NUM_TOKENS, **fields)


def few_tokens(*tokens: int) -> SamplingParams:
    """Returns seeded sampling of a few tokens, whose n-grams repeat now and then."""
    return SamplingParams(
        temperature=2.0, seed=5, logit_bias=tuple((token, 30.0) for token in tokens)
    )


def rows_that_differ(ours: Answer, expected: Answer) -> list[int]:
    """Returns the positions at which the bits of the logits differ, of those that both have."""
    both = ours.logits.keys() & expected.logits.keys()
    assert len(both) >= len(ours.tokens)
    return sorted(at for at in both if not torch.equal(ours.logits[at], expected.logits[at]))
