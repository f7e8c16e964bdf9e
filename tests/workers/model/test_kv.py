import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.workers.engine.plan import KvLayout
from tandem.workers.model.kv import PagedKv

LAYERS, HEADS, HEAD_DIM = 3, 2, 8


def store(*, block_size: int, num_blocks: int = 64, dtype: str = "bfloat16", seed: int | None = None) -> PagedKv:
    layout = KvLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype, model="m")
    kv = PagedKv(layout, num_blocks=num_blocks, block_size=block_size, device=torch.device("cpu"))
    if seed is not None:
        torch.manual_seed(seed)
        kv.data.view(torch.uint8).random_(0, 256)
    return kv


def canonical(kv: PagedKv, blocks: list[int], first: int, count: int, layer: int, layers: int) -> bytes:
    """The definition, token by token: [layers, 2, tokens, heads, head_dim]."""
    return b"".join(
        bytes(
            kv.data[index, part, blocks[token // kv.block_size], head, token % kv.block_size].view(torch.uint8).numpy()
        )
        for index in range(layer, layer + layers)
        for part in (0, 1)
        for token in range(first, first + count)
        for head in range(HEADS)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_read_is_canonical(dtype: str) -> None:
    kv = store(block_size=4, dtype=dtype, seed=1)
    blocks = random.Random(2).sample(range(64), 7)
    for first, count, layer, layers in ((0, 28, 0, 3), (3, 1, 1, 1), (3, 2, 0, 2), (5, 20, 2, 1), (27, 1, 0, 3)):
        data = kv.read(blocks, first, count, layer, layers)
        assert data.nbytes == layers * count * kv.layout.bytes_per_token_layer
        assert bytes(data) == canonical(kv, blocks, first, count, layer, layers)


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
            data = source.read(source_blocks, first, count, layer, layers)
            target.write(target_blocks, first, count, layer, layers, memoryview(bytes(data)))
    assert target.read(target_blocks, 0, 49, 0, LAYERS) == source.read(source_blocks, 0, 49, 0, LAYERS)
    written = {(target_blocks[token // target_block], token % target_block) for token in range(49)}
    for block in range(64):
        for offset in range(target_block):
            if (block, offset) not in written:
                same = target.data[:, :, block, :, offset].view(torch.int16) == before[:, :, block, :, offset].view(
                    torch.int16
                )
                assert same.all(), "a token that was not written has changed"


def test_read_copies() -> None:
    kv = store(block_size=4, seed=5)
    data = kv.read([1, 2], 0, 8, 0, LAYERS)
    kept = bytes(data)
    kv.data.zero_()
    assert bytes(data) == kept


@pytest.mark.parametrize(
    ("blocks", "first", "count", "layer", "layers"),
    [
        ([1, 2], -1, 2, 0, 1),
        ([1, 2], 0, 9, 0, 1),
        ([1, 2], 8, 1, 0, 1),
        ([1, 2], 0, 0, 0, 1),
        ([1, 2], 0, 1, -1, 1),
        ([1, 2], 0, 1, 0, 4),
        ([1, 2], 0, 1, 0, 0),
        ([1, 64], 0, 8, 0, 1),
        ([-1, 2], 0, 8, 0, 1),
        ([], 0, 1, 0, 1),
    ],
)
def test_out_of_range_is_refused(blocks: list[int], first: int, count: int, layer: int, layers: int) -> None:
    kv = store(block_size=4)
    with pytest.raises(ValueError, match="not within"):
        kv.read(blocks, first, count, layer, layers)
    size = max(0, layers * count) * kv.layout.bytes_per_token_layer
    with pytest.raises(ValueError, match="not within"):
        kv.write(blocks, first, count, layer, layers, memoryview(bytes(size)))


@pytest.mark.parametrize("extra", [-32, -1, 1, 32])
def test_wrong_length_is_refused_and_writes_nothing(extra: int) -> None:
    kv = store(block_size=4)
    size = 2 * 5 * kv.layout.bytes_per_token_layer
    with pytest.raises(ValueError, match="bytes"):
        kv.write([1, 2], 0, 5, 0, 2, memoryview(b"\x01" * (size + extra)))
    assert not kv.data.any()


def test_threads_on_different_blocks_do_not_disturb_each_other() -> None:
    source, target = store(block_size=16, num_blocks=256, seed=6), store(block_size=16, num_blocks=256)

    def copy(first: int) -> None:
        blocks = list(range(first, first + 16))
        for layer in range(LAYERS):
            target.write(blocks, 0, 256, layer, 1, source.read(blocks, 0, 256, layer, 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copy, range(0, 256, 16)))
    assert torch.equal(source.data.view(torch.int16), target.data.view(torch.int16))
