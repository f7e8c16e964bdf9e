"""The Triton sampler against float64 and against the CPU sampler, in Triton's interpreter or on a
GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto.limits import MIN_TEMPERATURE
from tandem.tests.watermarks import WATERMARK
from tandem.tests.workers.model import sampling_frequencies
from tandem.tests.workers.model.sampling_frequencies import DEVICE, LEVEL, deviations
from tandem.tests.workers.model.test_gumbel import logits_row
from tandem.tests.workers.model.test_processors import expected_scores
from tandem.tests.workers.model.test_sampler import HISTORY, step
from tandem.workers.engine.plan import SamplingParams, SequenceStep
from tandem.workers.model import kernels
from tandem.workers.model.kernels.triton import elementwise as gpu
from tandem.workers.model.kernels.triton import sampling
from tandem.workers.model.sampling.grammar_cache import GrammarCache
from tandem.workers.model.sampling.gumbel import (
    Adjustments,
    _keys,
    exponential_noise,
    sample,
)
from tandem.workers.model.sampling.penalties import BANNED
from tandem.workers.model.sampling.sampler import Sampler

MARGIN: Final = 1e-3
"""If two float64 numbers that decide a draw differ by less, rounding may decide it."""


@pytest.mark.parametrize(("device", "tile"), [("cpu", 2**14), ("cuda", sampling._TILE)])
def test_frequencies_on_a_gpu_are_those_of_the_tile_in_use(
    monkeypatch: pytest.MonkeyPatch, device: str, tile: int
) -> None:
    monkeypatch.setattr(sampling_frequencies, "DEVICE", torch.device(device))
    monkeypatch.setattr(sampling_frequencies, "deviation", lambda params, draws: sampling._TILE)
    assert set(deviations(1)) == {tile}


def sample_on_gpu(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    adjustments: Adjustments | None = None,
    tile: int = 2**14,  # fewer programs to interpret
) -> list[int]:
    """Samples with the Triton kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "of", lambda tensor: gpu)
        if DEVICE.type == "cpu":
            patch.setattr(sampling, "_TILE", tile)
        tokens: list[int] = sample(logits.to(DEVICE), params, positions, adjustments).tolist()
    return tokens


def _gap(scores: torch.Tensor, threshold: torch.Tensor) -> float:
    """Returns the distance of a threshold to the next score that is not equal."""
    others = scores[scores != threshold]
    return float((others - threshold).abs().min()) if len(others) else math.inf


def expected_token(logits: torch.Tensor, params: SamplingParams, position: int) -> int | None:
    """Returns the token of logits [vocab_size] by float64; None if rounding may decide it."""
    if params.temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    scores = logits.double() / params.temperature
    top = scores.max()
    scale = max(1.0, float(top.abs()))
    kept = torch.ones_like(scores, dtype=torch.bool)
    ordered = scores.sort(descending=True).values
    if 0 < params.top_k < len(scores):
        kth = ordered[params.top_k - 1]
        if _gap(scores, kth) < MARGIN * scale:
            return None
        kept &= scores >= kth
    if params.top_p < 1:
        mass = ordered.masked_fill(ordered < scores[kept].min(), -torch.inf).softmax(-1)
        above = mass.cumsum(-1) - mass
        if (above - params.top_p).abs().min() < MARGIN:
            return None
        least = ordered[above < params.top_p].min()
        if _gap(scores, least) < MARGIN * scale:
            return None
        kept &= scores >= least
    if params.min_p > 0:
        if (scores - top - math.log(params.min_p)).abs().min() < MARGIN * scale:
            return None
        kept &= scores >= top + math.log(params.min_p)
    noise = exponential_noise(
        torch.arange(len(scores))[None], [_keys(params.seed, position)]
    ).double()[0]
    noisy = (scores - noise.log()).masked_fill(~kept, -torch.inf)
    best = noisy.topk(min(2, len(noisy)))
    if len(noisy) > 1 and best.values[0] - best.values[1] < MARGIN * scale:
        return None
    return int(best.indices[0])


PARAMS: Final = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 0.8, 1.0, 2.5, 1e4]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.5, 0.83, 0.98]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 1.0 / 3]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=25)
@given(
    vocab_size=st.sampled_from([1, 2, 17, 128, 1000, 1025, 4008]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    params=st.lists(PARAMS, min_size=1, max_size=12),
    position=st.integers(0, 2**20),
)
def test_tokens_are_those_of_float64_and_of_the_cpu(
    vocab_size: int,
    spread: float,
    dtype: torch.dtype,
    params: list[SamplingParams],
    position: int,
) -> None:
    """Of all draws with a margin, in batches of mixed parameters."""
    positions = range(position, position + len(params))
    logits = torch.stack(
        [logits_row(vocab_size, position + row, spread) for row in range(len(params))]
    ).to(dtype)
    found = sample_on_gpu(logits, params, positions)
    on_cpu = sample(logits, params, positions).tolist()
    for row, own in enumerate(params):
        expected = expected_token(logits[row].float(), own, positions[row])
        if expected is not None:
            assert found[row] == expected, own
            assert on_cpu[row] == expected, own


@pytest.mark.parametrize("vocab_size", [128, 1000])
def test_most_draws_equal_those_of_the_cpu(vocab_size: int) -> None:
    """Of 4,000 draws, with any margin; the property above checks few draws of many kinds."""
    kinds = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2),
        SamplingParams(top_k=20, seed=3),
        SamplingParams(top_k=50, top_p=0.95, min_p=0.01, seed=4),
    ]
    logits = torch.stack([logits_row(vocab_size, row) for row in range(250)]).bfloat16()
    for own in kinds:
        found = sample_on_gpu(logits, [own] * 250, range(250), tile=2**16)
        on_cpu = sample(logits, [own] * 250, range(250)).tolist()
        assert sum(map(int.__ne__, found, on_cpu)) <= 1


def test_a_vocabulary_of_llama() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=5),
        SamplingParams(top_k=40, top_p=0.9, seed=7),
    ]
    logits = torch.stack([logits_row(128_256, row, 4.0) for row in range(3)]).bfloat16()
    found = sample_on_gpu(logits, params, range(3), tile=2**15)
    assert found == sample(logits, params, range(3)).tolist()


def test_frequencies() -> None:
    """Chi-square of 10,000 draws of each kind; see the module for a run of millions."""
    assert max(map(abs, deviations(10_000))) < LEVEL


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_have_no_token(temperature: float) -> None:
    logits = torch.zeros(6, 40)
    logits[0, 39] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, :30] = -torch.inf
    logits[5, 7] = -torch.inf
    for kind in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=3, min_p=0.5)):
        params = [replace(kind, temperature=temperature, seed=9)] * 6
        found = sample_on_gpu(logits, params, range(6))
        assert found[:4] == [-1, -1, -1, 0]
        assert found[4] >= 30
        assert found == sample(logits, params, range(6)).tolist()


def test_ties() -> None:
    """Greedy rows take the first of equal logits; filters keep or exclude all of them."""
    logits = torch.zeros(1, 3000)
    logits[0, [500, 1500, 2500]] = 2.0
    assert sample_on_gpu(logits, [SamplingParams(temperature=0.0)], [0], tile=1024) == [500]
    for kind in (SamplingParams(top_k=1), SamplingParams(top_p=1e-4), SamplingParams(min_p=0.9)):
        params = [replace(kind, seed=seed) for seed in range(40)]
        found = sample_on_gpu(logits.expand(40, -1), params, range(40), tile=2**16)
        assert set(found) == {500, 1500, 2500}
        assert found == sample(logits.expand(40, -1), params, range(40)).tolist()


@pytest.mark.parametrize("top_k", [1, 2, 7, 15, 16, 17, 99, 100])
def test_top_k_keeps_that_many(top_k: int) -> None:
    """Scores are adjacent places, so a threshold off by one place keeps another number."""
    places = torch.randperm(100, generator=torch.Generator().manual_seed(top_k))
    logits = (-places.float() * 2.0**-16).expand(1500, -1)
    params = [SamplingParams(top_k=top_k, seed=seed) for seed in range(1500)]
    found = sample_on_gpu(logits, params, range(1500), tile=2**16)
    kept = set((places < top_k).nonzero().flatten().tolist())
    assert set(found) == kept


@pytest.mark.parametrize("num_kept", [1, 2, 16, 50])
def test_top_p_keeps_tokens_up_to_its_mass(num_kept: int) -> None:
    """As for top-k; each of 100 tokens has almost the same mass."""
    places = torch.randperm(100, generator=torch.Generator().manual_seed(num_kept))
    logits = (-places.float() * 2.0**-16).expand(1500, -1)
    params = [SamplingParams(top_p=(num_kept - 0.5) / 100, seed=seed) for seed in range(1500)]
    found = sample_on_gpu(logits, params, range(1500), tile=2**16)
    assert set(found) == set((places < num_kept).nonzero().flatten().tolist())


def test_a_token_does_not_depend_on_the_batch() -> None:
    params = [
        SamplingParams(temperature=row % 3 / 2, top_k=row % 4 * 9, top_p=1 - row % 2 / 5, seed=row)
        for row in range(12)
    ]
    logits = torch.stack([logits_row(3000, row) for row in range(12)]).bfloat16()
    together = sample_on_gpu(logits, params, range(12), tile=1024)
    for row in range(12):
        alone = sample_on_gpu(logits[row : row + 1], params[row : row + 1], [row], tile=1024)
        assert alone == together[row : row + 1]


PENALTIES: Final = [
    SamplingParams(repetition_penalty=1.8, seed=1),
    SamplingParams(repetition_penalty=0.6, temperature=0.0),
    SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5, seed=2),
    SamplingParams(frequency_penalty=1.2, top_p=0.8, seed=3),
    SamplingParams(presence_penalty=2.0, temperature=0.0),
    SamplingParams(seed=4),
]


def penalties_of(params: Sequence[SamplingParams], vocab_size: int) -> Adjustments:
    """Returns the penalties of rows whose tokens are HISTORY, two of them the prompt."""
    counts = torch.bincount(torch.tensor(HISTORY[2:]), minlength=vocab_size).int()
    in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
    in_prompt[list(HISTORY[:2])] = True
    return Adjustments(
        counts=torch.stack((torch.zeros_like(counts), counts)).to(DEVICE),
        in_prompt=torch.stack((~in_prompt, in_prompt)).to(DEVICE),
        masks=torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        penalty_rows=[1 if own.needs_history else -1 for own in params],
        mask_rows=[-1] * len(params),
    )


def test_penalties() -> None:
    """The kernel's scores are those of the definitions, so its draws are those from them."""
    params = [replace(own, seed=own.seed + 10 * n) for n in range(40) for own in PENALTIES]
    logits = torch.stack([logits_row(64, row, 1.0) for row in range(len(params))])
    found = sample_on_gpu(logits, params, range(len(params)), penalties_of(params, 64))
    scores = torch.stack(
        [expected_scores(logits[row], own, HISTORY, 2) for row, own in enumerate(params)]
    )
    assert sum(map(int.__ne__, found, sample(scores, params, range(len(params))).tolist())) <= 1


def test_masks() -> None:
    """Random masks of some rows, and a mask that allows one token alone."""
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(20, 96, generator=generator) < 0.3
    allowed[:, 70] = True
    allowed[3] = False
    allowed[3, 95] = True
    logits = torch.stack([logits_row(70 + 26, row) for row in range(20)])
    bits = (allowed.view(20, 3, 32).long() << torch.arange(32)).sum(-1).int()
    mask_rows = [row if row % 3 != 1 else -1 for row in range(20)]
    nothing = torch.zeros(1, 96, dtype=torch.int32, device=DEVICE)
    adjustments = Adjustments(nothing, nothing.bool(), bits.to(DEVICE), [-1] * 20, mask_rows)
    is_masked = torch.tensor(mask_rows)[:, None] >= 0
    scores = torch.where(is_masked & ~allowed, logits + BANNED, logits)
    for kind in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.8)):
        params = [replace(kind, seed=seed) for seed in range(20)]
        found = sample_on_gpu(logits, params, range(20), adjustments)
        assert found == sample(scores, params, range(20)).tolist()
        assert found[3] == 95


def test_penalties_and_masks_of_a_row_with_infinite_logits() -> None:
    """Together, with filters. Row 0 allows tokens of -inf alone, and row 1 bans a NaN."""
    num_rows = 120
    params = [
        replace(own, seed=number, top_k=(0, 5, 50)[number % 3], top_p=(1.0, 0.9)[number % 2])
        for number, own in enumerate(PENALTIES * (num_rows // len(PENALTIES)))
    ]
    logits = torch.stack([logits_row(64, row, 1.0) for row in range(num_rows)])
    generator = torch.Generator().manual_seed(1)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    allowed = torch.rand(logits.shape, generator=generator) < 0.6
    allowed[0] = logits[0] == -torch.inf
    allowed[1, 9] = False
    logits[1, 9] = torch.nan
    bits = (allowed.view(num_rows, 2, 32).long() << torch.arange(32)).sum(-1).int()
    adjustments = penalties_of(params, 64)._replace(
        masks=bits.to(DEVICE), mask_rows=list(range(num_rows))
    )
    found = sample_on_gpu(logits, params, range(num_rows), adjustments)
    scores = torch.stack(
        [expected_scores(logits[row], own, HISTORY, 2) for row, own in enumerate(params)]
    )
    scores = torch.where(allowed, scores, scores + BANNED)
    on_cpu = sample(scores, params, range(num_rows)).tolist()
    assert found[1] == on_cpu[1] == -1
    assert sum(map(int.__ne__, found, on_cpu)) <= 1
    assert all(allowed[row, token] for row, token in enumerate(found) if row > 1)


def test_top_k_above_the_tokens_with_mass() -> None:
    """The third largest is so far below that its place is the last one; top-p counts no mass."""
    logits = torch.full((300, 50), -300.0)
    logits[:, 11] = 4.0
    logits[:, 7] = 3.0
    logits[:, 30] = -100.0
    for kind in (
        SamplingParams(top_k=3),
        SamplingParams(top_k=200, top_p=0.9999),
        SamplingParams(top_k=3, top_p=0.5),
        SamplingParams(min_p=1.0),
    ):
        params = [replace(kind, seed=seed) for seed in range(300)]
        found = sample_on_gpu(logits, params, range(300), tile=2**16)
        assert found == sample(logits, params, range(300)).tolist()
        is_alone = kind.top_p == 0.5 or kind.min_p == 1
        assert set(found) == ({11} if is_alone else {7, 11})


def test_top_p_at_the_edge_of_a_mass() -> None:
    """Of three tokens with a third each, all are kept if they tie, and else the first, which has
    slightly more.
    """
    logits = torch.full((200, 40), -torch.inf)
    logits[:, 3] = 0.0
    logits[:, [20, 33]] = -1e-6  # the same place as the largest
    params = [SamplingParams(top_p=1 / 3, seed=seed) for seed in range(200)]
    assert set(sample_on_gpu(logits, params, range(200), tile=2**16)) == {3, 20, 33}
    logits[:, [20, 33]] = -1e-3  # another one
    assert set(sample_on_gpu(logits, params, range(200), tile=2**16)) == {3}


def run_sampler(device: torch.device, steps: list[list[SequenceStep]]) -> list[list[int]]:
    """Returns the tokens of each of the steps, on logits of their own."""
    sampler = Sampler(64, (1,), GrammarCache(None, 64, (1,)), device)
    tokens = []
    with torch.inference_mode():
        for number, batch in enumerate(steps):
            for each in batch:
                if each.sampling is not None:
                    sampler.admit(each, each.sampling)
            num_rows = sum(each.num_draft + 1 for each in batch)
            logits = torch.stack([logits_row(64, 50 * number + row) for row in range(num_rows)])
            sampled = [one for each in batch for one in each.each_sample()]
            tokens.append(sampler(logits.to(device), sampled).tokens.tolist())
    return tokens


def test_the_sampler_gives_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps, with drafts and several samples of a row; sampled tokens count at once."""
    kinds = [
        *PENALTIES,
        SamplingParams(repetition_penalty=0.1, typical_p=0.95, seed=5),
        SamplingParams(frequency_penalty=0.5, logit_bias=((3, 4.0),), logprobs=2, seed=6),
        SamplingParams(presence_penalty=2.0, bad_words=((4,),), temperature=0.0),
        SamplingParams(watermark=WATERMARK, presence_penalty=1.0, top_k=20, seed=7),
    ]
    steps = [[step(row, own, 1 + row % 2) for row, own in enumerate(kinds)]]
    for start in range(7, 12):
        more = [step(row, own, token_ids=(5,), start=start) for row, own in enumerate(kinds)]
        steps.append([replace(each, sampling=None) for each in more])
    drafts = [
        step(row, own, 3, token_ids=(5, 6, 7), start=12, num_draft=2)
        for row, own in enumerate(kinds)
    ]
    steps.append([replace(each, sampling=None) for each in drafts])
    expected = run_sampler(torch.device("cpu"), steps)
    monkeypatch.setattr(kernels, "of", lambda tensor: gpu)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(sampling, "_TILE", 2**12)
    assert run_sampler(DEVICE, steps) == expected
