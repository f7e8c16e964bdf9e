"""The watermark in the sampler: green tokens, context, order, and nothing at all without one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.hashing import green_bits, green_threshold, hash_context, hash_token_ids
from tandem.router.watermark.detect import find_evidence
from tandem.tests.watermarks import WATERMARK
from tandem.tests.workers.model.test_gumbel import logits_row
from tandem.tests.workers.model.test_processors import decode_step, make_processors
from tandem.tests.workers.model.test_sampler import KINDS, make_sampler, read, sample_once, step
from tandem.workers.engine.plan import SamplingParams, Watermark
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.sampling import sampler as sampler_module
from tandem.workers.model.sampling.gumbel import sample
from tandem.workers.model.sampling.penalties import LEAST_SCORE
from tandem.workers.model.sampling.watermark import Watermarks

VOCAB_SIZE = 300
CPU = torch.device("cpu")


def green(watermark: Watermark, context: Sequence[int], vocab_size: int = VOCAB_SIZE) -> set[int]:
    """The green tokens after a context, by the functions that detection uses."""
    words = [np.array([token], np.int64) for token in context]
    hashes = hash_context(watermark.key, words)
    ids = np.arange(vocab_size, dtype=np.int32)
    first, second = (hashes >> 32).astype(np.int32), hashes.astype(np.int32)
    bits = green_bits(hash_token_ids(ids, first, second))
    return set(np.flatnonzero(bits < green_threshold(watermark.gamma)).tolist())


def scores_of(
    history: Sequence[int], params: SamplingParams, draft: tuple[int, ...] = ()
) -> torch.Tensor:
    """Processed zeros, [VOCAB_SIZE]."""
    processors = make_processors()
    processors.admit(decode_step(1, history, 1), params)
    known = decode_step(1, [*history, *draft], 1)
    asked = replace(
        known, token_ids=(*history[-1:], *draft), start=len(history) - 1, num_draft=len(draft)
    )
    return processors.apply(torch.zeros(1, VOCAB_SIZE), [asked])[0]


def marked(scores: torch.Tensor) -> set[int]:
    """The tokens with a score above 0."""
    return set(torch.nonzero(scores > 0).flatten().tolist())


@pytest.fixture(params=["C", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "usable", lambda tensor: False)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("gamma", [0.01, 0.25, 0.9])
@pytest.mark.usefixtures("kernels")
def test_green_tokens_get_delta_and_no_other_token(gamma: float, width: int) -> None:
    watermark = replace(WATERMARK, gamma=gamma, context_width=width, delta=1.5)
    history = list(range(3, 20))
    scores = scores_of(history, SamplingParams(watermark=watermark))
    assert marked(scores) == green(watermark, history[-width:])
    assert set(scores.tolist()) == {0.0, 1.5}
    # The tokens before the context have no influence, and each token of it has.
    other = SamplingParams(watermark=watermark)
    assert torch.equal(scores_of([7, *history[-width:]], other), scores)
    for place in range(1, width + 1):
        changed = list(history)
        changed[-place] += 100
        assert not torch.equal(scores_of(changed, other), scores)
    assert marked(
        scores_of(history, SamplingParams(watermark=replace(watermark, key=bytes(16))))
    ) != marked(scores)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.integers(0, 2**64 - 1))
def test_numpy_and_torch_hash_alike(ids: list[int], word: int) -> None:
    words = np.array([word], np.uint64).view(np.int64)
    hashes = hash_context(WATERMARK.key, [words])
    assert hash_context(WATERMARK.key, [torch.from_numpy(words)]).tolist() == hashes.tolist()
    tokens = np.array(ids, np.int32)
    first, second = np.array([word >> 32, word & 0xFFFFFFFF], np.uint32).view(np.int32)[:, None]
    expected = hash_token_ids(tokens, first, second)
    keys = torch.from_numpy(first), torch.from_numpy(second)
    assert hash_token_ids(torch.from_numpy(tokens), *keys).tolist() == expected.tolist()
    assert tokens.tolist() == ids


def test_the_share_of_green_tokens_is_gamma() -> None:
    """Over 100 contexts of a vocabulary of 50,000; within five standard deviations."""
    for gamma in (0.1, 0.25, 0.5):
        watermark = replace(WATERMARK, gamma=gamma)
        counts = [len(green(watermark, (n, 7), 50_000)) for n in range(100)]
        deviation = (50_000 * gamma * (1 - gamma)) ** 0.5
        assert abs(sum(counts) - 100 * 50_000 * gamma) < 5 * 10 * deviation
        assert all(abs(count - 50_000 * gamma) < 5 * deviation for count in counts)


@pytest.mark.usefixtures("kernels")
def test_c_and_torch_and_any_batch_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several watermarks in a batch, and beside sequences without one."""
    others = [
        SamplingParams(watermark=WATERMARK),
        SamplingParams(watermark=replace(WATERMARK, context_width=1, delta=0.3)),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(watermark=WATERMARK, repetition_penalty=1.3, logit_bias=((4, 3.0),)),
    ]
    logits = torch.stack([logits_row(VOCAB_SIZE, row) for row in range(8)]).bfloat16()
    histories = [[row + 1, 5 * row + 2, 9 + row] for row in range(8)]
    processors = make_processors()
    steps = [decode_step(row, history, 1) for row, history in enumerate(histories)]
    for row, each in enumerate(steps):
        processors.admit(each, others[row % 4])
    together = processors.apply(logits, steps)
    monkeypatch.setattr(cpu, "usable", lambda tensor: False)
    for row, each in enumerate(steps):
        alone = make_processors()
        alone.admit(each, others[row % 4])
        assert torch.equal(alone.apply(logits[row : row + 1], [each])[0], together[row])


def test_sampled_tokens_and_drafts_move_the_context() -> None:
    params = SamplingParams(watermark=WATERMARK)
    processors = make_processors()
    processors.admit(decode_step(1, [3, 4], 1), params)
    for history, holds in (([3, 4, 5], True), ([3, 4, 5], False), ([3, 4, 5, 6], True)):
        processors.append([1], torch.tensor([history[-1]]), torch.tensor([holds]))
        scores = processors.apply(torch.zeros(1, VOCAB_SIZE), [decode_step(1, history, 1)])[0]
        assert torch.equal(scores, scores_of(history, params))
    assert torch.equal(scores_of([3, 4], params, draft=(5, 6)), scores_of([3, 4, 5, 6], params))


def test_a_short_prompt_has_a_context_too() -> None:
    wide = SamplingParams(watermark=replace(WATERMARK, context_width=8))
    assert marked(scores_of([3], wide)) != marked(scores_of([4], wide))


def test_penalties_do_not_scale_delta_and_bans_stay() -> None:
    watermark = replace(WATERMARK, gamma=0.5)
    history = [3, 4, 5, 6]
    greens = green(watermark, history[-2:])
    banned = next(token for token in greens if token > 20)
    params = SamplingParams(
        watermark=watermark, repetition_penalty=10.0, bad_words=((banned,),), presence_penalty=1.0
    )
    scores = scores_of(history, params)
    assert scores[banned] < LEAST_SCORE
    assert all(scores[token] == 2.0 for token in greens - {banned} - set(history))


def test_choices_share_the_green_tokens_but_differ() -> None:
    params = SamplingParams(watermark=replace(WATERMARK, delta=20.0), seed=5)
    tokens = sample_once(make_sampler(1000), torch.zeros(1, 1000), [step(1, params, 32)]).tokens
    assert set(tokens.tolist()) <= green(WATERMARK, (5, 3), 1000)  # the end of the history
    assert len(set(tokens.tolist())) > 25


def test_log_probabilities_are_of_the_model_alone() -> None:
    logits = logits_row(1000, 1)[None]
    params = SamplingParams(watermark=WATERMARK, seed=5, logprobs=3)
    sampled = sample_once(make_sampler(1000), logits, [step(1, params)])
    (said,) = read(sampled.logprobs)[1]
    expected = logits[0].log_softmax(-1)
    assert said.logprob == pytest.approx(expected[sampled.tokens[0]].item(), abs=1e-5)
    assert [token for token, _ in said.top] == expected.topk(3).indices.tolist()


def test_without_a_watermark_its_code_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other kind of request, alone and in a batch, gives the bits of a sampler without it."""

    def entered(*_arguments: object) -> None:
        raise AssertionError("the code of the watermark has run")

    logits = torch.stack([logits_row(1000, row) for row in range(len(KINDS))]).bfloat16()
    steps = [step(row, own) for row, own in enumerate(KINDS)]
    for name in ("admit", "apply", "append", "read", "start"):
        monkeypatch.setattr(Watermarks, name, entered)
    sampler = make_sampler(1000)
    sample_once(sampler, logits, steps)
    assert not sampler._processors._watermarks.tensors[0].numel()
    # A request that only samples takes the shortest path, with the tokens of `sample` itself.
    plain = [SamplingParams(temperature=0.8, seed=row) for row in range(len(KINDS))]
    monkeypatch.setattr(sampler_module.Sampler, "_sample", entered)
    found = sample_once(
        make_sampler(1000), logits, [step(row, own) for row, own in enumerate(plain)]
    )
    positions = [steps[0].start + len(steps[0].token_ids)] * len(plain)
    assert torch.equal(found.tokens, sample(logits, plain, positions))
    with pytest.raises(AssertionError, match="has run"):
        sample_once(make_sampler(1000), logits[:1], [step(1, SamplingParams(watermark=WATERMARK))])


def generate(params: SamplingParams, num_tokens: int, vocab_size: int = 512) -> list[int]:
    """Samples a text from logits that depend on the last token alone, as in a bigram model."""
    sampler = make_sampler(vocab_size)
    tokens = [3, 4]
    for number in range(num_tokens):
        spread = torch.Generator().manual_seed(tokens[-1])
        logits = torch.randn(1, vocab_size, generator=spread) * 2
        own = step(
            1, params, token_ids=tuple(tokens[-1:]), start=len(tokens) - 1, history=tuple(tokens)
        )
        with torch.inference_mode():
            if number == 0:
                sampler.admit(own, params)
            tokens.append(int(sampler(logits, [own]).tokens))
    return tokens[2:]


def test_marked_texts_are_detected_and_others_are_not() -> None:
    """200 tokens each, gamma 0.25, delta 2, temperature 0.8; seeded, so the counts are fixed."""
    kinds = {"marked": WATERMARK, "plain": None}
    found = {
        name: [
            find_evidence(
                generate(SamplingParams(temperature=0.8, seed=seed, watermark=kind), 200),
                WATERMARK.key,
                WATERMARK.gamma,
                WATERMARK.context_width,
            )
            for seed in range(20)
        ]
        for name, kind in kinds.items()
    }
    assert sum(each.p < 0.01 for each in found["marked"]) >= 18
    assert sum(each.p < 0.01 for each in found["plain"]) <= 1
    assert all(each.num_tokens > 150 for each in found["marked"])
    # Another key finds nothing.
    text = generate(SamplingParams(temperature=0.8, seed=1, watermark=WATERMARK), 200)
    other = find_evidence(text, bytes(16), WATERMARK.gamma, WATERMARK.context_width)
    assert other.p > 0.01
