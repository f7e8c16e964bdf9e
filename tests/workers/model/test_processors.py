"""What requests do to raw logits: against transformers' processors, and against the definitions of
OpenAI.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tandem.workers.engine.plan import SamplingParams, SequenceStep
from tandem.workers.model.sampling.grammar_cache import GrammarCache
from tandem.workers.model.sampling.penalties import LEAST_SCORE
from tandem.workers.model.sampling.processors import LogitsProcessors

VOCAB_SIZE = 300
CPU = torch.device("cpu")
STOPS = (7, 299)


def make_processors(end_ids: Sequence[int] = (1,)) -> LogitsProcessors:
    return LogitsProcessors(VOCAB_SIZE, end_ids, GrammarCache(None, VOCAB_SIZE, end_ids), CPU)


def decode_step(sequence_id: int, history: Sequence[int], num_prompt: int) -> SequenceStep:
    """The step that computes the last known token and samples the next."""
    return SequenceStep(
        sequence_id=sequence_id,
        token_ids=tuple(history[-1:]),
        start=len(history) - 1,
        new_blocks=(),
        sampling=None,
        num_samples=1,
        history=tuple(history),
        num_prompt=num_prompt,
    )


def processors(params: SamplingParams, num_prompt: int) -> list[LogitsProcessor]:
    """transformers' for the same, in its order."""
    made: list[LogitsProcessor] = []
    if params.logit_bias:
        biases = {(token,): bias for token, bias in params.logit_bias}
        made.append(SequenceBiasLogitsProcessor(biases))  # type: ignore[arg-type]
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        made.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_length:
        made.append(MinLengthLogitsProcessor(params.min_length, list(params.stop_ids)))
        made.append(
            MinNewTokensLengthLogitsProcessor(
                num_prompt, max(params.min_length - num_prompt, 0), list(params.stop_ids)
            )
        )
    return made


def expected_scores(
    logits: torch.Tensor, params: SamplingParams, history: Sequence[int], num_prompt: int
) -> torch.Tensor:
    """[vocab_size], -inf for what is banned."""
    ids = torch.tensor([list(history)])
    scores = logits.float()[None]
    for processor in processors(params, num_prompt):
        scores = processor(ids, scores)
    for token in set(history[num_prompt:]):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * history[
            num_prompt:
        ].count(token)
    return scores[0]


def random_case(seed: int) -> tuple[SamplingParams, list[int], int]:
    """Parameters, tokens so far, and how many of them are prompt; few different tokens, so that
    words come up.
    """
    rng = random.Random(seed)
    num_prompt = rng.randint(1, 40)
    history = rng.choices(range(20), k=num_prompt + rng.randint(0, 40))
    ends = [history[-length:] for length in (1, 2, 3) if len(history) > length + 1]
    words = [(rng.randrange(300),), (*rng.choice(ends or [[3]]), rng.randrange(300)), (299, 299, 4)]
    fields = {
        "logit_bias": tuple(
            (token, rng.uniform(-100, 100)) for token in rng.sample(range(300), rng.randint(1, 30))
        ),
        "repetition_penalty": rng.choice([0.5, 1.3, 10.0]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "bad_words": tuple(words),
        "min_length": rng.randint(1, 80),
    }
    chosen = {
        name: fields[name] for name in rng.sample(sorted(fields), rng.randint(1, len(fields)))
    }
    stop_ids = STOPS if "min_length" in chosen else ()
    return SamplingParams(stop_ids=stop_ids, **chosen), history, num_prompt  # type: ignore[arg-type]


def check(scores: torch.Tensor, expected: torch.Tensor) -> None:
    is_banned = expected == -torch.inf
    assert torch.equal(scores < LEAST_SCORE, is_banned)
    torch.testing.assert_close(scores[~is_banned], expected[~is_banned], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_mixed_batches_equal_transformers(dtype: torch.dtype) -> None:
    """Also tokens that only the device has seen."""
    for batch in range(6):
        processors = make_processors()
        cases = [random_case(100 * batch + row) for row in range(40)]
        for row, (params, history, num_prompt) in enumerate(cases):
            processors.admit(decode_step(row, history, num_prompt), params)
        sampled = torch.randint(0, 20, (3, 40), generator=torch.Generator().manual_seed(batch))
        for tokens in (None, *sampled):
            if tokens is not None:
                processors.append(range(40), tokens, torch.ones(40, dtype=torch.bool))
                for (_, history, _), token in zip(cases, tokens.tolist(), strict=True):
                    history.append(token)
            steps = [
                decode_step(row, history, num_prompt)
                for row, (_, history, num_prompt) in enumerate(cases)
            ]
            rows = processors.rows(steps)
            logits = (torch.randn(40, VOCAB_SIZE) * 4).to(dtype)
            raw = logits.clone()
            scores = processors.apply(logits[rows], [steps[row] for row in rows])
            assert torch.equal(logits, raw)
            for row, own in zip(rows, scores, strict=True):
                check(own, expected_scores(logits[row], *cases[row]))
            for row in set(range(40)) - set(rows):
                assert torch.equal(expected_scores(logits[row], *cases[row]), logits[row].float())
        assert rows


@torch.inference_mode()
def test_sequences_come_and_go_and_come_anew() -> None:
    """A released sequence's memory is reused by others, without what it held."""
    processors = make_processors()
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, bad_words=((4, 5), (6,)))
    logits = torch.randn(1, VOCAB_SIZE)
    for turn in range(20):
        history = [turn, 4] * (turn % 3 + 1)
        for sequence_id in range(turn % 5, turn % 5 + 3):
            processors.admit(decode_step(sequence_id, history, 1), params)
            processors.append([sequence_id], torch.tensor([turn + 1]), torch.tensor([True]))
        for sequence_id in range(turn % 5, turn % 5 + 3):
            scores = processors.apply(logits, [decode_step(sequence_id, [*history, turn + 1], 1)])
            check(scores[0], expected_scores(logits[0], params, [*history, turn + 1], 1))
        processors.release(turn % 5)
        assert turn % 5 not in processors
        assert processors.rows([decode_step(turn % 5, history, 1)]) == []
    processors.admit(decode_step(2, [9], 1), SamplingParams(temperature=0.5))
    assert 2 not in processors


@torch.inference_mode()
def test_a_draft_counts_for_what_follows_it_and_stays_as_far_as_it_is_right() -> None:
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        bad_words=((4, 5), (7, 8, 9), (8, 9, 4)),
    )
    processors, history, draft = make_processors(), [3, 7], (8, 9, 4)
    processors.admit(decode_step(0, history, 1), params)
    step = replace(
        decode_step(0, history, 1), token_ids=(history[-1], *draft), num_samples=4, num_draft=3
    )
    logits = torch.randn(4, VOCAB_SIZE)
    for row, own in enumerate(processors.apply(logits, list(step.each_sample()))):
        check(own, expected_scores(logits[row], params, [*history, *draft[:row]], 1))
    for token, is_right in ((8, True), (9, True), (5, False), (6, False)):
        processors.append([0], torch.tensor([token]), torch.tensor([is_right]))
    history += [8, 9]
    check(
        processors.apply(logits[:1], [decode_step(0, history, 1)])[0],
        expected_scores(logits[0], params, history, 1),
    )


@torch.inference_mode()
def test_a_stop_id_is_free_again_at_min_length() -> None:
    processors = make_processors()
    params = SamplingParams(stop_ids=STOPS, min_length=6)
    processors.admit(decode_step(1, [5] * 4, 4), params)
    logits = torch.zeros(1, VOCAB_SIZE)
    for length in (4, 5):
        step = decode_step(1, [5] * length, 4)
        assert processors.rows([step]) == [0]
        banned = (processors.apply(logits, [step])[0] < LEAST_SCORE).nonzero().flatten()
        assert banned.tolist() == list(STOPS)
    assert processors.rows([decode_step(1, [5] * 6, 4)]) == []
    assert 1 not in processors


@torch.inference_mode()
def test_where_nothing_is_left_the_sequence_can_only_end() -> None:
    everything = tuple((token,) for token in range(VOCAB_SIZE))
    processors = make_processors(end_ids=(1, 44))
    processors.admit(decode_step(3, [8], 1), SamplingParams(bad_words=everything))
    scores = processors.apply(torch.randn(1, VOCAB_SIZE), [decode_step(3, [8], 1)])
    assert (scores[0] > LEAST_SCORE).nonzero().flatten().tolist() == [1, 44]


@torch.inference_mode()
def test_the_longest_bad_word() -> None:
    word = tuple(range(100, 164))
    processors = make_processors()
    for sequence_id, history in enumerate(
        ([*word[:-1]], [50, *word[:-1]], [*word[:-2], 50], [50, *word[:-2]])
    ):
        processors.admit(decode_step(sequence_id, history, 1), SamplingParams(bad_words=(word,)))
        scores = processors.apply(
            torch.zeros(1, VOCAB_SIZE), [decode_step(sequence_id, history, 1)]
        )
        assert bool(scores[0, 163] < LEAST_SCORE) == (sequence_id < 2)
