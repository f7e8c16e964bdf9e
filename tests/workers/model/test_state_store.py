"""Tests the memory of states: its views for kernels, and its canonical form."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.tests.workers.spans import read_now
from tandem.tests.workers.spans import span as token_span
from tandem.workers.kv_cache.layout import KvLayout, KvSpan, LayerGeometry, StatePart
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv.states import StateStore
from tandem.workers.model.kv.store import PagedKv

ATTENTION = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=8)
MIXER = LayerGeometry(
    num_heads=4,
    num_kv_heads=0,
    head_dim=0,
    states=(
        StatePart(name="matrix", num_heads=4, num_kv_heads=4, row=6),
        StatePart(name="conv", num_heads=4, num_kv_heads=2, planes=2, row=5, dtype="bfloat16"),
    ),
)
LAYOUT = KvLayout(layers=(MIXER, ATTENTION, MIXER), dtype="bfloat16", model="m")
GROUPS = {group.part.state: number for number, group in enumerate(LAYOUT.groups)}


def span(part: str, heads: range, layers: range = range(2)) -> KvSpan:
    return KvSpan(
        group=GROUPS[part],
        first_layer=layers.start,
        num_layers=len(layers),
        first_token=0,
        num_tokens=1,
        first_slot=heads.start,
        num_slots=len(heads),
    )


def test_the_canonical_form_is_of_layers_planes_heads_and_rows() -> None:
    store = StateStore(LAYOUT, num_slots=3)
    store.slots.random_(0, 256, generator=torch.Generator().manual_seed(1))
    for part, dtype, heads in (("matrix", torch.float32, 4), ("conv", torch.bfloat16, 2)):
        expected = torch.stack([store.memory(layer, part)[2] for layer in (0, 2)])
        assert (expected.dtype, expected.shape[2]) == (dtype, heads)
        data = store.read(TableBlocks((2,)), span(part, range(heads)))
        assert bytes(data) == expected.contiguous().view(torch.uint8).numpy().tobytes()
        assert data.nbytes == span(part, range(heads)).size(LAYOUT)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_heads_move_between_any_two_splits(source_tp: int, target_tp: int) -> None:
    whole = StateStore(LAYOUT, num_slots=2)
    whole.slots.random_(0, 256, generator=torch.Generator().manual_seed(2))

    def fill(source: StateStore, slot: int, tp: int) -> list[StateStore]:
        """The ranks' stores with their heads of a whole state."""
        stores = []
        for rank in range(tp):
            store = StateStore(LAYOUT, num_slots=3, tp=tp, rank=rank)
            for part, num_heads in (("matrix", 4), ("conv", 2)):
                count = max(1, num_heads // tp)
                first = rank * num_heads // tp
                data = source.read(TableBlocks((slot,)), span(part, range(first, first + count)))
                store.write(TableBlocks((1,)), span(part, range(count)), data)
            stores.append(store)
        return stores

    ranks = fill(whole, 1, source_tp)
    joined = StateStore(LAYOUT, num_slots=1)
    for rank, store in enumerate(ranks):
        for part, num_heads in (("matrix", 4), ("conv", 2)):
            count = max(1, num_heads // source_tp)
            first = rank * num_heads // source_tp
            data = store.read(TableBlocks((1,)), span(part, range(count)))
            joined.write(TableBlocks((0,)), span(part, range(first, first + count)), data)
    for ours, theirs in zip(fill(joined, 0, target_tp), fill(whole, 1, target_tp), strict=True):
        assert torch.equal(ours.slots, theirs.slots)
        assert not ours.slots[[0, 2]].any()


def test_what_is_out_of_range_is_refused() -> None:
    store = StateStore(LAYOUT, num_slots=3)
    good = span("matrix", range(4))
    data = memoryview(bytes(good.size(LAYOUT)))
    for slot, part in (
        (3, good),
        (-1, good),
        (0, replace(good, first_token=1)),
        (0, replace(good, num_tokens=2)),
        (0, replace(good, num_slots=5)),
        (0, replace(good, num_layers=3)),
        (0, replace(good, group=len(LAYOUT.groups))),
    ):
        with pytest.raises(ValueError, match="not within"):
            store.read(TableBlocks((slot,)), part)
        with pytest.raises(ValueError, match="not within"):
            store.write(TableBlocks((slot,)), part, data)
    with pytest.raises(ValueError, match="not one of states"):
        store.read(TableBlocks((0,)), replace(good, group=0, num_layers=1, num_slots=2))
    with pytest.raises(ValueError, match="bytes"):
        store.write(TableBlocks((0,)), good, data[1:])
    assert not store.slots.any()


def test_slots_are_copied_whole() -> None:
    store, host = StateStore(LAYOUT, num_slots=3), StateStore(LAYOUT, num_slots=2)
    store.slots.random_(0, 256, generator=torch.Generator().manual_seed(3))
    before = store.slots.clone()
    host.copy([(2, 0), (1, 1)], store)
    store.copy([(0, 0)], host)
    assert np.array_equal(store.slots[0], before[2])
    assert np.array_equal(store.slots[1:], before[1:])


def test_a_cache_has_blocks_and_states() -> None:
    kv = PagedKv(LAYOUT, num_blocks=4, block_size=4, device=torch.device("cpu"), num_states=3)
    assert kv.states is not None
    kv.states.slots.random_(0, 256, generator=torch.Generator().manual_seed(4))
    conv = span("conv", range(kv.num_slots(GROUPS["conv"])))
    data = read_now(kv, (2,), conv)
    assert data == kv.states.read(TableBlocks((2,)), conv)
    kv.write(TableBlocks((0,)), conv, data)
    assert read_now(kv, (0,), conv) == data
    assert not kv.memory.any()
    keys = token_span(kv, 0, 3, 1)
    kv.write(TableBlocks((1, 3)), keys, memoryview(bytes([1]) * keys.size(LAYOUT)))
    assert kv.memory.count_nonzero() == keys.size(LAYOUT)


def test_a_cache_without_states_refuses_their_spans() -> None:
    kv = PagedKv(LAYOUT, num_blocks=4, block_size=4, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="group"):
        read_now(kv, (0,), span("conv", range(2)))


def test_a_cache_without_attention_has_states_alone() -> None:
    """Its blocks have no bytes, and its memory can be mapped all the same."""
    layout = KvLayout(layers=(MIXER, MIXER), dtype="bfloat16", model="m")
    device = torch.device("cpu")
    kv = PagedKv(layout, num_blocks=4, block_size=4, device=device, num_states=3, shared=True)
    assert (kv.block_bytes, kv.parts, kv.layers) == (0, (), [(), ()])
    assert [table.block_size for table in kv.tables] == [4]
    kv.copy([(0, 1)])
    assert kv.states is not None
    assert kv.states.num_slots == 3


@pytest.mark.parametrize("setting", ["kv_cache_gb", "kv_host_gb"])
def test_states_that_do_not_fit_into_memory_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"^{setting}: .* GiB do not fit into the .* available$"):
        StateStore(LAYOUT, num_slots=1 << 40, setting=setting)
