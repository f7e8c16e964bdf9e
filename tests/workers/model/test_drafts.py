"""Guessed tokens on a real model: tokens and log probabilities are those of plain decoding, for
every way to sample.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.tiny import DENSE, make_tiny_model
from tandem.tests.watermarks import WATERMARK
from tandem.tests.workers.model.helpers import (
    GREEDY,
    check_close,
    load,
    prompt,
    reference,
    reference_logits,
)
from tandem.workers.engine.config import Budgets, EngineConfig, SpeculativeConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Failed, NewTokens
from tandem.workers.engine.ngram import Drafter
from tandem.workers.engine.plan import SampledLogprobs, SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.runner import ModelRunner

NUM_TOKENS = 40
KINDS = [
    GREEDY,
    SamplingParams(temperature=0.0, logprobs=4, prompt_logprobs=2),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, seed=2**64 - 1, logprobs=0),
    SamplingParams(top_k=20, seed=3),
    SamplingParams(top_p=0.8, seed=4, logprobs=2),
    SamplingParams(min_p=0.1, seed=5),
    SamplingParams(typical_p=0.7, seed=6),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02, seed=7),
    SamplingParams(logit_bias=((65, 4.0), (70, -100.0)), seed=8, logprobs=1),
    SamplingParams(stop_ids=(2, 30, 77), min_length=50, seed=9),
    SamplingParams(repetition_penalty=1.4, seed=10),
    SamplingParams(presence_penalty=0.6, frequency_penalty=0.4, temperature=0.0, logprobs=1),
    SamplingParams(bad_words=((100,), (200, 201)), seed=11),
    SamplingParams(
        bad_words=((100, 101, 102, 103, 104), (7,)),
        repetition_penalty=0.8,
        top_k=30,
        seed=12,
        logprobs=1,
    ),
    SamplingParams(watermark=WATERMARK, seed=13, logprobs=1),
    SamplingParams(
        watermark=replace(WATERMARK, context_width=4, delta=4.0),
        repetition_penalty=1.3,
        top_p=0.9,
        seed=14,
    ),
]

is_exact = cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16))

Made = tuple[list[int], list[SampledLogprobs], list[SampledLogprobs]]
"""The tokens of a sequence, their log probabilities and those of the prompt."""


class Oracle(Drafter):
    """Drafts what plain decoding has made, now and then with an error."""

    def __init__(self, number: int, tokens: Sequence[int]) -> None:
        self._rng = random.Random(number)
        self._tokens = tokens

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        assert list(tokens) == list(self._tokens[: len(tokens)])
        draft = list(self._tokens[len(tokens) :][: self._rng.randint(0, max(room, 0))])
        if draft and self._rng.random() < 0.6:
            draft[self._rng.randrange(len(draft))] = self._rng.randrange(512)
        return tuple(draft)

    def record(self, num_accepted: int) -> None:
        pass


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[SamplingParams],
    drafters: Sequence[Drafter] = (),
    max_tokens: int = NUM_TOKENS,
    **config: Any,
) -> tuple[list[Made], Engine]:
    """Of all sequences together."""
    speculative = SpeculativeConfig(max_step_tokens=64) if drafters else None
    budgets = Budgets(chunk_tokens=48, mixed_chunk_tokens=16, speculative=speculative)
    engine = Engine(
        runner, EngineConfig(num_blocks=128, tables=runner.kv.tables, budgets=budgets, **config)
    )
    for number, (tokens, kind) in enumerate(zip(prompts, kinds, strict=True)):
        spec = SequenceSpec(
            id=number,
            task=Task.COLOCATED,
            tokens=tuple(tokens),
            max_tokens=max_tokens,
            sampling=kind,
        )
        engine.submit(spec)
        if drafters:
            engine.requests.sequences[number].drafter = drafters[number]
    made: list[Made] = [([], [], []) for _ in kinds]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, NewTokens):
                tokens, logprobs, of_prompt = made[event.id]
                tokens += event.token_ids
                logprobs += event.logprobs
                of_prompt += event.prompt_logprobs
    engine.check_integrity()
    return made, engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def check(runner: ModelRunner, *, exact: bool, overlap: bool = False) -> None:
    prompts = [prompt(7 + 9 * row, row) for row in range(len(KINDS))]
    plain, _ = generate(runner, prompts, KINDS)
    assert len({tuple(tokens) for tokens, _, _ in plain}) == len(KINDS)
    oracles = [Oracle(row, [*prompts[row], *tokens]) for row, (tokens, _, _) in enumerate(plain)]
    guessed, engine = generate(runner, prompts, KINDS, oracles, overlap=overlap)
    requests = engine.requests
    assert 0.1 < requests.num_accepted_tokens / requests.num_draft_tokens < 0.9
    assert requests.num_accepted_tokens > NUM_TOKENS * len(KINDS) / 4
    for (tokens, *plain_scores), (drafted, *scores) in zip(plain, guessed, strict=True):
        assert drafted == tokens
        if exact:
            assert scores == plain_scores
        for ours, theirs in zip(scores, plain_scores, strict=True):
            check_close(ours, theirs)


@pytest.mark.skipif(not is_exact, reason="no product of our own with AMX")
@pytest.mark.parametrize("family", DENSE)
def test_in_bfloat16_all_is_the_same_to_the_bit(tmp_path: Path, family: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256} | ({} if family == "qwen2" else {"head_dim": 32})
    check(load(make_tiny_model(tmp_path, family, **sizes), dtype="bfloat16"), exact=True)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("with_kernels", [True, False])
def test_in_float32_too_but_for_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_kernels: bool, overlap: bool
) -> None:
    if not with_kernels:
        monkeypatch.setattr(cpu, "usable", lambda tensor: False)
    check(load(make_tiny_model(tmp_path)), exact=False, overlap=overlap)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.seed))
def test_many_prompts_of_each_kind_have_the_tokens_of_plain_decoding(
    model: ModelRunner, kind: SamplingParams
) -> None:
    prompts = [prompt(3 + 5 * row, row) for row in range(12)]
    kinds = [replace(kind, seed=(kind.seed + row) % 2**64) for row in range(12)]
    plain, _ = generate(model, prompts, kinds)
    oracles = [Oracle(row, [*prompts[row], *tokens]) for row, (tokens, _, _) in enumerate(plain)]
    guessed, engine = generate(model, prompts, kinds, oracles)
    assert [tokens for tokens, _, _ in guessed] == [tokens for tokens, _, _ in plain]
    assert engine.requests.num_accepted_tokens > 12


def chi_square(
    observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> tuple[float, float]:
    """Returns Pearson's statistic of counts against probabilities, and what about one of 100,000 is
    above by chance; what is expected less than five times counts as one.
    """
    total, rare = sum(observed.values()), [0.0, 0.0]
    assert set(observed) <= set(expected)
    statistic, count = 0.0, 0
    for outcome, probability in expected.items():
        if total * probability < 5:
            rare = [rare[0] + observed[outcome], rare[1] + total * probability]
        else:
            statistic += (observed[outcome] - total * probability) ** 2 / (total * probability)
            count += 1
    statistic += (rare[0] - rare[1]) ** 2 / max(rare[1], 1.0)
    return statistic, count + 5 * math.sqrt(2 * count)


def test_what_follows_guesses_is_distributed_as_the_model_says(tmp_path: Path) -> None:
    """By a chi-square test of three tokens, the third of which is sampled after two guesses."""
    runner, model = load(make_tiny_model(tmp_path)), reference(tmp_path)
    start, temperature = tuple(prompt(9)), 0.7
    following: dict[tuple[int, ...], dict[int, float]] = {}

    def spread(
        tokens: tuple[int, ...], depth: int, temperature: float
    ) -> dict[tuple[int, ...], float]:
        values, ids = (reference_logits(model, tokens)[-1] / temperature).topk(4)
        following[tokens] = dict(zip(ids.tolist(), values.softmax(-1).tolist(), strict=True))
        if not depth:
            return {(token,): each for token, each in following[tokens].items()}
        return {
            (token, *rest): each * more
            for token, each in following[tokens].items()
            for rest, more in spread((*tokens, token), depth - 1, temperature).items()
        }

    class Likeliest(Drafter):
        def __init__(self) -> None: ...

        def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
            first = max(following[tuple(tokens)].items(), key=lambda item: item[1])[0]
            return (
                first,
                max(following.get((*tokens, first), {0: 1.0}).items(), key=lambda item: item[1])[0],
            )[:room]

        def record(self, num_accepted: int) -> None: ...

    other, expected = spread(start, 2, 1.1), spread(start, 2, temperature)
    kinds = [SamplingParams(temperature=temperature, top_k=4, seed=seed) for seed in range(1000)]
    made, engine = generate(
        runner, [start] * 1000, kinds, [Likeliest() for _ in kinds], max_tokens=3
    )
    observed = Counter(tuple(tokens) for tokens, _, _ in made)
    assert engine.requests.num_accepted_tokens > 100
    statistic, bound = chi_square(observed, expected)
    assert statistic < bound
    statistic, bound = chi_square(observed, other)
    assert statistic > bound, "the test tells another distribution"


def test_drafts_of_n_grams_change_nothing(tmp_path: Path) -> None:
    """The drafter itself, on texts whose n-grams repeat."""
    runner = load(make_tiny_model(tmp_path))
    prompts = [[token % 7 + 3 for token in prompt(60, row)] for row in range(4)]
    kinds = [replace(GREEDY, logit_bias=tuple((token, 30.0) for token in range(3, 10)))] * 4
    plain, _ = generate(runner, prompts, kinds)
    config = SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=2)
    guessed, engine = generate(runner, prompts, kinds, [Drafter(config) for _ in prompts])
    assert guessed == plain
    assert 0 < engine.requests.num_accepted_tokens < engine.requests.num_draft_tokens


def test_a_sequence_that_fails_within_a_draft_is_reported(tmp_path: Path) -> None:
    poison = 307
    runner = load(make_tiny_model(tmp_path))
    runner._model.embed_tokens.weight.data[poison] = float("nan")  # type: ignore[attr-defined]
    config = EngineConfig(
        num_blocks=16, block_size=16, budgets=Budgets(speculative=SpeculativeConfig())
    )
    engine = Engine(runner, config)
    sampling = replace(GREEDY, logit_bias=((poison, 100.0),))
    engine.submit(
        SequenceSpec(id=1, task=Task.COLOCATED, tokens=(5, 6), max_tokens=9, sampling=sampling)
    )
    engine.requests.sequences[1].drafter = Oracle(0, [5, 6, *[poison] * 9])
    events = [event for _ in range(9) if engine.has_work for event in engine.step()]
    assert [event for event in events if isinstance(event, Failed)]
    assert not engine.requests.sequences
    engine.check_integrity()


@pytest.mark.parametrize("with_kernels", [True, False])
def test_a_wrong_guess_whose_output_is_not_finite_harms_no_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_kernels: bool
) -> None:
    """Neither at once nor by the KV cache that it leaves behind the sequence's own."""
    if not with_kernels:
        monkeypatch.setattr(cpu, "usable", lambda tensor: False)
    poison = 307
    runner = load(make_tiny_model(tmp_path))
    runner._model.embed_tokens.weight.data[poison] = float("nan")  # type: ignore[attr-defined]
    prompts = [prompt(7, 1), prompt(30, 2)]
    kinds = [
        replace(GREEDY, logit_bias=((poison, -100.0),), frequency_penalty=penalty)
        for penalty in (0.0, 1.5)
    ]
    plain, _ = generate(runner, prompts, kinds)
    poisoned = [Oracle(row, [*prompts[row], *tokens]) for row, (tokens, _, _) in enumerate(plain)]
    for oracle in poisoned:
        monkeypatch.setattr(oracle, "draft", lambda tokens, room: (poison,) * min(room, 4))
    assert generate(runner, prompts, kinds, poisoned)[0] == plain
