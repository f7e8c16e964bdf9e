"""A request through interruptions, on pools of fake workers: whatever fails, its tokens are the
same.
"""

import asyncio
import random
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import InternalError, InvalidArgument, Overloaded, Unavailable
from tandem.router.dispatch.execution import (
    AVOID_SECONDS,
    MAX_TRANSFERS_LOST,
    PARK_SECONDS,
    RequestExecution,
)
from tandem.router.dispatch.output_buffer import Wakeup
from tandem.router.dispatch.poison_guard import SOLO_RUN_SECONDS, PoisonGuard
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.policy import Placement
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.examples import num_examples
from tandem.tests.router.fake_pools import (
    SEED,
    Caller,
    FakePools,
    choices_request,
    completion,
    make_execution,
    outputs_of,
    start,
)
from tandem.tests.router.pools import fill, report
from tandem.tests.token_request import changed, token_request


@settings(max_examples=num_examples(150))
@given(
    seed=st.integers(0, 2**32),
    num_choices=st.integers(1, 5),
    max_tokens=st.integers(1, 25),
    pairs=st.booleans(),
    faults=st.lists(
        st.sampled_from(
            ["kill", "transfer", "full", "preempt", "leave", "preempt", "not_finite", "unable"]
        ),
        max_size=3,
    ),
)
def test_the_tokens_after_any_fault_are_those_of_a_run_without_faults(
    seed: int, num_choices: int, max_tokens: int, pairs: bool, faults: list[str]
) -> None:
    request = choices_request(num_choices, max_tokens)
    pools = FakePools(random.Random(seed), pairs)
    caller = Caller(num_choices)
    faults = sorted(set(faults) - {"preempt"}) + [kind for kind in faults if kind == "preempt"]
    execution, _ = start(pools, request)
    for _ in range(10_000):
        if execution.done:
            break
        if faults and pools.chance.random() < 0.15:
            pools.strike(faults.pop(pools.chance.randrange(len(faults))))
        pools.advance()
        if pools.chance.random() < 0.5:
            caller.read(execution)
    assert caller.finished == set(range(num_choices))
    assert caller.ids == [
        completion(request.submit.token_ids, SEED + choice, max_tokens)
        for choice in range(num_choices)
    ]
    assert caller.num_prompt_logprobs == 1
    execution.end()
    assert all(client.num_streams == 0 for client in pools.clients.values())
    assert not pools.held
    assert len(
        {submit.attempt for submit in pools.submits if submit.task != worker_pb2.TASK_DECODE}
    ) == len([submit for submit in pools.submits if submit.task != worker_pb2.TASK_DECODE])


@given(seed=st.integers(0, 2**32), pairs=st.booleans(), kill=st.booleans())
def test_choices_that_the_caller_ends_have_no_further_delta(
    seed: int, pairs: bool, kill: bool
) -> None:
    request = choices_request(4)
    pools = FakePools(random.Random(seed), pairs)
    whole = [completion(request.submit.token_ids, SEED + choice, 30) for choice in range(4)]
    limits = [pools.chance.randrange(1, 40) for _ in range(4)]
    ended: set[int] = set()
    caller = Caller(4)
    execution, _ = start(pools, request, ended)
    while not execution.done:
        if kill and pools.chance.random() < 0.05:
            kill = False
            pools.strike("kill")
        pools.advance()
        for delta in execution.deltas():
            assert delta.choice not in ended
            caller.take(delta)
            if (
                len(caller.ids[delta.choice]) >= limits[delta.choice]
                and delta.choice not in caller.finished
            ):
                ended.add(delta.choice)
    assert caller.finished | ended == {0, 1, 2, 3}
    assert all(whole[choice][: len(ids)] == ids for choice, ids in enumerate(caller.ids))
    assert not pools.held
    assert all(client.num_streams == 0 for client in pools.clients.values())


@given(
    seed=st.integers(0, 2**32),
    pairs=st.booleans(),
    cuts=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_a_request_begun_elsewhere_goes_on_with_the_same_tokens(
    seed: int, pairs: bool, cuts: list[int]
) -> None:
    request = choices_request(len(cuts))
    expected = [
        completion(request.submit.token_ids, SEED + choice, 30) for choice in range(len(cuts))
    ]
    begun = [tuple(ids[:cut]) for ids, cut in zip(expected, cuts, strict=True)]
    has_ended = [len(ids) == len(whole) for ids, whole in zip(begun, expected, strict=True)]
    emitted = tuple(None if ended else ids for ids, ended in zip(begun, has_ended, strict=True))
    pools, caller = FakePools(random.Random(seed), pairs), Caller(len(cuts))
    caller.ids = [list(ids) for ids in begun]
    turn = worker_pb2.TURN_IN_ORDER
    execution, _ = start(pools, changed(request, emitted=emitted, turn=turn))
    kill = True
    while not execution.done:
        if kill and pools.chance.random() < 0.1:
            kill = False
            pools.strike("kill")
        pools.advance()
        caller.read(execution)
    assert caller.ids == expected
    assert caller.finished == {choice for choice, ended in enumerate(has_ended) if not ended}
    assert all(
        not submit.HasField("prompt_logprobs") for submit in pools.submits if submit.first_index
    )
    assert not pools.held
    for (
        submit
    ) in pools.submits:  # what the service interrupts goes ahead, what its client resumes does not
        is_recovery = submit.first_index == len(begun[submit.first_choice])
        assert submit.turn == (turn if is_recovery else worker_pb2.TURN_UNSPECIFIED)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_first_choice_brings_prompt_logprobs_though_a_later_one_had_begun(pairs: bool) -> None:
    request = choices_request(2)
    begun = completion(request.submit.token_ids, SEED + 1, 30)[:4]
    pools, caller = FakePools(random.Random(1), pairs), Caller(2)
    caller.ids = [[], list(begun)]
    execution, _ = start(pools, changed(request, emitted=((), tuple(begun))))
    while not execution.done:
        pools.advance()
        caller.read(execution)
    assert caller.num_prompt_logprobs == 1


@pytest.mark.parametrize("is_parked", [False, True])
async def test_a_request_begun_elsewhere_counts_only_at_its_workers_once_it_has_begun(
    is_parked: bool,
) -> None:
    registry = WorkerRegistry(rng=random.Random(0))
    fill(registry, prefill=1, decode=1, max_sequences=5, num_blocks=4096)
    admission = Admission(registry)
    request = choices_request(3, emitted=((1, 2), None, (3,)))
    pools = FakePools(random.Random(3), pairs=True)
    execution = make_execution(
        request, inference_pb2.Timeline(), send=pools.send, registry=registry
    )
    async with AsyncExitStack() as scope:
        await scope.enter_async_context(admission.permit(request))
        others = [
            asyncio.create_task(
                scope.enter_async_context(admission.permit(token_request([n], name=str(n))))
            )
            for n in range(4)
        ]
        await asyncio.sleep(0)
        if is_parked:
            for worker_id in ("d0", "p0"):
                registry.session_lost(worker_id, 1)
        execution.start()
        if is_parked:
            for worker_id in ("d0", "p0"):
                report(registry, worker_id)
            assert list(execution.deltas()) == []
        await asyncio.wait(others, timeout=0)
        # The reservation counts the ended choice too.
        assert (admission.num_active, len(admission.queue)) == (4, 1)
        for other in others:
            other.cancel()
    execution.end()


def test_a_choice_that_the_caller_ended_is_cancelled_at_its_next_tokens() -> None:
    pools, caller = FakePools(random.Random(3), pairs=False), Caller(2)
    ended: set[int] = set()
    execution, _ = start(pools, choices_request(2), ended)
    client, outputs = pools.running[0].client, outputs_of(pools.submits[0])

    def say(count: int) -> None:
        for _ in range(count):
            client.receive(next(outputs))
        caller.read(execution)

    say(3)  # admitted, and the first token of each
    ended.add(0)
    say(2)
    assert [len(ids) for ids in caller.ids] == [1, 2]
    assert client.cancels() == [worker_pb2.Cancel(request_id="r", attempt=1, choice=0)]
    ended.add(1)
    assert not execution.done
    say(2)
    assert client.cancels() == [worker_pb2.Cancel(request_id="r", attempt=1)]
    assert execution.done


def test_after_a_lost_worker_each_choice_has_an_attempt_of_its_own() -> None:
    pools, caller = FakePools(random.Random(3), pairs=False), Caller(4)
    execution, timeline = start(pools, choices_request(4), set())
    caller.read_until(pools, execution, 1)
    pools.clients[pools.running[0].worker].kill()
    pools.decode = ("d9",)
    caller.read(execution)
    first, *alone = pools.submits
    open_choices = [choice for choice in range(4) if choice not in caller.finished]
    assert (first.num_choices, first.first_choice, first.first_index) == (4, 0, 0)
    assert [(s.num_choices, s.first_choice) for s in alone] == [
        (1, choice) for choice in open_choices
    ]
    for submit in alone:
        emitted = caller.ids[submit.first_choice]
        assert submit.first_index == len(emitted)
        assert list(submit.token_ids) == [5, 6, 7, 8, *emitted]
        assert submit.max_tokens == 30 - len(emitted)
        assert submit.sampling.seed == SEED  # the worker adds the number of the choice
        assert not submit.HasField("prompt_logprobs")
    assert timeline.attempts == 1 + len(alone)


def test_a_prefill_worker_lost_after_the_kv_transfer_interrupts_nothing() -> None:
    """Even if the caller has read nothing yet."""
    pools, caller = FakePools(random.Random(3), pairs=True), Caller(1)
    execution, timeline = start(pools, choices_request(1))
    prefill = pools.running[0]
    prefill.client.receive(next(prefill.outputs))  # admitted
    assert list(execution.deltas()) == []
    for one in pools.running:
        for output in one.outputs:
            one.client.receive(output)
    prefill.client.kill()
    caller.read(execution)
    assert execution.done
    assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]
    assert timeline.attempts == 1


def test_choices_without_tokens_are_replayed_together() -> None:
    pools = FakePools(random.Random(3), pairs=True)
    execution, _ = start(pools, choices_request(4))
    pools.running[0].client.receive(next(pools.running[0].outputs))  # admitted
    assert list(execution.deltas()) == []
    pools.clients[pools.running[0].worker].kill()
    assert list(execution.deltas()) == []
    prefills = [submit for submit in pools.submits if submit.task == worker_pb2.TASK_PREFILL]
    assert [submit.num_choices for submit in prefills] == [4, 4]
    assert prefills[1].HasField("prompt_logprobs")


def test_a_preempted_choice_is_replayed_alone_and_the_others_stay() -> None:
    pools, caller = FakePools(random.Random(3), pairs=False), Caller(4)
    execution, _ = start(pools, choices_request(4))
    caller.read_until(pools, execution, 1)
    choice = next(choice for choice in range(4) if choice not in caller.finished)
    pools.fail(pools.running[0], worker_pb2.FAILURE_KIND_PREEMPTED, choice)
    caller.read(execution)
    assert [submit.first_choice for submit in pools.submits] == [0, choice]
    assert not pools.clients[pools.running[0].worker].cancels()


@settings(max_examples=num_examples(100))
@given(
    seed=st.integers(0, 2**32),
    num_choices=st.integers(1, 4),
    pairs=st.booleans(),
    faults=st.lists(
        st.sampled_from(["kill", "transfer", "full", "leave"]), max_size=2, unique=True
    ),
    time_left=st.integers(0, 60),
)
def test_when_its_time_is_over_each_choice_ends_with_its_tokens_so_far(
    seed: int, num_choices: int, pairs: bool, faults: list[str], time_left: int
) -> None:
    """Also while its choices wait for a worker after a fault; the workers hold nothing."""
    request = choices_request(num_choices)
    pools, caller = FakePools(random.Random(seed), pairs), Caller(num_choices)
    ended: set[int] = set()
    execution, _ = start(pools, request, ended)
    for _ in range(time_left):
        if execution.done:
            break
        if faults and pools.chance.random() < 0.15:
            pools.strike(faults.pop())
        pools.advance()
        if pools.chance.random() < 0.5:
            caller.read(execution)
    is_cut = not execution.done
    if is_cut and num_choices > 1 and 0 not in caller.finished:
        ended.add(0)  # by a rule of the router
    execution.end_time()
    caller.read(execution)
    assert execution.done
    assert caller.finished | ended == set(range(num_choices))
    for choice, ids in enumerate(caller.ids):
        assert ids == completion(request.submit.token_ids, SEED + choice, 30)[: len(ids)]
    execution.end()
    assert all(client.num_streams == 0 for client in pools.clients.values())
    assert not pools.held


def beam_outputs(submit: worker_pb2.Submit) -> list[worker_pb2.Output]:
    """The hypotheses of a beam search of two choices."""
    return [
        worker_pb2.Output(
            request_id=submit.request_id,
            attempt=submit.attempt,
            choice=choice,
            tokens=worker_pb2.Tokens(
                ids=[1, 2, 3 + choice], finish_reason="FINISH_REASON_LENGTH", score=-1.0 - choice
            ),
        )
        for choice in range(2)
    ]


@pytest.mark.parametrize("num_said", [0, 1])
def test_a_beam_search_restarts_and_repeats_no_token(num_said: int) -> None:
    pools, caller = FakePools(random.Random(3), pairs=True), Caller(2)
    beams = inference_pb2.BeamSearch(width=4, length_penalty=1, early_stopping=False)
    execution, _ = start(pools, choices_request(2, beam_search=beams))
    for attempt in (1, 2):
        prefill = pools.running[-1]
        prefill.client.receive(next(prefill.outputs))
        opened = worker_pb2.Tokens(prefill_seconds=0.5)
        prefill.client.receive(worker_pb2.Output(request_id="r", attempt=attempt, tokens=opened))
        for _ in range(attempt):  # after the crash it first ends its solo run at the prefill worker
            list(execution.deltas())
        decode = pools.running[-1]
        assert decode.submit.task == worker_pb2.TASK_DECODE
        pools.step(decode, 2)  # admitted, KV cache received
        hypotheses = beam_outputs(decode.submit)
        for output in hypotheses[:num_said] if attempt == 1 else hypotheses:
            decode.client.receive(output)
        caller.read(execution)
        if attempt == 1:
            decode.client.kill()
            assert list(execution.deltas()) == []
    assert caller.ids == [[1, 2, 3], [1, 2, 4]]
    assert caller.finished == {0, 1}
    assert execution.done
    assert [list(submit.token_ids) for submit in pools.submits] == [[5, 6, 7, 8]] * 4


def lose_worker(pools: FakePools) -> None:
    one = pools.running[-1]
    one.client.receive(next(one.outputs))  # admitted
    one.client.kill()


def test_a_request_that_cost_two_workers_is_given_up_even_if_its_choices_run_apart() -> None:
    pools, caller = FakePools(random.Random(4), pairs=False), Caller(4)
    execution, _ = start(pools, choices_request(4))
    caller.read_until(pools, execution, 1)
    pools.clients[pools.running[0].worker].kill()
    list(execution.deltas())
    lose_worker(pools)
    with pytest.raises(InternalError, match="two workers"):
        list(execution.deltas())
    execution.end()
    assert not pools.held
    assert all(client.num_streams == 0 for client in pools.clients.values() if not client.broken)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("heard", [False, True])
def test_a_worker_that_dies_in_its_first_step_counts_if_it_had_lived(
    pairs: bool, heard: bool
) -> None:
    """It has not reported that it had begun; a worker that never sent anything may not run."""
    pools = FakePools(random.Random(4), pairs=pairs)
    poison_guard = PoisonGuard()
    execution, _ = start(pools, choices_request(1), poison_guard=poison_guard)

    def lose(times: int) -> None:
        for _ in range(times):
            client = pools.running[-1].client
            if heard:
                client.greet()
            client.kill()
            list(execution.deltas())

    if heard:
        lose(1)
        with pytest.raises(InternalError, match="two workers"):
            lose(1)
    else:
        lose(3)
    assert poison_guard.blocked_prompts.is_blocked(choices_request(1)) == heard
    execution.end()
    assert not pools.held


NOT_FINITE = worker_pb2.FAILURE_KIND_NOT_FINITE
UNABLE = worker_pb2.FAILURE_KIND_UNABLE


def fail_last(pools: FakePools, kind: "worker_pb2.FailureKind") -> str:
    """Fails what was submitted last; returns the worker."""
    one = pools.running.pop()
    pools.fail(one, kind)
    return one.worker


@pytest.mark.parametrize("pairs", [False, True])
def test_a_request_with_nan_goes_on_at_another_worker_and_is_no_suspect(pairs: bool) -> None:
    pools, caller, poison_guard, clock = (
        FakePools(random.Random(4), pairs),
        Caller(1),
        PoisonGuard(),
        Clock(),
    )
    execution, timeline = start(pools, choices_request(1), poison_guard=poison_guard, clock=clock)
    caller.read_until(pools, execution, 3)
    failed = fail_last(pools, NOT_FINITE)
    caller.read(execution)
    assert execution not in poison_guard
    clock.now += AVOID_SECONDS + 1
    assert failed not in {one.worker for one in pools.running}
    replayed = pools.submits[-1].task != worker_pb2.TASK_DECODE
    assert replayed, "the KV cache of the prefill worker may not be finite"
    while not execution.done:
        pools.advance()
        caller.read(execution)
    assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]
    assert [each.cause for each in timeline.interruptions] == ["not_finite"]
    execution.end()
    assert not pools.held


def test_nan_at_a_second_worker_ends_the_request_with_an_internal_error_and_blocks_none() -> None:
    pools, poison_guard = FakePools(random.Random(4), pairs=False), PoisonGuard()
    execution, _ = start(pools, choices_request(1), poison_guard=poison_guard)
    first = fail_last(pools, NOT_FINITE)
    list(execution.deltas())
    assert pools.running[-1].worker != first
    fail_last(pools, NOT_FINITE)
    with pytest.raises(InternalError, match="not finite"):
        list(execution.deltas())
    execution.end()
    assert not pools.held
    assert execution not in poison_guard
    assert not poison_guard.blocked_prompts.is_blocked(choices_request(1))


def test_nan_twice_at_the_only_worker_ends_the_request() -> None:
    clock = Clock()
    pools = FakePools(random.Random(4), pairs=False, decode=("d1",))
    execution, _ = start(pools, choices_request(1), clock=clock)
    fail_last(pools, NOT_FINITE)
    list(execution.deltas())
    assert not pools.running
    assert execution.wake_at == clock.now + AVOID_SECONDS
    clock.now += AVOID_SECONDS
    list(execution.deltas())
    fail_last(pools, NOT_FINITE)
    with pytest.raises(InternalError):
        list(execution.deltas())


def test_choices_that_one_worker_fails_at_the_same_time_are_one_report() -> None:
    """They go on by themselves since another worker was lost, and then are at the same one."""
    pools, caller = FakePools(random.Random(4), pairs=False, decode=("d1",)), Caller(2)
    execution, _ = start(pools, choices_request(2))
    caller.read_until(pools, execution, 2)
    pools.decode = ("d2",)
    pools.running[-1].client.kill()
    caller.read(execution)
    at_d2 = [one for one in pools.running if one.worker == "d2"]
    assert len(at_d2) == 2
    pools.decode = ("d2", "d3")
    for one in at_d2:
        pools.fail(one, NOT_FINITE)
        pools.running.remove(one)
    while not execution.done:
        caller.read(execution)
        pools.advance()
    assert caller.ids == [completion((5, 6, 7, 8), SEED + choice, 30) for choice in range(2)]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_fault_of_one_worker_ends_no_request_and_counts_against_none(pairs: bool) -> None:
    pools, caller, poison_guard = FakePools(random.Random(4), pairs), Caller(1), PoisonGuard()
    execution, timeline = start(pools, choices_request(1), poison_guard=poison_guard)
    caller.read_until(pools, execution, 3)
    fail_last(pools, UNABLE)
    while not execution.done:
        caller.read(execution)
        pools.advance()
    assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]
    assert [each.cause for each in timeline.interruptions] == ["unable"]
    assert execution not in poison_guard


def test_a_request_that_no_worker_can_serve_is_told_why_at_once() -> None:
    pools = FakePools(random.Random(4), pairs=False, decode=("d1", "d2"))
    execution, _ = start(pools, choices_request(1))
    fail_last(pools, UNABLE)
    list(execution.deltas())
    fail_last(pools, UNABLE)
    with pytest.raises(Unavailable, match="no worker can serve the request now: because"):
        list(execution.deltas())


def test_a_request_that_workers_refuse_in_turn_ends() -> None:
    """Each of them is asked again after the time in which it is avoided."""
    clock = Clock()
    pools = FakePools(random.Random(4), pairs=False, decode=("d1", "d2"))
    execution, _ = start(pools, choices_request(1), clock=clock)
    given_up = clock.now + PARK_SECONDS
    while clock.now <= given_up:
        fail_last(pools, UNABLE)
        list(execution.deltas())
        clock.now += AVOID_SECONDS
    fail_last(pools, UNABLE)
    with pytest.raises(Unavailable, match="no worker can serve the request now: because"):
        list(execution.deltas())


def test_a_stream_that_no_worker_can_continue_waits_for_one() -> None:
    clock = Clock()
    pools, caller = FakePools(random.Random(4), pairs=False, decode=("d1",)), Caller(1)
    execution, _ = start(pools, choices_request(1), clock=clock)
    caller.read_until(pools, execution, 3)
    fail_last(pools, UNABLE)
    caller.read(execution)
    given_up = clock.now + PARK_SECONDS
    while clock.now + AVOID_SECONDS < given_up:
        clock.now += AVOID_SECONDS
        caller.read(execution)
        fail_last(pools, UNABLE)
        caller.read(execution)
    pools.decode = ()
    clock.now = given_up
    with pytest.raises(Unavailable, match="because"):
        caller.read(execution)


def test_one_crash_counts_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, caller = FakePools(random.Random(4), pairs=False), Caller(4)
    execution, _ = start(pools, choices_request(4))
    caller.read_until(pools, execution, 1)
    for choice in range(4):  # each goes alone, all to one worker
        if choice not in caller.finished:
            monkeypatch.setattr(
                pools, "place", lambda *_, **__: Placement(prefill=None, decode="d2")
            )
            pools.fail(pools.running[0], worker_pb2.FAILURE_KIND_PREEMPTED, choice)
    list(execution.deltas())
    alone = pools.running[1:]
    assert len(alone) > 1
    for one in alone:
        one.client.receive(next(one.outputs))
    monkeypatch.setattr(pools, "place", lambda *_, **__: Placement(prefill=None, decode="d3"))
    pools.clients["d2"].kill()
    list(execution.deltas())
    assert len(pools.submits) == 1 + 2 * len(alone)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_after_two_transfers_that_failed_one_worker_does_all(times: int) -> None:
    pools, caller = FakePools(random.Random(4), pairs=True), Caller(2)
    execution, _ = start(pools, choices_request(2))
    for _ in range(times):
        pools.fail(pools.running[-1], worker_pb2.FAILURE_KIND_TRANSFER)
        list(execution.deltas())
    is_whole = pools.submits[-1].task == worker_pb2.TASK_COLOCATED
    assert is_whole == (times >= MAX_TRANSFERS_LOST)
    caller.read_until(pools, execution, 30)
    assert execution.done


@pytest.mark.parametrize(
    ("kind", "message", "error", "text"),
    [
        (
            worker_pb2.FAILURE_KIND_INVALID,
            "num_choices: at most 4 here",
            InvalidArgument,
            "n: at most 4 here",
        ),
        (
            worker_pb2.FAILURE_KIND_INVALID,
            "beam_search.width: must be at most 4 on this worker",
            InvalidArgument,
            r"beam_search\.width: must be at most 4 on this worker",
        ),
        (
            worker_pb2.FAILURE_KIND_INVALID,
            "beam_search: only 3 hypotheses exist",
            InvalidArgument,
            r"beam_search\.width: only 3 hypotheses exist",
        ),
        (
            worker_pb2.FAILURE_KIND_INVALID,
            "grammar: the grammar cannot be followed: no token: 'x: y'",
            InvalidArgument,
            "constraint: the grammar cannot be followed: no token: 'x: y'",
        ),
        (worker_pb2.FAILURE_KIND_INVALID, "too long", InvalidArgument, "prompt: too long"),
        (
            worker_pb2.FAILURE_KIND_FULL,
            "queue full",
            Overloaded,
            "every worker is full: queue full",
        ),
        (
            worker_pb2.FAILURE_KIND_FULL,
            "8 adapters are in use (max_loras)",
            Overloaded,
            r"every worker is full: 8 adapters are in use \(max_loras\)",
        ),
        (
            worker_pb2.FAILURE_KIND_WORKER,
            "",
            InternalError,
            "the request was given up: at least two workers crashed while they computed it; the "
            "same request is refused for the next 10 minutes",
        ),
        (worker_pb2.FAILURE_KIND_GONE, "", Unavailable, "no worker is ready"),
    ],
)
def test_failures_that_end_the_request(
    kind: "worker_pb2.FailureKind", message: str, error: type[Exception], text: str
) -> None:
    pools = FakePools(random.Random(4), pairs=False)
    execution, _ = start(pools, choices_request(1), park_seconds=0.0)

    def fail_for_ever() -> None:
        for _ in range(5):
            pools.fail(pools.running[-1], kind, message=message)
            assert list(execution.deltas()) == []

    with pytest.raises(error, match=f"^{text}$"):
        fail_for_ever()
    execution.end()
    assert not pools.held


def test_the_registry_gets_what_was_measured() -> None:
    pools, caller = FakePools(random.Random(4), pairs=True), Caller(2)
    execution, timeline = start(pools, choices_request(2, arrived=time.monotonic()))
    caller.read_until(pools, execution, 30)
    assert pools.prefilled_tokens == [3]  # the prompt less what was cached
    assert pools.num_transfers == 1
    assert timeline.kv_transfer_bytes == 10


Run = tuple[FakePools, Caller, RequestExecution]


class Clock:
    """A clock that stands."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_choices_wait_for_a_worker_and_then_go_on() -> None:
    pools, caller, clock, woken = FakePools(random.Random(4), pairs=True), Caller(3), Clock(), []
    execution, _ = start(pools, choices_request(3), clock=clock, wake=lambda: woken.append(True))
    caller.read_until(pools, execution, 2)
    pools.decode = ()
    pools.running[-1].client.kill()
    caller.read(execution)
    assert not execution.done
    assert execution.wake_at == clock.now + AVOID_SECONDS
    clock.now += PARK_SECONDS / 2
    caller.read(execution)
    assert execution.wake_at == clock.now + PARK_SECONDS / 2
    pools.decode, pools.prefill = ("d9",), ("p1",)
    for on_free in pools.subscribers:
        on_free()
    assert woken
    caller.read(execution)
    assert not pools.subscribers
    caller.read_until(pools, execution, 30)
    assert caller.ids == [completion((5, 6, 7, 8), SEED + choice, 30) for choice in range(3)]
    assert not pools.held


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("prefill_ends", [False, True])
def test_a_choice_that_ends_while_its_handoff_is_parked_is_over(
    num_choices: int, prefill_ends: bool
) -> None:
    """The first token of the last choice is its last one; no other decode worker is free."""
    seed = 1020 - num_choices
    sampling = inference_pb2.SamplingParams(temperature=1, top_p=1, seed=seed)
    pools, caller = FakePools(random.Random(4), pairs=True), Caller(num_choices)
    execution, _ = start(pools, changed(choices_request(num_choices), sampling=sampling))
    (prefill,) = pools.running
    pools.step(prefill)
    caller.read(execution)
    pools.decode = ()
    fail_last(pools, worker_pb2.FAILURE_KIND_GONE)
    caller.read(execution)
    pools.step(prefill, num_choices)
    caller.read(execution)
    assert caller.finished == {num_choices - 1}
    assert execution._open_choices() == set(range(num_choices - 1))
    assert execution.done == (num_choices == 1)
    pools.decode = ("d9",)
    if prefill_ends:
        prefill.client.kill()
    while not execution.done:
        caller.read(execution)
        pools.advance()
    assert caller.ids == [
        completion((5, 6, 7, 8), seed + choice, 30) for choice in range(num_choices)
    ]
    assert not pools.held
    assert not pools.subscribers


def test_nobody_waits_for_a_worker_for_ever() -> None:
    pools, caller, clock = FakePools(random.Random(4), pairs=False), Caller(1), Clock()
    execution, _ = start(pools, choices_request(1), clock=clock, park_seconds=5.0)
    caller.read_until(pools, execution, 2)
    pools.decode = ()
    pools.running[-1].client.kill()
    caller.read(execution)
    clock.now += 5.0
    with pytest.raises(Unavailable, match="no worker is ready"):
        caller.read(execution)
    execution.end()
    assert not pools.subscribers


@pytest.mark.parametrize("is_read", [False, True])
def test_a_choice_that_is_suspended_when_its_request_ends_is_cancelled(is_read: bool) -> None:
    """It waits for a worker until its time is over, or nobody has read yet that it is suspended."""
    pools, caller, clock = FakePools(random.Random(4), pairs=False), Caller(1), Clock()
    execution, _ = start(pools, choices_request(1), clock=clock, park_seconds=5.0)
    caller.read_until(pools, execution, 2)
    one = pools.running[-1]
    pools.decode = ()
    one.client.receive(
        worker_pb2.Output(
            request_id=one.submit.request_id,
            attempt=one.submit.attempt,
            suspended=worker_pb2.Suspended(),
        )
    )
    if is_read:
        caller.read(execution)
        clock.now += 5.0
        with pytest.raises(Unavailable):
            caller.read(execution)
    execution.end()
    assert one.client.num_streams == 0
    assert one.client.cancelled == {one.submit.attempt}


def test_refusals_do_not_prolong_the_wait() -> None:
    pools, caller, clock = (
        FakePools(random.Random(4), pairs=False, decode=("d1",)),
        Caller(1),
        Clock(),
    )
    execution, _ = start(pools, choices_request(1), clock=clock, park_seconds=3 * AVOID_SECONDS)
    caller.read_until(pools, execution, 2)
    for _ in range(3):
        pools.fail(pools.running[-1], worker_pb2.FAILURE_KIND_FULL)
        caller.read(execution)
        clock.now += AVOID_SECONDS
        caller.read(execution)
    pools.fail(pools.running[-1], worker_pb2.FAILURE_KIND_FULL)
    with pytest.raises(Unavailable):
        caller.read(execution)
    execution.end()


def crash_together(
    clock: Clock, poison_guard: PoisonGuard, count: int, **options: Any
) -> list[Run]:
    """Returns requests that were all at the worker d1, which has crashed, and now can go to d2
    only.
    """
    runs: list[Run] = []
    for number in range(count):
        pools, caller = FakePools(random.Random(number), pairs=False, decode=("d1",)), Caller(1)
        execution, _ = start(
            pools, choices_request(1), poison_guard=poison_guard, clock=clock, **options
        )
        caller.read_until(pools, execution, 2)
        runs.append((pools, caller, execution))
    for pools, caller, execution in runs:
        pools.running[-1].client.kill()
        pools.decode = ("d2",)
        caller.read(execution)
    return runs


def test_a_suspect_that_waits_for_its_turn_is_given_up_only_without_a_worker() -> None:
    clock = Clock()
    (_, _, first), (pools, caller, second) = crash_together(
        clock, PoisonGuard(clock), 2, park_seconds=2.0
    )
    for _ in range(3):  # the first has a worker, but shows no token for long
        clock.now += 2.0
        caller.read(second)
        assert second.wake_at == clock.now + 2.0
    pools.decode = ()
    clock.now += 2.0
    with pytest.raises(Unavailable, match="no worker is ready"):
        caller.read(second)
    for execution in (first, second):
        execution.end()


def test_a_suspect_that_shows_nothing_keeps_its_turn_for_a_while_only() -> None:
    clock = Clock()
    started = clock.now
    runs = crash_together(clock, PoisonGuard(clock), 3)
    clock.now += AVOID_SECONDS
    _, caller, second = runs[1]
    caller.read(second)
    assert second.wake_at == started + SOLO_RUN_SECONDS
    clock.now = started + SOLO_RUN_SECONDS
    for _, caller, execution in (runs[2], runs[1]):
        caller.read(execution)
    assert [len(pools.submits) for pools, _, _ in runs] == [2, 1, 2]
    for pools, caller, execution in (runs[0], runs[2], runs[1]):
        caller.read_until(pools, execution, 30)
    assert all(caller.ids == [completion((5, 6, 7, 8), SEED, 30)] for _, caller, _ in runs)


def test_a_worker_that_was_full_is_asked_again() -> None:
    pools, caller, clock = (
        FakePools(random.Random(4), pairs=False, decode=("d1",)),
        Caller(1),
        Clock(),
    )
    execution, _ = start(pools, choices_request(1), clock=clock)
    caller.read_until(pools, execution, 2)
    pools.fail(pools.running[-1], worker_pb2.FAILURE_KIND_FULL)
    caller.read(execution)
    assert len(pools.submits) == 1
    clock.now += AVOID_SECONDS
    caller.read_until(pools, execution, 30)
    assert len(pools.submits) == 2
    assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]


def test_crashes_with_tokens_between_them_are_not_the_request_s() -> None:
    pools, caller, clock = FakePools(random.Random(4), pairs=False), Caller(1), Clock()
    request = choices_request(1)
    execution, _ = start(pools, request, clock=clock)
    for _ in range(4):
        clock.now += AVOID_SECONDS
        caller.read_until(pools, execution, len(caller.ids[0]) + 3)
        pools.running[-1].client.kill()
        caller.read(execution)
    caller.read_until(pools, execution, 30)
    assert caller.ids == [completion(request.submit.token_ids, SEED, 30)]


def test_after_a_crash_the_other_workers_of_its_host_are_the_last_choice() -> None:
    """They may be lost as well, and a second crash would block the request."""
    for left, chosen in ((("d2", "d3"), "d3"), (("d2",), "d2")):
        pools, caller = FakePools(random.Random(5), pairs=False, decode=("d1",)), Caller(1)
        pools.hosts = {"d1": "a", "d2": "a"}
        execution, _ = start(pools, choices_request(1), clock=Clock())
        caller.read_until(pools, execution, 2)
        pools.decode = left
        pools.running[-1].client.kill()
        caller.read(execution)
        assert pools.running[-1].worker == chosen
        caller.read_until(pools, execution, 30)
        assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]


def test_only_hosts_of_the_latest_crashes_are_avoided() -> None:
    clock = Clock()
    pools, caller = FakePools(random.Random(5), pairs=False, decode=("d1",)), Caller(1)
    pools.hosts = {"d1": "a", "d2": "a", "d3": "b", "d4": "b"}
    execution, _ = start(pools, choices_request(1), clock=clock)
    for left, chosen in ((("d2", "d3"), "d3"), (("d2", "d4"), "d2")):
        caller.read_until(pools, execution, len(caller.ids[0]) + 3)
        pools.decode = left
        pools.running[-1].client.kill()
        caller.read(execution)
        assert pools.running[-1].worker == chosen
        clock.now += AVOID_SECONDS
    caller.read_until(pools, execution, 30)
    assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]


def test_suspects_start_one_at_a_time_and_the_one_at_fault_is_refused() -> None:
    poison_guard = PoisonGuard()
    runs = crash_together(Clock(), poison_guard, 4)
    assert [len(pools.submits) for pools, _, _ in runs] == [2, 1, 1, 1]
    for num_outputs, may_ask in (
        (2, False),
        (1, True),
    ):  # the first token may be one that the prefill worker drew
        pools, caller, execution = runs[0]
        pools.step(pools.running[-1], num_outputs)
        caller.read(execution)
        assert poison_guard.may_ask(runs[1][2]) == may_ask
    pools, caller, execution = runs[1]
    caller.read(execution)
    assert [len(pools.submits) for pools, _, _ in runs] == [2, 2, 1, 1]
    pools.step(pools.running[-1])  # admitted
    pools.running[-1].client.kill()
    with pytest.raises(InternalError, match="two workers"):
        caller.read(execution)
    execution.end()
    assert poison_guard.blocked_prompts.is_blocked(choices_request(1))
    assert not poison_guard.blocked_prompts.is_blocked(choices_request(1, tenant="another"))
    _, caller, execution = runs[2]
    caller.read(execution)
    execution.end()  # the client has gone
    _, caller, execution = runs[3]
    caller.read(execution)
    assert [len(pools.submits) for pools, _, _ in runs] == [2, 2, 2, 2]


class _Slot:
    async def __aenter__(self) -> Any:
        return lambda: None

    async def __aexit__(self, *_: object) -> None: ...


async def test_the_error_of_a_blocked_request_says_how_long_a_retry_is_useless() -> None:
    pools, wake, poison_guard = FakePools(random.Random(4), pairs=False), Wakeup(), PoisonGuard()
    request = choices_request(1)
    poison_guard.blocked_prompts.block(request)
    execution = make_execution(
        request,
        inference_pb2.Timeline(),
        send=pools.send,
        registry=pools,
        poison_guard=poison_guard,
    )
    admission: Any = SimpleNamespace(permit=lambda request: _Slot())
    with pytest.raises(InternalError, match="within the last 10 minutes; change the prompt"):
        await anext(execution.run(admission, wake))
    assert not pools.submits


@pytest.mark.parametrize("error", [None, Unavailable("the service is stopping")])
async def test_what_came_while_the_caller_was_away_is_its_even_if_it_was_the_end(
    error: Unavailable | None,
) -> None:
    pools, wake = FakePools(random.Random(4), pairs=False), Wakeup()
    request = choices_request(1)
    execution = make_execution(
        request, inference_pb2.Timeline(), send=pools.send, registry=pools, wake=wake.set
    )
    admission: Any = SimpleNamespace(permit=lambda request: _Slot())
    deltas = execution.run(admission, wake)
    first = asyncio.create_task(anext(deltas))
    while not pools.running:
        await asyncio.sleep(0)
    pools.step(pools.running[-1], 2)  # admitted, a token
    wake.set()
    ids = list((await first).ids)
    while pools.running and (error is None or len(execution._emitted[0]) < 5):
        pools.step(pools.running[-1])
        execution._collect_unread(lambda: None)
    if error is not None:
        execution.fail(error)
    wake.set()
    try:
        async for delta in deltas:
            ids += delta.ids
    except Unavailable:
        assert error is not None
    expected = completion(request.submit.token_ids, SEED, 30)
    assert ids == (expected if error is None else expected[:5])
