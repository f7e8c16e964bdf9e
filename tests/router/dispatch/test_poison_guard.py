"""Who is tried where, who is blocked, and who waits for whom: the poison_guard without workers and
without waiting.
"""

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.dispatch.poison_guard import SOLO_RUN_SECONDS, PoisonGuard
from tandem.router.scheduling.policy import Placement
from tandem.tests.examples import num_examples
from tandem.tests.router.pools import Clock

WORKERS = ("w0", "w1", "w2")


@dataclass(eq=False)
class Request:
    """A request that is sent to a worker, computed there, and proves itself or kills it."""

    name: int
    is_poison: bool
    at: str | None = None
    is_proven: bool = False
    is_awake: bool = True
    is_blocked: bool = False

    def wake(self) -> None:
        self.is_awake = True


@dataclass
class Service:
    """Workers that die and come back, and requests that are where the poison_guard lets them be."""

    chance: random.Random
    num_kills: int  # from outside, still to come
    requests: list[Request]
    clock: Clock = field(default_factory=Clock)
    epochs: Counter[str] = field(default_factory=Counter)
    cost: Counter[int] = field(default_factory=Counter)  # workers, by the request that killed them
    in_vain: list[Request] = field(default_factory=list)  # blocked of what something else has done

    def __post_init__(self) -> None:
        self.poison_guard = PoisonGuard(self.clock)

    def run(self) -> None:
        """Goes on until every request is proven or blocked, and no kill is left."""
        while self.num_kills or any(
            not (each.is_proven or each.is_blocked) for each in self.requests
        ):
            acting = [
                each
                for each in self.requests
                if each.is_awake and not (each.is_proven or each.is_blocked)
            ]
            if self.num_kills and (not acting or self.chance.random() < 0.1):
                self.num_kills -= 1
                self.crash(self.chance.choice(WORKERS), None)
            else:
                assert acting, "all wait, and nobody is to wake them"
                self.act(self.chance.choice(acting))

    def act(self, request: Request) -> None:
        if request.at is None:
            self.send(request)
        elif request.is_poison:
            self.crash(request.at, request)
        else:
            request.is_proven = True
            self.poison_guard.leave(request)

    def send(self, request: Request) -> None:
        worker = self.chance.choice(WORKERS)
        if self.poison_guard.may_ask(request) and self.poison_guard.may_start(request, worker):
            request.at = worker
            assert request not in self.poison_guard or self.tried_at(worker) == [request], (
                "two suspects at one worker"
            )
        else:
            request.is_awake = False

    def crash(self, worker: str, culprit: Request | None) -> None:
        """Ends a worker; its requests report that in any order."""
        tried, key = self.tried_at(worker), (worker, self.epochs[worker])
        self.epochs[worker] += 1
        if culprit is not None:
            self.cost[culprit.name] += 1
        there = [each for each in self.requests if each.at == worker and not each.is_blocked]
        for each in self.chance.sample(there, len(there)):
            if self.poison_guard.count_crash(each, key, each.wake, is_proven=each.is_proven):
                assert tried == [each], "blocked although it was not the only suspect"
                each.is_blocked = True
                self.poison_guard.leave(each)
                if each is not culprit:
                    self.in_vain.append(each)
            each.at, each.is_proven, each.is_awake = None, False, True

    def tried_at(self, worker: str) -> list[Request]:
        return [
            each
            for each in self.requests
            if each.at == worker and each in self.poison_guard and not each.is_proven
        ]


def make_service(seed: int, num_requests: int, num_poisons: int, num_kills: int) -> Service:
    return Service(
        random.Random(seed), num_kills, [Request(n, n < num_poisons) for n in range(num_requests)]
    )


@settings(max_examples=num_examples(300))
@given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 12))
def test_a_request_that_kills_its_workers_costs_two_and_no_other_is_blocked(
    seed: int, num_requests: int
) -> None:
    service = make_service(seed, num_requests, 1, 0)
    service.run()
    assert [each.name for each in service.requests if each.is_blocked] == [0]
    assert service.cost == {0: 2}


@settings(max_examples=num_examples(300))
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 12),
    num_poisons=st.integers(0, 3),
    num_kills=st.integers(0, 12),
)
def test_a_request_is_blocked_in_vain_only_if_something_kills_the_worker_that_tries_it(
    seed: int, num_requests: int, num_poisons: int, num_kills: int
) -> None:
    """Whatever else kills workers. And nobody kills workers for ever."""
    service = make_service(seed, num_requests, num_poisons, num_kills)
    service.run()
    poisons = [each for each in service.requests if each.is_poison]
    assert all(each.is_blocked for each in poisons)
    assert all(service.cost[each.name] <= 2 for each in poisons)
    assert len(service.in_vain) <= num_kills + len(poisons)


def test_all_workers_try_at_once_and_each_one_suspect() -> None:
    service = make_service(1, 5, 0, 0)
    for each in service.requests:
        each.at = "w0"
    service.crash("w0", None)
    poison_guard, (first, second, third, *_) = service.poison_guard, service.requests
    assert poison_guard.may_start(first, "w1")
    assert poison_guard.may_start(second, "w2")
    assert not poison_guard.may_start(third, "w1")
    assert not poison_guard.may_start(first, "w0"), "it is on solo run elsewhere"
    third.is_awake = False
    poison_guard.leave(second)
    assert not third.is_awake
    assert not poison_guard.may_ask(third)
    poison_guard.keep(first, ["w1"])
    assert not poison_guard.may_ask(third)
    poison_guard.keep(first, [])
    assert third.is_awake
    assert poison_guard.may_ask(third)
    assert poison_guard.may_start(third, "w1")
    assert first in poison_guard


def test_suspects_with_one_cached_prompt_go_elsewhere_once_several_wait_for_its_worker() -> None:
    service = make_service(1, 10, 0, 0)
    for each in service.requests:
        each.at = "w0"
    service.crash("w0", None)

    def find(avoid: Collection[str]) -> Placement | None:
        free = [worker for worker in WORKERS if worker not in avoid]
        return Placement(prefill=free[0], decode="d") if free else None

    placed = [service.poison_guard.place(each, find, ()) for each in service.requests]
    workers = [each and each.prefill for each in placed]
    assert workers == ["w0", None, None, None, "w1", None, None, None, "w2", None]
    assert service.poison_guard.place(Request(99, is_poison=False), find, {"w0"}) == ("w1", "d"), (
        "it is no suspect"
    )


def test_a_solo_run_keeps_others_away_for_a_while_that_grows_until_a_slow_poison_was_alone() -> (
    None
):
    service = make_service(1, 2, 0, 0)
    poison_guard, clock, (slow, other) = service.poison_guard, service.clock, service.requests
    slow.at = other.at = "w0"
    service.crash("w0", None)
    for turn in range(3):
        assert poison_guard.may_start(slow, "w1")
        assert not poison_guard.may_start(other, "w1")
        assert poison_guard.waits_until(other) == clock.now + SOLO_RUN_SECONDS * 2**turn
        clock.now = poison_guard.waits_until(other)
        assert poison_guard.may_ask(other)
        assert poison_guard.may_start(other, "w1")
        assert not any(
            poison_guard.count_crash(each, ("w1", turn), each.wake) for each in (slow, other)
        )
    assert poison_guard.may_start(slow, "w2")
    assert poison_guard.count_crash(slow, ("w2", 0), slow.wake)
