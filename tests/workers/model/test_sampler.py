"""The sampler over a batch: distributions under every parameter, several samples of one row, log
probabilities.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.tests.workers.model.helpers import check_frequencies, check_same
from tandem.tests.workers.model.test_gumbel import logits_row, warped
from tandem.tests.workers.model.test_processors import expected_scores
from tandem.workers.engine.plan import SampledLogprobs, SamplingParams, SequenceStep
from tandem.workers.model.sampling.grammar_cache import GrammarCache
from tandem.workers.model.sampling.gumbel import sample
from tandem.workers.model.sampling.logprobs import LogprobsTensors, compute_logprobs
from tandem.workers.model.sampling.sampler import SampledTokens, Sampler

NUM_SAMPLES = 20_000
HISTORY = (3, 9, 9, 4, 9, 5, 3)
CPU = torch.device("cpu")


def make_sampler(vocab_size: int) -> Sampler:
    return Sampler(vocab_size, (1,), GrammarCache(None, vocab_size, (1,)), CPU)


def step(
    sequence_id: int, params: SamplingParams, num_samples: int = 1, **fields: Any
) -> SequenceStep:
    values: dict[str, Any] = {"token_ids": HISTORY, "start": 0, "history": HISTORY, "num_prompt": 2}
    return SequenceStep(
        sequence_id=sequence_id,
        new_blocks=(),
        sampling=params,
        num_samples=num_samples,
        **(values | fields),
    )


def sample_once(sampler: Sampler, logits: torch.Tensor, steps: list[SequenceStep]) -> SampledTokens:
    with torch.inference_mode():
        for each in steps:
            assert each.sampling is not None
            sampler.admit(each, each.sampling)
        return sampler(logits, steps)


def read(measured: LogprobsTensors | None) -> dict[int, list[SampledLogprobs]]:
    assert measured is not None
    chosen, ranks, values, ids = (tensor.tolist() for tensor in measured.tensors)
    return measured.to_lists(chosen, ranks, values, ids)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(repetition_penalty=1.8, seed=2),
        SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5, seed=3),
        SamplingParams(logit_bias=((0, 2.0), (9, -1.0), (63, 1.5), (5, -100.0)), seed=4),
        SamplingParams(bad_words=((8,), (5, 3, 17), (4, 18)), seed=5),
        SamplingParams(stop_ids=(2, 30), min_length=8, seed=6),
        SamplingParams(repetition_penalty=0.7, min_p=0.1, temperature=1.4, seed=7),
        SamplingParams(logit_bias=((1, 3.0),), typical_p=0.7, seed=8),
        SamplingParams(frequency_penalty=0.6, top_k=30, top_p=0.9, temperature=0.8, seed=2**64 - 1),
    ],
)
def test_distribution(params: SamplingParams) -> None:
    """Chi-square of 20,000 samples of one row, each by a seed of its own; five standard
    deviations.
    """
    logits = logits_row(spread=1.0)
    tokens = sample_once(make_sampler(64), logits[None], [step(1, params, NUM_SAMPLES)]).tokens
    scores = expected_scores(logits, params, HISTORY, 2)
    check_frequencies(tokens, warped(scores, params)[0].double().softmax(-1))


KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=2**64 - 2),
    SamplingParams(top_p=0.8, seed=11, logprobs=0),
    SamplingParams(repetition_penalty=1.5, seed=12, logprobs=5),
    SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0),
    SamplingParams(logit_bias=((3, 5.0), (700, 4.0)), seed=13, typical_p=0.9),
    SamplingParams(bad_words=((3, 40), (41,)), seed=14, logprobs=20),
    SamplingParams(stop_ids=(5, 6), min_length=100, temperature=0.0),
    SamplingParams(seed=15, logprobs=1000, typical_p=0.3, min_p=0.01, top_k=50),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_equals_each_alone(dtype: torch.dtype) -> None:
    params = KINDS * 3
    logits = torch.stack([logits_row(1000, row) for row in range(len(params))]).to(dtype)
    steps = [step(10 * row, own, 1 + row % 4) for row, own in enumerate(params)]
    together = sample_once(make_sampler(1000), logits, steps)
    tokens, logprobs = together.tokens.tolist(), read(together.logprobs)
    begin = 0
    for row, own in enumerate(steps):
        alone = sample_once(make_sampler(1000), logits[row : row + 1], [own])
        assert alone.tokens.tolist() == tokens[begin : begin + own.num_samples]
        assert alone.rows == ({10 * row: 0} if own.num_samples == 1 else {})
        assert together.rows.get(10 * row) == (begin if own.num_samples == 1 else None)
        if params[row].logprobs is None:
            assert 10 * row not in logprobs
        else:
            check_same(read(alone.logprobs)[10 * row], logprobs[10 * row])
        begin += own.num_samples
    assert begin == len(tokens)


@pytest.mark.parametrize("params", KINDS)
def test_n_draws_are_those_of_n_seeds(params: SamplingParams) -> None:
    logits = logits_row(1000, 3)[None]
    together = sample_once(make_sampler(1000), logits, [step(1, params, 6)])
    for number in range(6):
        own = replace(params, seed=(params.seed + number) % 2**64)
        alone = sample_once(make_sampler(1000), logits, [step(1, own)])
        assert together.tokens[number] == alone.tokens[0]
        if params.logprobs is not None:
            check_same([read(together.logprobs)[1][number]], read(alone.logprobs)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    params = [own for own in KINDS if own.logprobs is not None]
    logits = torch.stack([logits_row(1000, row) for row in range(len(params))]).to(dtype)
    sampled = sample_once(
        make_sampler(1000), logits, [step(row, own) for row, own in enumerate(params)]
    )
    expected = logits.float().log_softmax(-1)
    for row, (token, own) in enumerate(zip(sampled.tokens.tolist(), params, strict=True)):
        (said,) = read(sampled.logprobs)[row]
        assert said.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert said.rank == 1 + int((logits[row].float() > logits[row, token].float()).sum())
        assert len(said.top) == own.logprobs
        values = expected[row].topk(own.logprobs or 0).values
        assert [value for _, value in said.top] == pytest.approx(values.tolist(), abs=1e-5)
        ids = logits[row].float().sort(dim=-1, descending=True, stable=True).indices[: own.logprobs]
        assert [token for token, _ in said.top] == ids.tolist()


def test_processed_logprobs_are_those_of_the_drawn_distribution() -> None:
    """Each kind of parameters, in one batch with rows that report the model's own.

    In float32: of equal scores, which are frequent in bfloat16, transformers keeps only some.
    """
    params = [
        replace(own, logprobs=8, processed_logprobs=row % 3 < 2)
        for row, own in enumerate([*KINDS, SamplingParams(temperature=0.0)] * 2)
    ]
    logits = torch.stack([logits_row(1000, row) for row in range(len(params))])
    steps = [step(row, own) for row, own in enumerate(params)]
    sampled = sample_once(make_sampler(1000), logits, steps)
    for row, (token, own) in enumerate(zip(sampled.tokens.tolist(), params, strict=True)):
        (said,) = read(sampled.logprobs)[row]
        expected = logits[row].float()
        if own.processed_logprobs:
            expected = expected_scores(expected, own, HISTORY, 2)
            if own.temperature == 0:
                best = expected.argmax()
                expected = torch.full_like(expected, -torch.inf)
                expected[best] = 0.0
            else:
                expected = warped(expected, own)[0].float()
        expected = expected.log_softmax(-1)
        assert said.logprob == pytest.approx(expected[token].item(), abs=1e-4)
        assert said.logprob > -math.inf
        values = expected.topk(8).values.tolist()
        assert [value for _, value in said.top] == pytest.approx(values, abs=1e-4)


def test_tokens_that_are_never_drawn_have_no_processed_probability() -> None:
    for params in (
        SamplingParams(bad_words=((4,), (5,), (6,))),
        SamplingParams(top_k=7),
        SamplingParams(temperature=0.0),
    ):
        own = replace(params, logprobs=10, processed_logprobs=True)
        logits = torch.arange(10.0)[None].flip(1)
        sampled = sample_once(make_sampler(10), logits, [step(1, own)])
        (said,) = read(sampled.logprobs)[1]
        count = 1 if params.temperature == 0 else 7
        assert [value == -math.inf for _, value in said.top] == [False] * count + [True] * (
            10 - count
        )


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    _, ranks, values, ids = compute_logprobs(torch.zeros(2, 5), torch.tensor([1, 2]), 9)
    assert ranks.tolist() == [1, 1]
    assert values.tolist() == [[pytest.approx(-math.log(5))] * 5] * 2
    assert sorted(ids[0].tolist()) == list(range(5))


def test_rows_without_features_are_drawn_as_ever() -> None:
    logits = torch.stack([logits_row(1000, row) for row in range(12)]).bfloat16()
    plain = [
        SamplingParams(temperature=row % 3 / 2, top_k=row % 2 * 9, seed=row) for row in range(12)
    ]
    params = [
        replace(own, presence_penalty=1.0) if row % 4 == 1 else own for row, own in enumerate(plain)
    ]
    expected = sample(logits, plain, [len(HISTORY)] * 12)
    sampled = sample_once(
        make_sampler(1000), logits, [step(row, own) for row, own in enumerate(params)]
    ).tokens
    rows = [row for row in range(12) if row % 4 != 1]
    assert torch.equal(sampled[rows], expected[rows])


def test_a_sequence_past_its_min_length_is_special_no_more() -> None:
    sampler = make_sampler(64)
    params = SamplingParams(stop_ids=(3,), min_length=9, temperature=0.0)
    logits = torch.zeros(1, 64).index_fill_(1, torch.tensor([3]), 5.0)
    assert sample_once(sampler, logits, [step(1, params)]).tokens.item() != 3
    for start, is_free in ((7, False), (8, True), (9, True)):
        with torch.inference_mode():
            sampled = sampler(logits, [step(1, params, token_ids=(3,), start=start)])
        assert (sampled.tokens.item() == 3) == is_free
        assert (1 in sampler._special) != is_free
