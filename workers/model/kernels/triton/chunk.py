"""Computes attention of prompt chunks in Triton, several tokens of a sequence at a time."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from . import FP_FUSION
from .attention import (
    LOG2_E,
    MAX_NARROW_DIM,
    Scales,
    Scoring,
    attend,
    heads_of_program,
    nothing_attended,
    padded,
    tile_keys,
)

_CHUNK_ROWS: Final = 128  # rows of one product: two groups of warps with 64 rows


class ChunkWork(NamedTuple):
    """Describes chunks, cut into tiles of up to `tile_tokens` tokens; int32 on the device."""

    tile_rows: torch.Tensor  # [num_tiles] the tile's first row of query and out
    tile_counts: torch.Tensor  # [num_tiles] the number of tokens
    tile_starts: torch.Tensor  # [num_tiles] the position of the first token
    tile_offsets: torch.Tensor  # [num_tiles] start of the sequence's block table in `tables`
    tables: torch.Tensor  # [sum of table lengths] the concatenated block tables


@triton.jit(do_not_specialize=ChunkWork._fields)
def _chunk_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    tile_rows,
    tile_counts,
    tile_starts,
    tile_offsets,
    tables,
    sinks,
    query_stride_row,
    out_stride_row,
    stride_block,
    stride_head,
    stride_slot,
    cap_scale,
    scale,
    sink_scale,
    HEADS: tl.constexpr,  # query heads of a program
    SPLITS: tl.constexpr,  # programs that share a KV head
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    # The last tiles of a prompt see the most keys. They start first, so that short tiles fill the
    # gaps at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // SPLITS
    count = tl.load(tile_counts + tile)
    start = tl.load(tile_starts + tile)
    token = tl.arange(0, ROWS) // HEADS
    head = tl.program_id(1) * HEADS + tl.arange(0, ROWS) % HEADS
    columns = tl.arange(0, DIM_PADDED)
    row = tl.load(tile_rows + tile).to(tl.int64) + token
    known = token < count
    inside = known[:, None] & (columns < VALUE_DIM)[None, :]
    place = query + row[:, None] * query_stride_row + head[:, None] * (VALUE_DIM + REST)
    queries = tl.load(place + columns[None, :], mask=inside, other=0.0)
    queries_rest = queries
    if REST > 0:
        rest = tl.arange(0, REST_PADDED)
        rest_inside = known[:, None] & (rest < REST)[None, :]
        queries_rest = tl.load(place + VALUE_DIM + rest[None, :], mask=rest_inside, other=0.0)
    keys += kv_head.to(tl.int64) * stride_head
    values += kv_head.to(tl.int64) * stride_head
    if SCALED:
        key_scales += kv_head.to(tl.int64) * (stride_head // 2)
        value_scales += kv_head.to(tl.int64) * (stride_head // 2)
    peak, total, mix = nothing_attended(ROWS, DIM_PADDED)
    if HAS_SINKS:
        peak = tl.load(sinks + head) * sink_scale
        total += 1.0
    total, mix = _attend_tile(
        queries,
        queries_rest,
        start + token,
        peak,
        total,
        mix,
        start,
        start + count - 1,
        keys,
        values,
        key_scales,
        value_scales,
        tables + tl.load(tile_offsets + tile),
        stride_block,
        stride_slot,
        cap_scale,
        scale,
        CAPPED,
        WINDOW,
        SCALED,
        KEYS,
        BLOCK_SIZE,
        VALUE_DIM,
        DIM_PADDED,
        REST,
        REST_PADDED,
        ONE_LOOP,
    )
    target = out + row[:, None] * out_stride_row + head[:, None] * VALUE_DIM + columns[None, :]
    tl.store(target, mix / total[:, None], mask=inside)


@triton.jit
def _attend_tile(
    queries,
    queries_rest,
    positions,
    peak,
    total,
    mix,
    start,
    last_key,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    stride_block,
    stride_slot,
    cap_scale,
    scale,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    """Computes a tile of positions [start, last_key]; returns the total and the mix."""
    first_key = tl.maximum(start + 1 - WINDOW, 0) if WINDOW > 0 else 0
    begin = first_key // KEYS * KEYS
    middle_end = (start + 1) // KEYS * KEYS
    middle = begin
    if ONE_LOOP:
        middle_end = begin
    # First the keys that only some tokens see because of the window, then the keys that all tokens
    # see, then the causal end. Wide values leave no registers for three loops.
    if WINDOW > 0 and not ONE_LOOP:
        all_seen = tl.cdiv(tl.maximum(last_key + 1 - WINDOW, 0), KEYS) * KEYS
        middle = tl.minimum(all_seen, tl.maximum(middle_end, begin))
        peak, total, mix = attend(
            queries,
            queries_rest,
            positions,
            peak,
            total,
            mix,
            keys,
            values,
            key_scales,
            value_scales,
            table,
            stride_block,
            stride_slot,
            begin,
            middle,
            first_key,
            last_key,
            cap_scale,
            scale,
            CAPPED,
            WINDOW,
            True,
            SCALED,
            KEYS,
            BLOCK_SIZE,
            VALUE_DIM,
            DIM_PADDED,
            REST,
            REST_PADDED,
        )
    if not ONE_LOOP:
        peak, total, mix = attend(
            queries,
            queries_rest,
            positions,
            peak,
            total,
            mix,
            keys,
            values,
            key_scales,
            value_scales,
            table,
            stride_block,
            stride_slot,
            middle,
            middle_end,
            first_key,
            last_key,
            cap_scale,
            scale,
            CAPPED,
            WINDOW,
            False,
            SCALED,
            KEYS,
            BLOCK_SIZE,
            VALUE_DIM,
            DIM_PADDED,
            REST,
            REST_PADDED,
        )
    peak, total, mix = attend(
        queries,
        queries_rest,
        positions,
        peak,
        total,
        mix,
        keys,
        values,
        key_scales,
        value_scales,
        table,
        stride_block,
        stride_slot,
        tl.maximum(middle, middle_end),
        last_key + 1,
        first_key,
        last_key,
        cap_scale,
        scale,
        CAPPED,
        WINDOW,
        True,
        SCALED,
        KEYS,
        BLOCK_SIZE,
        VALUE_DIM,
        DIM_PADDED,
        REST,
        REST_PADDED,
    )
    return total, mix


def tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns the maximum number of tokens of a tile of `ChunkWork`."""
    most = _tile_rows(head_dim)
    return most // heads_of_program(num_heads // num_kv_heads, head_dim, most)


def _tile_rows(head_dim: int) -> int:
    return _CHUNK_ROWS if head_dim <= _CHUNK_ROWS else _CHUNK_ROWS // 2


def chunk_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads one after the other
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], a layer's cache
    # The same, in the same strides; or a view of the first elements of the keys.
    values: torch.Tensor,
    work: ChunkWork,
    scoring: Scoring,
    out: torch.Tensor,  # [num_tokens, num_heads * value_dim]
    scales: Scales | None = None,  # of a quantized cache
) -> None:
    """Computes causal attention of new tokens over keys that are read in place.

    The keys and values of the new tokens must be stored already.
    """
    _, num_heads, head_dim = query.shape
    _, kv_heads, block_size, value_dim = values.shape
    heads = heads_of_program(num_heads // kv_heads, head_dim, _tile_rows(head_dim))
    # Without tensor cores a product needs more registers.
    exact = query.dtype == torch.float32
    _chunk_kernel[(len(work.tile_rows), num_heads // heads)](
        query,
        keys,
        values,
        *(scales or (query, query)),
        out,
        *work,
        query if scoring.sinks is None else scoring.sinks,
        query.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        *scoring.factors,
        LOG2_E,
        HEADS=heads,
        SPLITS=num_heads // kv_heads // heads,
        ROWS=padded(tile_tokens(num_heads, kv_heads, head_dim) * heads),
        HAS_SINKS=scoring.sinks is not None,
        CAPPED=scoring.soft_cap > 0,
        WINDOW=scoring.window,
        SCALED=scales is not None,
        KEYS=16 if exact else tile_keys(query, value_dim, scaled=scales is not None),
        BLOCK_SIZE=block_size,
        VALUE_DIM=value_dim,
        DIM_PADDED=padded(value_dim),
        REST=head_dim - value_dim,
        REST_PADDED=padded(head_dim - value_dim),
        ONE_LOOP=head_dim > MAX_NARROW_DIM,
        enable_fp_fusion=FP_FUSION,
        num_warps=16 if exact else 8,
        num_stages=3,
    )
