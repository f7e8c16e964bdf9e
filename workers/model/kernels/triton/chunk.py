"""Computes attention of prompt chunks in Triton, several tokens of a sequence at a time."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from . import FP_FUSION
from .attention import LOG2_E, Scales, Scoring, attend, nothing_attended, padded, tile_keys

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
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    # The last tiles of a prompt see the most keys. They start first, so that short tiles fill the
    # gaps at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    count = tl.load(tile_counts + tile)
    start = tl.load(tile_starts + tile)
    token = tl.arange(0, ROWS) // GROUP
    columns = tl.arange(0, DIM_PADDED)
    place = (kv_head * GROUP + tl.arange(0, ROWS) % GROUP)[:, None] * HEAD_DIM + columns[None, :]
    row = tl.load(tile_rows + tile).to(tl.int64) + token
    inside = (token < count)[:, None] & (columns < HEAD_DIM)[None, :]
    queries = tl.load(query + row[:, None] * query_stride_row + place, mask=inside, other=0.0)
    keys += kv_head.to(tl.int64) * stride_head
    values += kv_head.to(tl.int64) * stride_head
    if SCALED:
        key_scales += kv_head.to(tl.int64) * (stride_head // 2)
        value_scales += kv_head.to(tl.int64) * (stride_head // 2)
    peak, total, mix = nothing_attended(ROWS, DIM_PADDED)
    if HAS_SINKS:
        peak = tl.load(sinks + kv_head * GROUP + tl.arange(0, ROWS) % GROUP) * sink_scale
        total += 1.0
    total, mix = _attend_tile(
        queries,
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
        HEAD_DIM,
        DIM_PADDED,
    )
    tl.store(out + row[:, None] * out_stride_row + place, mix / total[:, None], mask=inside)


@triton.jit
def _attend_tile(
    queries,
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
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Computes a tile of positions [start, last_key]; returns the total and the mix."""
    first_key = tl.maximum(start + 1 - WINDOW, 0) if WINDOW > 0 else 0
    begin = first_key // KEYS * KEYS
    middle_end = (start + 1) // KEYS * KEYS
    middle = begin
    # First the keys that only some tokens see because of the window, then the keys that all tokens
    # see, then the causal end.
    if WINDOW > 0:
        all_seen = tl.cdiv(tl.maximum(last_key + 1 - WINDOW, 0), KEYS) * KEYS
        middle = tl.minimum(all_seen, tl.maximum(middle_end, begin))
        peak, total, mix = attend(
            queries,
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
            HEAD_DIM,
            DIM_PADDED,
        )
    peak, total, mix = attend(
        queries,
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
        HEAD_DIM,
        DIM_PADDED,
    )
    peak, total, mix = attend(
        queries,
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
        HEAD_DIM,
        DIM_PADDED,
    )
    return total, mix


def tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns the maximum number of tokens of a tile of `ChunkWork`."""
    rows = _CHUNK_ROWS if head_dim <= _CHUNK_ROWS else _CHUNK_ROWS // 2
    return max(1, rows * num_kv_heads // num_heads)


def chunk_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads one after the other
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], a layer's cache
    values: torch.Tensor,  # the same, in the same strides
    work: ChunkWork,
    scoring: Scoring,
    out: torch.Tensor,  # [num_tokens, num_heads * head_dim]
    scales: Scales | None = None,  # of a quantized cache
) -> None:
    """Computes causal attention of new tokens over keys that are read in place.

    The keys and values of the new tokens must be stored already.
    """
    _, num_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    group = num_heads // kv_heads
    # Without tensor cores a product needs more registers.
    exact = query.dtype == torch.float32
    _chunk_kernel[(len(work.tile_rows), kv_heads)](
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
        GROUP=group,
        ROWS=padded(tile_tokens(num_heads, kv_heads, head_dim) * group),
        HAS_SINKS=scoring.sinks is not None,
        CAPPED=scoring.soft_cap > 0,
        WINDOW=scoring.window,
        SCALED=scales is not None,
        KEYS=16 if exact else tile_keys(query) // (1 if scales is None else 2),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=padded(head_dim),
        enable_fp_fusion=FP_FUSION,
        num_warps=16 if exact else 8,
        num_stages=3,
    )
