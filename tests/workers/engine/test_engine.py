"""What one engine does, step by step."""

import itertools
from collections import abc
from collections.abc import Callable, Collection
from dataclasses import replace
from queue import Full

import pytest

from tandem.tests.imported import imported
from tandem.tests.workers.engine.drive import (
    PROMPT,
    MakeWorker,
    cached_of,
    expected,
    finish_of,
    make_worker,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.fake import FakeExecutor
from tandem.tests.workers.engine.harness import SeqEvent, engine_config
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import (
    Admitted,
    CacheChanged,
    Event,
    NewTokens,
    Preempted,
    Progress,
)
from tandem.workers.engine.plan import Constrained, OnLayers, Samples, SamplingParams, StepPlan
from tandem.workers.engine.sequence import MOVES, FinishReason, Sequence, State, Task


def test_long_prompt_goes_in_chunks_and_samples_once(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=4)
    target.submit(spec(1, max_tokens=1))
    events = run(target)
    steps = [plan.sequences[0] for plan in target.executor.plans if plan.sequences]
    assert [(step.start, len(step.token_ids), step.num_samples) for step in steps] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
    ]
    assert [step.sampling is not None for step in steps] == [True, False, False]
    assert [[len(new.blocks) for new in step.new_blocks] for step in steps] == [[3], [], []]
    assert tokens_of(events, 1) == expected(PROMPT, 1)


def test_decodes_come_first_and_prompts_beside_them_in_chunks_of_their_own(
    worker: MakeWorker,
) -> None:
    target = worker(chunk_tokens=8, mixed_chunk_tokens=6, prefix_caching=False)
    target.submit(spec(1, PROMPT[:3], max_tokens=8))
    target.step()
    target.submit(spec(2))
    events: list[SeqEvent] = []
    for chunk in (4, 4, 2):
        events += target.step()
        steps = target.executor.plans[-1].sequences
        assert [(step.sequence_id, len(step.token_ids)) for step in steps] == [(1, 1), (2, chunk)]
    assert tokens_of(events + run(target), 2) == expected(PROMPT, 4)
    target.submit(spec(3))
    target.step()
    assert [len(step.token_ids) for step in target.executor.plans[-1].sequences] == [8], (
        "alone it is the whole chunk"
    )
    run(target)


def test_prefill_reports_progress_and_then_holds_a_lease(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=4)
    target.submit(spec(1, task=Task.PREFILL))
    events = run(target)
    assert [event.num_computed for event in events if isinstance(event, Progress)] == [4, 8, 10]
    assert finish_of(events, 1) == []
    assert (target.engine.blocks()[BlockState.LEASED], target.engine.requests.num_leased) == (3, 1)
    assert target.executor.plans[-1].dropped == (1,), "the ranks forget a leased sequence"
    target.engine.cancel(1)
    target.check_idle()
    assert target.engine.blocks()[BlockState.CACHED] == 2


def test_admission_reserves_growth_and_what_is_beyond_comes_block_by_block(
    worker: MakeWorker,
) -> None:
    target = worker(block_size=2, growth_tokens=2)
    target.submit(spec(1, PROMPT[:4], max_tokens=9))
    target.step()
    assert (
        target.engine.blocks()[BlockState.OWNED],
        target.engine.blocks()[BlockState.RESERVED],
    ) == (2, 1)
    held = []
    while target.engine.has_work:
        target.step()
        blocks = target.engine.blocks()
        held.append(blocks[BlockState.OWNED] + blocks[BlockState.RESERVED])
    end = [6, 0, 0, 0] if target.config.overlap else [0, 0]
    assert held == [3, 3, 4, 4, 5, 5, 6, *end], (
        "of a token that ends the sequence nothing is stored"
    )
    growth = [step.new_blocks for plan in target.executor.plans[1:] for step in plan.sequences]
    assert [sum(len(new.blocks) for new in each) for each in growth] == [1, 0, 1, 0, 1, 0, 1, 0]


def test_reservation_is_never_larger_than_the_sequence_can_grow(worker: MakeWorker) -> None:
    target = worker(block_size=2, growth_tokens=100)
    target.submit(spec(1, PROMPT[:4], max_tokens=2))
    target.submit(spec(2, PROMPT[4:8], max_tokens=9, task=Task.PREFILL))
    target.step()
    assert target.engine.blocks()[BlockState.RESERVED] == 1


def test_newest_is_preempted_and_continues_with_the_same_tokens(worker: MakeWorker) -> None:
    target = worker(num_blocks=4, block_size=2, growth_tokens=0, prefix_caching=False)
    old, new = PROMPT[:4], PROMPT[4:8]
    target.submit(spec(1, old, max_tokens=5))
    target.submit(spec(2, new, max_tokens=5))
    events = target.step()
    events += target.step()
    assert [event.id for event in events if isinstance(event, Preempted)] == [2]
    assert 2 in target.executor.plans[-1].dropped
    assert [step.sequence_id for step in target.executor.plans[-1].sequences] == [1]
    got = tokens_of(events, 2)
    target.submit(spec(3, new + tuple(got), max_tokens=5 - len(got), first_index=len(got)))
    events += run(target)
    assert tokens_of(events, 1) == expected(old, 5)
    assert got + tokens_of(events, 3) == expected(new, 5)
    assert [e.first_index for e in events if isinstance(e, NewTokens) and e.id == 3] == list(
        range(len(got), 5)
    )
    target.check_idle()


def test_prompts_that_continue_streams_share_their_steps_with_no_new_prompt(
    worker: MakeWorker,
) -> None:
    target = worker(chunk_tokens=16, mixed_chunk_tokens=16)
    target.submit(spec(1, PROMPT, max_tokens=3))
    target.submit(spec(2, PROMPT[:4], max_tokens=3, first_index=1))
    target.submit(spec(3, PROMPT[:5], max_tokens=3, first_index=2))
    events = target.step()
    assert [step.sequence_id for step in target.executor.plans[-1].sequences] == [2, 3]
    assert target.executor.plans[-1].is_expedited
    events += target.step()
    assert [step.sequence_id for step in target.executor.plans[-1].sequences] == [2, 3, 1]
    assert not target.executor.plans[-1].is_expedited
    target.submit(spec(4, tuple(range(20, 60)), max_tokens=1, first_index=2))
    events += run(target)
    for number, tokens in ((1, PROMPT), (2, PROMPT[:4]), (3, PROMPT[:5])):
        assert tokens_of(events, number) == expected(tokens, 3)
    target.check_idle()


def test_nobody_overtakes_the_head_of_the_queue(worker: MakeWorker) -> None:
    target = worker(num_blocks=4, block_size=4, growth_tokens=0)
    target.submit(spec(1, PROMPT[:8], max_tokens=3))
    target.submit(spec(2, tuple(range(20, 33)), max_tokens=1))
    target.submit(spec(3, PROMPT[:1], max_tokens=1))
    admitted = [event.id for event in run(target) if isinstance(event, Admitted)]
    assert admitted == [1, 2, 3]
    assert [s.sequence_id for s in target.executor.plans[0].sequences] == [1], (
        "3 would have fitted beside 1"
    )


@pytest.mark.parametrize("resumed", [False, True])
def test_a_decode_is_admitted_beside_a_prompt_that_takes_the_whole_budget(
    worker: MakeWorker, resumed: bool
) -> None:
    """Its KV cache comes from elsewhere, so it needs nothing of the step but blocks."""
    target = worker(num_blocks=40, mixed_chunk_tokens=2)
    target.submit(spec(1, max_tokens=40))
    target.step()
    target.submit(spec(2, tuple(range(60)), first_index=int(resumed)))
    target.submit(spec(3, task=Task.DECODE))
    target.submit(spec(4, PROMPT[:4]))
    target.submit(spec(5, task=Task.DECODE))
    events = target.step() + target.step()
    admitted = [event.id for event in events if isinstance(event, Admitted)]
    assert admitted == [2, 3], "the prompt 4 waits for the budget, and 5 does not overtake it"
    steps = target.executor.plans[-1].sequences
    assert [(step.sequence_id, len(step.token_ids)) for step in steps] == [(1, 1), (2, 2)]
    assert target.engine.requests.running[-1].spec.id == 2


def test_full_queue_refuses_and_holds_nothing_of_it(worker: MakeWorker) -> None:
    target = worker(max_waiting=2)
    target.submit(spec(1))
    target.submit(spec(2))
    with pytest.raises(Full, match="2 sequences are waiting"):
        target.engine.submit(spec(3))
    target.step()
    target.step()
    target.submit(spec(4))
    assert cached_of(run(target), 4) == 8
    target.check_idle()


@pytest.mark.parametrize("task", list(Task))
def test_what_could_never_run_is_refused_and_the_longest_that_can_runs(
    worker: MakeWorker, task: Task
) -> None:
    target = worker(num_blocks=4, block_size=2, prefix_caching=False)
    room = 8 if task is Task.PREFILL else 5  # the last of 4 generated tokens needs no KV cache
    with pytest.raises(ValueError, match="capacity of 8"):
        target.engine.submit(spec(1, tuple(range(room + 1)), task=task))
    target.submit(spec(2, tuple(range(room)), task=task))
    events = target.step()
    assert cached_of(events, 2) == 0
    if task is Task.COLOCATED:
        assert tokens_of(events + run(target), 2) == expected(tuple(range(room)), 4)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_stop_token_finishes_the_sequence_and_is_reported(
    worker: MakeWorker, position: int
) -> None:
    want = expected(PROMPT, 8)
    position = want.index(want[position])
    target = worker()
    target.submit(spec(1, max_tokens=8, stop_ids=(want[position],)))
    events = run(target)
    assert tokens_of(events, 1) == want[: position + 1]
    assert finish_of(events, 1) == [FinishReason.STOP]
    target.check_idle()


def test_prefill_that_ends_with_its_first_token_leaves_no_lease(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, task=Task.PREFILL, stop_ids=(expected(PROMPT, 1)[0],)))
    target.submit(spec(2, task=Task.PREFILL, max_tokens=1))
    events = run(target)
    assert finish_of(events, 1) == [FinishReason.STOP]
    assert finish_of(events, 2) == [FinishReason.LENGTH]
    target.check_idle()


def test_one_token_is_one_token(worker: MakeWorker) -> None:
    target = worker()
    target.submit(spec(1, max_tokens=1))
    events = run(target)
    assert tokens_of(events, 1) == expected(PROMPT, 1)
    assert finish_of(events, 1) == [FinishReason.LENGTH]
    target.check_idle()


@pytest.mark.parametrize("block_size", [1, 2, 5, 10, 16])
def test_whole_sequences_of_any_length_and_block_size(worker: MakeWorker, block_size: int) -> None:
    target = worker(block_size=block_size, num_blocks=40)
    for number, length in enumerate((1, 2, 5, 9, 10), 1):
        target.submit(spec(number, PROMPT[:length], max_tokens=7))
    events = run(target)
    for number, length in enumerate((1, 2, 5, 9, 10), 1):
        assert tokens_of(events, number) == expected(PROMPT[:length], 7)
    target.check_idle()


@pytest.mark.parametrize("task", list(Task))
def test_cancel_frees_everything_in_every_state_and_twice(worker: MakeWorker, task: Task) -> None:
    target = worker(chunk_tokens=8)
    target.submit(spec(1, task=task))
    target.engine.cancel(1)
    target.check_idle()
    for steps in (1, 2):
        target.submit(spec(1 + steps, tuple(range(steps, steps + 10)), task=task))
        for _ in range(steps):
            target.step()
        target.engine.cancel(1 + steps)
        target.engine.cancel(1 + steps)
        target.check_idle()
        assert tokens_of(run(target), 1 + steps) == []


def test_only_the_moves_of_the_table_are_possible() -> None:
    for old, new in itertools.product(State, State):
        sequence = Sequence(spec(1), 4, 0.0)
        sequence.state = old
        if new in MOVES[old]:
            sequence.move(new)
            assert sequence.state is new
        else:
            with pytest.raises(RuntimeError, match=f"{old.value} -> {new.value}"):
                sequence.move(new)
            assert sequence.state is old


def test_an_admission_is_emitted_before_the_computation_and_once() -> None:
    reported: list[Event] = []

    class Executor(FakeExecutor):
        def launch(
            self, plan: StepPlan, on_layers: OnLayers | None = None
        ) -> Callable[[], Samples]:
            assert [type(event) for event in reported] == [Admitted]
            return super().launch(plan, on_layers)

    engine = Engine(Executor(8, 4), EngineConfig(num_blocks=8, block_size=4))
    engine.submit(spec(1))
    assert engine.step(reported.extend) == []
    assert [type(event) for event in reported] == [Admitted, NewTokens, CacheChanged]
    engine = Engine(FakeExecutor(8, 4), EngineConfig(num_blocks=8, block_size=4))
    engine.submit(spec(1))
    assert [type(event) for event in engine.step()] == [Admitted, NewTokens, CacheChanged]


def test_layers_of_a_long_prefill_are_reported_while_it_runs() -> None:
    reported: list[Event] = []
    engine = Engine(
        FakeExecutor(64, 16), engine_config(num_blocks=64, block_size=16, chunk_tokens=200)
    )
    engine.submit(spec(1, tuple(range(300)), task=Task.PREFILL))
    engine.submit(spec(2, tuple(range(9)), task=Task.PREFILL))
    engine.submit(spec(3, tuple(range(400, 700))))
    for _ in range(4):
        engine.step(reported.extend)
    assert [event for event in reported if isinstance(event, Progress) and event.num_layers] == [
        Progress(id=1, num_computed=0, num_ahead=200, num_layers=1),
        Progress(id=1, num_computed=0, num_ahead=200, num_layers=2),
    ]
    # Not for the 100 tokens of its second step, nor for the short prompt, nor for a sequence whose
    # cache nobody waits for.


def test_times_are_the_clock_s() -> None:
    ticks = itertools.count(step=10)
    engine = Engine(
        FakeExecutor(8, 4),
        EngineConfig(num_blocks=8, block_size=4),
        clock=lambda: float(next(ticks)),
    )
    engine.submit(spec(1))
    admitted, first, _ = engine.step()
    assert engine.step_seconds == 0.0, "no step with decodes yet"
    token_seconds = engine.prompt_token_seconds
    assert token_seconds == 30.0 / len(PROMPT)
    (second,) = engine.step()
    assert engine.prompt_token_seconds == token_seconds, "no step with a prompt"
    assert isinstance(admitted, Admitted)
    assert isinstance(first, NewTokens)
    assert isinstance(second, NewTokens)
    assert (admitted.queue_seconds, first.prefill_seconds, second.prefill_seconds) == (
        20.0,
        10.0,
        0.0,
    )
    assert engine.step_seconds == 10.0


@pytest.mark.parametrize("overlap", [False, True])
def test_what_lengthens_steps_gives_masks_no_more_time(overlap: bool) -> None:
    """A step takes 10 ms; later other processes make three of four ten times as long."""
    now, given = 0.0, list[float]()

    class Executor(FakeExecutor):
        def launch(
            self, plan: StepPlan, on_layers: OnLayers | None = None
        ) -> Callable[[], Samples]:
            collect = super().launch(plan, on_layers)

            def timed() -> Samples:
                nonlocal now
                now += 0.01 if self.num_steps < 50 or self.num_steps % 4 == 0 else 0.1
                return collect()

            return timed

        def prepare_masks(
            self, sequences: abc.Sequence[Constrained], seconds: float
        ) -> Collection[int]:
            nonlocal now
            given.append(seconds)
            now += 0.0 if overlap else seconds  # else it computes meanwhile
            return [each.sequence_id for each in sequences]

    config = EngineConfig(num_blocks=64, block_size=4, overlap=overlap)
    engine = Engine(Executor(64, 4), config, clock=lambda: now)
    engine.submit(spec(1, max_tokens=200, sampling=SamplingParams(grammar="start: /a+/")))
    while engine.has_work:
        engine.step()
    assert len(given) > 100
    assert max(given) == pytest.approx(0.01), "of masks of one step"
    assert given[-1] == pytest.approx(0.01)
    engine.check_integrity()


def test_load_counts_the_prompt_tokens_ahead() -> None:
    target = make_worker(chunk_tokens=4, max_sequences=1)
    target.submit(spec(1))
    target.submit(spec(2, PROMPT[:6]))
    target.submit(spec(3, task=Task.DECODE))
    requests = target.engine.requests
    assert (requests.waiting_tokens, len(requests.waiting)) == (16, 3)
    target.step()
    assert (requests.waiting_tokens, len(requests.waiting)) == (12, 2)
    target.step()
    target.step()
    assert requests.waiting_tokens == 6, "a decoding sequence waits for nothing"


def test_what_comes_from_elsewhere_is_no_time_of_the_prefill() -> None:
    """And nothing to compute, while it is on its way; the rest of the prompt is."""
    now = 0.0
    engine = Engine(FakeExecutor(8, 4), EngineConfig(num_blocks=8, block_size=4), clock=lambda: now)
    engine.submit(replace(spec(1), num_remote=8))
    now = 1.0
    (admitted,) = engine.step()
    assert isinstance(admitted, Admitted)
    assert (admitted.queue_seconds, len(admitted.import_hashes)) == (1.0, 2)
    assert engine.requests.waiting_tokens == len(PROMPT) - 8
    now = 31.0
    engine.commit_prefix(1, 0)
    assert engine.requests.waiting_tokens == len(PROMPT), "nothing has come"
    now = 33.0
    (first,) = (event for event in engine.step() if isinstance(event, NewTokens))
    assert first.prefill_seconds == 2.0
    engine.cancel(1)
    engine.step()
    engine.check_integrity()


@pytest.mark.parametrize("number", [1, 2, 3])  # 3: the prompt that runs, if it is read twice
def test_load_is_not_negative_while_the_engine_runs(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop reads it: here the engine runs in the middle of one of its reads."""
    config = EngineConfig(num_blocks=16, block_size=4, budgets=Budgets(chunk_tokens=8))
    engine = Engine(FakeExecutor(16, 4), config)
    engine.submit(replace(spec(1), num_remote=8))
    engine.submit(spec(2, max_tokens=9))
    engine.step()
    reads = itertools.count(1)

    def count_uncomputed(sequence: Sequence) -> int:
        num_tokens = sequence.num_tokens
        if next(reads) == number:
            engine.commit_prefix(1, 0)
            for _ in range(6):
                engine.step()
        return num_tokens - sequence.num_computed

    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "num_uncomputed", property(count_uncomputed))
        assert engine.requests.waiting_tokens >= 0


def test_after_a_failed_step_every_block_can_still_be_freed(worker: MakeWorker) -> None:
    target = worker(chunk_tokens=8)
    target.submit(spec(1, PROMPT[:4], max_tokens=9))
    target.submit(spec(2))
    target.submit(spec(3, task=Task.DECODE))
    target.step()
    target.executor.fail_after_steps = 1
    with pytest.raises(RuntimeError, match="fails after 1"):
        run(target)
    for number in (1, 2, 3):
        target.engine.cancel(number)
    target.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wrong", [[], [1, 2]])
def test_executor_that_returns_too_few_or_too_many_tokens_is_refused(
    wrong: list[int], overlap: bool
) -> None:
    class Executor(FakeExecutor):
        def launch(
            self, plan: StepPlan, on_layers: OnLayers | None = None
        ) -> Callable[[], Samples]:
            return lambda: Samples(tokens=wrong)

    engine = Engine(Executor(8, 4), EngineConfig(num_blocks=8, block_size=4, overlap=overlap))
    engine.submit(spec(1))
    if overlap:
        engine.step()
    with pytest.raises(RuntimeError, match="1 were planned"):
        engine.step()


@pytest.mark.io
def test_engine_imports_no_torch_ray_or_grpc() -> None:
    found = imported("import tandem.workers.engine.engine, tandem.tests.workers.engine.fake")
    assert not {"torch", "ray", "grpc", "numpy"} & found
