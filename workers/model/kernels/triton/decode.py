"""Computes attention of decodes in Triton, split over keys (flash decoding)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from ...device import Ints
from . import FP_FUSION
from .attention import (
    FLOOR,
    LOG2_E,
    Scales,
    Scoring,
    attend,
    heads_of_program,
    nothing_attended,
    padded,
    tile_keys,
)

_Position = TypeVar("_Position", int, Ints)

SPLIT_TOKENS: Final = 256  # keys of one work item

_COMBINED_SPLITS: Final = 16  # splits that the combining kernel reads at once


class DecodeWork(NamedTuple):
    """Describes decodes, whose keys are cut into items of SPLIT_TOKENS; int32 on the device.

    A sequence has `num_splits` items, in order of their split. Shapes may be larger than necessary,
    because a CUDA graph fixes them: rows past the batch are padding, and items from `num_items` on
    are ignored.
    """

    first_items: torch.Tensor  # [batch] the sequence's first item; its others follow
    rows: torch.Tensor  # [batch] the row of query and out; -1 is padding, without items or result
    last_keys: torch.Tensor  # [batch] the position of the token, the last key that it sees
    offsets: torch.Tensor  # [batch] start of the block table in `tables`
    num_items: torch.Tensor  # [1]
    item_sequences: torch.Tensor  # [capacity] the sequence of each item
    # [capacity] the split of each item; its keys are [split * SPLIT_TOKENS, (split + 1) *
    # SPLIT_TOKENS).
    item_splits: torch.Tensor
    tables: torch.Tensor  # [sum of table lengths] the concatenated block tables


@triton.jit(do_not_specialize=DecodeWork._fields)
def _decode_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    partial,
    # The fields of DecodeWork, except first_items.
    rows,
    last_keys,
    offsets,
    num_items,
    item_sequences,
    item_splits,
    tables,
    query_stride_row,
    stride_block,
    stride_head,
    stride_slot,
    cap_scale,
    scale,
    HEADS: tl.constexpr,  # query heads of a program
    SPLITS: tl.constexpr,  # programs that share a KV head
    HEADS_PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    # 64 bits, so that an item's place in `partial` has 64 bits.
    num_heads = (tl.num_programs(1) * HEADS).to(tl.int64)
    kv_head = tl.program_id(1) // SPLITS
    is_head = tl.arange(0, HEADS_PADDED) < HEADS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS_PADDED)
    columns = tl.arange(0, DIM_PADDED)
    inside = is_head[:, None] & (columns < VALUE_DIM)[None, :]
    place = head[:, None] * (VALUE_DIM + REST) + columns[None, :]
    keys += kv_head.to(tl.int64) * stride_head
    values += kv_head.to(tl.int64) * stride_head
    if SCALED:
        key_scales += kv_head.to(tl.int64) * (stride_head // 2)
        value_scales += kv_head.to(tl.int64) * (stride_head // 2)
    for item in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        sequence = tl.load(item_sequences + item)
        last_key = tl.load(last_keys + sequence)
        first_key = tl.maximum(last_key + 1 - WINDOW, 0) if WINDOW > 0 else 0
        begin = tl.load(item_splits + item) * SPLIT
        end = tl.minimum(begin + SPLIT, last_key + 1)
        begin = tl.maximum(begin, first_key // KEYS * KEYS)
        if begin < end:
            row_start = query + tl.load(rows + sequence).to(tl.int64) * query_stride_row
            queries = tl.load(row_start + place, mask=inside, other=0.0)
            queries_rest = queries
            if REST > 0:
                rest = tl.arange(0, REST_PADDED)[None, :]
                rest_place = head[:, None] * (VALUE_DIM + REST) + VALUE_DIM + rest
                rest_inside = is_head[:, None] & (rest < REST)
                queries_rest = tl.load(row_start + rest_place, mask=rest_inside, other=0.0)
            peak, total, mix = nothing_attended(HEADS_PADDED, DIM_PADDED)
            peak, total, mix = attend(
                queries,
                queries_rest,
                tl.zeros([HEADS_PADDED], tl.int32) + last_key,
                peak,
                total,
                mix,
                keys,
                values,
                key_scales,
                value_scales,
                tables + tl.load(offsets + sequence),
                stride_block,
                stride_slot,
                begin,
                end,
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
            target = partial + (item * num_heads + head) * (VALUE_DIM + 2)
            _store_partial(target, peak, total, mix, columns, inside, is_head, VALUE_DIM)


@triton.jit
def _store_partial(target, peak, total, mix, columns, inside, is_head, VALUE_DIM: tl.constexpr):
    tl.store(target[:, None] + columns[None, :], mix, mask=inside)
    tl.store(target + VALUE_DIM, peak, mask=is_head)
    tl.store(target + VALUE_DIM + 1, total, mask=is_head)


@triton.jit(do_not_specialize=DecodeWork._fields)
def _combine_kernel(
    partial,
    out,
    first_items,
    rows,
    last_keys,
    sinks,
    out_stride_row,
    sink_scale,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    row = tl.load(rows + sequence).to(tl.int64)
    if row >= 0:
        last_key = tl.load(last_keys + sequence)
        first_item = tl.load(first_items + sequence).to(tl.int64)
        first_split = tl.maximum(last_key + 1 - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
        columns = tl.arange(0, DIM_PADDED)
        inside = columns < VALUE_DIM
        peak = tl.full([], FLOOR, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        mix = tl.zeros([DIM_PADDED], tl.float32)
        if HAS_SINKS:
            peak = tl.load(sinks + head) * sink_scale
            total += 1.0
        for splits in range(first_split, last_key // SPLIT + 1, SPLITS):
            split = splits + tl.arange(0, SPLITS)
            known = split <= last_key // SPLIT
            source = partial + ((first_item + split) * num_heads + head) * (VALUE_DIM + 2)
            peaks = tl.load(source + VALUE_DIM, mask=known, other=FLOOR)
            totals = tl.load(source + VALUE_DIM + 1, mask=known, other=0.0)
            mixes = tl.load(
                source[:, None] + columns[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )
            higher = tl.maximum(peak, tl.max(peaks, axis=0))
            weights = tl.exp2(peaks - higher)
            fade = tl.exp2(peak - higher)
            total = total * fade + tl.sum(totals * weights, axis=0)
            mix = mix * fade + tl.sum(mixes * weights[:, None], axis=0)
            peak = higher
        tl.store(out + row * out_stride_row + head * VALUE_DIM + columns, mix / total, mask=inside)


def num_splits(last_key: _Position) -> _Position:
    """Returns the number of work items of a sequence whose token is at position `last_key`.

    For an array of positions, returns an array.
    """
    return last_key // SPLIT_TOKENS + 1


def num_head_groups(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns the number of groups of query heads; a program computes one group."""
    group = num_heads // num_kv_heads
    return num_heads // heads_of_program(group, head_dim, group)


def decode_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads one after the other
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], a layer's cache
    # The same, in the same strides; or a view of the first elements of the keys.
    values: torch.Tensor,
    work: DecodeWork,
    scoring: Scoring,
    partial: torch.Tensor,  # [capacity, num_heads, value_dim + 2] float32, contiguous: scratch
    out: torch.Tensor,  # [num_tokens, num_heads * value_dim]
    # Per group of query heads. Best is three per multiprocessor over all groups, the number that
    # runs at once.
    num_programs: int,
    scales: Scales | None = None,  # of a quantized cache
) -> None:
    """Computes attention of one query per sequence over its own keys, read in place.

    For each item and head, the first kernel writes to `partial` the weighted sum of the values, the
    greatest score in base 2, and the sum of the weights; weights are relative to that score. The
    second kernel combines a sequence's items. Items entirely before the window are neither read nor
    written.
    """
    num_heads, head_dim = query.shape[1:]
    kv_heads, block_size, value_dim = values.shape[1:]
    num_groups = num_head_groups(num_heads, kv_heads, head_dim)
    heads = num_heads // num_groups
    _decode_kernel[(num_programs, num_groups)](
        query,
        keys,
        values,
        *(scales or (query, query)),
        partial,
        *work[1:],
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        *scoring.factors,
        HEADS=heads,
        SPLITS=num_groups // kv_heads,
        HEADS_PADDED=padded(heads),
        CAPPED=scoring.soft_cap > 0,
        WINDOW=scoring.window,
        SCALED=scales is not None,
        SPLIT=SPLIT_TOKENS,
        KEYS=tile_keys(query, value_dim, scaled=scales is not None),
        BLOCK_SIZE=block_size,
        VALUE_DIM=value_dim,
        DIM_PADDED=padded(value_dim),
        REST=head_dim - value_dim,
        REST_PADDED=padded(head_dim - value_dim),
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
        num_stages=3,
    )
    _combine(partial, work, scoring, out, value_dim)


def _combine(
    partial: torch.Tensor, work: DecodeWork, scoring: Scoring, out: torch.Tensor, value_dim: int
) -> None:
    _combine_kernel[(len(work.rows), partial.shape[1])](
        partial,
        out,
        *work[:3],
        partial if scoring.sinks is None else scoring.sinks,
        out.stride(0),
        LOG2_E,
        HAS_SINKS=scoring.sinks is not None,
        WINDOW=scoring.window,
        SPLIT=SPLIT_TOKENS,
        SPLITS=_COMBINED_SPLITS,
        VALUE_DIM=value_dim,
        DIM_PADDED=padded(value_dim),
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
    )
