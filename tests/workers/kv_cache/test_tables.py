"""Tests the plan of block tables."""

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.store import slots_of
from tandem.workers.kv_cache.tables import (
    MAX_RATIO,
    TableSpec,
    alignment,
    block_bytes,
    plan_tables,
    table_of,
)


def layout(*runs: tuple[int, int | None, int]) -> KvLayout:
    """Returns a layout with runs of (number of layers, window, KV heads)."""
    layers = tuple(
        LayerGeometry(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=64, window=window)
        for num_layers, window, num_kv_heads in runs
        for _ in range(num_layers)
    )
    return KvLayout(layers=layers, dtype="bfloat16", model="m")


@pytest.mark.parametrize(
    ("runs", "block_sizes"),
    [
        pytest.param([(28, None, 2)], {None: 16}, id="dense"),
        pytest.param([(5, None, 4), (29, 1024, 4)], {None: 96, 1024: 16}, id="Gemma 3 4B"),
        pytest.param([(10, None, 16), (52, 1024, 16)], {None: 80, 1024: 16}, id="Gemma 3 27B"),
        pytest.param([(12, None, 8), (12, 128, 8)], {None: 16, 128: 16}, id="gpt-oss"),
        pytest.param([(32, 4096, 8)], {4096: 16}, id="Mistral 7B v0.1"),
        pytest.param([(1, None, 1), (40, 512, 1)], {None: 128, 512: 16}, id="at most 8"),
    ],
)
def test_known_models(
    runs: list[tuple[int, int | None, int]], block_sizes: dict[int | None, int]
) -> None:
    tables = plan_tables(layout(*runs), 16)
    assert {table.window: table.block_size for table in tables} == block_sizes
    assert [table.window for table in tables] == list(block_sizes)


def test_the_waste_of_gemma_is_as_designed() -> None:
    gemma = layout((5, None, 4), (29, 1024, 4))
    tables = plan_tables(gemma, 16)
    size = block_bytes(gemma, tables, slots_of(gemma, 1, 0))
    token_bytes = 4 * 2 * 128  # of a layer
    assert size == 96 * 5 * token_bytes
    assert 16 * 29 * token_bytes > 0.96 * size


windows = st.sampled_from([None, 64, 512, 4096])
runs = st.lists(
    st.tuples(st.integers(1, 40), windows, st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=5
)


@given(runs, st.sampled_from([8, 16, 32]))
def test_blocks_hold_what_their_tables_need(
    runs: list[tuple[int, int | None, int]], block_size: int
) -> None:
    model = layout(*runs)
    tables = plan_tables(model, block_size)
    assert {table.window for table in tables} == {window for _, window, _ in runs}
    assert min(table.block_size for table in tables) == block_size
    assert max(table.block_size for table in tables) <= MAX_RATIO * block_size
    assert all(alignment(tables) % table.block_size == 0 for table in tables)
    assert alignment(tables) == lcm(*{table.block_size for table in tables})
    size = block_bytes(model, tables, slots_of(model, 1, 0))
    token_bytes = dict.fromkeys(range(len(tables)), 0)
    for group in model.groups:
        part = group.part
        token_bytes[table_of(tables, group)] += (
            len(group.layers) * part.num_kv_heads * part.slot_bytes
        )
    for number, table in enumerate(tables):
        used = table.block_size * token_bytes[number]
        assert used <= size
        # Rounding leaves out half a base block of this table, and adds half of another's.
        if table.block_size < MAX_RATIO * block_size:
            most = max(token_bytes.values())
            assert size - used <= block_size * (token_bytes[number] + most) / 2


def test_a_model_with_one_table_keeps_its_block_size() -> None:
    assert plan_tables(layout((3, None, 2)), 16) == (TableSpec(block_size=16),)
