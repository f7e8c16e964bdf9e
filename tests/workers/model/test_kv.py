import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import Driver, load, prompt
from tandem.tests.workers.spans import as_table, read_now, span
from tandem.workers.kv_cache.layout import GPU_QUANTIZED, KvLayout, KvSpan, LayerGeometry
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.kv import allocate, host
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.model.runner import ModelRunner

LAYERS, HEADS, HEAD_DIM = 3, 2, 8


def store(
    *,
    block_size: int,
    num_blocks: int = 64,
    dtype: str = "bfloat16",
    seed: int | None = None,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    tp: int = 1,
    shared: bool = False,
) -> PagedKv:
    layout = KvLayout.uniform(
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        model="m",
    )
    cpu = torch.device("cpu")
    kv = PagedKv(
        layout, num_blocks=num_blocks, block_size=block_size, device=cpu, tp=tp, shared=shared
    )
    if seed is not None:
        torch.manual_seed(seed)
        kv.data.view(torch.uint8).random_(0, 256)
    return kv


async def check_kv_moves(source: ModelRunner, target: ModelRunner, whole: list[int]) -> None:
    """Moves the KV cache of a prompt layer by layer; `whole` is the continuation on one runner.

    As between workers, the first blocks of a layer with a window are not moved: their places in the
    block table are empty.
    """
    prefill, decode = Driver(source), Driver(target, seed=4)
    tokens = prefill.run(prefill.step(1, prompt(37), 0))
    step = decode.step(1, tokens, 37)
    for layer, part in prefill.needed_parts(37):
        data = await source.kv.read(prefill.table(1, layer), part)
        target.kv.write(decode.table(1, layer), part, data)
        assert await target.kv.read(decode.table(1, layer), part) == data
    tokens += decode.run(step)
    while len(tokens) < len(whole):
        tokens += decode.run(decode.step(1, tokens[-1:], 37 + len(tokens) - 1))
    assert tokens == whole
    prefill.drop(1)
    decode.drop(1)


@pytest.mark.parametrize("cache_dtype", ["auto", *GPU_QUANTIZED])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
async def test_kv_cache_moves_between_runners_unchanged(
    tmp_path: Path, family: str, cache_dtype: str
) -> None:
    """Without a window, with one in all layers, and with one in the first of two layers."""
    folder = make_tiny_model(tmp_path, family)
    large, small = (load(folder, block_size=size, cache_dtype=cache_dtype) for size in (16, 4))
    driver = Driver(large)
    whole = driver.generate(1, prompt(37), 10)
    driver.drop(1)
    for source, target in ((large, small), (small, large)):
        await check_kv_moves(source, target, whole)


def canonical(kv: PagedKv, blocks: list[int], span: KvSpan) -> bytes:
    """The definition, token by token: [layers, 2, tokens, slots, head_dim]."""
    return b"".join(
        bytes(
            kv.data[index, part, blocks[token // kv.block_size], slot, token % kv.block_size]
            .view(torch.uint8)
            .numpy()
        )
        for index in range(span.first_layer, span.first_layer + span.num_layers)
        for part in (0, 1)
        for token in range(span.first_token, span.first_token + span.num_tokens)
        for slot in range(span.first_slot, span.first_slot + span.num_slots)
    )


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How heads are copied: a machine without a compiler has the second."""
    if request.param == "numpy":
        monkeypatch.setattr(host, "library", lambda: None)


@pytest.mark.parametrize(
    ("heads", "tp", "slots"), [(2, 1, 2), (4, 1, 4), (4, 2, 2), (2, 4, 1), (1, 2, 1)]
)
def test_memory_is_for_the_slots_of_the_rank(heads: int, tp: int, slots: int) -> None:
    kv = store(block_size=4, heads=heads, tp=tp)
    assert (kv.num_slots(0), kv.tp, kv.rank) == (slots, tp, 0)
    assert kv.data.shape == (LAYERS, 2, 64, slots, 4, HEAD_DIM)


@pytest.mark.parametrize(("tp", "rank"), [(3, 0), (0, 0), (2, 2)])
def test_a_split_that_cannot_be_is_refused(tp: int, rank: int) -> None:
    layout = store(block_size=4).layout
    with pytest.raises(ValueError, match=r"tp|rank"):
        PagedKv(layout, num_blocks=4, block_size=4, device=torch.device("cpu"), tp=tp, rank=rank)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 8), ("bfloat16", 8), ("float16", 64), ("float32", 64)]
)
def test_read_is_canonical(dtype: str, head_dim: int) -> None:
    kv = store(block_size=4, dtype=dtype, seed=1, heads=4, head_dim=head_dim)
    blocks = random.Random(2).sample(range(64), 7)
    places = ((0, 28, 0, 3), (3, 1, 1, 1), (3, 2, 0, 2), (5, 20, 2, 1), (27, 1, 0, 3))
    for place, (slot, slots) in zip(places, ((0, 4), (3, 1), (0, 2), (1, 3), (1, 2)), strict=True):
        part = replace(span(kv, *place), first_slot=slot, num_slots=slots)
        data = read_now(kv, blocks, part)
        assert data.nbytes == part.size(kv.layout)
        assert bytes(data) == canonical(kv, blocks, part)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("source_block", "target_block"), [(16, 16), (16, 4), (5, 32), (1, 7)])
def test_round_trip_between_block_sizes(source_block: int, target_block: int) -> None:
    choose = random.Random(source_block)
    source, target = store(block_size=source_block, seed=3), store(block_size=target_block, seed=4)
    source_blocks = choose.sample(range(64), -(-50 // source_block))
    target_blocks = choose.sample(range(64), -(-50 // target_block))
    before = target.data.clone()
    # Out of order, in ragged pieces, by ranges of layers; the last token is left alone.
    pieces = [(first, min(13, 49 - first)) for first in range(0, 49, 13)]
    for first, count in choose.sample(pieces, len(pieces)):
        for layer, layers in ((2, 1), (0, 2)):
            part = span(source, first, count, layer, layers)
            target.write(
                as_table(target_blocks),
                part,
                memoryview(bytes(read_now(source, source_blocks, part))),
            )
    whole = span(source, 0, 49)
    assert read_now(target, target_blocks, whole) == read_now(source, source_blocks, whole)
    written = {(target_blocks[token // target_block], token % target_block) for token in range(49)}
    for block in range(64):
        for offset in range(target_block):
            if (block, offset) not in written:
                same = target.data[:, :, block, :, offset].view(torch.int16) == before[
                    :, :, block, :, offset
                ].view(torch.int16)
                assert same.all(), "a token that was not written has changed"


def test_slots_go_where_they_are_sent_and_nowhere_else() -> None:
    source, target = store(block_size=4, seed=7, heads=4), store(block_size=8, seed=8, heads=4)
    before = target.data.clone()
    part = span(source, 2, 9, 1, 2)
    data = read_now(source, [5, 0, 9], replace(part, first_slot=2, num_slots=2))
    target.write(as_table([3, 1]), replace(part, first_slot=1, num_slots=2), data)
    assert read_now(target, [3, 1], replace(part, first_slot=1, num_slots=2)) == data
    for index, block, slot, token in ((1, 3, 1, 2), (2, 1, 2, 2)):  # written; what is beside it not
        at = 2 if block == 3 else 10
        there = source.data[index, :, [5, 0, 9][at // 4], slot + 1, at % 4].view(torch.int16)
        assert target.data[index, :, block, slot, token].view(torch.int16).equal(there)
    changed = (target.data.view(torch.int16) != before.view(torch.int16)).any(
        -1
    )  # [layers, 2, blocks, slots, tokens]
    assert {int(slot) for slot in changed.nonzero()[:, 3]} == {1, 2}
    assert {int(layer) for layer in changed.nonzero()[:, 0]} == {1, 2}
    assert {int(block) for block in changed.nonzero()[:, 2]} == {1, 3}


@pytest.mark.usefixtures("way")
def test_a_table_without_its_first_blocks_has_the_same_positions() -> None:
    kv, target = store(block_size=4, seed=1), store(block_size=4)
    whole, tail = as_table((9, 3, 7, 5)), TableBlocks((7, 5), first=2)
    assert tail.tokens(4) == range(8, 16)
    for first, count in ((8, 8), (9, 3), (11, 2), (15, 1)):
        part = span(kv, first, count)
        data = read_now(kv, whole, part)
        assert read_now(kv, tail, part) == data
        target.write(TableBlocks((1, 2), first=2), part, data)
        assert read_now(target, (63, 63, 1, 2), part) == data
    for part in (span(kv, 7, 1), span(kv, 7, 2), span(kv, 15, 2)):
        with pytest.raises(ValueError, match="not within"):
            read_now(kv, tail, part)


def test_read_copies() -> None:
    kv = store(block_size=4, seed=5)
    data = read_now(kv, [1, 2], span(kv, 0, 8))
    kept = bytes(data)
    kv.data.zero_()
    assert bytes(data) == kept


@pytest.mark.parametrize(
    ("blocks", "change"),
    [
        ([1, 2], {"first_token": -1}),
        ([1, 2], {"num_tokens": 9}),
        ([1, 2], {"first_token": 8, "num_tokens": 1}),
        ([1, 2], {"num_tokens": 0}),
        ([1, 2], {"first_layer": -1}),
        ([1, 2], {"num_layers": 4}),
        ([1, 2], {"num_layers": 0}),
        ([1, 2], {"first_slot": -1}),
        ([1, 2], {"first_slot": 2}),
        ([1, 2], {"first_slot": 1, "num_slots": 2}),
        ([1, 2], {"num_slots": 3}),
        ([1, 2], {"num_slots": 0}),
        ([1, 64], {"num_tokens": 8}),
        ([-1, 2], {"num_tokens": 8}),
        ([], {}),
    ],
)
def test_out_of_range_is_refused(blocks: list[int], change: dict[str, int]) -> None:
    kv = store(block_size=4)
    part = replace(
        KvSpan(first_layer=0, num_layers=1, first_token=0, num_tokens=1, first_slot=0, num_slots=1),
        **change,
    )
    with pytest.raises(ValueError, match="not within"):
        read_now(kv, blocks, part)
    with pytest.raises(ValueError, match="not within"):
        kv.write(as_table(blocks), part, memoryview(bytes(max(0, part.size(kv.layout)))))


@pytest.mark.parametrize("extra", [-32, -1, 1, 32])
def test_wrong_length_is_refused_and_writes_nothing(extra: int) -> None:
    kv = store(block_size=4)
    part = span(kv, 0, 5, 0, 2)
    with pytest.raises(ValueError, match="bytes"):
        kv.write(as_table([1, 2]), part, memoryview(b"\x01" * (part.size(kv.layout) + extra)))
    assert not kv.data.any()


def test_threads_on_different_blocks_do_not_disturb_each_other() -> None:
    source, target = (
        store(block_size=16, num_blocks=256, seed=6),
        store(block_size=16, num_blocks=256),
    )

    def copy(first: int) -> None:
        blocks = list(range(first, first + 16))
        for layer in range(LAYERS):
            part = span(source, 0, 256, layer, 1)
            target.write(as_table(blocks), part, read_now(source, blocks, part))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copy, range(0, 256, 16)))
    assert torch.equal(source.data.view(torch.int16), target.data.view(torch.int16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copied_blocks_are_whole_and_others_stay(dtype: str) -> None:
    kv = store(block_size=4, dtype=dtype, seed=3)
    before = kv.data.view(torch.uint8).clone()  # of noise, which as numbers may be NaN
    pairs = ((5, 9), (5, 0), (63, 30), (7, 62))
    with torch.inference_mode():
        kv.copy(pairs)
    after = kv.data.view(torch.uint8)
    sources = {target: source for source, target in pairs}
    for block in range(64):
        assert torch.equal(after[:, :, block], before[:, :, sources.get(block, block)])


WIDE = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=8)
MIXED = (
    WIDE,
    replace(WIDE, num_kv_heads=1, head_dim=16),
    WIDE,
    replace(WIDE, num_kv_heads=4, head_dim=4),
)


def mixed(seed: int) -> PagedKv:
    """A model whose layers differ in their KV heads."""
    layout = KvLayout(layers=MIXED, dtype="bfloat16", model="m")
    kv = PagedKv(layout, num_blocks=8, block_size=4, device=torch.device("cpu"))
    for tensor in kv.tensors:
        tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return kv


def test_each_layer_has_its_own_shape() -> None:
    kv = mixed(1)
    assert [group.layers for group in kv.layout.groups] == [(0, 2), (1,), (3,)]
    assert kv.layout.places == ((0, 0), (1, 0), (0, 1), (2, 0))
    for layer, (slots, size) in enumerate(((2, 8), (1, 16), (2, 8), (4, 4))):
        assert kv.num_slots(kv.layout.place(layer)[0]) == slots
        assert {part.shape for part in kv.layers[layer]} == {(8, slots, 4, size)}
    assert kv.layers[2][1].data_ptr() == kv.tensors[0][1, 1].data_ptr()
    with pytest.raises(ValueError, match="unpack"):  # there is no one tensor
        _ = kv.data
    assert (kv.device, kv.dtype) == (torch.device("cpu"), torch.bfloat16)


@pytest.mark.usefixtures("way")
def test_unequal_layers_are_read_and_written_where_they_are() -> None:
    source, target = mixed(1), mixed(2)
    blocks, into = (5, 0, 3), (1, 7, 2)
    before = [tensor.clone() for tensor in target.tensors]
    for layer in range(4):
        part = span(source, 2, 9, layer, 1)
        target.write(as_table(into), part, read_now(source, blocks, part))
        assert bytes(read_now(target, into, part)) == bytes(read_now(source, blocks, part))
        for kind in (0, 1):
            for token in range(2, 11):
                there = source.layers[layer][kind][blocks[token // 4], :, token % 4].view(
                    torch.int16
                )
                assert (
                    target.layers[layer][kind][into[token // 4], :, token % 4]
                    .view(torch.int16)
                    .equal(there)
                )
    for tensor, old in zip(target.tensors, before, strict=True):
        others = [block for block in range(8) if block not in into]
        assert tensor[:, :, others].view(torch.int16).equal(old[:, :, others].view(torch.int16))


def test_copies_concern_all_layers() -> None:
    kv = mixed(3)
    before = [tensor.view(torch.int16).clone() for tensor in kv.tensors]
    kv.copy([(1, 6), (2, 4)])
    for tensor, old in zip(kv.tensors, before, strict=True):
        now = tensor.view(torch.int16)
        for block, source in ((6, 1), (4, 2), (0, 0), (7, 7)):
            assert now[:, :, block].equal(old[:, :, source])


@pytest.mark.parametrize("shared", [False, True])
def test_what_does_not_fit_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    size = store(block_size=4).data.nbytes
    monkeypatch.setattr(allocate, "available_memory", lambda: size)
    assert not store(block_size=4, shared=shared).data.any()
    monkeypatch.setattr(allocate, "available_memory", lambda: size - 1)
    with pytest.raises(
        ValueError, match=r"kv_cache_gb: .* GiB do not fit into the .* GiB that are available"
    ):
        store(block_size=4, shared=shared)


def test_shared_memory_is_taken_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = store(block_size=16, num_blocks=1024, shared=True)
    assert kv.shared_fd is not None
    assert os.fstat(kv.shared_fd).st_blocks * 512 >= kv.data.nbytes

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ValueError, match="kv_cache_gb"):
        store(block_size=16, shared=True)
