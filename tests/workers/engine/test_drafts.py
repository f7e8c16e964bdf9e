"""Steps that verify guessed tokens: the tokens of plain decoding in fewer steps, and no block is
lost or too many.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    expected,
    fill,
    finish_of,
    first_tokens,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.fake import expected_choices
from tandem.tests.workers.engine.harness import VOCAB_SIZE, SeqEvent, Worker
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import SpeculativeConfig
from tandem.workers.engine.events import Admitted, Failed, NewTokens, Suspended
from tandem.workers.engine.ngram import Drafter
from tandem.workers.engine.plan import DraftRequest, SamplingParams
from tandem.workers.engine.sequence import FinishReason, SequenceSpec, Task

Draft = Callable[[Sequence[int], int], tuple[int, ...]]


class Scripted(Drafter):
    """Drafts what a function says."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.accepted: list[int] = []

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        return self._draft(tokens, room)[: max(room, 0)]

    def record(self, num_accepted: int) -> None:
        self.accepted.append(num_accepted)


def right(count: int) -> Draft:
    """Drafts `count` right tokens."""
    return lambda tokens, room: tuple(expected(tuple(tokens), count))


def wrong_at(index: int, count: int) -> Draft:
    """Drafts `count` tokens, of which that at `index` is wrong."""

    def draft(tokens: Sequence[int], room: int) -> tuple[int, ...]:
        guess = expected(tuple(tokens), count)
        return (*guess[:index], (guess[index] + 1) % VOCAB_SIZE, *guess[index + 1 :])

    return draft


def start(
    worker: MakeWorker, submitted: SequenceSpec, draft: Draft, **config: Any
) -> tuple[Worker, Scripted]:
    target = worker(**({"speculative": SpeculativeConfig(max_step_tokens=64)} | config))
    target.submit(submitted)
    scripted = target.sequences[submitted.id].drafter = Scripted(draft)
    return target, scripted


def counts(events: Sequence[SeqEvent]) -> list[int]:
    return [len(event.token_ids) for event in events if isinstance(event, NewTokens)]


def test_prompts_end_beside_drafts_within_the_rows_of_a_step(worker: MakeWorker) -> None:
    """Drafts would fill the step, but leave a row for the end of a prompt."""
    speculative = SpeculativeConfig(max_step_tokens=8)
    target, _ = start(
        worker, spec(1, max_tokens=40), right(7), speculative=speculative, max_sequences=6
    )
    for _ in range(3):
        target.step()
    for number in range(2, 7):
        target.submit(spec(number, (number,) * 3, max_tokens=1))
    target.step()
    plan = target.executor.plans[-1]
    steps = [(step.sequence_id, step.num_draft, step.num_samples) for step in plan.sequences]
    assert steps == [(1, 6, 7), (2, 0, 1)]
    events = run(target)
    assert all(finish_of(events, number) for number in range(3, 7))
    for plan in target.executor.plans:
        assert sum(step.num_samples for step in plan.sequences) <= 8
    target.check_idle()


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_right_guesses_come_as_one_event(worker: MakeWorker, block_size: int) -> None:
    target, drafter = start(
        worker, spec(1, max_tokens=12), right(3), block_size=block_size, num_blocks=96
    )
    events = run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 12)
    # With overlap the second token's step begins before the first token is known. The last draft
    # leaves none over.
    sizes = [1, 1, 4, 4, 2] if target.config.overlap else [1, 4, 4, 3]
    assert counts(events) == sizes
    indices = [sum(sizes[:number]) for number in range(len(sizes))]
    assert [event.first_index for event in events if isinstance(event, NewTokens)] == indices
    assert drafter.accepted == [size - 1 for size in sizes if size > 1]
    requests = target.engine.requests
    assert requests.num_draft_tokens == requests.num_accepted_tokens == sum(drafter.accepted)
    target.check_idle()


@pytest.mark.parametrize("index", [0, 1, 3])
def test_tokens_after_a_wrong_guess_have_never_been(worker: MakeWorker, index: int) -> None:
    target, drafter = start(worker, spec(1, max_tokens=30), wrong_at(index, 4))
    events = run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 30)
    assert set(drafter.accepted[:-1]) == {index}
    assert target.engine.requests.num_accepted_tokens == sum(drafter.accepted)
    target.check_idle()


def test_a_stop_token_within_a_draft_ends_the_sequence(worker: MakeWorker) -> None:
    want = expected(PROMPT, 8)
    at = next(index for index, token in enumerate(want) if index > 1 and token not in want[:index])
    target, _ = start(worker, spec(1, max_tokens=20, stop_ids=(want[at],)), right(7))
    events = run(target)
    assert (tokens_of(events, 1), finish_of(events, 1)) == (want[: at + 1], [FinishReason.STOP])
    target.check_idle()


def test_what_a_draft_has_computed_is_in_the_prefix_cache_as_far_as_it_is_right(
    worker: MakeWorker,
) -> None:
    """The harness checks that what is cached was computed for these tokens; here, that it is all
    there.
    """
    target, _ = start(worker, spec(1, max_tokens=15), wrong_at(2, 5), block_size=2, num_blocks=64)
    run(target)
    longer = (*PROMPT, *expected(PROMPT, 15))
    target.submit(spec(2, longer, max_tokens=1))
    events = run(target)
    assert (
        next(event.num_cached for event in events if isinstance(event, Admitted)) == len(longer) - 1
    )
    target.check_idle()


def test_log_probabilities_are_those_of_plain_decoding(worker: MakeWorker) -> None:
    sampling = SamplingParams(temperature=0.5, logprobs=3, prompt_logprobs=1)
    found = []
    for draft in (right(0), right(3), wrong_at(1, 3)):
        target, _ = start(worker, spec(1, max_tokens=9, sampling=sampling), draft)
        events = [event for event in run(target) if isinstance(event, NewTokens)]
        found.append(
            [
                [scores for event in events for scores in part(event)]
                for part in (own_logprobs, of_prompt)
            ]
        )
        assert len(found[-1][0]) == 9
        assert len(found[-1][1]) == len(PROMPT) - 1
    assert found[0] == found[1] == found[2]


def own_logprobs(event: NewTokens) -> Sequence[Any]:
    return event.logprobs


def of_prompt(event: NewTokens) -> Sequence[Any]:
    return event.prompt_logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(grammar="start: /a/", bad_words=((7,),)),
        SamplingParams(stop_ids=(9,), min_length=100),
    ],
)
def test_no_draft_where_each_token_changes_what_may_follow(
    worker: MakeWorker, sampling: SamplingParams
) -> None:
    target, drafter = start(worker, spec(1, max_tokens=6, sampling=sampling), right(3))
    assert counts(run(target)) == [1] * 6
    assert not drafter.accepted


def test_drafts_begin_when_enough_tokens_are_there_for_stop_tokens(worker: MakeWorker) -> None:
    sampling = SamplingParams(stop_ids=(VOCAB_SIZE,), min_length=len(PROMPT) + 4)
    target, _ = start(worker, spec(1, max_tokens=12, sampling=sampling), right(3))
    found = counts(run(target))
    assert found[:4] == [1] * 4
    assert max(found) == 4


def test_many_sequences_leave_no_room_for_drafts(worker: MakeWorker) -> None:
    config = SpeculativeConfig(max_step_tokens=8)
    target = worker(speculative=config, num_blocks=64)
    for number in range(1, 8):
        target.submit(spec(number, PROMPT[number:], max_tokens=9))
        target.sequences[number].drafter = Scripted(right(5))
    events = run(target)
    for number in range(1, 8):
        assert tokens_of(events, number) == expected(PROMPT[number:], 9)
    drafts = [
        [step.num_draft for step in plan.sequences if step.start] for plan in target.executor.plans
    ]
    assert max((sum(each) for each in drafts if len(each) == 7), default=0) <= 1
    assert max(map(sum, drafts)) > 1, "while there are fewer"
    target.check_idle()


def test_no_sequence_waits_for_a_draft_that_has_no_room(worker: MakeWorker) -> None:
    steps = []
    for speculative in (None, SpeculativeConfig(max_step_tokens=4)):
        target = worker(speculative=speculative, num_blocks=64)
        for number in range(1, 7):
            target.submit(spec(number, PROMPT[number - 1 :], max_tokens=9))
            target.sequences[number].drafter = Scripted(right(5))
        events = run(target)
        for number in range(1, 7):
            assert tokens_of(events, number) == expected(PROMPT[number - 1 :], 9)
        steps.append(sum(bool(plan.sequences) for plan in target.executor.plans))
    assert steps[1] <= steps[0]


def test_choices_draft_after_the_fork(worker: MakeWorker) -> None:
    target = worker(
        speculative=SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=2), num_blocks=64
    )
    target.submit(spec(1, max_tokens=40, num_choices=3, sampling=SamplingParams(seed=7)))
    target.sequences[1].drafter = None
    events = run(target, 300)
    for number, tokens in enumerate(expected_choices(PROMPT, 3, 40, VOCAB_SIZE, seed=7), start=1):
        assert tokens_of(events, number) == tokens
    assert target.engine.requests.num_draft_tokens > 0
    target.check_idle()


def test_a_draft_preempts_nobody_and_takes_the_blocks_that_are_left(worker: MakeWorker) -> None:
    """Two sequences that fill the pool to the last block."""
    config = {"block_size": 2, "num_blocks": 20, "growth_tokens": 0, "prefix_caching": False}
    target, _ = start(worker, spec(1, max_tokens=11), right(5), **config)
    target.submit(spec(2, PROMPT[::-1], max_tokens=11))
    target.sequences[2].drafter = Scripted(wrong_at(0, 5))
    events = run(target)
    assert not any(type(event).__name__ == "Preempted" for event in events)
    assert tokens_of(events, 1) == expected(PROMPT, 11)
    assert tokens_of(events, 2) == expected(PROMPT[::-1], 11)
    target.check_idle()


@pytest.mark.parametrize("num_steps", range(2, 9))
@pytest.mark.parametrize("count", [1, 4])
def test_a_suspended_sequence_gives_the_blocks_of_its_draft_back(
    worker: MakeWorker, num_steps: int, count: int
) -> None:
    target, _ = start(
        worker, spec(1, max_tokens=40), wrong_at(count - 1, count), block_size=2, num_blocks=64
    )
    events = [event for _ in range(num_steps) for event in target.step()]
    target.engine.suspend(1)
    events += run(target)
    (event,) = [each for each in events if isinstance(each, Suspended)]
    made = tokens_of(events, 1)
    assert (*event.tokens, event.first_token) == (*PROMPT, *made)
    assert made == expected(PROMPT, len(made))
    assert (
        len(event.tables[0].blocks)
        == -(-len(event.tokens) // 2)
        == target.engine.blocks()[BlockState.LEASED]
    )
    assert target.engine.blocks()[BlockState.OWNED] == 0
    target.engine.cancel(1)
    run(target)
    target.check_idle()


def test_a_decode_worker_drafts_from_the_prompt_that_it_has_received(worker: MakeWorker) -> None:
    target, _ = start(worker, spec(1, task=Task.DECODE, max_tokens=12), right(3))
    (admitted,) = target.step()
    assert isinstance(admitted, Admitted)
    target.engine.commit_import(1, first_tokens(fill(target, admitted, PROMPT)))
    events = run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 12)[1:]
    assert counts(events) == [4, 4, 3]
    target.check_idle()


def test_a_sequence_with_pending_tokens_waits_for_one_where_a_draft_is_likely(
    worker: MakeWorker,
) -> None:
    """With overlap it would never have a draft otherwise. It skips no step if none is likely."""
    for length, num_steps in ((3, 5 if worker().config.overlap else 4), (0, 12)):
        target, _ = start(worker, spec(1, max_tokens=12), right(length))
        run(target)
        assert sum(bool(plan.sequences) for plan in target.executor.plans) == num_steps


def test_a_sequence_beyond_the_context_of_the_draft_model_skips_no_step_and_takes_no_room(
    worker: MakeWorker,
) -> None:
    context = len(PROMPT) + 8
    config = SpeculativeConfig(model="draft", max_step_tokens=7)
    target = worker(speculative=config, draft_context_tokens=context)
    ends: list[int] = []

    def propose(requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        ends.extend(len(each.tokens) + each.count for each in requests)
        return {
            each.sequence_id: tuple(expected(tuple(each.tokens), each.count)) for each in requests
        }

    target.engine.scheduler._propose = propose
    target.submit(spec(1, max_tokens=30))
    target.sequences[1].drafter = None
    num_made = 0
    while num_made < 20:
        num_made += sum(counts(target.step()))
    assert max(ends) == context
    ends.clear()
    num_steps = 0
    while target.engine.has_work:
        num_made += sum(counts(target.step()))
        num_steps += 1
    assert num_made == 30
    assert num_steps <= 11 + target.config.overlap, "the last one drops the sequence"
    assert not ends
    target.check_idle()


def test_a_failed_draft_fails_its_sequence_alone(worker: MakeWorker) -> None:
    target, _ = start(worker, spec(1, max_tokens=12), right(3))
    target.submit(spec(2, PROMPT[1:], max_tokens=5))
    events = target.step() + target.step() + target.step()
    target.executor.failing[1] = "not finite"
    events += run(target)
    assert [event for event in events if event.id == 1][-1] == Failed(id=1, reason="not finite")
    made = tokens_of(events, 1)
    assert made == expected(PROMPT, len(made))
    assert tokens_of(events, 2) == expected(PROMPT[1:], 5)
    target.check_idle()


def test_a_draft_whose_step_fails_is_taken_back_and_no_other_made(worker: MakeWorker) -> None:
    target, drafter = start(worker, spec(1, max_tokens=12), right(3))
    events = target.step() + target.step() + target.step()
    plans, num_before = target.executor.plans, len(target.executor.plans)
    target.executor.failing[1] = "not finite"
    while not any(plan.sequences for plan in plans[num_before:]):
        events += target.step()
    num_failed = len(plans)
    assert any(step.num_draft for step in plans[-1].sequences)
    target.executor.failing.clear()
    events += run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 12)
    assert not any(step.num_draft for plan in plans[num_failed:] for step in plan.sequences)
    assert drafter.accepted == [count - 1 for count in counts(events) if count > 1]
    target.check_idle()


def test_nothing_is_drafted_unless_it_is_asked_for(worker: MakeWorker) -> None:
    target, drafter = start(worker, spec(1, max_tokens=8), right(3), speculative=None)
    assert counts(run(target)) == [1] * 8
    assert not drafter.accepted
