"""A request's way through failures, in a world of played workers: whatever breaks, its tokens are the same."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import InternalError, InvalidArgument, Overloaded, Unavailable
from tandem.router.dispatch import execution as run_module
from tandem.router.scheduling.policy import Placement
from tandem.tests.router.world import SEED, Caller, World, choices_request, completion, deltas_until, outputs_of, start


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    num_choices=st.integers(1, 5),
    max_tokens=st.integers(1, 25),
    pairs=st.booleans(),
    faults=st.lists(st.sampled_from(["kill", "transfer", "full", "preempt", "leave", "preempt"]), max_size=3),
)
def test_whatever_fails_the_tokens_are_those_of_a_run_without_faults(
    seed: int, num_choices: int, max_tokens: int, pairs: bool, faults: list[str]
) -> None:
    request = choices_request(num_choices, max_tokens)
    world = World(random.Random(seed), pairs)
    caller = Caller(num_choices)
    faults = sorted(set(faults) - {"preempt"}) + [kind for kind in faults if kind == "preempt"]
    run, _ = start(world, request)
    for _ in range(10_000):
        if run.done:
            break
        if faults and world.chance.random() < 0.15:
            world.strike(faults.pop(world.chance.randrange(len(faults))))
        world.advance()
        if world.chance.random() < 0.5:
            for delta in run.deltas():
                caller.take(delta)
    assert caller.finished == set(range(num_choices))
    assert caller.ids == [completion(request.prompt, SEED + choice, max_tokens) for choice in range(num_choices)]
    assert caller.num_prompt_logprobs == 1
    run.end()
    assert all(link.num_attempts == 0 for link in world.links.values())
    assert not world.held
    assert len({submit.attempt for submit in world.submits if submit.task != worker_pb2.TASK_DECODE}) == len(
        [submit for submit in world.submits if submit.task != worker_pb2.TASK_DECODE]
    )


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), pairs=st.booleans(), kill=st.booleans())
def test_choices_that_the_caller_ends_say_nothing_more(seed: int, pairs: bool, kill: bool) -> None:
    request = choices_request(4)
    world = World(random.Random(seed), pairs)
    whole = [completion(request.prompt, SEED + choice, 30) for choice in range(4)]
    limits = [world.chance.randrange(1, 40) for _ in range(4)]
    ended: set[int] = set()
    caller = Caller(4)
    run, _ = start(world, request, ended)
    while not run.done:
        if kill and world.chance.random() < 0.05:
            kill = False
            world.strike("kill")
        world.advance()
        for delta in run.deltas():
            assert delta.choice not in ended
            caller.take(delta)
            if len(caller.ids[delta.choice]) >= limits[delta.choice] and delta.choice not in caller.finished:
                ended.add(delta.choice)
    assert caller.finished | ended == {0, 1, 2, 3}
    assert all(whole[choice][: len(ids)] == ids for choice, ids in enumerate(caller.ids))
    assert not world.held
    assert all(link.num_attempts == 0 for link in world.links.values())


def test_a_choice_that_the_caller_ended_is_cancelled_at_its_next_word() -> None:
    world, caller = World(random.Random(3), pairs=False), Caller(2)
    ended: set[int] = set()
    run, _ = start(world, choices_request(2), ended)
    link, outputs = world.jobs[0].link, outputs_of(world.submits[0])

    def say(count: int) -> None:
        for _ in range(count):
            link.say(next(outputs))
        for delta in run.deltas():
            caller.take(delta)

    say(3)  # admitted, and the first token of each
    ended.add(0)
    say(2)
    assert [len(ids) for ids in caller.ids] == [1, 2]
    assert link.cancels() == [worker_pb2.Cancel(request_id="r", attempt=1, choice=0)]
    ended.add(1)
    assert not run.done
    say(2)
    assert link.cancels() == [worker_pb2.Cancel(request_id="r", attempt=1)]
    assert run.done


def test_a_lost_worker_sends_each_choice_its_own_way() -> None:
    world, caller = World(random.Random(3), pairs=False), Caller(4)
    run, timeline = start(world, choices_request(4), set())
    deltas_until(world, run, caller, 1)
    world.links[world.jobs[0].worker].kill()
    for delta in run.deltas():
        caller.take(delta)
    first, *alone = world.submits
    open_choices = [choice for choice in range(4) if choice not in caller.finished]
    assert (first.num_choices, first.first_choice, first.first_index) == (4, 0, 0)
    assert [(s.num_choices, s.first_choice) for s in alone] == [(1, choice) for choice in open_choices]
    for submit in alone:
        emitted = caller.ids[submit.first_choice]
        assert submit.first_index == len(emitted)
        assert list(submit.token_ids) == [5, 6, 7, 8, *emitted]
        assert submit.max_tokens == 30 - len(emitted)
        assert submit.sampling.seed == SEED  # the worker adds the number of the choice
        assert not submit.HasField("prompt_logprobs")
    assert timeline.attempts == 1 + len(alone)


def test_a_prefill_worker_that_leaves_after_the_hand_over_costs_nothing() -> None:
    """Even if the caller has read nothing yet."""
    world, caller = World(random.Random(3), pairs=True), Caller(1)
    run, timeline = start(world, choices_request(1))
    prefill = world.jobs[0]
    prefill.link.say(next(prefill.outputs))  # admitted
    assert list(run.deltas()) == []
    for job in world.jobs:
        for output in job.outputs:
            job.link.say(output)
    prefill.link.kill()
    for delta in run.deltas():
        caller.take(delta)
    assert run.done
    assert caller.ids == [completion((5, 6, 7, 8), SEED, 30)]
    assert timeline.attempts == 1


def test_choices_of_which_nothing_came_go_on_together() -> None:
    world = World(random.Random(3), pairs=True)
    run, _ = start(world, choices_request(4))
    world.jobs[0].link.say(next(world.jobs[0].outputs))  # admitted
    assert list(run.deltas()) == []
    world.links[world.jobs[0].worker].kill()
    assert list(run.deltas()) == []
    prefills = [submit for submit in world.submits if submit.task == worker_pb2.TASK_PREFILL]
    assert [submit.num_choices for submit in prefills] == [4, 4]
    assert prefills[1].HasField("prompt_logprobs")


def test_a_preempted_choice_goes_alone_and_the_others_stay() -> None:
    world, caller = World(random.Random(3), pairs=False), Caller(4)
    run, _ = start(world, choices_request(4))
    deltas_until(world, run, caller, 1)
    choice = next(choice for choice in range(4) if choice not in caller.finished)
    world.fail(world.jobs[0], worker_pb2.FAILURE_KIND_PREEMPTED, choice)
    for delta in run.deltas():
        caller.take(delta)
    assert [submit.first_choice for submit in world.submits] == [0, choice]
    assert not world.links[world.jobs[0].worker].cancels()


def beam_outputs(submit: worker_pb2.Submit) -> list[worker_pb2.Output]:
    """The hypotheses of a beam search of two choices."""
    return [
        worker_pb2.Output(
            request_id=submit.request_id,
            attempt=submit.attempt,
            choice=choice,
            tokens=worker_pb2.Tokens(ids=[1, 2, 3 + choice], finish_reason="FINISH_REASON_LENGTH", score=-1.0 - choice),
        )
        for choice in range(2)
    ]


@pytest.mark.parametrize("num_said", [0, 1])
def test_a_beam_search_begins_anew_and_repeats_nothing(num_said: int) -> None:
    world, caller = World(random.Random(3), pairs=True), Caller(2)
    beams = inference_pb2.BeamSearch(width=4, length_penalty=1, early_stopping=False)
    run, _ = start(world, choices_request(2, beam_search=beams))
    for attempt in (1, 2):
        prefill = world.jobs[-1]
        prefill.link.say(next(prefill.outputs))
        list(run.deltas())
        opened = worker_pb2.Tokens(prefill_seconds=0.5)
        prefill.link.say(worker_pb2.Output(request_id="r", attempt=attempt, tokens=opened))
        decode = world.jobs[-1]
        assert decode.submit.task == worker_pb2.TASK_DECODE
        hypotheses = beam_outputs(decode.submit)
        for output in hypotheses[:num_said] if attempt == 1 else hypotheses:
            decode.link.say(output)
        for delta in run.deltas():
            caller.take(delta)
        if attempt == 1:
            decode.link.kill()
            assert list(run.deltas()) == []
    assert caller.ids == [[1, 2, 3], [1, 2, 4]]
    assert caller.finished == {0, 1}
    assert run.done
    assert [list(submit.token_ids) for submit in world.submits] == [[5, 6, 7, 8]] * 4


def lose_worker(world: World) -> None:
    job = world.jobs[-1]
    job.link.say(next(job.outputs))  # admitted
    job.link.kill()


def test_a_request_that_cost_two_workers_is_given_up_though_its_choices_run_apart() -> None:
    world, caller = World(random.Random(4), pairs=False), Caller(4)
    run, _ = start(world, choices_request(4))
    deltas_until(world, run, caller, 1)
    world.links[world.jobs[0].worker].kill()
    list(run.deltas())
    lose_worker(world)
    with pytest.raises(InternalError, match="two workers"):
        list(run.deltas())
    run.end()
    assert not world.held
    assert all(link.num_attempts == 0 for link in world.links.values() if not link.broken)


def test_choices_that_one_death_costs_count_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, caller = World(random.Random(4), pairs=False), Caller(4)
    run, _ = start(world, choices_request(4))
    deltas_until(world, run, caller, 1)
    for choice in range(4):  # each goes alone, all to one worker
        if choice not in caller.finished:
            monkeypatch.setattr(world, "place", lambda *_: Placement(prefill=None, decode="d2"))
            world.fail(world.jobs[0], worker_pb2.FAILURE_KIND_PREEMPTED, choice)
    list(run.deltas())
    alone = world.jobs[1:]
    assert len(alone) > 1
    for job in alone:
        job.link.say(next(job.outputs))
    monkeypatch.undo()
    world.links["d2"].kill()
    list(run.deltas())
    assert len(world.submits) == 1 + 2 * len(alone)


@pytest.mark.parametrize("times", [2, 3])
def test_transfers_are_counted_by_choice(times: int) -> None:
    world, caller = World(random.Random(4), pairs=True), Caller(2)
    run, _ = start(world, choices_request(2))
    for _ in range(times - 1):
        world.fail(world.jobs[-1], worker_pb2.FAILURE_KIND_TRANSFER)
        list(run.deltas())
    world.fail(world.jobs[-1], worker_pb2.FAILURE_KIND_TRANSFER)
    if times < run_module.MAX_TRANSFERS_LOST:
        list(run.deltas())
        deltas_until(world, run, caller, 30)
        assert run.done
    else:
        with pytest.raises(InternalError, match="could not be moved"):
            list(run.deltas())


@pytest.mark.parametrize(
    ("kind", "message", "error", "text"),
    [
        (worker_pb2.FAILURE_KIND_INVALID, "num_choices: at most 4 here", InvalidArgument, "n: at most 4 here"),
        (
            worker_pb2.FAILURE_KIND_INVALID,
            "grammar: the grammar cannot be followed: no token: 'x: y'",
            InvalidArgument,
            "constraint: the grammar cannot be followed: no token: 'x: y'",
        ),
        (worker_pb2.FAILURE_KIND_INVALID, "too long", InvalidArgument, "prompt: too long"),
        (worker_pb2.FAILURE_KIND_FULL, "", Overloaded, "every worker's queue is full"),
        (worker_pb2.FAILURE_KIND_WORKER, "", Unavailable, "no worker is ready"),
    ],
)
def test_failures_that_nobody_can_mend(
    kind: "worker_pb2.FailureKind", message: str, error: type[Exception], text: str
) -> None:
    world = World(random.Random(4), pairs=False)
    run, _ = start(world, choices_request(1))

    def fail_for_ever() -> None:
        for _ in range(5):
            world.fail(world.jobs[-1], kind, message=message)
            assert list(run.deltas()) == []

    with pytest.raises(error, match=f"^{text}$"):
        fail_for_ever()
    run.end()
    assert not world.held


def test_the_view_hears_what_was_measured() -> None:
    world, caller = World(random.Random(4), pairs=True), Caller(2)
    run, timeline = start(world, choices_request(2, arrived=time.monotonic()))
    deltas_until(world, run, caller, 30)
    assert world.measured_tokens == [3]  # the prompt less what was cached
    assert world.num_transfers == 1
    assert timeline.kv_transfer_bytes == 10
