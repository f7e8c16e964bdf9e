"""The Triton kernels against float64 on a GPU or, where there is none, in Triton's interpreter."""

import ast
import itertools
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tandem.tests.paths import ROOT
from tandem.tests.workers.model.helpers import multiply_row_by_row
from tandem.workers.model.kernels.triton import decode as gpu_decode
from tandem.workers.model.kernels.triton import elementwise as gpu
from tandem.workers.model.kernels.triton import linear as gpu_linear
from tandem.workers.model.kernels.triton.attention import Scoring
from tandem.workers.model.kernels.triton.chunk import ChunkWork, chunk_attention, tile_tokens
from tandem.workers.model.kernels.triton.decode import (
    SPLIT_TOKENS,
    DecodeWork,
    decode_attention,
    num_splits,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    num_heads: int
    kv_heads: int
    head_dim: int
    # Of latent attention: the elements of a row that are also its value.
    value_dim: int | None = None
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def result_dim(self) -> int:
        return self.value_dim or self.head_dim


class Cache:
    """A layer's cache that is NaN but where a sequence sees it, and its block tables."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        size = (2, 512, shape.kv_heads, shape.block_size, shape.head_dim)
        planes = torch.full(size, torch.nan, dtype=shape.dtype, device=DEVICE)
        self.keys, self.values = planes
        if shape.value_dim is not None:
            self.values = self.keys[..., : shape.value_dim]
        sinks = 2 * torch.randn(shape.num_heads, device=DEVICE) if shape.has_sinks else None
        scale = shape.head_dim**-0.5 * (1.0 if not shape.soft_cap else 3.0)
        self.scoring = Scoring(
            window=shape.window, scale=scale, soft_cap=shape.soft_cap, sinks=sinks
        )
        self.tables: list[int] = []
        self._free = torch.randperm(512).tolist()

    def add(self, first_token: int, end: int) -> int:
        """Stores random keys and values for the tokens that are seen; returns the offset of the
        block table.
        """
        offset, size = len(self.tables), self.shape.block_size
        self.tables += [self._free.pop() for _ in range(-(-end // size))]
        seen = torch.arange(max(0, first_token), end)
        blocks = torch.tensor(self.tables[offset:])[seen // size]
        for part in (self.keys,) if self.shape.value_dim else (self.keys, self.values):
            random = torch.randn(len(seen), self.shape.kv_heads, self.shape.head_dim)
            part[blocks, :, seen % size] = random.to(part)
        return offset

    def expected(self, query: torch.Tensor, position: int, offset: int) -> torch.Tensor:
        """One token's [num_heads, result_dim] in float64."""
        shape = self.shape
        seen = torch.arange(
            max(0, position + 1 - shape.window) if shape.window else 0, position + 1
        )
        blocks = torch.tensor(self.tables[offset:])[seen // shape.block_size]
        keys, values = (
            part[blocks, :, seen % shape.block_size].double() for part in (self.keys, self.values)
        )
        heads = query.double().view(shape.kv_heads, -1, shape.head_dim)
        scores = torch.einsum("kgd,nkd->kgn", heads, keys) * self.scoring.scale
        if shape.soft_cap:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        if self.scoring.sinks is not None:
            sinks = self.scoring.sinks.double().view(shape.kv_heads, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[:, :, : len(seen)]
        return torch.einsum("kgn,nkd->kgd", weights, values).reshape(
            shape.num_heads, shape.result_dim
        )


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def fused_query(rows: int, shape: Shape) -> torch.Tensor:
    """[rows, num_heads, head_dim], the first part of a row as the decoder has it."""
    fused = torch.randn(rows, shape.num_heads + 2 * shape.kv_heads, shape.head_dim).to(
        DEVICE, shape.dtype
    )
    return fused[:, : shape.num_heads]


def decode_work(
    rows: list[int], last_keys: list[int], offsets: list[int], tables: list[int]
) -> DecodeWork:
    """As the planner builds it, with room for more items: those are of no sequence."""
    counts = [
        num_splits(last) if row >= 0 else 0 for row, last in zip(rows, last_keys, strict=True)
    ]
    items = [(sequence, split) for sequence, count in enumerate(counts) for split in range(count)]
    unused = [-1] * 3
    return DecodeWork(
        rows=ints(rows),
        last_keys=ints(last_keys),
        offsets=ints(offsets),
        first_items=ints([0, *itertools.accumulate(counts)][:-1]),
        item_sequences=ints([sequence for sequence, _ in items] + unused),
        item_splits=ints([split for _, split in items] + unused),
        num_items=ints([len(items)]),
        tables=ints(tables),
    )


def decode(cache: Cache, query: torch.Tensor, work: DecodeWork, num_programs: int) -> torch.Tensor:
    """[num_tokens, num_heads, result_dim]; NaN where nothing is written."""
    shape = cache.shape
    size = (len(work.item_splits), shape.num_heads, shape.result_dim + 2)
    partial = torch.full(size, torch.nan, device=DEVICE)
    out = query.new_full((len(query), shape.num_heads * shape.result_dim), torch.nan)
    decode_attention(
        query, cache.keys, cache.values, work, cache.scoring, partial, out, num_programs
    )
    return out.view(*query.shape[:2], -1)


def check_decode(shape: Shape, lengths: list[int], num_programs: int = 2) -> None:
    """Sequences of these lengths, their rows in reverse, one row of padding in the midst of
    them.
    """
    torch.manual_seed(0)
    cache = Cache(shape)
    last_keys = [length - 1 for length in lengths]
    offsets = [
        cache.add(length - shape.window if shape.window else 0, length) for length in lengths
    ]
    query = fused_query(len(lengths) + 1, shape)
    rows = list(range(len(lengths), 0, -1))
    padded = [[*values[:1], -1, *values[1:]] for values in (rows, last_keys, offsets)]
    work = decode_work(padded[0], padded[1], padded[2], cache.tables)
    result = decode(cache, query, work, num_programs)
    assert result[0].isnan().all(), "no sequence's row is not written"
    for row, position, offset in zip(rows, last_keys, offsets, strict=True):
        close(result[row], cache.expected(query[row], position, offset))


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the roundings of the dtype, relative to the greatest number."""
    assert ours.shape == expected.shape
    error = (ours.double() - expected.double()).abs().max()  # NaN if any is
    assert error <= TOLERANCE[ours.dtype] * max(1.0, expected.abs().max().item())


WIDE = [
    # Latent attention: more heads than a program computes, and sizes that are no power of two.
    Shape(num_heads=20, kv_heads=1, head_dim=576, value_dim=512, dtype=torch.bfloat16),
    Shape(num_heads=3, kv_heads=1, head_dim=44, value_dim=30, block_size=4),
    Shape(num_heads=70, kv_heads=1, head_dim=160, value_dim=144),
    Shape(num_heads=6, kv_heads=2, head_dim=512, dtype=torch.bfloat16, soft_cap=2.0),
]
SHAPES = [
    Shape(num_heads=9, kv_heads=3, head_dim=64),
    Shape(num_heads=2, kv_heads=2, head_dim=16, block_size=4),
    Shape(num_heads=9, kv_heads=1, head_dim=80, dtype=torch.bfloat16),
    Shape(num_heads=8, kv_heads=2, head_dim=64, dtype=torch.float16),
    Shape(num_heads=6, kv_heads=2, head_dim=32, soft_cap=1.5, has_sinks=True),
]


@pytest.mark.parametrize(
    "shape",
    [*SHAPES, Shape(num_heads=32, kv_heads=1, head_dim=128, block_size=5, dtype=torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 100, 256])
def test_decode_attention(shape: Shape, window: int) -> None:
    check_decode(replace(shape, window=window), [1, 255, 256, 257, 700])


@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("window", [0, 20])
def test_attention_of_wide_and_latent_rows(shape: Shape, window: int) -> None:
    shape = replace(shape, window=window, has_sinks=window > 0)
    check_decode(shape, [1, 257, 300])
    check_chunks(shape, [(0, 20), (60, 3)])


@settings(max_examples=15)
@given(
    group=st.integers(1, 9),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.integers(0, 80),
    lengths=st.lists(st.integers(1, 2 * SPLIT_TOKENS - 1), min_size=1, max_size=2),
    num_programs=st.integers(1, 4),
)
def test_decode_attention_of_any_shape(
    group: int, block_size: int, window: int, lengths: list[int], num_programs: int
) -> None:
    lengths = [min(length, 250 * block_size) for length in lengths]
    shape = Shape(num_heads=group, kv_heads=1, head_dim=16, block_size=block_size, window=window)
    check_decode(shape, lengths, num_programs)


def test_many_splits_are_combined() -> None:
    """Twice what the combining kernel reads at once; some heads have their greatest score in either
    half.
    """
    length = SPLIT_TOKENS * 2 * gpu_decode._COMBINED_SPLITS
    check_decode(Shape(num_heads=8, kv_heads=1, head_dim=16, block_size=32), [length])


def test_scores_far_apart_do_not_overflow() -> None:
    torch.manual_seed(0)
    cache = Cache(Shape(num_heads=2, kv_heads=1, head_dim=16))
    offset = cache.add(0, 600)
    query = fused_query(1, cache.shape) * 1000
    result = decode(cache, query, decode_work([0], [599], [offset], cache.tables), 1)
    close(result[0], cache.expected(query[0], 599, offset))


def test_a_sequence_gets_the_same_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    cache = Cache(Shape(num_heads=6, kv_heads=2, head_dim=16, dtype=torch.bfloat16))
    lengths = [300, 17, 700, 256]
    offsets = [cache.add(0, length) for length in lengths]
    query = fused_query(4, cache.shape)
    last_keys = [length - 1 for length in lengths]
    batch = decode(cache, query, decode_work([0, 1, 2, 3], last_keys, offsets, cache.tables), 3)
    for row in range(4):
        for num_programs in (1, 7):
            work = decode_work(
                [row], last_keys[row : row + 1], offsets[row : row + 1], cache.tables
            )
            assert torch.equal(decode(cache, query, work, num_programs)[row], batch[row])


def test_splits_of_a_sequence() -> None:
    assert [num_splits(last_key) for last_key in (0, 255, 256, 511, 512)] == [1, 1, 2, 2, 3]


def check_chunks(
    shape: Shape, chunks: list[tuple[int, int]], most_tokens: int | None = None
) -> None:
    """Chunks (start, tokens), one row that is of none after each; `most_tokens` cuts smaller
    tiles.
    """
    torch.manual_seed(0)
    cache = Cache(shape)
    size = min(
        tile_tokens(shape.num_heads, shape.kv_heads, shape.head_dim), most_tokens or sys.maxsize
    )
    query = fused_query(sum(count + 1 for _, count in chunks), shape)
    tiles: list[tuple[int, int, int, int]] = []  # row, tokens, position, offset
    row = 0
    for start, count in chunks:
        offset = cache.add(start + 1 - shape.window if shape.window else 0, start + count)
        firsts = range(0, count, size)
        tiles += [
            (row + first, min(size, count - first), start + first, offset) for first in firsts
        ]
        row += count + 1
    rows, counts, starts, offsets = (ints(list(column)) for column in zip(*tiles, strict=True))
    work = ChunkWork(
        tile_rows=rows,
        tile_counts=counts,
        tile_starts=starts,
        tile_offsets=offsets,
        tables=ints(cache.tables),
    )
    out = query.new_full((len(query), shape.num_heads * shape.result_dim), torch.nan)
    chunk_attention(query, cache.keys, cache.values, work, cache.scoring, out)
    result = out.view(*query.shape[:2], -1)
    expected = torch.full(result.shape, torch.nan, dtype=torch.float64, device=DEVICE)
    for row, count, position, offset in tiles:
        for token in range(count):
            expected[row + token] = cache.expected(query[row + token], position + token, offset)
    written = ~expected.isnan()
    assert torch.equal(~result.isnan(), written)
    close(result[written], expected[written])


@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        Shape(num_heads=2, kv_heads=1, head_dim=256, block_size=5, dtype=torch.bfloat16),
        Shape(
            num_heads=4, kv_heads=1, head_dim=128, dtype=torch.bfloat16
        ),  # of Llama 3 8B and its like
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 20, 200])
def test_chunk_attention(shape: Shape, window: int) -> None:
    check_chunks(replace(shape, window=window), [(0, 150), (254, 3), (127, 70), (600, 1)])


@settings(max_examples=15)
@given(
    group=st.integers(1, 9),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.integers(0, 300),
    chunks=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=2),
    most_tokens=st.integers(7, 200),
)
def test_chunk_attention_of_any_shape(
    group: int, block_size: int, window: int, chunks: list[tuple[int, int]], most_tokens: int
) -> None:
    shape = Shape(num_heads=group, kv_heads=1, head_dim=16, block_size=block_size, window=window)
    check_chunks(shape, chunks, most_tokens)


def test_tiles_hold_whole_groups() -> None:
    """As many rows as the kernel multiplies at once, and a token at least."""
    assert tile_tokens(32, 8, 128) == 32
    assert tile_tokens(9, 3, 64) == 42
    assert tile_tokens(16, 2, 256) == 8
    assert tile_tokens(200, 1, 64) == 1


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fused = torch.randn(5, 7, 80).to(DEVICE, dtype) * 3
    weight = torch.randn(80).to(DEVICE, dtype)
    for x in (fused[:, 2:6], fused[:, 3], fused[:0, 3]):  # per head, per row, no row
        wide = x.double()
        expected = weight.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.1)
        result = gpu.rms_norm(x, weight, 0.1)
        assert result.is_contiguous()
        assert result.shape == x.shape
        if len(x):
            close(result, expected)
            residual = torch.randn(x.shape).to(x)
            expected = (
                expected
                + wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.1)
                + residual.double()
            )
            close(gpu.rms_norm(x, weight, 0.1, 1.0, residual), expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [96, 1500])
def test_silu_mul(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2 * dim).to(DEVICE, dtype)
    x[:, :10] *= 100  # where e^x leaves the range of float32
    gate, up = x.double().chunk(2, -1)
    close(gpu.silu_mul(x), functional.silu(gate) * up)
    close(gpu.gelu_mul(x), functional.gelu(gate, approximate="tanh") * up)


def test_roundings_are_those_of_torch() -> None:
    """But for a few numbers on the edge. In float16, which the interpreter rounds to nearest,
    unlike bfloat16.
    """
    torch.manual_seed(0)
    x, weight = (
        torch.randn(20, 96).to(DEVICE, torch.float16),
        torch.randn(96).to(DEVICE, torch.float16),
    )
    wide = x.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).half()
    assert (gpu.rms_norm(x, weight, 1e-5) == normed).float().mean() > 0.99
    gate, up = x.chunk(2, -1)
    assert (gpu.silu_mul(x) == functional.silu(gate) * up).float().mean() > 0.99


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("has_bias", "has_residual"), [(False, False), (True, True)])
def test_a_row_of_a_product_is_the_same_bits_in_any_batch(
    dtype: torch.dtype, has_bias: bool, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_row_by_row(monkeypatch)
    torch.manual_seed(0)
    fused, weight = (
        torch.randn(150, 3, 200).to(DEVICE, dtype),
        torch.randn(90, 200).to(DEVICE, dtype),
    )
    x, residual = fused[:, 1], torch.randn(150, 90).to(DEVICE, dtype) if has_residual else None
    bias = torch.randn(90).to(DEVICE, dtype) if has_bias else None

    def rows(chosen: slice) -> torch.Tensor:
        return gpu_linear.linear(
            x[chosen], weight, bias, None if residual is None else residual[chosen]
        )

    whole = rows(slice(None))
    expected = x.double() @ weight.double().t()
    close(
        whole / 20,
        sum((each.double() for each in (bias, residual) if each is not None), expected) / 20,
    )
    for start, stop in [(0, 0), (0, 1), (149, 150), (63, 66), (70, 150), (5, 21)]:
        assert torch.equal(rows(slice(start, stop)), whole[start:stop])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 80), (20, 16)])
def test_rotate(dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    fused = torch.randn(4, num_heads + 2, head_dim).to(DEVICE, dtype)
    cos, sin = (torch.randn(4, 1, head_dim).to(DEVICE, dtype) for _ in range(2))
    before = fused.double()
    gpu.rotate(fused[:, 1:-1], cos, sin)
    assert torch.equal(fused[:, 0].double(), before[:, 0])
    assert torch.equal(fused[:, -1].double(), before[:, -1])
    close(
        fused[:, 1:-1],
        (before * cos.double() + before.roll(head_dim // 2, -1) * sin.double())[:, 1:-1],
    )


@settings(max_examples=20)
@given(
    kv_heads=st.integers(1, 5),
    block_size=st.sampled_from([1, 4, 16]),
    head_dim=st.sampled_from([16, 24]),
    slots=st.lists(st.integers(0, 40), unique=True, max_size=6),
    padding=st.integers(0, 3),
)
def test_stored_keys_and_values_are_found_again(
    kv_heads: int, block_size: int, head_dim: int, slots: list[int], padding: int
) -> None:
    """And nothing else changes, whichever way the cache lies."""
    rows = slots + [-1 - row for row in range(padding)]
    fused = torch.randn(len(rows), 3, kv_heads, head_dim, device=DEVICE)
    cache = torch.zeros(48 // block_size, 2, kv_heads, block_size, head_dim, device=DEVICE)
    keys, values = cache[:, 0], cache[:, 1]
    expected = cache.clone()
    for row, slot in enumerate(slots):
        expected[slot // block_size, :, :, slot % block_size] = fused[row, 1:]
    gpu.store_kv(fused[:, 1], fused[:, 2], keys, values, ints(rows))
    assert torch.equal(cache, expected)


def test_every_launch_says_whether_it_fuses() -> None:
    """In the source, so that a new launch cannot be forgotten."""
    launches = []
    for path in (ROOT / "workers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Subscript)
                and ast.unparse(node.func.value).endswith("_kernel")
            ):
                options = {each.arg: ast.unparse(each.value) for each in node.keywords}
                launches.append(f"{path.name}:{node.lineno}")
                assert options.get("enable_fp_fusion") == "FP_FUSION", launches[-1]
    assert len(launches) >= 8, launches
