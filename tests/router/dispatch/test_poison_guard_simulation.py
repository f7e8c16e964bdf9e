"""Suspects of a crash: no two are at one worker, all workers compute for one at once, and only one
on solo run is blocked.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto import worker_pb2
from tandem.proto.errors import InternalError
from tandem.proto.worker_pb2 import TASK_COLOCATED, TASK_DECODE, TASK_PREFILL
from tandem.router.dispatch.execution import AVOID_SECONDS, RequestExecution
from tandem.router.dispatch.poison_guard import SOLO_RUN_SECONDS, PoisonGuard
from tandem.router.dispatch.worker_client import WorkerStream
from tandem.tests.examples import num_examples
from tandem.tests.router.fake_pools import (
    SEED,
    Caller,
    FakeClient,
    FakePools,
    Submitted,
    choices_request,
    completion,
    start,
)
from tandem.tests.router.pools import Clock

EXPECTED = completion((5, 6, 7, 8), SEED, 30)


@dataclass
class Suspect:
    """A request that has lost its decode worker, and what it has sent since."""

    pools: FakePools
    execution: RequestExecution
    caller: Caller = field(default_factory=lambda: Caller(1))
    num_before: int = 0

    def read(self) -> list[int]:
        """Takes what has come; returns the tasks that were submitted since the crash."""
        for _ in range(2):  # the end of its solo run wakes it
            self.caller.read(self.execution)
        return [int(submit.task) for submit in self.pools.submits[self.num_before :]]

    def say(self, task: int, count: int) -> None:
        """Has the newest worker with this task send its next outputs, and takes them."""
        self.pools.step(self.at(task), count)
        self.read()

    def at(self, task: int) -> Submitted:
        return next(one for one in reversed(self.pools.running) if one.submit.task == task)

    def finish(self) -> None:
        self.caller.read_until(self.pools, self.execution, 30)
        assert self.caller.ids == [EXPECTED]


def make_suspects(
    *prefill: str, clock: Clock | None = None, poison_guard: PoisonGuard | None = None
) -> list[Suspect]:
    """Returns requests whose decode worker d1 has crashed after some tokens. For each the prefill
    worker that it will be sent to, then to the decode worker d2.
    """
    clock = clock or Clock()
    poison_guard, suspects = poison_guard or PoisonGuard(clock), []
    for number, worker in enumerate(prefill):
        pools = FakePools(random.Random(number), pairs=True, decode=("d1",), prefill=(worker,))
        execution, _ = start(pools, choices_request(1), poison_guard=poison_guard, clock=clock)
        suspects.append(Suspect(pools, execution))
        suspects[-1].caller.read_until(pools, execution, 3)
    for each in suspects:
        each.at(TASK_DECODE).client.kill()
        each.pools.decode = ("d2",)
        each.num_before = len(each.pools.submits)
        each.read()
    return suspects


def tasks(suspects: Sequence[Suspect]) -> str:
    """Returns what each has sent since the crash: w a whole request, p a prefill, d a decode."""
    return " ".join("".join(".wpd"[task] for task in each.read()) or "-" for each in suspects)


def test_every_prefill_worker_computes_for_one_suspect_and_every_decode_worker_decodes_one() -> (
    None
):
    first, second, third = suspects = make_suspects("p1", "p1", "p2")
    assert tasks(suspects) == "p - p"
    first.say(TASK_PREFILL, 1)  # admitted
    assert tasks(suspects) == "p - p", "nobody waits at a decode worker for a prompt"
    first.say(TASK_PREFILL, 1)
    assert tasks(suspects) == "pd p p"
    before = len(second.caller.ids[0])
    second.say(TASK_PREFILL, 2)
    third.say(TASK_PREFILL, 2)
    assert tasks(suspects) == "pd p p"
    assert len(second.caller.ids[0]) == before + 1, "the token of its prefill worker does not wait"
    first.say(TASK_DECODE, 2)  # admitted, the KV cache is there
    assert tasks(suspects) == "pd p p"
    first.say(TASK_DECODE, 1)
    assert tasks(suspects) == "pd pd p"
    second.say(TASK_DECODE, 3)
    assert tasks(suspects) == "pd pd pd"
    for each in suspects:
        each.finish()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_prefill_worker_that_crashes_is_the_fault_of_the_one_that_it_computed_for(
    is_first: bool,
) -> None:
    poison_guard = PoisonGuard()
    first, second, third = make_suspects("p1", "p1", "p2", poison_guard=poison_guard)
    fresh = Suspect(
        pools := FakePools(random.Random(9), pairs=True, decode=("d2",), prefill=("p1",)),
        start(pools, choices_request(1), poison_guard=poison_guard)[0],
    )
    first.say(TASK_PREFILL, 1)
    fresh.say(TASK_PREFILL, 1)
    for number, each in enumerate((second, third, fresh), 3):
        each.pools.prefill = (f"p{number}",)
    for each in (first, fresh):
        each.at(TASK_PREFILL).client.kill()
    if is_first:
        fresh.read()
    with pytest.raises(InternalError, match="two workers"):
        first.read()
    first.execution.end()
    fresh.read()
    assert fresh.execution in poison_guard, (
        "it had not begun there before, so it may be at fault as well"
    )
    for each in (second, third, fresh):
        each.finish()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_decode_worker_that_crashes_is_the_fault_of_the_one_on_its_solo_run_there(
    is_first: bool,
) -> None:
    poison_guard = PoisonGuard()
    beside = Suspect(
        pools := FakePools(random.Random(9), pairs=True, decode=("d2",)),
        start(pools, choices_request(1), poison_guard=poison_guard)[0],
    )
    beside.caller.read_until(pools, beside.execution, 4)
    beside.pools.decode = ("d3",)
    first, second = make_suspects("p1", "p2", poison_guard=poison_guard)
    first.say(TASK_PREFILL, 2)
    first.say(TASK_DECODE, 1)
    for each in (first, beside):
        each.at(TASK_DECODE).client.kill()
    if is_first:
        beside.read()
    with pytest.raises(InternalError, match="two workers"):
        first.read()
    beside.read()
    assert beside.execution not in poison_guard
    first.execution.end()
    second.pools.decode = ("d3",)
    second.finish()
    beside.finish()


def test_a_suspect_that_waits_is_not_counted_for_what_happens_elsewhere() -> None:
    first, second = make_suspects("p1", "p2")
    first.say(TASK_PREFILL, 2)
    second.say(TASK_PREFILL, 2)
    assert tasks([first, second]) == "pd p"
    second.at(TASK_PREFILL).client.kill()
    second.pools.prefill = ("p3",)
    assert tasks([second]) == "pp", "its KV cache is lost, and it is not at fault"
    for each in (first, second):
        each.finish()


def test_crashes_after_its_solo_run_block_none() -> None:
    (only,) = make_suspects("p1")
    for number in range(3, 6):
        only.say(TASK_PREFILL, 2)
        only.say(TASK_DECODE, 3)
        only.pools.decode = (f"d{number}",)
        only.at(TASK_DECODE).client.kill()
    only.finish()


@pytest.mark.parametrize(("num_steps", "num_lost"), [(1, 6), (3, 7)])
def test_a_request_that_always_kills_some_steps_after_it_has_moved_is_blocked_at_last(
    num_steps: int, num_lost: int
) -> None:
    (only,) = make_suspects("p1")
    for number in range(3, 2 + num_lost):
        only.say(TASK_PREFILL, 2)
        only.say(TASK_DECODE, 2 + num_steps)
        only.pools.decode = (f"d{number}",)
        only.at(TASK_DECODE).client.kill()
        if number < 1 + num_lost:
            only.read()
    with pytest.raises(InternalError, match="two workers"):
        only.read()
    only.execution.end()


def test_a_suspect_whose_worker_would_do_all_waits_until_it_is_alone() -> None:
    first, second = make_suspects("p1", "p2")
    first.say(TASK_PREFILL, 2)
    second.say(TASK_PREFILL, 2)
    second.pools.pairs = False
    second.at(TASK_PREFILL).client.kill()
    assert tasks([first, second]) == "pd p"
    first.say(TASK_DECODE, 3)
    assert tasks([second]) == "pw"
    first.finish()
    second.finish()


def test_one_that_waits_is_woken_when_the_one_before_takes_too_long() -> None:
    clock = Clock()
    first, second, third = make_suspects("p1", "p2", "p1", clock=clock)
    first.say(TASK_PREFILL, 2)
    second.say(TASK_PREFILL, 2)
    assert tasks([first, second, third]) == "pd p p"
    assert not second.execution._parked
    assert second.execution.wake_at == SOLO_RUN_SECONDS
    clock.now = SOLO_RUN_SECONDS
    assert second.execution.wake_at is None
    assert tasks([second]) == "pd"
    for each in (first, second, third):
        each.finish()


def test_the_choices_of_a_suspect_are_at_one_worker_at_a_time() -> None:
    poison_guard, caller = PoisonGuard(), Caller(4)
    pools = FakePools(random.Random(3), pairs=True, decode=("d1",), prefill=("p1", "p2", "p3"))
    execution, _ = start(pools, choices_request(4), poison_guard=poison_guard)
    caller.read_until(pools, execution, 2)
    pools.decode = ("d2", "d3", "d4")
    pools.running[-1].client.kill()
    num_before = len(pools.submits)
    while not execution.done:
        pools.advance()
        caller.read(execution)
        if execution in poison_guard:
            unproven = {each.unproven_worker for each in execution._attempts} - {None}
            assert len(unproven) <= 1
    assert len(pools.submits) > num_before
    assert caller.ids == [completion((5, 6, 7, 8), SEED + choice, 30) for choice in range(4)]


@dataclass
class SharedPools(FakePools):
    """Workers as one request sees them, which die for all requests at once."""

    deaths: Counter[str] = field(default_factory=Counter)

    def send(self, worker_id: str, submit: worker_pb2.Submit) -> WorkerStream | None:
        client = self.clients.get(worker_id)
        if client is None or client.broken:
            self.clients[worker_id] = FakeClient(worker_id, self.deaths[worker_id])
            self.clients[worker_id].greet()
        return super().send(worker_id, submit)


def has_begun(one: Submitted) -> bool:
    """Returns whether the worker computes: at once, or with the KV cache."""
    return one.begun or one.submit.task != TASK_DECODE


@settings(max_examples=num_examples(200))
@given(
    seed=st.integers(0, 2**32),
    num_others=st.integers(0, 6),
    pairs=st.booleans(),
    kills=st.sampled_from([(TASK_PREFILL, TASK_COLOCATED), (TASK_DECODE, TASK_COLOCATED)]),
)
def test_a_request_that_kills_its_workers_costs_two_and_no_other_request_anything(
    seed: int, num_others: int, pairs: bool, kills: tuple[int, int]
) -> None:
    """It kills those that compute its prompt, or those that decode it."""
    chance, clock, deaths = random.Random(seed), Clock(), Counter[str]()
    poison_guard = PoisonGuard(clock)
    runs: list[tuple[SharedPools, Caller, RequestExecution]] = []
    for number in range(1 + num_others):
        pools = SharedPools(random.Random(seed + number), pairs=pairs, deaths=deaths)
        execution, _ = start(pools, choices_request(1), poison_guard=poison_guard, clock=clock)
        runs.append((pools, Caller(1), execution))
    poison, _, at_fault = runs[0]

    def crash(worker: str) -> None:
        deaths[worker] += 1
        clock.now += AVOID_SECONDS / 2
        for pools, _, _ in runs:
            if worker in pools.clients and not pools.clients[worker].broken:
                pools.clients[worker].kill()

    refused = False
    while not (refused and all(execution.done for _, _, execution in runs[1:])):
        pools, caller, execution = chance.choice(runs)
        if not execution.done:
            alive = [one for one in pools.running if not one.client.broken]
            one = chance.choice(alive) if alive else None
            if one is not None and pools is poison and one.submit.task in kills and has_begun(one):
                crash(one.worker)
            elif one is not None:
                pools.step(one)
        try:
            if not (refused and execution is at_fault):
                caller.read(execution)
        except InternalError:
            assert execution is at_fault
            refused = True
            execution.end()
        if execution.done:
            execution.end()
    assert deaths.total() == 2
    assert all(caller.ids == [EXPECTED] for _, caller, _ in runs[1:])
    assert not any(pools.held for pools, _, _ in runs)
