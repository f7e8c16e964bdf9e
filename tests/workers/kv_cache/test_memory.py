"""Tests where the groups of tokens are in a rank's memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.memory import KvMemory, plan_memory
from tandem.workers.kv_cache.tables import table_of

NUM_BLOCKS = 3
layers = st.lists(
    st.builds(
        LayerGeometry,
        num_heads=st.just(4),
        num_kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([4, 8]),
        window=st.sampled_from([None, 5, 16]),
        value_dim=st.sampled_from([None, 4]),
    ),
    min_size=1,
    max_size=6,
)


def plan(layout: KvLayout, tp: int = 1, rank: int = 0) -> KvMemory:
    return plan_memory(layout, num_blocks=NUM_BLOCKS, block_size=2, tp=tp, rank=rank)


@given(layers, st.sampled_from([1, 2, 4]))
def test_each_row_has_bytes_of_its_own_in_its_block(parts: list[LayerGeometry], tp: int) -> None:
    layout = KvLayout(layers=tuple(parts), dtype="float32", model="m")
    memory = plan(layout, tp, tp - 1)
    places = np.arange(memory.num_bytes)
    # The block of each byte, by the parts of the memory.
    owners = np.concatenate(
        [
            np.broadcast_to(
                np.arange(NUM_BLOCKS)[None, :, None], (planes, NUM_BLOCKS, size)
            ).ravel()
            for planes, size in memory.parts
        ]
    )
    assert len(owners) == memory.num_bytes
    used: list[set[int]] = [set() for _ in memory.tables]
    for group, own in zip(layout.token_groups, memory.groups, strict=True):
        strides = tuple(8 * stride for stride in own.strides)
        rows = np.lib.stride_tricks.as_strided(places[own.offset :], own.shape, strides)
        for block in range(NUM_BLOCKS):
            assert (owners[rows[:, :, block]] == block).all()
        found = set(rows.ravel().tolist())
        assert len(found) == rows.size
        table = table_of(memory.tables, group)
        assert own.block_size == memory.tables[table].block_size
        assert found.isdisjoint(used[table])
        used[table] |= found
    assert max(map(len, used)) == memory.num_bytes


def test_memory_that_is_too_small_is_refused() -> None:
    layer = LayerGeometry(num_heads=1, num_kv_heads=1, head_dim=4)
    memory = plan(KvLayout(layers=(layer,), dtype="float32", model="m"))
    memory.check_fits(memory.num_bytes)
    with pytest.raises(ValueError, match="bytes are too few for 3 blocks of 64 bytes"):
        memory.check_fits(memory.num_bytes - 1)
