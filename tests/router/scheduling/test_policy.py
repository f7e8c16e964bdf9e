"""Tests the properties of placement, which is a pure function."""

import copy
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.costs import KvCost, LinearCost, TableCost, mixed_chunk
from tandem.proto.limits import PREFIX_FETCH_SECONDS
from tandem.router.scheduling.capacity import Capacity
from tandem.router.scheduling.policy import (
    NEUTRAL_PREFILL,
    Candidate,
    Placement,
    choose_holder,
    colocated_seconds,
    place,
    prefill_seconds,
)

KV_BYTES = 131_072
DENSE = KvCost(16, (TableCost(16, KV_BYTES),))


def candidates(prefix: str) -> st.SearchStrategy[list[Candidate]]:
    one: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "pending_tokens": st.integers(0, 9999),
            "num_pending": st.integers(0, 9),
            "num_requests": st.integers(0, 99),
            "free_tokens": st.integers(0, 9999),
            "matched_tokens": st.integers(0, 4096),
            "max_sequences": st.sampled_from([0, 1, 64]),
            "prefill": st.builds(LinearCost, fixed=st.floats(0, 0.1), each=st.floats(1e-6, 1e-2)),
            "step_seconds": st.floats(1e-4, 0.1),
            "cost": st.just(DENSE),
        }
    )
    return st.lists(one, max_size=5).map(
        lambda found: [
            Candidate(worker_id=f"{prefix}{i}", **fields) for i, fields in enumerate(found)
        ]
    )


def idle(worker_id: str, **fields: Any) -> Candidate:
    base: dict[str, Any] = {
        "pending_tokens": 0,
        "num_requests": 0,
        "free_tokens": 16_000,
        "cost": DENSE,
    }
    return Candidate(worker_id=worker_id, **base | fields)


def needed(num_tokens: int, num_sequences: int = 1) -> Capacity:
    return Capacity(prompt_tokens=num_tokens, sequences=num_sequences)


def chosen(
    wanted: Capacity,
    prefill: list[Candidate],
    decode: list[Candidate],
    *,
    local: int = 0,
    tries: int = 40,
    affinity: str = "",
) -> Counter[Placement | None]:
    return Counter(
        place(
            wanted, prefill, decode, random.Random(n), local_prefill_tokens=local, affinity=affinity
        )
        for n in range(tries)
    )


@given(st.integers(1, 4096), candidates("p"), candidates("d"), st.integers(0, 4096), st.integers())
def test_it_is_pure_and_chooses_among_what_it_is_given(
    tokens: int, prefill: list[Candidate], decode: list[Candidate], local: int, seed: int
) -> None:
    before = copy.deepcopy((prefill, decode))
    placements = {
        place(needed(tokens), prefill, decode, random.Random(seed), local_prefill_tokens=local)
        for _ in range(2)
    }
    assert len(placements) == 1
    assert (prefill, decode) == before
    placement = placements.pop()
    if not decode:
        assert placement is None
        return
    assert placement is not None
    worker = next(c for c in decode if c.worker_id == placement.decode)
    if placement.prefill is None:
        assert not prefill or tokens - worker.matched_tokens <= max(local, 1)
    else:
        assert placement.prefill in {c.worker_id for c in prefill}


@given(
    st.integers(1, 4096), candidates("p").filter(bool), candidates("d").filter(bool), st.integers()
)
def test_no_chosen_worker_costs_more_than_a_tenth_above_the_best(
    tokens: int, prefill: list[Candidate], decode: list[Candidate], seed: int
) -> None:
    wanted = needed(tokens)
    placement = place(wanted, prefill, decode, random.Random(seed))
    assert placement is not None
    taken = next(c for c in prefill if c.worker_id == placement.prefill)
    sending = 1e-3 + tokens * KV_BYTES * 1e-9  # the same from everybody
    for other in prefill:
        roomy = other.free_tokens + other.matched_tokens >= tokens and other.num_requests < (
            other.max_sequences or 999
        )
        cost = prefill_seconds(tokens, other) + sending
        assert not roomy or prefill_seconds(tokens, taken) + sending <= 1.1 * cost * (1 + 1e-9)


def test_a_cached_prefix_decides_between_equals_and_does_not_outweigh_load() -> None:
    cold, warm = idle("cold"), idle("warm", matched_tokens=512)
    assert set(chosen(needed(600), [cold, warm], [cold, warm])) == {
        Placement(prefill="warm", decode="warm")
    }
    busy = idle("busy", matched_tokens=512, pending_tokens=2000, num_requests=30)
    assert set(chosen(needed(600), [cold, busy], [cold, busy])) == {
        Placement(prefill="cold", decode="cold")
    }


def test_a_slower_worker_needs_a_longer_cached_prefix() -> None:
    fast, slow = (
        idle("fast", prefill=LinearCost(fixed=0.0, each=1e-4)),
        idle("slow", prefill=LinearCost(fixed=0.0, each=4e-4)),
    )
    decode = [idle("d")]
    assert set(chosen(needed(1000), [fast, slow], decode)) == {
        Placement(prefill="fast", decode="d")
    }
    slow = idle("slow", prefill=LinearCost(fixed=0.0, each=4e-4), matched_tokens=900)
    assert set(chosen(needed(1000), [fast, slow], decode)) == {
        Placement(prefill="slow", decode="d")
    }


def test_the_decode_worker_has_capacity_for_the_prompt_and_its_choices() -> None:
    full, busy = idle("full", free_tokens=48), idle("busy", num_requests=9, max_sequences=12)
    assert set(chosen(needed(100), [], [full, busy])) == {Placement(prefill=None, decode="busy")}
    assert set(chosen(needed(40), [], [full, busy])) == {Placement(prefill=None, decode="full")}
    assert set(chosen(needed(100, 4), [], [idle("other", num_requests=70), busy])) == {
        Placement(prefill=None, decode="other")
    }


def test_choices_count_as_one_sequence_on_the_prefill_worker() -> None:
    small = idle("small", max_sequences=1)
    assert set(chosen(needed(100, 8), [small, idle("far", pending_tokens=9000)], [idle("d")])) == {
        Placement(prefill="small", decode="d")
    }


def test_equals_take_turns() -> None:
    got = chosen(needed(9), [idle("a"), idle("b"), idle("c")], [idle("d"), idle("e")], tries=300)
    assert len(got) == 6
    assert min(got.values()) > 20


@pytest.mark.parametrize("is_split", [False, True])
def test_one_affinity_goes_to_one_worker_and_many_to_all(is_split: bool) -> None:
    """In every router, and without the prefix in any cache. A leaving worker moves only its own."""
    workers = [idle(name) for name in "abcd"]

    def worker(affinity: str, among: list[Candidate]) -> str:
        pools = (among, [idle("d1"), idle("d2")]) if is_split else ([], among)
        found = chosen(needed(600), *pools, affinity=affinity, tries=9)
        (name,) = {each and (each.prefill if is_split else each.decode) for each in found}
        assert name is not None
        return name

    homes = {str(number): worker(str(number), workers) for number in range(60)}
    assert set(Counter(homes.values())) == set("abcd")
    assert min(Counter(homes.values()).values()) >= 5
    for affinity, home in homes.items():
        now = worker(affinity, workers[1:])
        assert now == home or home == "a"


def test_an_affinity_does_not_outweigh_load_or_a_cached_prefix() -> None:
    homes = dict.fromkeys("ab", "")
    for number in range(20):
        (placed,) = chosen(needed(600), [], [idle("a"), idle("b")], affinity=str(number))
        assert placed is not None
        homes[placed.decode] = str(number)
    busy = [idle("a", pending_tokens=9000, num_pending=9), idle("b")]
    assert set(chosen(needed(600), [], busy, affinity=homes["a"])) == {Placement(None, "b")}
    warm = [idle("a"), idle("b", matched_tokens=590)]
    assert set(chosen(needed(600), [], warm, affinity=homes["a"])) == {Placement(None, "b")}
    near = [idle("a", pending_tokens=300, num_pending=1), idle("b")]
    assert set(chosen(needed(600), [], near, affinity=homes["a"])) == {Placement(None, "a")}
    assert set(chosen(needed(600), [], near)) == {Placement(None, "b")}


def test_of_two_near_equals_the_less_loaded_is_taken() -> None:
    near = [
        idle("least", pending_tokens=1000),
        idle("more", pending_tokens=1080),
        idle("far", pending_tokens=1400),
    ]
    got = chosen(needed(1000), near, [idle("d")])
    assert set(got) == {Placement(prefill="least", decode="d")}


@pytest.mark.parametrize(
    ("uncached", "local", "pending", "whole"),
    [
        (40, 64, 2000, True),
        (40, 64, 0, False),  # the prefill worker is idle, and steps are slow here
        (65, 64, 2000, False),  # past the bound
        (40, 0, 2000, False),
    ],
)
def test_a_short_uncached_rest_is_computed_by_the_decode_worker_if_that_is_faster(
    uncached: int, local: int, pending: int, whole: bool
) -> None:
    prefill = idle("p", matched_tokens=1000 - uncached, pending_tokens=pending)
    decode = idle(
        "d",
        matched_tokens=1000 - uncached,
        num_requests=4,
        mixed_chunk_tokens=32,
        max_sequences=64,
        step_seconds=0.05,
    )
    expected = Placement(prefill=None if whole else "p", decode="d")
    assert set(chosen(needed(1000), [prefill], [decode], local=local)) == {expected}


def test_each_chunk_of_a_prompt_costs_a_step_on_a_busy_decode_worker() -> None:
    running = idle("d", num_requests=1, mixed_chunk_tokens=32, max_sequences=64, step_seconds=0.1)
    chunk = mixed_chunk(32, 2)
    one, two = (
        colocated_seconds(needed(chunk), running),
        colocated_seconds(needed(chunk + 1), running),
    )
    assert two - one == pytest.approx(0.1 + NEUTRAL_PREFILL.each)
    resting = idle("d", mixed_chunk_tokens=32, step_seconds=0.1)
    assert colocated_seconds(needed(33), resting) == pytest.approx(NEUTRAL_PREFILL.seconds(33))


@given(
    st.integers(1, 4096),
    candidates("p"),
    candidates("d"),
    st.builds(LinearCost, fixed=st.floats(0, 1), each=st.floats(0, 1e-6)),
)
def test_a_prefix_is_fetched_only_where_that_is_faster(
    num_tokens: int, prefill: list[Candidate], decode: list[Candidate], transfer: LinearCost
) -> None:
    """The source has the most cached tokens, and the fetch is faster than the computation and ends
    before the worker gives it up.

    The last token of a prompt is always computed.
    """
    decode = [one._replace(transfer=transfer) for one in decode]
    for first in prefill:
        found = choose_holder(num_tokens, first, decode)
        most = max((one.matched_tokens for one in decode), default=0)
        missing = min(most, num_tokens - 1) - first.matched_tokens
        most_seconds = min(missing * first.prefill.each, 0.8 * PREFIX_FETCH_SECONDS)
        is_faster = transfer.seconds(missing * KV_BYTES) < most_seconds
        assert (found is not None) == (missing >= 64 and is_faster)
        assert found is None or found.matched_tokens == most


@pytest.mark.parametrize(("share", "fetches"), [(0.7, True), (0.9, False), (2.0, False)])
def test_a_prefix_that_the_worker_would_give_up_is_computed(share: float, fetches: bool) -> None:
    """However long the computation takes."""
    prefill = idle("p0", prefill=LinearCost(fixed=0.0, each=1.0))
    seconds = share * PREFIX_FETCH_SECONDS
    transfer = LinearCost(fixed=0.0, each=seconds / (8192 * KV_BYTES))
    holder = idle("d0", transfer=transfer, matched_tokens=8192)
    assert (choose_holder(16_000, prefill, [holder]) == holder) == fetches


def test_of_equal_holders_the_less_loaded_is_asked() -> None:
    first = idle("p0", prefill=LinearCost(fixed=0.0, each=1.0))
    decode = [idle(f"d{n}", matched_tokens=512, num_requests=(5, 1, 3)[n]) for n in range(3)]
    assert choose_holder(1000, first, decode) == decode[1]
    assert choose_holder(1000, first, []) is None


def test_a_window_costs_what_it_moves_and_holds() -> None:
    """A long prompt of which the decode worker needs the last 1,024 tokens only."""
    window = KvCost(16, (TableCost(16, KV_BYTES, 1024),))
    slow = LinearCost(fixed=0.0, each=1e-8)
    first = [idle("p0", prefill=LinearCost(fixed=0.0, each=1e-4), transfer=slow)]
    for cost, expected in ((DENSE, "d1"), (window, "d0")):
        # d1 has half of the prompt, but its steps are slower.
        decode = [
            idle("d0", cost=cost, transfer=slow),
            idle("d1", cost=cost, transfer=slow, matched_tokens=8192, num_requests=32),
        ]
        placed = place(needed(16_000), first, decode, random.Random(1))
        assert placed is not None
        assert placed.decode == expected
    # Without room for 16,000 tokens, a worker takes a prompt of a window.
    assert window.kv_tokens(16_000) == 1024 + 16
    small = [idle("d0", cost=window, free_tokens=1100), idle("d1", cost=window, free_tokens=900)]
    for seed in range(9):
        placed = place(needed(16_000), first, small, random.Random(seed))
        assert placed is not None
        assert placed.decode == "d0"


def test_a_holder_of_a_window_is_worth_less_bytes() -> None:
    prefill = idle("p0", prefill=LinearCost(fixed=0.0, each=1e-4))
    slow = LinearCost(fixed=0.0, each=1e-9)
    for cost, fetches in ((DENSE, False), (KvCost(16, (TableCost(16, KV_BYTES, 1024),)), True)):
        holder = idle("d0", cost=cost, transfer=slow, matched_tokens=8192)
        assert (choose_holder(16_000, prefill, [holder]) == holder) == fetches
