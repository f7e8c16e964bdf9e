"""Several continuations of one prompt: computed once, forked, and each what it would be alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.tests.examples import num_examples
from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    fill,
    finish_of,
    first_tokens,
    make_worker,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.fake import expected_choices
from tandem.tests.workers.engine.harness import VOCAB_SIZE, SeqEvent, Worker
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.events import (
    Admitted,
    Event,
    NewTokens,
    Preempted,
    PrefillFinished,
    Progress,
)
from tandem.workers.engine.plan import CpuShare, SamplingParams
from tandem.workers.engine.sequence import FinishReason, Task, Turn


def choices_of(events: Sequence[Event], first: int, n: int) -> list[list[int]]:
    return [tokens_of(events, first + choice) for choice in range(n)]


def wanted(n: int, count: int, prompt: tuple[int, ...] = PROMPT, seed: int = 0) -> list[list[int]]:
    return expected_choices(prompt, n, count, VOCAB_SIZE, seed)


@settings(max_examples=num_examples(60), database=None)
@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(2, 5),
    st.integers(1, 5),
    st.integers(0, 2**64 - 1),
    st.integers(1, 16),
    st.booleans(),
    st.booleans(),
)
def test_choices_are_what_sequences_with_their_seeds_are(
    length: int,
    max_tokens: int,
    n: int,
    block_size: int,
    seed: int,
    chunk: int,
    overlap: bool,
    late: bool,
) -> None:
    prompt = tuple(range(1, length + 1))
    config: dict[str, Any] = {
        "num_blocks": 150,
        "block_size": block_size,
        "chunk_tokens": chunk,
        "overlap": overlap,
        "late": late,
    }
    together, apart = make_worker(**config), make_worker(**config)
    together.submit(
        spec(1, prompt, max_tokens=max_tokens, num_choices=n, sampling=SamplingParams(seed=seed))
    )
    for choice in range(n):
        sampling = SamplingParams(seed=(seed + choice) % 2**64)
        apart.submit(spec(1 + choice, prompt, max_tokens=max_tokens, sampling=sampling))
    ours, theirs = run(together), run(apart)
    assert choices_of(ours, 1, n) == choices_of(theirs, 1, n) == wanted(n, max_tokens, prompt, seed)
    reported = [(e.id, e.first_index, e.finish) for e in ours if isinstance(e, NewTokens)]
    assert sorted(reported, key=lambda t: t[:2]) == sorted(
        ((e.id, e.first_index, e.finish) for e in theirs if isinstance(e, NewTokens)),
        key=lambda t: t[:2],
    )
    assert together.executor.num_tokens == length + n * (max_tokens - 1), (
        "the prompt once, and each token once"
    )
    together.check_idle()


def test_full_blocks_are_shared_and_the_partial_one_is_copied(worker: MakeWorker) -> None:
    target = worker(growth_tokens=0, chunk_tokens=8)
    target.submit(spec(1, num_choices=4))
    target.step()
    blocks = target.engine.blocks()
    assert (blocks[BlockState.OWNED], blocks[BlockState.RESERVED]) == (3, 3), (
        "reserved from the start"
    )
    while not any(plan.copies for plan in target.executor.plans):
        target.step()
    plan = target.executor.plans[-1]
    tables = [step.new_blocks[0].blocks if step.new_blocks else () for step in plan.sequences]
    assert [len(table) for table in tables] == [0, 3, 3, 3], "the first goes on with its own"
    assert [step.sampling is not None for step in plan.sequences] == [False, True, True, True]
    assert len({table[:2] for table in tables[1:]}) == 1
    assert {source for source, _ in plan.copies} == {target.sequences[1].tables[0].blocks[2]}
    assert [copied for _, copied in plan.copies] == [table[2] for table in tables[1:]]
    assert target.engine.blocks()[BlockState.OWNED] == 2 + 4
    run(target)
    target.check_idle()


def test_a_prompt_of_whole_blocks_needs_no_copy(worker: MakeWorker) -> None:
    target = worker(growth_tokens=0)
    target.submit(spec(1, PROMPT[:8], num_choices=3))
    events = run(target)
    assert choices_of(events, 1, 3) == wanted(3, 4, PROMPT[:8])
    assert not any(plan.copies for plan in target.executor.plans)


def test_choices_that_end_with_their_first_token_never_become_sequences(worker: MakeWorker) -> None:
    want = wanted(4, 4)
    firsts = [tokens[0] for tokens in want]
    for stop in sorted(set(firsts)):
        target = worker()
        target.submit(spec(1, num_choices=4, stop_ids=(stop,)))
        events = run(target)
        for choice, tokens in enumerate(want):
            end = tokens.index(stop) + 1 if stop in tokens else 4
            assert tokens_of(events, 1 + choice) == tokens[:end]
            assert finish_of(events, 1 + choice) == [
                FinishReason.STOP if stop in tokens else FinishReason.LENGTH
            ]
        ended = {1 + choice for choice in range(1, 4) if firsts[choice] == stop}
        known = {step.sequence_id for plan in target.executor.plans for step in plan.sequences}
        assert not ended & known
        target.check_idle()


@pytest.mark.parametrize("cancelled", [0, 1, 3])
@pytest.mark.parametrize("steps", range(5))
def test_a_cancelled_choice_has_no_event_and_the_others_have(
    worker: MakeWorker, cancelled: int, steps: int
) -> None:
    target = worker(chunk_tokens=4)
    target.submit(spec(1, num_choices=4, max_tokens=6))
    before: list[SeqEvent] = []
    for _ in range(steps):
        before += target.step()
    target.engine.cancel_choice(1, cancelled)
    target.engine.cancel_choice(1, cancelled)
    target.check()
    after = run(target)
    assert not tokens_of(after, 1 + cancelled)
    for choice in {0, 1, 2, 3} - {cancelled}:
        assert tokens_of(before + after, 1 + choice) == wanted(4, 6)[choice]
    target.check_idle()


@pytest.mark.parametrize("task", list(Task))
def test_the_last_choice_that_is_cancelled_ends_all(worker: MakeWorker, task: Task) -> None:
    for steps in range(4):
        target = worker(chunk_tokens=8)
        target.submit(spec(1, num_choices=3, task=task))
        for _ in range(steps):
            target.step()
        for choice in (2, 0, 1):
            target.engine.cancel_choice(1, choice)
        target.check_idle()
        assert [e for e in run(target) if not isinstance(e, Progress)] == []


@pytest.mark.parametrize("steps", range(6))
def test_cancelling_every_id_frees_all_in_every_state(worker: MakeWorker, steps: int) -> None:
    target = worker(chunk_tokens=4)
    target.submit(spec(1, num_choices=3, max_tokens=6))
    for _ in range(steps):
        target.step()
    for number in (3, 1, 2, 1):
        target.engine.cancel(number)
        target.check()
    target.check_idle()
    assert run(target) == []


def test_a_prefill_reports_all_first_tokens_and_then_its_end(worker: MakeWorker) -> None:
    firsts = [tokens[0] for tokens in wanted(3, 1)]
    target = worker()
    target.submit(spec(1, task=Task.PREFILL, num_choices=3, stop_ids=(firsts[1],)))
    events = [event for event in run(target) if isinstance(event, NewTokens | PrefillFinished)]
    reported = [
        (event.id, *event.token_ids) for event in events[:3] if isinstance(event, NewTokens)
    ]
    assert reported == [(1, firsts[0]), (2, firsts[1]), (3, firsts[2])]
    assert finish_of(events, 2) == [FinishReason.STOP]
    opened = events[3]
    assert isinstance(opened, PrefillFinished)
    assert (opened.id, opened.first_tokens) == (1, first_tokens(*firsts))
    assert target.engine.requests.num_leased == 1
    assert target.executor.num_tokens == len(PROMPT)
    target.engine.cancel(1)
    target.check_idle()


def test_a_step_samples_no_more_than_its_memory_was_measured_for(worker: MakeWorker) -> None:
    """Except for a request that has more choices; the head of the queue is not overtaken."""
    target = worker(chunk_tokens=64, max_sequences=4)
    for number, num_choices in ((10, 2), (20, 2), (30, 1), (40, 6)):
        target.submit(spec(number, task=Task.PREFILL, num_choices=num_choices))
    events = run(target)
    sampled = [
        {step.sequence_id: step.num_samples for step in plan.sequences if step.num_samples}
        for plan in target.executor.plans
        if plan.sequences
    ]
    assert sampled == [{10: 2, 20: 2}, {30: 1}, {40: 6}]
    for number, num_choices in ((10, 2), (20, 2), (30, 1), (40, 6)):
        assert choices_of(events, number, num_choices) == [
            tokens[:1] for tokens in wanted(num_choices, 1)
        ]
        target.engine.cancel(number)
    target.check_idle()


def test_a_prefill_whose_choices_all_finish_leases_nothing(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, task=Task.PREFILL, num_choices=3, max_tokens=1))
    events = run(target)
    assert [type(e) for e in events if not isinstance(e, Progress)] == [
        Admitted,
        NewTokens,
        NewTokens,
        NewTokens,
    ]
    target.check_idle()


def imported(target: Worker, number: int, n: int, **options: Any) -> None:
    target.submit(spec(number, task=Task.DECODE, num_choices=n, **options))
    admitted = next(event for event in target.step() if isinstance(event, Admitted))
    fill(target, admitted, PROMPT)


@pytest.mark.parametrize("growth", [0, 100])
def test_a_committed_import_is_forked(worker: MakeWorker, growth: int) -> None:
    want = wanted(4, 5)
    target = worker(growth_tokens=growth)
    imported(target, 1, 4, max_tokens=5)
    target.engine.commit_import(1, first_tokens(*(tokens[0] for tokens in want)))
    events = run(target)
    assert choices_of(events, 1, 4) == [tokens[1:] for tokens in want]
    assert target.executor.num_tokens == 4 * 4
    target.check_idle()


def test_an_import_reports_finished_choices_and_forks_the_others(worker: MakeWorker) -> None:
    want = wanted(4, 5)
    stop = want[0][0]
    ended = [choice for choice in range(3) if want[choice][0] == stop]
    target = worker()
    imported(target, 1, 4, max_tokens=5, stop_ids=(stop,))
    target.engine.cancel_choice(1, 3)
    target.engine.commit_import(1, first_tokens(*(tokens[0] for tokens in want)))
    events = run(target)
    for choice in ended:
        assert [
            (e.first_index, e.token_ids)
            for e in events
            if isinstance(e, NewTokens) and e.id == 1 + choice
        ] == [(0, (stop,))]
    assert not tokens_of(events, 4)
    target.check_idle()


def test_first_tokens_of_another_request_are_refused(worker: MakeWorker) -> None:
    target = worker()
    imported(target, 1, 3)
    with pytest.raises(ValueError, match="first_tokens: 2 tokens and 0 logprobs for 3 choices"):
        target.engine.commit_import(1, first_tokens(1, 2))
    target.engine.commit_import(1, first_tokens(1, 2, 3))


def test_a_preempted_choice_ends_alone_and_goes_on_alone_with_the_same_tokens(
    worker: MakeWorker,
) -> None:
    want = wanted(3, 9, PROMPT[:4])
    target = worker(num_blocks=8, block_size=2, growth_tokens=0, prefix_caching=False)
    target.submit(spec(1, PROMPT[:4], max_tokens=9, num_choices=3))
    events: list[SeqEvent] = []
    while not (gone := [event.id for event in events if isinstance(event, Preempted)]):
        events += target.step()
    assert gone == [3], "the newest"
    got = tokens_of(events, 3)
    sampling = SamplingParams(seed=2)
    target.submit(
        spec(
            9,
            PROMPT[:4] + tuple(got),
            max_tokens=9 - len(got),
            first_index=len(got),
            sampling=sampling,
        )
    )
    events += run(target)
    assert got + tokens_of(events, 9) == want[2]
    resumed = [event.id for event in events if isinstance(event, Preempted)]
    assert tokens_of(events, 1) == want[0]
    assert resumed in ([3], [3, 2])


def test_choices_preempted_before_the_fork_are_reported_one_by_one(worker: MakeWorker) -> None:
    target = worker(
        num_blocks=6, block_size=2, growth_tokens=0, chunk_tokens=4, mixed_chunk_tokens=1
    )
    target.submit(spec(1, PROMPT[:4], max_tokens=9))
    events = target.step()
    target.submit(spec(5, PROMPT[4:], num_choices=3))
    target.engine.cancel_choice(5, 1)
    events += run(target)
    assert [event.id for event in events if isinstance(event, Preempted)] == [5, 7]
    assert len(tokens_of(events, 1)) == 9
    target.check_idle()


def test_choices_count_as_sequences_from_their_admission_on(worker: MakeWorker) -> None:
    target = worker(max_sequences=4)
    target.submit(spec(1, num_choices=3))
    target.submit(spec(9, num_choices=2))
    target.submit(spec(20, task=Task.PREFILL, num_choices=4))
    target.step()
    requests = target.engine.requests
    assert (requests.num_holding, len(requests.waiting)) == (3, 2)
    with pytest.raises(
        ValueError, match="5 times 10 \\+ 4 tokens exceed the capacity of 128 tokens, 4 sequences"
    ):
        target.engine.submit(spec(30, num_choices=5))
    assert {event.id for event in run(target) if isinstance(event, NewTokens)} == {
        1,
        2,
        3,
        9,
        10,
        20,
        21,
        22,
        23,
    }


def test_choices_that_wait_for_more_sequences_than_a_new_role_has_run_alone(
    worker: MakeWorker,
) -> None:
    target = worker()
    target.submit(spec(1))
    target.step()
    target.submit(spec(2, num_choices=4))
    budgets = replace(target.engine.config.budgets, max_sequences=2)
    target.engine.take_role(budgets, CpuShare(nice=0, num_threads=1))
    target.submit(spec(9, PROMPT[::-1]))
    events = run(target)
    assert choices_of(events, 2, 4) == expected_choices(PROMPT, 4, 4, VOCAB_SIZE)
    assert finish_of(events, 9) == [FinishReason.LENGTH]
    target.check_idle()


@pytest.mark.parametrize(("length", "n", "least"), [(5, 4, 2 + 4), (4, 4, 2 + 2), (4, 5, 4)])
def test_choices_fit_where_all_can_begin_and_one_can_end(
    worker: MakeWorker, length: int, n: int, least: int
) -> None:
    small = worker(num_blocks=least - 1, block_size=2)
    with pytest.raises(ValueError, match="exceed the capacity"):
        small.engine.submit(spec(1, PROMPT[:length], num_choices=n, max_tokens=5))
    target = worker(num_blocks=least, block_size=2, prefix_caching=False)
    target.submit(spec(1, PROMPT[:length], num_choices=n, max_tokens=5))
    events = run(target)
    assert tokens_of(events, 1) == wanted(1, 5, PROMPT[:length])[0]
    ended = {
        e.id for e in events if isinstance(e, Preempted) or (isinstance(e, NewTokens) and e.finish)
    }
    assert ended == set(range(1, n + 1))
    target.check_idle()


def test_nobody_gets_the_block_that_a_copy_is_from_before_the_copy(worker: MakeWorker) -> None:
    """The first choice is cancelled, and its partial block would be free; an import that is
    admitted in the step that copies it is filled at once.
    """
    want = wanted(3, 5)
    target = worker(num_blocks=12, growth_tokens=0, prefix_caching=False)
    target.submit(spec(1, num_choices=3, max_tokens=5))
    events: list[Event] = [*target.step()]
    while not tokens_of(events, 3):
        events += target.step()
    target.engine.cancel(1)
    source = target.sequences[2].tables[0].copy_source
    assert source is not None
    target.submit(spec(10, tuple(range(20, 36)), task=Task.DECODE, max_tokens=1))
    filled: list[int] = []

    def emit(reported: list[Event]) -> None:
        events.extend(reported)
        for event in reported:
            if isinstance(event, Admitted):
                filled.extend(event.tables[0].blocks)
                fill(target, event, tuple(range(20, 36)))

    target.engine.step(emit)
    assert target.executor.plans[-1].copies
    assert len(filled) == 4
    assert source not in filled
    events += [event for event in run(target) if isinstance(event, NewTokens)]
    assert [tokens_of(events, 2), tokens_of(events, 3)] == want[1:]


def test_a_grammar_waits_for_each_token_and_gets_its_history_at_first(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, sampling=SamplingParams(grammar="%llguidance {}"), num_choices=2))
    target.submit(spec(9, (7, 7, 7), sampling=SamplingParams(presence_penalty=0.5), first_index=1))
    events = run(target)
    assert choices_of(events, 1, 2) == wanted(2, 4)
    steps = [step for plan in target.executor.plans for step in plan.sequences]
    reported = [(s.sequence_id, s.history, s.num_prompt) for s in steps if s.sampling]
    firsts = [tokens[0] for tokens in wanted(2, 1)]
    assert reported == [
        (9, (7, 7, 7), 2),  # it goes on after an interruption
        (1, PROMPT, 10),
        (1, (*PROMPT, firsts[0]), 10),
        (2, (*PROMPT, firsts[1]), 10),
    ]
    assert not any(step.history for step in steps if not step.sampling)
    assert all(token >= 0 for step in steps if step.sequence_id < 9 for token in step.token_ids), (
        "none is pending"
    )


def test_priority_goes_before_arrival(worker: MakeWorker) -> None:
    target = worker(max_sequences=1, prefix_caching=False)
    for number, priority in ((1, 0), (2, 0), (3, 5), (4, -1), (5, 5), (6, 0)):
        target.submit(spec(number, priority=priority, max_tokens=1))
    assert [event.id for event in run(target) if isinstance(event, Admitted)] == [3, 5, 1, 2, 6, 4]


def test_an_interrupted_stream_goes_before_prompts_that_wait_or_are_under_way(
    worker: MakeWorker,
) -> None:
    """Its reader waits for the next token; theirs have got none yet."""
    target = worker(chunk_tokens=4, prefix_caching=False)
    target.submit(spec(1, max_tokens=1))
    target.submit(spec(2, priority=5, max_tokens=1))
    target.step()
    num_before = len(target.executor.plans)
    target.submit(spec(3, first_index=2, max_tokens=1))
    run(target)
    steps = [step for plan in target.executor.plans for step in plan.sequences]
    assert steps[0].sequence_id == 2
    later = [
        step.sequence_id for plan in target.executor.plans[num_before:] for step in plan.sequences
    ]
    assert later[:3] == [3, 3, 3]
    assert set(later[3:]) == {1, 2}
    assert later[3:] == sorted(later[3:], reverse=True)


def test_a_stream_that_its_client_resumes_keeps_its_priority(worker: MakeWorker) -> None:
    """Once it goes before those of its priority; otherwise it waits as they do."""
    target = worker(max_sequences=1, prefix_caching=False)
    first, later = Turn.FIRST_OF_PRIORITY, Turn.IN_ORDER
    asked = [
        (1, 0, Turn.BY_INDEX),
        (2, 5, Turn.BY_INDEX),
        (3, 0, later),
        (4, 0, first),
        (5, 5, first),
    ]
    for number, priority, turn in asked:
        first_index = 0 if turn is Turn.BY_INDEX else 2
        target.submit(
            spec(number, first_index=first_index, priority=priority, turn=turn, max_tokens=1)
        )
    target.submit(spec(6, first_index=2, max_tokens=1))  # interrupted by the service
    admitted = [event.id for event in run(target) if isinstance(event, Admitted)]
    assert admitted == [6, 5, 2, 4, 1, 3]
