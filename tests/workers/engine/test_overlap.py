"""A step is scheduled while the last one runs: what is known when, and what a finished sequence
leaves in flight.
"""

import itertools
from collections.abc import Callable

import pytest

from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    cached_of,
    expected,
    fill,
    finish_of,
    first_tokens,
    make_worker,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.fake import FakeExecutor
from tandem.tests.workers.engine.harness import LateExecutor, SeqEvent, Worker
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import (
    Admitted,
    CacheChanged,
    Event,
    NewTokens,
    Preempted,
    Progress,
)
from tandem.workers.engine.plan import PENDING_TOKEN, OnLayers, Samples, StepPlan
from tandem.workers.engine.sequence import FinishReason, Task


@pytest.fixture(params=[False, True], ids=["ahead", "late"])
def worker(request: pytest.FixtureRequest) -> MakeWorker:
    late: bool = request.param

    def make(**config: object) -> Worker:
        return make_worker(overlap=True, late=late, **config)

    return make


def planned(target: Worker, number: int) -> list[tuple[int, ...]]:
    """The token ids of the sequence's steps so far."""
    steps = (step for plan in target.executor.plans for step in plan.sequences)
    return [step.token_ids for step in steps if step.sequence_id == number]


def test_a_step_is_launched_before_the_one_before_it_is_collected() -> None:
    calls: list[str] = []

    class Executor(FakeExecutor):
        def launch(
            self, plan: StepPlan, on_layers: OnLayers | None = None
        ) -> Callable[[], Samples]:
            number = len(calls)
            calls.append("launch")
            collect = super().launch(plan)

            def reported() -> Samples:
                calls.append(f"collect {number}")
                return collect()

            return reported

    engine = Engine(Executor(8, 4), EngineConfig(num_blocks=8, block_size=4, overlap=True))
    engine.submit(spec(1, max_tokens=2))
    kinds = []
    while engine.has_work:
        kinds.append([type(event) for event in engine.step()])
    assert calls == ["launch", "launch", "collect 0", "collect 1", "launch", "collect 4"]
    assert kinds == [[Admitted], [NewTokens, CacheChanged], [NewTokens], [], []]


def test_a_decode_is_scheduled_with_a_pending_token(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=8)
    target.submit(spec(1, max_tokens=5))
    events = run(target)
    assert planned(target, 1) == [PROMPT[:8], PROMPT[8:], *[(PENDING_TOKEN,)] * 4]
    assert tokens_of(events, 1) == expected(PROMPT, 5)
    assert [event.first_index for event in events if isinstance(event, NewTokens)] == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("position", range(6))
def test_stop_token_ends_the_sequence_while_one_more_step_of_it_runs(
    worker: MakeWorker, position: int
) -> None:
    prompt = (1, 1, 2)
    want = expected(prompt, 8)
    assert len(set(want)) == 8, "each token stops at its own position alone"
    target = worker()
    target.submit(spec(1, prompt, max_tokens=8, stop_ids=(want[position],)))
    events: list[SeqEvent] = []
    while not finish_of(events, 1):
        events += target.step()
    assert target.in_flight == {1}
    target.check_idle()
    events += run(target)
    assert tokens_of(events, 1) == want[: position + 1]
    assert finish_of(events, 1) == [FinishReason.STOP]
    assert len(planned(target, 1)) == position + 2
    assert target.executor.plans[-1].dropped == (1,)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_the_last_token_that_max_tokens_allows_is_foreseen(
    worker: MakeWorker, block_size: int, max_tokens: int
) -> None:
    """As many steps as without overlap, and never a block more; the harness looks at the tables
    after every step.
    """
    target = worker(block_size=block_size, num_blocks=-(-(10 + max_tokens - 1) // block_size))
    target.submit(spec(1, max_tokens=max_tokens))
    events = run(target)
    assert tokens_of(events, 1) == expected(PROMPT, max_tokens)
    assert finish_of(events, 1) == [FinishReason.LENGTH]
    assert len(planned(target, 1)) == max_tokens
    target.check_idle()


def test_a_prefill_takes_no_step_after_the_one_that_samples(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=4)
    target.submit(spec(1, task=Task.PREFILL))
    reported = []
    while target.engine.has_work:
        reported.append([e.num_computed for e in target.step() if isinstance(e, Progress)])
    assert reported == [[], [4], [8], [10], [], []], "of steps that have ended"
    assert planned(target, 1) == [PROMPT[:4], PROMPT[4:8], PROMPT[8:]]
    assert target.engine.blocks()[BlockState.LEASED] == 3


def test_cancel_in_flight_frees_at_once_and_the_next_owner_s_tokens_are_right(
    worker: MakeWorker,
) -> None:
    target = worker(num_blocks=3, growth_tokens=2, prefix_caching=False)
    target.submit(spec(1, max_tokens=3))
    target.step()
    target.step()
    target.engine.cancel(1)
    assert target.in_flight == {1}
    target.check_idle()
    other = PROMPT[::-1]
    target.submit(spec(2, other, max_tokens=3))
    events = run(target)
    assert {event.id for event in events} == {2}
    assert tokens_of(events, 2) == expected(other, 3)


def import_over_a_step_in_flight(target: Worker) -> list[SeqEvent]:
    """A sequence is cancelled whose step in flight writes position 11; an import takes its blocks
    and is filled as soon as that is reported, position 11 among them.
    """
    tokens = tuple(range(12))
    target.submit(spec(2, PROMPT, max_tokens=6))
    for _ in range(3):
        target.step()
    target.engine.cancel(2)
    target.submit(spec(1, tokens, task=Task.DECODE))
    first: list[int] = []

    def filled(events: list[Event]) -> None:
        first.extend(fill(target, event, tokens) for event in events if isinstance(event, Admitted))

    target.engine.step(filled)
    target.engine.commit_import(1, first_tokens(first[0]))
    return run(target)


def test_import_may_fill_blocks_that_the_step_in_flight_still_writes(worker: MakeWorker) -> None:
    events = import_over_a_step_in_flight(
        worker(num_blocks=4, growth_tokens=2, prefix_caching=False)
    )
    assert tokens_of(events, 1) == expected(tuple(range(12)), 4)[1:]


def test_import_that_is_written_before_the_steps_launched_earlier_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LateExecutor, "catch_up", lambda executor: None)
    with pytest.raises(RuntimeError, match="KV of something else"):
        import_over_a_step_in_flight(
            make_worker(
                num_blocks=4, growth_tokens=2, prefix_caching=False, overlap=True, late=True
            )
        )


def test_preempted_in_flight_ends_a_token_earlier_and_resumes(worker: MakeWorker) -> None:
    target = worker(num_blocks=6, block_size=2, growth_tokens=0, prefix_caching=False)
    old, new = PROMPT[:4], PROMPT[4:8]
    target.submit(spec(1, old, max_tokens=7))
    target.submit(spec(2, new, max_tokens=7))
    events: list[SeqEvent] = []
    while not (gone := [event.id for event in events if isinstance(event, Preempted)]):
        before = target.in_flight
        events += target.step()
    assert (gone, 2 in before, 2 in target.in_flight) == ([2], True, False)
    got = tokens_of(events, 2)
    assert got == expected(new, 7)[: len(planned(target, 2)) - 1]
    target.submit(spec(3, new + tuple(got), max_tokens=7 - len(got), first_index=len(got)))
    events += run(target)
    assert tokens_of(events, 1) == expected(old, 7)
    assert got + tokens_of(events, 3) == expected(new, 7)
    assert [event.id for event in events if isinstance(event, Preempted)] == [2]


def test_a_committed_import_runs_beside_a_step_in_flight(worker: MakeWorker) -> None:
    target = worker(prefix_caching=False)
    target.submit(spec(2, (7, 3, 9), max_tokens=8))
    target.submit(spec(1, task=Task.DECODE))
    admitted = next(
        event for event in target.step() if isinstance(event, Admitted) and event.id == 1
    )
    first = fill(target, admitted, PROMPT)
    target.engine.commit_import(1, first_tokens(first))
    events = target.step()
    assert not [event for event in events if event.id == 1]
    assert [(step.sequence_id, step.token_ids) for step in target.executor.plans[-1].sequences] == [
        (2, (PENDING_TOKEN,)),
        (1, (first,)),
    ]
    events += run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 4)[1:]
    assert tokens_of(events, 2) == expected((7, 3, 9), 8)


def test_a_prefix_is_found_from_the_step_on_that_finds_it_computed(worker: MakeWorker) -> None:
    target = worker()
    events: list[SeqEvent] = []
    for number in (1, 2, 3):
        target.submit(spec(number, max_tokens=8))
        events += target.step()
    assert [cached_of(events, number) for number in (1, 2, 3)] == [0, 0, 8]
    events += run(target)
    for number in (1, 2, 3):
        assert tokens_of(events, number) == expected(PROMPT, 8)


@pytest.mark.parametrize("stop", [False, True])
def test_generated_blocks_are_published_with_known_tokens_only(
    worker: MakeWorker, stop: bool
) -> None:
    """A stop at the eighth token leaves the fourth block full, but with an unknown token."""
    prompt = (7, 3, 9, 1, 4, 7, 3, 1, 1)
    want = expected(prompt, 8)
    assert want.index(want[6]) == 6
    target = worker()
    target.submit(spec(1, prompt, max_tokens=8, stop_ids=(want[6],) if stop else ()))
    run(target)
    answer = want[: 7 if stop else 8]
    target.submit(spec(2, (*prompt, *answer, 1), max_tokens=2))
    events = run(target)
    assert cached_of(events, 2) == (12 if stop else 16)
    assert tokens_of(events, 2) == expected((*prompt, *answer, 1), 2)


@pytest.mark.parametrize("chunk", [3, 16])
def test_overlap_changes_no_sequence_s_events(chunk: int) -> None:
    """But for times, and what the prefix cache holds when: here it is off."""
    stop = expected(PROMPT[:5], 3)[2]
    runs = []
    for overlap, late in ((False, False), (True, False), (True, True)):
        target = make_worker(chunk_tokens=chunk, prefix_caching=False, overlap=overlap, late=late)
        for number, task in zip(
            range(6), itertools.cycle((Task.COLOCATED, Task.PREFILL)), strict=False
        ):
            target.submit(
                spec(number, PROMPT[: 4 + number], task=task, max_tokens=5, stop_ids=(stop,))
            )
        events = run(target)
        reported = [
            (e.id, e.first_index, e.token_ids, e.finish)
            if isinstance(e, NewTokens)
            else (e.id, type(e))
            for e in events
        ]
        runs.append(sorted(reported, key=lambda event: event[0]))
    assert runs[0] == runs[1] == runs[2]
    assert any(
        isinstance(event, NewTokens) and event.finish is FinishReason.STOP for event in events
    )
