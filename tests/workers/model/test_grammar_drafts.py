"""Guessed tokens under grammars: what is generated is what plain decoding generates, and it keeps
to the grammar.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tandem.tests.schemas import random_schema
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_tokenizer import EOS_ID
from tandem.tests.watermarks import WATERMARK
from tandem.tests.workers.model.helpers import check_close, load, prompt
from tandem.workers.engine.config import Budgets, EngineConfig, SpeculativeConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Failed, NewTokens
from tandem.workers.engine.ngram import Drafter
from tandem.workers.engine.plan import SampledLogprobs, SamplingParams
from tandem.workers.engine.sequence import FinishReason, SequenceSpec, Task
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.sampling import grammar as grammar_module

VOCAB_SIZE = 512
KINDS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 20]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    bad_words=st.sampled_from([(), ((100,), (40, 41))]),
    logprobs=st.sampled_from([None, 1]),
    watermark=st.sampled_from([None, WATERMARK]),
    seed=st.integers(0, 2**64 - 1),
)


@dataclass
class Outcome:
    """Holds what became of one sequence."""

    tokens: list[int]
    logprobs: list[SampledLogprobs]
    end: FinishReason | str | None = None


class Oracle(Drafter):
    """Drafts what is right, with an error in most drafts: of any token, of one that the grammar
    does not allow, or of the end token.
    """

    def __init__(self, seed: int, tokens: Sequence[int]) -> None:
        self._rng = random.Random(seed)
        self._tokens = tokens

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        right = [*self._tokens[len(tokens) :], *self._rng.choices(range(VOCAB_SIZE), k=6)]
        draft = right[: self._rng.randint(0, min(max(room, 0), 6))]
        if draft and self._rng.random() < 0.6:
            draft[self._rng.randrange(len(draft))] = self._rng.choice(
                [EOS_ID, 0, self._rng.randrange(VOCAB_SIZE)]
            )
        return tuple(draft)

    def record(self, num_accepted: int) -> None: ...


def generate(
    runner: ModelRunner,
    kinds: Sequence[SamplingParams],
    drafters: Sequence[Drafter] = (),
    *,
    stops: bool = True,
) -> tuple[list[Outcome], Engine]:
    """Of all sequences together, up to 120 tokens."""
    speculative = SpeculativeConfig(max_step_tokens=64) if drafters else None
    budgets = Budgets(chunk_tokens=48, mixed_chunk_tokens=16, speculative=speculative)
    engine = Engine(runner, EngineConfig(num_blocks=128, block_size=16, budgets=budgets))
    stop_ids = frozenset([EOS_ID] if stops else [])
    for number, kind in enumerate(kinds):
        tokens = tuple(prompt(9 + number, number))
        spec = SequenceSpec(
            id=number,
            task=Task.COLOCATED,
            tokens=tokens,
            max_tokens=120,
            sampling=kind,
            stop_ids=stop_ids,
        )
        engine.submit(spec)
        if drafters:
            engine.requests.sequences[number].drafter = drafters[number]
    outcomes = [Outcome([], []) for _ in kinds]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, NewTokens):
                outcomes[event.id].tokens += event.token_ids
                outcomes[event.id].logprobs += event.logprobs
                outcomes[event.id].end = event.finish
            elif isinstance(event, Failed):
                outcomes[event.id].end = event.reason
    engine.check_integrity()
    return outcomes, engine


def oracles(seed: int, outcomes: Sequence[Outcome]) -> list[Oracle]:
    return [
        Oracle(seed, [*prompt(9 + row, row), *each.tokens]) for row, each in enumerate(outcomes)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load(folder)


def check(
    runner: ModelRunner, kinds: Sequence[SamplingParams], seed: int, *, stops: bool
) -> tuple[list[Outcome], int]:
    """Generates with guesses what is generated without; returns it, and how many guesses were
    right.
    """
    plain, _ = generate(runner, kinds, stops=stops)
    guessed, engine = generate(runner, kinds, oracles(seed, plain), stops=stops)
    for ours, theirs in zip(guessed, plain, strict=True):
        assert (ours.tokens, ours.end) == (theirs.tokens, theirs.end)
        check_close(ours.logprobs, theirs.logprobs)
    return plain, engine.requests.num_accepted_tokens


@settings(deadline=None, max_examples=15)
@given(
    kinds=st.lists(st.tuples(KINDS, st.integers(0, 99)), min_size=1, max_size=5),
    seed=st.integers(),
    stops=st.booleans(),
)
def test_guesses_change_nothing_under_any_schema(
    runner: ModelRunner,
    folder: Path,
    kinds: list[tuple[SamplingParams, int]],
    seed: int,
    stops: bool,
) -> None:
    """With `ignore_eos`, too, where the document is over and the grammar allows nothing more."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    schemas = [random_schema(number) for _, number in kinds]
    constrained = [
        SamplingParams(
            **{name: getattr(kind, name) for name in SamplingParams.__slots__}
            | {"grammar": to_grammar(schema)}
        )
        for (kind, _), schema in zip(kinds, schemas, strict=True)
    ]
    outcomes, _ = check(runner, constrained, seed, stops=stops)
    for kind, schema, outcome in zip(constrained, schemas, outcomes, strict=True):
        if outcome.end is FinishReason.STOP and not kind.bad_words:
            jsonschema.validate(json.loads(tokenizer.decode(outcome.tokens)), schema)


def to_grammar(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def test_many_guesses_under_a_grammar_are_right(runner: ModelRunner) -> None:
    kinds = [
        SamplingParams(seed=seed, grammar=to_grammar(random_schema(seed))) for seed in range(12)
    ]
    outcomes, num_accepted = check(runner, kinds, 0, stops=True)
    assert num_accepted > sum(len(each.tokens) for each in outcomes) / 4


def test_guesses_whose_masks_take_too_long_are_given_up(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence goes on without them."""
    kinds = [SamplingParams(seed=3, grammar="start: /[a-z ]+/"), SamplingParams(seed=4)]
    plain, _ = generate(runner, kinds)
    monkeypatch.setattr(grammar_module, "_MAX_GUESS_SECONDS", -1.0)
    guessed, engine = generate(
        runner, kinds, [Oracle(0, [*prompt(9), *plain[0].tokens]), Drafter(SpeculativeConfig())]
    )
    assert [each.tokens for each in guessed] == [each.tokens for each in plain]
    assert [each.end for each in guessed] == [each.end for each in plain]
    assert not engine.requests.num_draft_tokens
