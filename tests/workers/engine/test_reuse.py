"""What one engine reuses instead of computing it: cached prefixes and imported KV caches."""

import pytest

from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    cached_of,
    expected,
    fill,
    finish_of,
    first_tokens,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.harness import SeqEvent, Worker
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import Budgets
from tandem.workers.engine.events import Admitted, NewTokens, Preempted
from tandem.workers.engine.sequence import FinishReason, Task


def test_more_prompt_tokens_are_computed_beside_more_sequences() -> None:
    budgets = Budgets(chunk_tokens=512, mixed_chunk_tokens=34)
    assert [budgets.chunk_beside(decodes, 1) for decodes in (0, 1, 8, 20, 21, 22, 64)] == [
        512,
        14,
        21,
        33,
        34,
        34,
        34,
    ]
    assert [budgets.chunk_beside(4, prompts) for prompts in (1, 2, 18, 19)] == [17, 18, 34, 34]
    assert Budgets(mixed_chunk_tokens=1).chunk_beside(1, 1) == 1


def test_a_late_decode_does_not_wait_for_an_older_prompt(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=4, mixed_chunk_tokens=3, prefix_caching=False)
    target.submit(spec(1, PROMPT[:3], task=Task.DECODE, max_tokens=8))
    (admitted,) = target.step()
    assert isinstance(admitted, Admitted)
    target.submit(spec(2))
    target.step()
    target.engine.commit_import(1, first_tokens(fill(target, admitted, PROMPT[:3])))
    target.step()
    steps = target.executor.plans[-1].sequences
    assert [(step.sequence_id, len(step.token_ids)) for step in steps] == [(1, 1), (2, 3)]
    assert tokens_of(run(target), 2) == expected(PROMPT, 4)


def test_nothing_that_runs_at_a_reset_is_found_again(worker: MakeWorker) -> None:
    """Neither its blocks from before, nor those that it adds to them."""
    target = worker()
    target.submit(spec(1, max_tokens=12))
    events = target.step() + target.step()
    target.clear_cache()
    events += run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 12)
    assert target.engine.blocks()[BlockState.CACHED] == 0
    longer = (*PROMPT, *expected(PROMPT, 11))
    for number, cached in ((2, 0), (3, len(longer) // 4 * 4)):
        target.submit(spec(number, longer))
        assert cached_of(run(target), number) == cached


def test_of_what_waits_at_a_reset_only_a_prompt_is_cached(worker: MakeWorker) -> None:
    """The KV cache of a decode may have been computed before."""
    target = worker()
    target.submit(spec(1, task=Task.DECODE))
    target.clear_cache()
    (admitted,) = target.step()
    assert isinstance(admitted, Admitted)
    target.engine.commit_import(1, first_tokens(fill(target, admitted, PROMPT)))
    run(target)
    assert target.engine.blocks()[BlockState.CACHED] == 0
    target.submit(spec(2))
    target.clear_cache()
    run(target)
    assert target.engine.blocks()[BlockState.CACHED] > 0


def test_imported_prefix_is_there_for_others_from_the_commit_on(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, task=Task.DECODE))
    (admitted,) = target.step()
    assert isinstance(admitted, Admitted)
    target.engine.commit_import(1, first_tokens(fill(target, admitted, PROMPT)))
    target.engine.cancel(1)
    target.submit(spec(2, task=Task.DECODE))
    assert cached_of(target.step(), 2) == 8


def test_imports_are_never_preempted_since_their_blocks_are_being_written(
    worker: MakeWorker,
) -> None:
    target = worker(num_blocks=4, block_size=2, growth_tokens=0, prefix_caching=False)
    target.submit(spec(1, PROMPT[:4], max_tokens=5))
    target.submit(spec(2, PROMPT[4:8], max_tokens=5, task=Task.DECODE))
    events = target.step() + target.step()
    assert [event.id for event in events if isinstance(event, Preempted)] == [1]
    assert target.engine.requests.num_holding == 1


def test_max_sequences_counts_imports_and_not_leases(worker: MakeWorker) -> None:
    target = worker(max_sequences=2)
    target.submit(spec(1, task=Task.PREFILL))
    run(target)
    target.submit(spec(2, task=Task.DECODE))
    target.submit(spec(3, PROMPT[:2]))
    target.submit(spec(4, PROMPT[:2]))
    target.step()
    requests = target.engine.requests
    assert (requests.num_leased, requests.num_holding, len(requests.waiting)) == (1, 2, 1)


@pytest.mark.parametrize(("max_tokens", "stop"), [(1, False), (4, True)])
def test_an_import_whose_first_token_is_its_last_finishes_at_once(
    worker: MakeWorker, max_tokens: int, stop: bool
) -> None:
    target, first = worker(), expected(PROMPT, 1)[0]
    target.submit(
        spec(1, task=Task.DECODE, max_tokens=max_tokens, stop_ids=(first,) if stop else ())
    )
    target.step()
    target.engine.commit_import(1, first_tokens(first))
    events = run(target)
    assert [type(event) for event in events] == [NewTokens]
    assert finish_of(events, 1) == [FinishReason.STOP if stop else FinishReason.LENGTH]
    assert not any(plan.sequences for plan in target.executor.plans), "nothing was left to compute"
    target.check_idle()


def imported(
    target: Worker, source: Worker, tokens: tuple[int, ...], max_tokens: int
) -> tuple[int, list[SeqEvent]]:
    """Prefills on `source`, imports and decodes on `target`; returns the cached tokens and the
    target's events.
    """
    target.submit(spec(9, tokens, task=Task.DECODE, max_tokens=max_tokens))
    admitted = next(event for event in target.step() if isinstance(event, Admitted))
    assert not target.engine.has_work, "an import that waits for its bytes is no work"
    target.engine.commit_import(9, first_tokens(fill(target, admitted, tokens, source)))
    return admitted.num_cached, run(target)


@pytest.mark.parametrize(("from_size", "to_size"), [(1, 1), (4, 4), (4, 3), (1, 16), (16, 1)])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 16])
def test_prefill_and_decode_apart_give_the_same_tokens(
    worker: MakeWorker, from_size: int, to_size: int, length: int
) -> None:
    tokens = tuple(range(1, length + 1))
    target = worker(block_size=to_size)
    _, events = imported(target, worker(block_size=from_size, chunk_tokens=5), tokens, 6)
    assert tokens_of(events, 9) == expected(tokens, 6)[1:]
    assert [event.first_index for event in events if isinstance(event, NewTokens)] == [
        1,
        2,
        3,
        4,
        5,
    ]
    target.check_idle()


def test_import_with_its_whole_prompt_cached_needs_only_the_first_token(worker: MakeWorker) -> None:
    target, tokens = worker(), PROMPT[:8]
    target.submit(spec(1, tokens, max_tokens=1))
    run(target)
    num_tokens = target.executor.num_tokens
    num_cached, events = imported(target, worker(), tokens, 4)
    assert num_cached == 8
    assert tokens_of(events, 9) == expected(tokens, 4)[1:]
    assert target.executor.num_tokens == num_tokens + 3


def test_prefix_hits_skip_computation_but_never_the_last_token(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, PROMPT[:8], max_tokens=1))
    run(target)
    assert target.executor.num_tokens == 8
    for number, prompt, num_cached in (
        (2, PROMPT[:8], 4),
        (3, PROMPT, 8),
        (4, (99, *PROMPT[1:]), 0),
    ):
        before = target.executor.num_tokens
        target.submit(spec(number, prompt, max_tokens=1))
        events = run(target)
        assert cached_of(events, number) == num_cached
        assert target.executor.num_tokens - before == len(prompt) - num_cached
        assert tokens_of(events, number) == expected(prompt, 1)


def test_shared_blocks_need_no_room_at_admission(worker: MakeWorker) -> None:
    target = worker(num_blocks=4, growth_tokens=0)
    target.submit(spec(1, PROMPT[:9], max_tokens=4))
    target.step()
    target.step()
    target.submit(spec(2, (*PROMPT[:8], 99), max_tokens=4))
    assert cached_of(target.step(), 2) == 8
    assert target.engine.blocks()[BlockState.OWNED] == 4


def test_generated_tokens_are_cached_for_the_next_turn(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, max_tokens=7))
    answer = tokens_of(run(target), 1)
    turn = (*PROMPT, *answer, 1, 2)
    target.submit(spec(2, turn))
    events = run(target)
    assert cached_of(events, 2) == 16
    assert tokens_of(events, 2) == expected(turn, 4)


def test_tenants_share_nothing_and_prefix_caching_can_be_off(worker: MakeWorker) -> None:
    target = worker()
    for number, salt in ((1, b""), (2, b"a"), (3, b"b"), (4, b"a")):
        target.submit(spec(number, salt=salt))
        assert cached_of(run(target), number) == (8 if number == 4 else 0)
    target = worker(prefix_caching=False)
    for number in (1, 2):
        target.submit(spec(number))
        assert cached_of(run(target), number) == 0
    assert target.engine.blocks()[BlockState.FREE] == 32


def test_least_recently_used_prefix_is_evicted(worker: MakeWorker) -> None:
    target = worker(num_blocks=6, growth_tokens=0)
    prompts = {1: tuple(range(20, 29)), 2: tuple(range(40, 49))}
    for number, prompt in prompts.items():
        target.submit(spec(number, prompt, max_tokens=1))
        run(target)
    target.submit(
        spec(3, tuple(range(60, 73)), max_tokens=1)
    )  # takes the two free blocks and two of the first prompt
    run(target)
    target.submit(spec(4, prompts[2], max_tokens=1))
    assert cached_of(run(target), 4) == 8
    target.submit(spec(5, prompts[1], max_tokens=1))
    assert cached_of(run(target), 5) == 0


def test_cancel_between_commit_and_the_next_step_leaves_nothing(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, task=Task.DECODE))
    target.step()
    target.engine.commit_import(1, first_tokens(5))
    target.engine.cancel(1)
    assert run(target) == []
    target.check_idle()


def test_commit_is_for_imports_only(worker: MakeWorker) -> None:
    target = worker(max_sequences=1)
    target.submit(spec(1, task=Task.DECODE))
    target.submit(spec(2, task=Task.DECODE))
    target.step()
    with pytest.raises(RuntimeError, match="commit while waiting"):
        target.engine.commit_import(2, first_tokens(5))
    target.engine.commit_import(1, first_tokens(5))
    with pytest.raises(RuntimeError, match="commit while running"):
        target.engine.commit_import(1, first_tokens(5))
    target.engine.commit_import(77, first_tokens(5))
    target.check()
