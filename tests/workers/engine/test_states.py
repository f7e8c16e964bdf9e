"""States of sequences: slots that are never written in place, resume points, drafts and refusals,
and engines with a bug put in, each of which the fake model must catch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.proto.hashing import hash_chain
from tandem.tests.workers.engine import harness
from tandem.tests.workers.engine.drive import (
    cached_of,
    expected,
    first_tokens,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.harness import Worker, engine_config
from tandem.tests.workers.engine.null import NullExecutor
from tandem.tests.workers.engine.pair import Pair, Request
from tandem.tests.workers.engine.test_drafts import Scripted, right
from tandem.tests.workers.engine.test_windows import run_null
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.block_table import SequenceTable
from tandem.workers.engine.config import EngineConfig, SpeculativeConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Admitted, Preempted, Suspended
from tandem.workers.engine.plan import StatePlan
from tandem.workers.engine.request_table import RequestTable
from tandem.workers.engine.sequence import BeamSearch, Sequence, Task
from tandem.workers.engine.states import SequenceStates
from tandem.workers.kv_cache.tables import TableSpec

PROMPT = tuple(range(1, 31))
CONFIG = engine_config(
    num_blocks=80,
    block_size=2,
    chunk_tokens=8,
    growth_tokens=2,
    num_states=12,
    state_tokens=8,
    tables=(TableSpec(block_size=2), TableSpec(block_size=4, window=5)),
)
OVERLAP = replace(CONFIG, overlap=True)
DRAFTS = replace(
    CONFIG, budgets=replace(CONFIG.budgets, speculative=SpeculativeConfig(max_step_tokens=12))
)
UNDRAFTED = replace(
    CONFIG, budgets=replace(CONFIG.budgets, speculative=SpeculativeConfig(model="never drafts"))
)

Serve = Callable[[EngineConfig], None]


def serve(config: EngineConfig) -> None:
    """Prompts with a common start, whole and split, one after another and then together."""
    pair = Pair(config, config)
    for number in range(12):
        prompt = (*range(1, 12), *range(20 + number, 24 + 2 * number))
        pair.submit(Request(prompt, 9, split=number % 2 == 0))
        if number < 6:
            pair.drain()
    pair.drain()


@pytest.mark.parametrize("config", [CONFIG, OVERLAP, DRAFTS])
def test_the_unbroken_build_passes(config: EngineConfig) -> None:
    serve(config)


@pytest.mark.parametrize("config", [CONFIG, OVERLAP, DRAFTS])
def test_no_state_of_a_running_sequence_is_cached_after_a_reset(config: EngineConfig) -> None:
    target = Worker(config)
    target.submit(spec(1, PROMPT, max_tokens=20))
    events = target.step() + target.step()
    target.clear_cache()
    events += run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 20)
    assert target.engine.blocks()[BlockState.CACHED] == 0
    assert target.engine.states()[BlockState.CACHED] == 0
    target.submit(spec(2, PROMPT))
    assert cached_of(run(target), 2) == 0


def count_held(worker: Worker) -> int:
    """The slots that sequences own or have reserved."""
    states = worker.engine.requests.states.pool
    return states.count(BlockState.OWNED) + states.count(BlockState.RESERVED)


@pytest.mark.parametrize("config", [CONFIG, UNDRAFTED])
def test_a_running_sequence_has_two_slots_and_never_writes_in_place(config: EngineConfig) -> None:
    target = Worker(config)
    target.submit(spec(1, PROMPT, max_tokens=12))
    target.sequences[1].drafter = None
    num_held: list[int] = []
    while target.engine.has_work:
        target.step()
        num_held.append(count_held(target))
    assert set(num_held) == {2, 0}, "0 after its end"
    for plan in target.executor.plans:
        for step in plan.sequences:
            assert step.state is not None
            assert step.state.source not in [slot for _, slot in step.state.targets]
    target.check_idle()


@pytest.mark.parametrize("beam", [None, BeamSearch(num_best=1)])
def test_a_prompt_keeps_the_slots_of_its_branches_until_the_fork(beam: BeamSearch | None) -> None:
    target = Worker(CONFIG)
    target.submit(spec(1, PROMPT, num_choices=3, beam=beam))
    prompt = target.sequences[1]
    num_held: list[int] = []
    while prompt.num_branches > 1:
        target.step()
        num_held.append(count_held(target))
    assert num_held == [6] * 4, "two for each branch, after each chunk"
    run(target)
    target.check_idle()


def test_slots_of_choices_that_end_before_the_fork_go_back() -> None:
    target = Worker(CONFIG)
    target.submit(spec(1, PROMPT, num_choices=3))
    prompt = target.sequences[1]
    target.step()
    for choice in (1, 2):
        target.engine.cancel_choice(1, choice)
    while prompt.num_branches > 1:
        target.step()
    target.step()
    assert count_held(target) == 2
    run(target)
    target.check_idle()


def drafting_worker(*, overlap: bool, **budgets: Any) -> Worker:
    """A worker whose sequence 1 drafts as many tokens as it gets slots for."""
    speculative = SpeculativeConfig(max_step_tokens=64)
    target = Worker(
        replace(
            CONFIG,
            num_blocks=400,
            num_states=8,
            overlap=overlap,
            budgets=replace(CONFIG.budgets, speculative=speculative, **budgets),
        )
    )
    target.submit(spec(1, PROMPT[1:9], max_tokens=200))
    target.sequences[1].drafter = Scripted(right(9))
    plans = target.executor.plans
    while not (plans and any(step.num_draft for step in plans[-1].sequences)):
        target.step()
    assert [step.num_draft for step in plans[-1].sequences] == [6], "it holds all 8 slots"
    return target


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_leave_slots_to_the_next_request(overlap: bool) -> None:
    target = drafting_worker(overlap=overlap)
    target.submit(spec(2, (7, 8, 9), max_tokens=1))
    events = [event for _ in range(5) for event in target.step()]
    assert tokens_of(events, 2) == expected((7, 8, 9), 1)
    (plan,) = [each for each in target.executor.plans if len(each.sequences) > 1]
    assert [step.num_draft for step in plan.sequences] == [3, 0], "the draft is shorter"
    target.engine.cancel(1)
    run(target)
    target.check_idle()


def test_drafts_preempt_no_prompt_whose_slot_became_a_resume_point() -> None:
    target = drafting_worker(overlap=True, chunk_tokens=4, mixed_chunk_tokens=4)
    target.submit(spec(2, PROMPT, max_tokens=1))
    events = [event for _ in range(20) for event in target.step()]
    assert not any(isinstance(event, Preempted) for event in events)
    assert tokens_of(events, 2) == expected(PROMPT, 1)
    target.engine.cancel(1)
    run(target)
    target.check_idle()


def test_later_prompts_continue_from_a_state_within_a_chunk() -> None:
    target = Worker(replace(CONFIG, budgets=replace(CONFIG.budgets, chunk_tokens=64)))
    common = PROMPT[:17]
    for number in range(1, 5):
        tokens = (*common, *range(100 * number, 100 * number + 20))
        target.submit(spec(number, tokens))
        events = run(target)
        assert tokens_of(events, number) == expected(tokens, 4)
        if number > 2:
            assert cached_of(events, number) == 16, "in blocks of 4 tokens"


def test_the_next_turn_continues_from_the_newest_state() -> None:
    target = Worker(CONFIG)
    target.submit(spec(1, PROMPT, max_tokens=20))
    turn = (*PROMPT, *tokens_of(run(target), 1), 5, 6, 7)
    target.submit(spec(2, turn))
    events = run(target)
    assert cached_of(events, 2) == 48
    assert tokens_of(events, 2) == expected(turn, 4)
    target.check_idle()


def test_a_state_is_found_with_its_blocks_or_not_at_all() -> None:
    target = Worker(CONFIG)
    target.submit(spec(1, PROMPT))
    run(target)
    states = target.engine.requests.states.pool
    states.unreserve(states.reserve(CONFIG.num_states))  # evicts all
    target.cached.clear()
    states.take_changes()
    target.submit(spec(2, PROMPT))
    assert cached_of(run(target), 2) == 0, "attention alone is no hit"


def test_evicted_states_come_back_from_host_memory() -> None:
    target = Worker(replace(CONFIG, num_host_states=8, num_host_blocks=8))
    target.submit(spec(1, PROMPT))
    run(target)
    states = target.engine.requests.states.pool
    states.unreserve(states.reserve(CONFIG.num_states))
    target.submit(spec(2, PROMPT))
    events = run(target)
    assert cached_of(events, 2) == 28
    assert any(plan.loaded_states for plan in target.executor.plans)
    assert tokens_of(events, 2) == expected(PROMPT, 4)


def test_a_leased_prefix_has_its_state() -> None:
    target = Worker(CONFIG)
    target.submit(spec(1, PROMPT))
    run(target)
    lease = target.engine.lease_prefix(hash_chain(PROMPT, 2))
    assert lease.num_tokens == 28
    assert lease.state is not None
    assert target.engine.requests.states.pool.holders(lease.state) == (0, 1)
    target.engine.unlease_prefix(lease)
    target.check_idle()


@pytest.mark.parametrize("config", [CONFIG, OVERLAP, DRAFTS])
@pytest.mark.parametrize("num_steps", [6, 7, 9])
def test_a_suspended_sequence_continues_on_another_worker(
    config: EngineConfig, num_steps: int
) -> None:
    source, target = Worker(config), Worker(config)
    source.submit(spec(1, PROMPT, max_tokens=20))
    events = [event for _ in range(num_steps) for event in source.step()]
    assert source.engine.suspend(1)
    events += run(source)
    (event,) = [each for each in events if isinstance(each, Suspended)]
    assert event.state is not None
    made = tokens_of(events, 1)
    assert (*event.tokens, event.first_token) == (*PROMPT, *made)
    rest = 20 - len(made) + 1
    target.submit(
        spec(1, event.tokens, task=Task.DECODE, max_tokens=rest, first_index=len(made) - 1)
    )
    (admitted,) = target.step()
    assert isinstance(admitted, Admitted)
    assert admitted.state is not None
    kv = source.executor.kv, event.tables
    harness.copy_tokens(
        kv, target.executor.kv, admitted.tables, admitted.num_cached, len(event.tokens)
    )
    target.write_state(admitted.state, source.read_state(event.state))
    target.engine.commit_import(1, first_tokens(event.first_token))
    source.engine.cancel(1)
    assert made + tokens_of(run(target), 1) == expected(PROMPT, 20)
    for worker in (source, target):
        run(worker)
        worker.check_idle()


@pytest.mark.parametrize(("task", "count"), [(Task.COLOCATED, 6), (Task.PREFILL, 3)])
def test_too_many_choices_for_the_states_are_refused(task: Task, count: int) -> None:
    target = Worker(replace(CONFIG, num_states=count - 1))
    with pytest.raises(ValueError, match=f"takes {count} states; {count - 1} are available"):
        target.engine.submit(spec(1, PROMPT, num_choices=3, task=task))


def test_prompts_with_a_common_start_find_it_from_the_third_on() -> None:
    config = engine_config(num_blocks=4000, num_states=64, state_tokens=1584)
    engine = Engine(NullExecutor(), config)
    for number in range(20):
        ends = [10_000 + 700 * number + place for place in range(700)]
        cached, _ = run_null(engine, [*range(1500), *ends], 1 + 10 * number)
        assert number < 2 or cached == 1500 // 16 * 16


# Engines with a bug put in.


def test_a_state_written_in_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SequenceStates.plan

    def in_place(states: SequenceStates, sequence: Sequence, count: int, draft: int) -> StatePlan:
        state = plan(states, sequence, count, draft)
        if state.source is None:
            return state
        return StatePlan(state.source, (*state.targets[:-1], (count + draft, state.source)))

    monkeypatch.setattr(SequenceStates, "plan", in_place)
    with pytest.raises(AssertionError, match="a state is written in place"):
        serve(CONFIG)


def test_a_point_that_is_published_a_step_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of the position before its own."""
    publish = SequenceStates.publish

    def early(states: SequenceStates, sequence: Sequence) -> None:
        step = states._alignment
        sequence.slots.points = [
            (max(position - step, step), slot) for position, slot in sequence.slots.points
        ]
        publish(states, sequence)

    monkeypatch.setattr(SequenceStates, "publish", early)
    with pytest.raises(RuntimeError, match="a state of another position"):
        serve(CONFIG)


def test_a_rollback_that_takes_the_wrong_slot_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = SequenceStates.settle

    def wrong(states: SequenceStates, sequence: Sequence) -> None:
        draft = sequence.slots.draft
        slots = [slot for _, slot in draft]
        rotated = [*slots[1:], *slots[:1]]
        sequence.slots.draft = [
            (position, slot) for (position, _), slot in zip(draft, rotated, strict=True)
        ]
        settle(states, sequence)

    monkeypatch.setattr(SequenceStates, "settle", wrong)
    with pytest.raises(RuntimeError, match="a state of another position"):
        serve(DRAFTS)


def test_a_tail_that_is_a_token_short_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = harness.spans_of

    def short(kv: Any, tables: Any, start: int, end: int) -> Any:
        for layer, table, first in spans(kv, tables, start, end):
            yield layer, table, first + (kv.tables[kv.table_of[layer]].window is not None)

    monkeypatch.setattr(harness, "spans_of", short)
    with pytest.raises(RuntimeError, match="KV of something else"):
        serve(CONFIG)


def test_a_block_that_leaves_its_window_too_early_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slide = SequenceTable.slide
    monkeypatch.setattr(SequenceTable, "slide", lambda table, first: slide(table, first + 1))
    with pytest.raises((AssertionError, RuntimeError)):
        serve(CONFIG)


def test_parts_of_two_points_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hit of the full table is kept although that of the state was missed."""
    find = RequestTable.find_hit

    def partial(table: RequestTable, sequence: Sequence) -> Any:
        hit = find(table, sequence)
        return replace(hit, state=None)

    monkeypatch.setattr(RequestTable, "find_hit", partial)
    with pytest.raises(RuntimeError, match="no state"):
        serve(CONFIG)
