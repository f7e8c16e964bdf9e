"""Computes attention of decodes in Triton, split over keys (flash decoding)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from ...device import Ints
from . import FP_FUSION
from .attention import FLOOR, LOG2_E, Scales, Scoring, attend, nothing_attended, padded, tile_keys

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
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    # 64 bits, so that an item's place in `partial` has 64 bits.
    num_heads = (tl.num_programs(1) * GROUP).to(tl.int64)
    kv_head = tl.program_id(1)
    head = tl.arange(0, GROUP_PADDED)
    columns = tl.arange(0, DIM_PADDED)
    inside = (head < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    place = (kv_head * GROUP + head)[:, None] * HEAD_DIM + columns[None, :]
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
            peak, total, mix = nothing_attended(GROUP_PADDED, DIM_PADDED)
            peak, total, mix = attend(
                queries,
                tl.zeros([GROUP_PADDED], tl.int32) + last_key,
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
                HEAD_DIM,
                DIM_PADDED,
            )
            target = partial + (item * num_heads + kv_head * GROUP + head) * (HEAD_DIM + 2)
            _store_partial(target, peak, total, mix, columns, inside, head < GROUP, HEAD_DIM)


@triton.jit
def _store_partial(target, peak, total, mix, columns, inside, is_head, HEAD_DIM: tl.constexpr):
    tl.store(target[:, None] + columns[None, :], mix, mask=inside)
    tl.store(target + HEAD_DIM, peak, mask=is_head)
    tl.store(target + HEAD_DIM + 1, total, mask=is_head)


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
    HEAD_DIM: tl.constexpr,
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
        inside = columns < HEAD_DIM
        peak = tl.full([], FLOOR, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        mix = tl.zeros([DIM_PADDED], tl.float32)
        if HAS_SINKS:
            peak = tl.load(sinks + head) * sink_scale
            total += 1.0
        for splits in range(first_split, last_key // SPLIT + 1, SPLITS):
            split = splits + tl.arange(0, SPLITS)
            known = split <= last_key // SPLIT
            source = partial + ((first_item + split) * num_heads + head) * (HEAD_DIM + 2)
            peaks = tl.load(source + HEAD_DIM, mask=known, other=FLOOR)
            totals = tl.load(source + HEAD_DIM + 1, mask=known, other=0.0)
            mixes = tl.load(
                source[:, None] + columns[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )
            higher = tl.maximum(peak, tl.max(peaks, axis=0))
            weights = tl.exp2(peaks - higher)
            fade = tl.exp2(peak - higher)
            total = total * fade + tl.sum(totals * weights, axis=0)
            mix = mix * fade + tl.sum(mixes * weights[:, None], axis=0)
            peak = higher
        tl.store(out + row * out_stride_row + head * HEAD_DIM + columns, mix / total, mask=inside)


def num_splits(last_key: _Position) -> _Position:
    """Returns the number of work items of a sequence whose token is at position `last_key`.

    For an array of positions, returns an array.
    """
    return last_key // SPLIT_TOKENS + 1


def decode_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads one after the other
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], a layer's cache
    values: torch.Tensor,  # the same, in the same strides
    work: DecodeWork,
    scoring: Scoring,
    partial: torch.Tensor,  # [capacity, num_heads, head_dim + 2] float32, contiguous: scratch
    out: torch.Tensor,  # [num_tokens, num_heads * head_dim]
    # Per KV head. Best is three per multiprocessor over all heads, the number that runs at once.
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
    kv_heads, block_size = keys.shape[1:3]
    group = num_heads // kv_heads
    _decode_kernel[(num_programs, kv_heads)](
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
        GROUP=group,
        GROUP_PADDED=padded(group),
        CAPPED=scoring.soft_cap > 0,
        WINDOW=scoring.window,
        SCALED=scales is not None,
        SPLIT=SPLIT_TOKENS,
        # Half a tile, because the conversion needs registers: so three programs run at once, too.
        KEYS=tile_keys(query) // (1 if scales is None else 2),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=padded(head_dim),
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
        num_stages=3,
    )
    _combine(partial, work, scoring, out, head_dim)


def _combine(
    partial: torch.Tensor, work: DecodeWork, scoring: Scoring, out: torch.Tensor, head_dim: int
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
        HEAD_DIM=head_dim,
        DIM_PADDED=padded(head_dim),
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
    )
