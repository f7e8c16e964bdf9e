"""Which KV slots go from which rank to which, for every pair of tensor-parallel degrees."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.tests.examples import num_examples
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.reshard import Piece, plan, plan_layout
from tandem.workers.kv_cache.sharding import kv_heads

P2pGroup = tuple[int, int, int, int]  # num_heads, num_kv_heads, source_tp, target_tp


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def pairs(draw: st.DrawFn) -> P2pGroup:
    num_heads = draw(st.integers(1, 64))
    num_kv_heads, source_tp, target_tp = (
        draw(st.sampled_from(divisors(num_heads))) for _ in range(3)
    )
    return num_heads, num_kv_heads, source_tp, target_tp


def plans(pair: P2pGroup) -> list[tuple[Piece, ...]]:
    return [plan(*pair, rank) for rank in range(pair[3])]


def slots_of(num_heads: int, num_kv_heads: int, tp: int) -> list[tuple[int, ...]]:
    return [kv_heads(num_heads, num_kv_heads, tp, rank) for rank in range(tp)]


@settings(max_examples=num_examples(120))
@given(pairs())
def test_every_slot_is_filled_once_and_with_the_right_head(pair: P2pGroup) -> None:
    num_heads, num_kv_heads, source_tp, target_tp = pair
    caches = [
        np.array(slots) for slots in slots_of(num_heads, num_kv_heads, source_tp)
    ]  # [slots] of head labels
    needed = slots_of(num_heads, num_kv_heads, target_tp)
    for pieces, heads in zip(plans(pair), needed, strict=True):
        cache, num_writes = np.full(len(heads), -1), np.zeros(len(heads), int)
        for piece in pieces:
            assert len(piece.source_slots) == len(piece.target_slots) > 0
            cache[piece.target_slots] = caches[piece.source_rank][piece.source_slots]
            num_writes[piece.target_slots] += 1
        assert num_writes.tolist() == [1] * len(heads)
        assert cache.tolist() == list(heads)


@settings(max_examples=num_examples(80))
@given(pairs())
def test_no_plan_has_fewer_pieces(pair: P2pGroup) -> None:
    num_heads, num_kv_heads, source_tp, target_tp = pair
    runs = {
        slots[first:stop]
        for slots in slots_of(num_heads, num_kv_heads, source_tp)
        for stop in range(len(slots) + 1)
        for first in range(stop)
    }
    for pieces, heads in zip(
        plans(pair), slots_of(num_heads, num_kv_heads, target_tp), strict=True
    ):
        fewest = [0]  # pieces that fill the first 0, 1, ... slots
        for stop in range(1, len(heads) + 1):
            fewest.append(
                1 + min(fewest[first] for first in range(stop) if heads[first:stop] in runs)
            )
        assert len(pieces) == fewest[-1]


@settings(max_examples=num_examples(60))
@given(pairs())
def test_between_equal_degrees_each_rank_reads_everything_from_its_like(pair: P2pGroup) -> None:
    num_heads, num_kv_heads, tp, _ = pair
    for rank, pieces in enumerate(plans((num_heads, num_kv_heads, tp, tp))):
        every = range(len(kv_heads(num_heads, num_kv_heads, tp, rank)))
        assert pieces == (Piece(source_rank=rank, source_slots=every, target_slots=every),)


@settings(max_examples=num_examples(120))
@given(pairs())
def test_targets_spread_evenly_over_the_replicas_of_each_head(pair: P2pGroup) -> None:
    num_heads, num_kv_heads, source_tp, target_tp = pair
    group = num_heads // num_kv_heads
    sources, targets = (
        slots_of(num_heads, num_kv_heads, source_tp),
        slots_of(num_heads, num_kv_heads, target_tp),
    )
    # Elsewhere which rank holds a run of heads decides.
    assume(
        not any(
            (num_heads // tp) % group and group % (num_heads // tp) for tp in (source_tp, target_tp)
        )
    )
    planned = plans(pair)
    for head in range(num_kv_heads):
        readers_of = [0] * source_tp
        for pieces in planned:
            for piece in pieces:
                readers_of[piece.source_rank] += (
                    head in sources[piece.source_rank][slice_of(piece.source_slots)]
                )
        wanting = sum(head in slots for slots in targets)
        replicas = sum(head in slots for slots in sources)
        assert sum(readers_of) == wanting
        assert max(readers_of) <= ceil(wanting / replicas)


def slice_of(slots: range) -> slice:
    return slice(slots.start, slots.stop)


def piece(source_rank: int, source_slots: range, target_slots: range) -> Piece:
    return Piece(source_rank=source_rank, source_slots=source_slots, target_slots=target_slots)


FIRST, SECOND, BOTH = range(1), range(1, 2), range(2)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ((8, 2, 4, 1), [[piece(0, FIRST, FIRST), piece(2, FIRST, SECOND)]]),
        (
            (8, 2, 1, 4),
            [
                [piece(0, FIRST, FIRST)],
                [piece(0, FIRST, FIRST)],
                [piece(0, SECOND, FIRST)],
                [piece(0, SECOND, FIRST)],
            ],
        ),
        (
            (9, 3, 3, 1),
            [[piece(0, FIRST, FIRST), piece(1, FIRST, SECOND), piece(2, FIRST, range(2, 3))]],
        ),
        ((8, 1, 2, 4), [[piece(rank, FIRST, FIRST)] for rank in (0, 0, 1, 1)]),
        ((8, 1, 4, 2), [[piece(rank, FIRST, FIRST)] for rank in (0, 2)]),
        ((8, 8, 2, 1), [[piece(0, range(4), range(4)), piece(1, range(4), range(4, 8))]]),
        # (0, 0) (0, 1) (1, 1) (2, 2) (2, 3) (3, 3) to (0, 1, 2, 3): the ranks that hold two of them
        ((12, 4, 6, 1), [[piece(1, BOTH, BOTH), piece(4, BOTH, range(2, 4))]]),
        # (0, 1) (2, 3) to the same six: a repeated head is read again, from the same rank
        (
            (12, 4, 2, 6),
            [
                [piece(0, FIRST, FIRST), piece(0, FIRST, SECOND)],
                [piece(0, BOTH, BOTH)],
                [piece(0, SECOND, FIRST), piece(0, SECOND, SECOND)],
                [piece(1, FIRST, FIRST), piece(1, FIRST, SECOND)],
                [piece(1, BOTH, BOTH)],
                [piece(1, SECOND, FIRST), piece(1, SECOND, SECOND)],
            ],
        ),
    ],
)
def test_examples(pair: P2pGroup, expected: list[list[Piece]]) -> None:
    assert [list(pieces) for pieces in plans(pair)] == expected


def test_a_repeated_head_comes_from_one_rank() -> None:
    # (0) (0) (1) (1) to (0, 0) (0, 1) (1, 1): the last rank's query heads lie on source ranks 2 and
    # 3
    assert [[each.source_rank for each in pieces] for pieces in plans((12, 2, 4, 3))] == [
        [0, 0],
        [1, 2],
        [2, 2],
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((8, 2, 3, 1, 0), "tp: 3 does not divide the model's 8 query heads"),
        ((8, 2, 1, 5, 0), "tp: 5 does not divide the model's 8 query heads"),
        ((8, 2, 0, 1, 0), "tp: 0 is less than 1"),
        ((8, 2, 1, 0, 0), "tp: 0 is less than 1"),
        ((8, 3, 1, 1, 0), "num_kv_heads: 3 does not divide the model's 8 query heads"),
        ((8, 2, 4, 4, 4), "rank: 4 is not in 0 to 3"),
    ],
)
def test_impossible_pairs_are_refused(arguments: tuple[int, int, int, int, int], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        plan(*arguments)


WIDE = LayerGeometry(num_heads=8, num_kv_heads=2, head_dim=64)
NARROW = LayerGeometry(num_heads=8, num_kv_heads=1, head_dim=128)
MIXED = KvLayout(
    layers=(WIDE, NARROW, replace(WIDE, window=8), NARROW), dtype="bfloat16", model="m"
)


def slot_bytes(layout: KvLayout) -> list[int]:
    return [group.part.slot_bytes for group in layout.groups]


def test_layers_with_equal_shapes_and_windows_form_a_group() -> None:
    assert [group.layers for group in MIXED.groups] == [(0,), (1, 3), (2,)]
    assert MIXED.places == ((0, 0), (1, 0), (2, 0), (1, 1))
    assert slot_bytes(MIXED) == [256, 512, 256]
    assert MIXED.bytes_per_token == 4 * 512
    rounded = replace(MIXED, cache_dtype="int8")  # two bytes more for each scale
    assert slot_bytes(rounded) == [132, 260, 132]
    assert rounded.bytes_per_token == 2 * (2 * 132 + 260)
    halved = replace(MIXED, cache_dtype="int4")  # four bytes more for each 32 numbers
    assert slot_bytes(halved) == [80, 160, 80]


def test_a_digest_is_of_everything() -> None:
    same = KvLayout(layers=MIXED.layers, dtype="bfloat16", model="m")
    assert (same, same.digest) == (MIXED, MIXED.digest)
    others = [
        replace(MIXED, model="n"),
        replace(MIXED, dtype="float16"),
        replace(MIXED, cache_dtype="int8"),
        replace(MIXED, dtype="float16", cache_dtype="int8"),
        replace(MIXED, cache_dtype="fp8"),
        replace(MIXED, cache_dtype="int4"),
        replace(MIXED, layers=MIXED.layers[:-1]),
        replace(MIXED, layers=(WIDE, NARROW, WIDE, NARROW)),
    ]
    assert len({layout.digest for layout in [MIXED, *others]}) == 9


def test_each_group_has_its_own_pieces() -> None:
    assert plan_layout(MIXED, 2, 1, 0) == (
        piece(0, FIRST, FIRST),
        piece(1, FIRST, SECOND),
        replace(piece(0, FIRST, FIRST), group=1),
        replace(piece(0, FIRST, FIRST), group=2),
        replace(piece(1, FIRST, SECOND), group=2),
    )
    with pytest.raises(ValueError, match="tp: 3 does not divide"):
        plan_layout(MIXED, 3, 1, 0)
