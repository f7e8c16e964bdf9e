"""Suspects of a crash: no two are at one worker, and one computes its prompt while those before it decode."""

import random
from dataclasses import dataclass, field

import pytest

from tandem.proto.errors import InternalError
from tandem.proto.worker_pb2 import TASK_DECODE, TASK_PREFILL, TASK_WHOLE
from tandem.router.dispatch.execution import RequestExecution
from tandem.router.dispatch.quarantine import TURN_SECONDS, Quarantine
from tandem.tests.router.fake_pools import SEED, Caller, FakePools, Submitted, choices_request, completion, start
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
        self.caller.read(self.execution)
        return [int(submit.task) for submit in self.pools.submits[self.num_before :]]

    def say(self, task: int, count: int) -> None:
        """Has the newest worker with this task send its next outputs."""
        self.pools.step(self.at(task), count)

    def at(self, task: int) -> Submitted:
        return next(one for one in reversed(self.pools.running) if one.submit.task == task)

    def finish(self) -> None:
        self.caller.read_until(self.pools, self.execution, 30)
        assert self.caller.ids == [EXPECTED]


def make_suspects(count: int, clock: Clock) -> list[Suspect]:
    """Returns requests whose decode worker has crashed after some tokens; each sees workers of its own."""
    quarantine, suspects = Quarantine(clock), []
    for number in range(count):
        pools = FakePools(random.Random(number), pairs=True)
        execution, _ = start(pools, choices_request(1), quarantine=quarantine, clock=clock)
        suspects.append(Suspect(pools, execution))
        suspects[-1].caller.read_until(pools, execution, 3)
    for each in suspects:
        each.at(TASK_DECODE).client.kill()
        each.num_before = len(each.pools.submits)
        each.read()
    return suspects


def test_a_suspect_computes_its_prompt_while_those_before_it_decode() -> None:
    first, second, third = suspects = make_suspects(3, Clock())
    assert [each.read() for each in suspects] == [[TASK_PREFILL], [], []]
    first.say(TASK_PREFILL, 1)  # admitted
    assert [each.read() for each in suspects] == [[TASK_PREFILL, TASK_DECODE], [], []]
    first.say(TASK_PREFILL, 1)
    assert [each.read() for each in suspects] == [[TASK_PREFILL, TASK_DECODE], [TASK_PREFILL], []]
    second.say(TASK_PREFILL, 2)
    before = len(second.caller.ids[0])
    assert [each.read() for each in suspects[1:]] == [[TASK_PREFILL], [TASK_PREFILL]]
    assert len(second.caller.ids[0]) == before + 1, "the token of its prefill worker does not wait"
    third.say(TASK_PREFILL, 2)
    assert third.read() == [TASK_PREFILL]
    first.say(TASK_DECODE, 3)  # admitted, the KV cache is there, a token
    first.read()
    assert [each.read() for each in suspects[1:]] == [[TASK_PREFILL, TASK_DECODE], [TASK_PREFILL]]
    second.say(TASK_DECODE, 3)
    second.read()
    assert third.read() == [TASK_PREFILL, TASK_DECODE]
    for each in suspects:
        each.finish()


def test_a_prefill_worker_that_crashes_is_the_fault_of_the_one_that_it_computed_for() -> None:
    first, second, third = make_suspects(3, Clock())
    first.say(TASK_PREFILL, 2)
    first.read()
    second.read()
    second.say(TASK_PREFILL, 2)
    second.read()
    assert third.read() == [TASK_PREFILL]
    third.say(TASK_PREFILL, 1)
    for each in (first, second, third):
        each.at(TASK_PREFILL).client.kill()
    with pytest.raises(InternalError, match="two workers"):
        third.read()
    third.execution.end()
    assert second.read() == [TASK_PREFILL, TASK_PREFILL], "its KV cache is lost, and it is not blamed"
    first.finish()
    second.finish()


def test_a_decode_worker_that_crashes_is_the_fault_of_the_one_that_was_sent_there() -> None:
    first, second = make_suspects(2, Clock())
    first.say(TASK_PREFILL, 2)
    first.read()
    second.read()
    second.say(TASK_PREFILL, 2)
    first.say(TASK_DECODE, 1)
    first.at(TASK_DECODE).client.kill()
    with pytest.raises(InternalError, match="two workers"):
        first.read()
    assert second.read() == [TASK_PREFILL]
    first.execution.end()
    assert second.read() == [TASK_PREFILL, TASK_DECODE]
    second.finish()


def test_a_suspect_whose_worker_would_do_all_waits_until_it_is_alone() -> None:
    first, second = make_suspects(2, Clock())
    second.pools.pairs = False
    first.say(TASK_PREFILL, 2)
    first.read()
    assert second.read() == []
    first.say(TASK_DECODE, 3)
    first.read()
    assert second.read() == [TASK_WHOLE]
    first.finish()
    second.finish()


def test_one_that_waits_to_decode_is_woken_when_the_turn_of_the_one_before_has_passed() -> None:
    clock = Clock()
    first, second = make_suspects(2, clock)
    first.say(TASK_PREFILL, 2)
    first.read()
    second.read()
    second.say(TASK_PREFILL, 2)
    assert second.read() == [TASK_PREFILL]
    assert not second.execution._parked
    assert second.execution.wake_at == TURN_SECONDS
    clock.now = TURN_SECONDS
    assert second.execution.wake_at is None, "it is its turn"
    assert second.read() == [TASK_PREFILL, TASK_DECODE]
    second.finish()
    first.finish()
