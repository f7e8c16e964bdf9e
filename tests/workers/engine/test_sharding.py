"""How tensor parallelism splits heads and dimensions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.tests.examples import num_examples
from tandem.workers.kv_cache.sharding import check_split, kv_heads, part, query_heads


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, tp."""
    num_heads = draw(st.integers(1, 64))
    return (
        num_heads,
        draw(st.sampled_from(divisors(num_heads))),
        draw(st.sampled_from(divisors(num_heads))),
    )


def slots_of(num_heads: int, num_kv_heads: int, tp: int) -> list[tuple[int, ...]]:
    return [kv_heads(num_heads, num_kv_heads, tp, rank) for rank in range(tp)]


@settings(max_examples=num_examples(150))
@given(splits())
def test_every_query_head_finds_its_kv_head_in_uniform_groups(split: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, tp = split
    seen: list[int] = []
    for rank, slots in enumerate(slots_of(*split)):
        heads = query_heads(num_heads, tp, rank)
        assert len(heads) % len(slots) == 0
        group = len(heads) // len(slots)
        for index, head in enumerate(heads):
            assert slots[index // group] == head // (num_heads // num_kv_heads)
        seen += heads
    assert seen == list(range(num_heads))


@settings(max_examples=num_examples(150))
@given(splits())
def test_slots_are_equally_many_on_every_rank_and_no_fewer_would_do(
    split: tuple[int, int, int],
) -> None:
    num_heads, num_kv_heads, tp = split
    (num_slots,) = {len(slots) for slots in slots_of(*split)}
    kv_of = [head // (num_heads // num_kv_heads) for head in range(num_heads)]
    for fewer in divisors(num_heads // tp):
        size = num_heads // tp // fewer
        uniform = all(
            len(set(kv_of[first : first + size])) == 1 for first in range(0, num_heads, size)
        )
        assert uniform == (fewer % num_slots == 0)


@settings(max_examples=num_examples(150))
@given(splits())
def test_heads_repeat_only_where_a_rank_straddles_groups_unevenly(
    split: tuple[int, int, int],
) -> None:
    num_heads, num_kv_heads, tp = split
    group, local = num_heads // num_kv_heads, num_heads // tp
    if local % group == 0 or group % local == 0:
        for rank, slots in enumerate(slots_of(*split)):
            assert list(slots) == sorted(
                {head // group for head in query_heads(num_heads, tp, rank)}
            )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp", "expected"),
    [
        (8, 2, 1, [(0, 1)]),
        (8, 4, 2, [(0, 1), (2, 3)]),
        (8, 2, 4, [(0,), (0,), (1,), (1,)]),
        (8, 1, 4, [(0,)] * 4),
        (9, 3, 3, [(0,), (1,), (2,)]),
        (12, 4, 6, [(0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3)]),
        (12, 4, 3, [(0, 0, 0, 1), (1, 1, 2, 2), (2, 3, 3, 3)]),
        (24, 4, 6, [(0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3)]),
    ],
)
def test_slots(num_heads: int, num_kv_heads: int, tp: int, expected: list[tuple[int, ...]]) -> None:
    assert slots_of(num_heads, num_kv_heads, tp) == expected


@given(st.integers(0, 200_000), st.integers(1, 64))
def test_parts_follow_one_another_and_differ_by_at_most_one(size: int, tp: int) -> None:
    parts = [part(size, tp, rank) for rank in range(tp)]
    assert [parts[0].start, *(each.stop for each in parts)] == [
        *(each.start for each in parts),
        size,
    ]
    lengths = {len(each) for each in parts}
    assert max(lengths) - min(lengths) <= (size % tp != 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((8, 2, 3, 0), "tp: 3 does not divide the model's 8 query heads"),
        ((8, 2, 16, 0), "tp: 16 does not divide the model's 8 query heads"),
        ((8, 2, 0, 0), "tp: 0 is less than 1"),
        ((8, 2, -2, 0), "tp: -2 is less than 1"),
        ((8, 3, 2, 0), "num_kv_heads: 3 does not divide the model's 8 query heads"),
        ((8, 0, 2, 0), "num_kv_heads: 0 does not divide the model's 8 query heads"),
        ((0, 1, 1, 0), "num_kv_heads: 1 does not divide the model's 0 query heads"),
        ((8, 2, 4, 4), "rank: 4 is not in 0 to 3"),
        ((8, 2, 4, -1), "rank: -1 is not in 0 to 3"),
    ],
)
def test_impossible_splits_are_refused(arguments: tuple[int, int, int, int], text: str) -> None:
    for refuse in (check_split, kv_heads):
        with pytest.raises(ValueError, match=f"^{text}$"):
            refuse(*arguments)


def test_query_heads_refuse_a_tp_that_does_not_divide_them() -> None:
    with pytest.raises(ValueError, match=r"^tp: 3 does not divide the model's 8 query heads$"):
        query_heads(8, 3, 0)
