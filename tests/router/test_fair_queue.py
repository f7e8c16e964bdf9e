"""The queue alone: what is next, what has no place, and that no tenant is charged for what it did
not get.
"""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.due_order import QueueEntry
from tandem.router.fair_queue import FairQueue, Ranking

MANY = 1 << 40


def entry(
    tenant: str = "a", num_tokens: int = 1, priority: int = 0, due: float = 0.0
) -> QueueEntry:
    return QueueEntry(tenant=tenant, priority=priority, num_tokens=num_tokens, due=due)


def queue(max_tokens: int = MANY, max_requests: int = MANY) -> "FairQueue[QueueEntry]":
    return FairQueue(max_tokens=max_tokens, max_requests=max_requests)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(-2, 2), st.integers(0, 5)),
        max_size=40,
    ),
    st.data(),
)
def test_priority_goes_first_and_a_tenant_by_due_time_then_in_order(
    arrivals: list[tuple[str, int, int, int]], data: st.DataObject
) -> None:
    waiting = queue()
    entries = [entry(*arrival) for arrival in arrivals]
    for one in entries:
        assert waiting.push(one) == []
    for one in data.draw(st.lists(st.sampled_from(entries), unique=True)) if entries else []:
        waiting.remove(one)
        waiting.remove(one)
        entries.remove(one)
    assert len(waiting) == len(entries)
    assert waiting.num_tokens == sum(one.num_tokens for one in entries)
    assert sorted(map(id, waiting)) == sorted(map(id, entries))
    left = []
    while waiting:
        first = waiting.first()
        left.append(waiting.pop())
        assert left[-1] is first
    assert [one.priority for one in left] == sorted((one.priority for one in entries), reverse=True)
    for tenant, priority in itertools.product("abc", range(-2, 3)):
        mine = [one for one in entries if (one.tenant, one.priority) == (tenant, priority)]
        mine.sort(key=lambda one: one.due)
        assert [one for one in left if (one.tenant, one.priority) == (tenant, priority)] == mine
    assert waiting.first() is None
    with pytest.raises(IndexError):
        waiting.pop()


@given(
    st.lists(st.integers(1, 50), min_size=60, max_size=60),
    st.lists(st.integers(1, 50), min_size=60, max_size=60),
    st.lists(st.integers(0, 9), min_size=60, max_size=60),
)
def test_tenants_that_wait_are_served_alike_in_tokens(
    mine: list[int], yours: list[int], dues: list[int]
) -> None:
    """Even if every request of one tenant is due before every request of the other."""
    waiting = queue()
    for tenant, sizes, late in (("a", mine, 0), ("b", yours, 100)):
        for num_tokens, due in zip(sizes, dues, strict=True):
            waiting.push(entry(tenant, num_tokens, due=late + due))
    served: Counter[str] = Counter()
    left = {"a": 60, "b": 60}
    while left["a"] and left["b"]:
        one = waiting.pop()
        served[one.tenant] += one.num_tokens
        left[one.tenant] -= 1
        assert abs(served["a"] - served["b"]) <= 100  # twice the largest (Goyal et al., 1996)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 200)), min_size=1, max_size=8), st.data()
)
def test_no_other_order_has_a_smaller_greatest_lateness(
    jobs: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Jackson's rule (1955), for requests that one worker serves one after another."""
    waiting = queue()
    for num_tokens, due in jobs:
        waiting.push(entry(num_tokens=num_tokens, due=due))

    def lateness(order: list[tuple[int, float]]) -> float:
        ends = itertools.accumulate(num_tokens for num_tokens, _ in order)
        return max(end - due for end, (_, due) in zip(ends, order, strict=True))

    served = [(one.num_tokens, one.due) for one in (waiting.pop() for _ in jobs)]
    assert lateness(served) <= lateness(list(data.draw(st.permutations(jobs))))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=20),
    st.integers(0, 9),
)
def test_the_tokens_ahead_of_a_tenant_alone_are_those_served_before(
    jobs: list[tuple[int, int]], due: int
) -> None:
    waiting = queue()
    for num_tokens, each_due in jobs:
        waiting.push(entry(num_tokens=num_tokens, due=each_due))
    new = entry(due=due)
    ahead = waiting.tokens_ahead(new)
    waiting.push(new)
    before = itertools.takewhile(lambda one: one is not new, iter(waiting.pop, None))
    assert sum(one.num_tokens for one in before) == ahead


def test_a_full_queue_gives_up_what_is_due_last() -> None:
    waiting = queue(max_requests=3)
    dues = [entry("flood", due=due) for due in (2, 9, 1)]
    for one in dues:
        waiting.push(one)
    assert waiting.push(entry("other", due=50)) == [dues[1]]


def test_a_tenant_that_was_away_gets_no_credit() -> None:
    waiting = queue()
    for _ in range(100):
        waiting.push(entry("busy", 10))
    for _ in range(50):
        waiting.pop()
    for _ in range(20):
        waiting.push(entry("back", 10))
    served = Counter(waiting.pop().tenant for _ in range(20))
    assert served["back"] == 10


def test_a_tenant_is_not_charged_for_requests_it_cancels() -> None:
    waiting = queue()
    for _ in range(20):
        waiting.push(entry("other", 10))
    waiting.pop()
    given_up = [entry("shy", 1000) for _ in range(5)]
    for one in given_up:
        waiting.push(one)
    for one in given_up:
        waiting.remove(one)
    waiting.push(entry("shy", 10))
    assert [waiting.pop().tenant for _ in range(2)].count("shy") == 1


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.integers(1, 60)), max_size=60)
)
def test_the_bounds_hold_and_a_longer_backlog_gives_way_to_a_shorter(
    arrivals: list[tuple[str, int, int]],
) -> None:
    waiting = queue(max_tokens=100, max_requests=8)
    for tenant, priority, num_tokens in arrivals:
        new = entry(tenant, num_tokens, priority)
        before = Counter({(one.tenant, one.priority): one.num_tokens for one in waiting})
        expected, count = waiting.displaced_by(new), len(waiting)
        displaced = waiting.push(new)
        assert displaced == expected
        if displaced is None:
            assert len(waiting) == count
            assert count == 8 or sum(one.num_tokens for one in waiting) + num_tokens > 100
            continue
        assert waiting.num_tokens <= 100
        assert len(waiting) <= 8
        assert waiting.num_tokens == sum(one.num_tokens for one in waiting)
        for victim in displaced:
            assert victim not in list(waiting)
            assert victim.tenant != tenant or victim.priority < priority
            assert victim.priority <= priority
            assert before[victim.tenant, victim.priority]


def test_a_full_queue_takes_from_the_longest_backlog() -> None:
    waiting = queue(max_requests=10)
    flood = [entry("flood") for _ in range(10)]
    for one in flood:
        waiting.push(one)
    assert waiting.push(entry("flood")) is None
    assert [waiting.push(entry("other")) for _ in range(5)] == [[flood[n]] for n in (9, 8, 7, 6, 5)]
    assert waiting.push(entry("other")) is None
    assert waiting.push(entry("other", priority=-1)) is None
    assert len(waiting.push(entry("other", priority=1)) or []) == 1
    assert {waiting.pop().tenant for _ in range(3)} == {"flood", "other"}


def test_an_entry_larger_than_the_bound_may_wait_alone() -> None:
    waiting = queue(max_tokens=100)
    waiting.push(entry("a", 500))
    assert waiting.displaced_by(entry("a", 1)) is None
    waiting.pop()
    waiting.push(entry("a", 1))
    assert waiting.displaced_by(entry("a", 500)) is None


def test_tokens_ahead_are_those_of_higher_priorities_and_a_fair_part_of_the_rest() -> None:
    waiting = queue()
    for _ in range(10):
        waiting.push(entry("a", 100))
    waiting.push(entry("b", 10))
    waiting.push(entry("c", 7, priority=1))
    assert waiting.tokens_ahead(entry("a", 50)) == 7 + 1000 + 10
    assert waiting.tokens_ahead(entry("new", 50)) == 7 + 100
    assert waiting.tokens_ahead(entry("new", 50, priority=1)) == 7
    assert waiting.tokens_ahead(entry("new", 50, priority=2)) == 0


def test_a_ranking_keeps_no_stale_entries() -> None:
    ranking: Ranking[int] = Ranking()
    rng = random.Random(0)
    ranks: dict[int, float] = {}
    for n in range(5000):
        key = rng.randrange(50)
        if rng.random() < 0.3:
            ranking.discard(key)
            ranks.pop(key, None)
        else:
            ranks[key] = rng.random()
            ranking.put(key, ranks[key])
        assert ranking.first() == (min(ranks, key=lambda k: ranks[k]) if ranks else None), n
    assert len(ranking._heap) <= 2 * len(ranks) + 17


def test_any_number_of_tenants_is_remembered_in_bounds() -> None:
    waiting = queue()
    for _ in range(2):
        waiting.push(entry("stays", 1000))
    waiting.pop()
    for n in range(10_000):
        waiting.push(entry(f"tenant {n}"))
        assert waiting.pop().tenant == f"tenant {n}"
    assert len(waiting._tags[0]) <= 4096 + 1


def test_work_that_was_more_than_expected_costs_its_tenant_turns() -> None:
    waiting = queue()
    for number in range(6):
        waiting.push(entry("ab"[number % 2]))
    first = waiting.pop()
    waiting.charge(first, 2)
    assert [waiting.pop().tenant for _ in range(5)] == ["b", "b", "b", "a", "a"]
    waiting.charge(first, 5)  # nothing waits, so nothing is remembered
    assert waiting.push(entry("a")) == []


def test_an_entry_served_out_of_turn_costs_its_tenant_turns_and_no_other_one() -> None:
    waiting = queue()
    late = entry("a", 2, due=9.0)
    for one in [*(entry("ab"[number % 2]) for number in range(6)), late]:
        waiting.push(one)
    waiting.serve(late)
    waiting.push(entry("new"))
    order = "".join(waiting.pop().tenant[0] for _ in range(7))
    assert order.count("a") == order.count("b") == 3
    assert order[:3] in ("bnb", "nbb", "bbn")
    assert order.index("n") < 2
    waiting.serve(late)  # not in the queue any more
    assert len(waiting) == 0
