"""Draws against exact softmax definitions and transformers' warpers."""

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tandem.tests.workers.model.helpers import check_frequencies
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.model.sampling import filters
from tandem.workers.model.sampling.filters import filter_scores
from tandem.workers.model.sampling.gumbel import _keys, exponential_noise, sample

NUM_SAMPLES = 20_000


def logits_row(vocab_size: int = 64, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' scores after all warpers, -inf for what is not kept; [1, vocab_size]."""
    scores: torch.Tensor = TemperatureLogitsWarper(params.temperature)(
        torch.zeros(1, 1, dtype=torch.long), logits[None]
    )
    warpers: list[object] = []
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)  # type: ignore[operator]
    return scores


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, seed=1),
        SamplingParams(temperature=2.0, seed=2**64 - 1),
        SamplingParams(top_k=5, seed=3),
        SamplingParams(top_p=0.7, seed=4),
        SamplingParams(min_p=0.1, seed=5),
        SamplingParams(typical_p=0.6, seed=8),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=6),
        SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, typical_p=0.8, seed=7),
    ],
)
def test_distribution(params: SamplingParams) -> None:
    """Chi-square of 20,000 samples against the exact softmax of what is kept; five standard
    deviations.
    """
    logits = logits_row(spread=1.0)
    tokens = sample(logits.expand(NUM_SAMPLES, -1), [params] * NUM_SAMPLES, range(NUM_SAMPLES))
    check_frequencies(tokens, warped(logits, params)[0].double().softmax(-1))


def test_seeds_draw_independently() -> None:
    """Pairs sampled with two seeds at the same positions fall as the product of the
    distributions.
    """
    logits = logits_row(4, spread=1.0).expand(NUM_SAMPLES, -1)
    first, second = (
        sample(logits, [SamplingParams(seed=seed)] * NUM_SAMPLES, range(NUM_SAMPLES))
        for seed in (7, 8)
    )
    expected = (
        logits[0].double().softmax(-1).outer(logits[0].double().softmax(-1)).flatten() * NUM_SAMPLES
    )
    chi_square = (
        (torch.bincount(first * 4 + second, minlength=16) - expected).square() / expected
    ).sum()
    assert abs(chi_square.item() - 15) < 5 * math.sqrt(30)
    following = (
        sample(logits, [SamplingParams(seed=7)] * NUM_SAMPLES, range(1, NUM_SAMPLES + 1))
    ).roll(1)
    assert torch.equal(first[1:], following[1:])


def test_greedy_rows_are_argmax_in_any_company() -> None:
    logits = torch.stack([logits_row(1000, seed) for seed in range(6)])
    greedy, hot = (
        SamplingParams(temperature=0.0, top_k=3, seed=9),
        SamplingParams(temperature=2.0, seed=9),
    )
    assert torch.equal(sample(logits, [greedy] * 6, range(6)), logits.argmax(-1))
    mixed = sample(logits, [greedy, hot, hot, greedy, hot, greedy], range(6))
    assert torch.equal(mixed[[0, 3, 5]], logits[[0, 3, 5]].argmax(-1))
    assert not torch.equal(mixed[[1, 2, 4]], logits[[1, 2, 4]].argmax(-1))
    assert torch.equal(
        sample(logits, [SamplingParams(temperature=1e-6)] * 6, range(6)), logits.argmax(-1)
    ), "a temperature next to 0 is greedy, not NaN"


def test_a_draw_does_not_depend_on_the_batch() -> None:
    params = [
        SamplingParams(
            temperature=0.5 + 0.1 * row,
            top_k=(0, 3, 40)[row % 3],
            top_p=(1.0, 0.8)[row % 2],
            seed=row // 2,
        )
        for row in range(24)
    ]
    logits = torch.stack([logits_row(3000, row) for row in range(24)])
    positions = [100 + row % 5 for row in range(24)]
    together = sample(logits, params, positions)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = sample(
        logits[order], [params[row] for row in order], [positions[row] for row in order]
    )
    assert torch.equal(shuffled, together[order])
    for row in range(24):
        assert (
            sample(logits[row : row + 1], params[row : row + 1], positions[row : row + 1])[0]
            == together[row]
        )


def test_seed_and_position_change_the_draw() -> None:
    logits = logits_row(5000, spread=0.1)[None]
    samples = [
        sample(logits, [SamplingParams(seed=seed)], [position]).item()
        for seed in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)
        for position in (0, 1, 2, 1000)
    ]
    assert len(set(samples)) >= len(samples) - 1


@pytest.mark.parametrize("num_candidates", [filters.NUM_CANDIDATES, 8])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=10_000),
        SamplingParams(top_p=0.001),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.99),
        SamplingParams(min_p=0.3),
        SamplingParams(min_p=1.0),
        SamplingParams(typical_p=0.01),
        SamplingParams(typical_p=0.5),
        SamplingParams(typical_p=0.99),
        SamplingParams(temperature=0.3, top_k=30, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=1.5, top_k=300, top_p=0.9, min_p=0.001, typical_p=0.7),
    ],
)
def test_kept_sets_equal_transformers(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, num_candidates: int
) -> None:
    """Also when the candidates sorted first do not reach down to the threshold."""
    monkeypatch.setattr(filters, "NUM_CANDIDATES", num_candidates)
    for seed in range(5):
        logits = logits_row(2000, seed)
        values, ids = filter_scores(logits[None] / params.temperature, [params])
        kept = set(ids[values > -torch.inf].tolist())
        assert kept == set(warped(logits, params)[0].isfinite().nonzero().flatten().tolist())


def test_ties_are_kept_together() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        values, ids = filter_scores(scores, [params])
        assert set(ids[values > -torch.inf].tolist()) == {1, 2, 3, 4}


def test_noise_is_pinned() -> None:
    """The bits of the noise are fixed: a resumed request must sample what it would have sampled
    elsewhere.
    """
    ids = torch.tensor([[0, 1, 2, 49_151, 151_935]])
    noise = exponential_noise(ids, [_keys(0, 0), _keys(2**64 - 1, 123)])
    assert noise[0].tolist() == pytest.approx(
        [1.19936085, 0.39770985, 0.15685970, 0.28319451, 1.08868730], rel=1e-6
    )
    assert noise[1].tolist() == pytest.approx(
        [0.60631740, 0.68995154, 2.86496162, 0.07441084, 1.64984047], rel=1e-6
    )


def test_noise_is_exponential() -> None:
    """Kolmogorov-Smirnov over 200,000 token ids of one key, and over 20,000 positions of one token
    id.
    """
    by_id = exponential_noise(torch.arange(200_000)[None], [_keys(1, 5)])[0]
    by_position = exponential_noise(torch.tensor([[17]]), [_keys(1, i) for i in range(20_000)])[
        :, 0
    ]
    for noise in (by_id, by_position):
        assert noise.min() > 0
        ordered = 1 - noise.double().sort().values.neg().exp()
        steps = torch.arange(1, len(noise) + 1, dtype=torch.float64) / len(noise)
        assert (ordered - steps).abs().max() < 2 / math.sqrt(len(noise))
