"""Triton kernels for GPUs: attention over a paged KV cache, of single tokens and of chunks of prompts.

As in gpu.py, all tensors are on one device, in float32, bfloat16 or float16, and their last dimension is contiguous;
nothing waits for the device. Softmax is in base 2 and online (arXiv 2205.14135). A program takes one KV head and all
query heads that share it, so that keys and values are read once. What a sequence gets depends on nothing else in the
batch, to the bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

import math
import os
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
import triton
import triton.language as tl

from ..device import Ints

_Position = TypeVar("_Position", int, Ints)

SPLIT_TOKENS: Final = 256  # keys of one work item of decode_attention

_TILE_BYTES: Final = 16_384  # of the keys of one product: so that three programs of _decode_kernel fit a processor
_CHUNK_ROWS: Final = 128  # of one product of chunk_attention: two groups of warps of 64 rows
_COMBINED_SPLITS: Final = 16  # that the combining kernel reads at once
_LOG2_E: Final = math.log2(math.e)

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_FLOOR = tl.constexpr(-1e30)  # below any score, and finite: the difference of two infinities would be NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """Sequences with one new token each, and their keys cut into items of SPLIT_TOKENS; int32 on the device.

    A sequence has `num_splits` items, in order of their split. Shapes may be larger than what is in use (a CUDA graph
    fixes them): rows past the batch are padding, items from `num_items` on are not looked at."""

    rows: torch.Tensor  # [batch] its row of query and out; -1 is padding: it has no items, and nothing is written
    last_keys: torch.Tensor  # [batch] the position of its token, which is the last key that it sees
    offsets: torch.Tensor  # [batch] where its block table begins in `tables`
    first_items: torch.Tensor  # [batch] its first item; the others follow
    item_sequences: torch.Tensor  # [capacity] whose an item is
    item_splits: torch.Tensor  # [capacity] its keys: [split * SPLIT_TOKENS, (split + 1) * SPLIT_TOKENS)
    num_items: torch.Tensor  # [1]
    tables: torch.Tensor  # [sum of table lengths] the block tables, one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """Chunks of sequences, cut into tiles of up to `tile_tokens` consecutive tokens; int32 on the device."""

    tile_rows: torch.Tensor  # [num_tiles] the first of its rows of query and out
    tile_counts: torch.Tensor  # [num_tiles] how many tokens it has
    tile_starts: torch.Tensor  # [num_tiles] the position of its first token
    tile_offsets: torch.Tensor  # [num_tiles] where its sequence's block table begins in `tables`
    tables: torch.Tensor  # [sum of table lengths] the block tables, one after the other


@triton.jit
def _attend(
    query,  # [ROWS, DIM_PADDED]
    positions,  # [ROWS] of the queries
    peak,  # [ROWS] the greatest score yet, in base 2
    total,  # [ROWS] of the weights yet, relative to the peak
    mix,  # [ROWS, DIM_PADDED] of the values yet, likewise
    keys,  # of one head
    values,
    table,
    stride_block,
    stride_slot,
    begin,  # a multiple of KEYS
    end,
    first_key,  # that any of the queries sees
    last_key,
    scale,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # False: all queries see all keys
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Goes on over the keys [begin, end); returns the new peak, total and mix."""
    columns = tl.arange(0, DIM_PADDED)
    key = begin + tl.arange(0, KEYS)
    block = tl.load(table + key // BLOCK_SIZE, mask=(key >= first_key) & (key < end), other=0)
    for _ in range(begin, end, KEYS):
        known = (key >= first_key) & (key <= last_key) if MASKED else key >= 0
        place = (block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_slot)[:, None] + columns[None, :]
        # A slot that nobody sees may hold anything, and zero times NaN is NaN.
        loaded = known[:, None] & (columns < HEAD_DIM)[None, :]
        key_tile = tl.load(keys + place, mask=loaded, other=0.0)
        value_tile = tl.load(values + place, mask=loaded, other=0.0)
        if _INTERPRETED:  # it cannot multiply bfloat16
            query, key_tile, value_tile = query.to(tl.float32), key_tile.to(tl.float32), value_tile.to(tl.float32)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee")
        if MASKED:
            seen = known[None, :] & (key[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen &= key[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -higher[:, None]))
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, axis=1)
        mix = tl.dot(weights.to(value_tile.dtype), value_tile, mix * fade[:, None], input_precision="ieee")
        peak = higher
        # One tile ahead: else the keys would wait for it.
        key += KEYS
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
    return peak, total, mix


_WORK: Final = ["rows", "last_keys", "offsets", "first_items", "item_sequences", "item_splits", "num_items", "tables"]


@triton.jit(do_not_specialize=_WORK)
def _decode_kernel(
    query,
    keys,
    values,
    partial,
    rows,
    last_keys,
    offsets,
    item_sequences,
    item_splits,
    num_items,
    tables,
    query_stride_row,
    stride_block,
    stride_head,
    stride_slot,
    scale,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    kv_head = tl.program_id(1)
    num_heads = (tl.num_programs(1) * GROUP).to(tl.int64)  # with which an item's place in `partial` has 64 bits
    head, columns = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
    inside = (head < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    place = (kv_head * GROUP + head)[:, None] * HEAD_DIM + columns[None, :]
    keys += kv_head.to(tl.int64) * stride_head
    values += kv_head.to(tl.int64) * stride_head
    for item in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        sequence = tl.load(item_sequences + item)
        row = tl.load(rows + sequence).to(tl.int64)
        last_key = tl.load(last_keys + sequence)
        first_key = tl.maximum(last_key + 1 - WINDOW, 0) if WINDOW > 0 else 0
        begin = tl.load(item_splits + item) * SPLIT
        end = tl.minimum(begin + SPLIT, last_key + 1)
        begin = tl.maximum(begin, first_key // KEYS * KEYS)
        if begin < end:
            queries = tl.load(query + row * query_stride_row + place, mask=inside, other=0.0)
            peak, total = tl.full([GROUP_PADDED], _FLOOR, tl.float32), tl.zeros([GROUP_PADDED], tl.float32)
            mix = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
            positions = tl.zeros([GROUP_PADDED], tl.int32) + last_key
            table = tables + tl.load(offsets + sequence)
            peak, total, mix = _attend(
                queries, positions, peak, total, mix, keys, values, table, stride_block, stride_slot, begin, end,
                first_key, last_key, scale, WINDOW, True, KEYS, BLOCK_SIZE, HEAD_DIM, DIM_PADDED,
            )  # fmt: skip
            target = partial + (item * num_heads + kv_head * GROUP + head) * (HEAD_DIM + 2)
            tl.store(target[:, None] + columns[None, :], mix, mask=inside)
            tl.store(target + HEAD_DIM, peak, mask=head < GROUP)
            tl.store(target + HEAD_DIM + 1, total, mask=head < GROUP)


@triton.jit(do_not_specialize=_WORK)
def _combine_kernel(
    partial,
    out,
    rows,
    last_keys,
    first_items,
    out_stride_row,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    sequence, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + sequence).to(tl.int64)
    if row >= 0:
        last_key = tl.load(last_keys + sequence)
        first_item = tl.load(first_items + sequence).to(tl.int64)
        first_split = tl.maximum(last_key + 1 - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
        columns = tl.arange(0, DIM_PADDED)
        inside = columns < HEAD_DIM
        peak, total = tl.full([], _FLOOR, tl.float32), tl.full([], 0.0, tl.float32)
        mix = tl.zeros([DIM_PADDED], tl.float32)
        for splits in range(first_split, last_key // SPLIT + 1, SPLITS):
            split = splits + tl.arange(0, SPLITS)
            known = split <= last_key // SPLIT
            source = partial + ((first_item + split) * num_heads + head) * (HEAD_DIM + 2)
            peaks = tl.load(source + HEAD_DIM, mask=known, other=_FLOOR)
            totals = tl.load(source + HEAD_DIM + 1, mask=known, other=0.0)
            mixes = tl.load(source[:, None] + columns[None, :], mask=known[:, None] & inside[None, :], other=0.0)
            higher = tl.maximum(peak, tl.max(peaks, axis=0))
            weights, fade = tl.exp2(peaks - higher), tl.exp2(peak - higher)
            total = total * fade + tl.sum(totals * weights, axis=0)
            mix = mix * fade + tl.sum(mixes * weights[:, None], axis=0)
            peak = higher
        tl.store(out + row * out_stride_row + head * HEAD_DIM + columns, mix / total, mask=inside)


def _side(length: int) -> int:
    """What a side of a matrix that tensor cores multiply is padded to."""
    return max(16, int(triton.next_power_of_2(length)))


def _tile_keys(query: torch.Tensor) -> int:
    """How many keys one product takes; a split is a whole number of them."""
    return min(128, max(16, _TILE_BYTES // (query.element_size() * _side(query.shape[-1]))))


def num_splits(last_key: _Position) -> _Position:
    """The work items of a sequence whose token is at position `last_key`; of an array, of each."""
    return last_key // SPLIT_TOKENS + 1


def decode_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads one after the other
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], a layer's cache
    values: torch.Tensor,  # the same, in the same strides
    work: DecodeWork,
    window: int,  # how many tokens each token sees, itself included; 0 is all
    partial: torch.Tensor,  # [capacity, num_heads, head_dim + 2] float32, contiguous: scratch
    out: torch.Tensor,  # [num_tokens, num_heads * head_dim]
    num_programs: int,  # for each KV head; best three a multiprocessor for all heads: as many as run at once
) -> None:
    """Attention of one query per sequence over its own keys, read in place.

    The first kernel leaves in `partial` for each item and head the sum of the values weighted relative to the greatest
    score, that score in base 2, and the sum of the weights; the second puts a sequence's items together. Items wholly
    before the window are neither read nor written."""
    num_heads, head_dim = query.shape[1:]
    kv_heads, block_size = keys.shape[1:3]
    group = num_heads // kv_heads
    _decode_kernel[(num_programs, kv_heads)](
        query,
        keys,
        values,
        partial,
        work.rows,
        work.last_keys,
        work.offsets,
        work.item_sequences,
        work.item_splits,
        work.num_items,
        work.tables,
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        head_dim**-0.5 * _LOG2_E,
        GROUP=group,
        GROUP_PADDED=_side(group),
        WINDOW=window,
        SPLIT=SPLIT_TOKENS,
        KEYS=_tile_keys(query),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=_side(head_dim),
        num_warps=4,
        num_stages=3,
    )
    _combine_kernel[(len(work.rows), num_heads)](
        partial,
        out,
        work.rows,
        work.last_keys,
        work.first_items,
        out.stride(0),
        WINDOW=window,
        SPLIT=SPLIT_TOKENS,
        SPLITS=_COMBINED_SPLITS,
        HEAD_DIM=head_dim,
        DIM_PADDED=_side(head_dim),
        num_warps=4,
    )


_CHUNK_WORK: Final = ["tile_rows", "tile_counts", "tile_starts", "tile_offsets", "tables"]


@triton.jit(do_not_specialize=_CHUNK_WORK)
def _chunk_kernel(
    query,
    keys,
    values,
    out,
    tile_rows,
    tile_counts,
    tile_starts,
    tile_offsets,
    tables,
    query_stride_row,
    out_stride_row,
    stride_block,
    stride_head,
    stride_slot,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    # The last tiles of a prompt see the most keys: they begin first, so that the short ones fill the end.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    count, start = tl.load(tile_counts + tile), tl.load(tile_starts + tile)
    token, columns = tl.arange(0, ROWS) // GROUP, tl.arange(0, DIM_PADDED)
    place = (kv_head * GROUP + tl.arange(0, ROWS) % GROUP)[:, None] * HEAD_DIM + columns[None, :]
    row = tl.load(tile_rows + tile).to(tl.int64) + token
    inside = (token < count)[:, None] & (columns < HEAD_DIM)[None, :]
    queries = tl.load(query + row[:, None] * query_stride_row + place, mask=inside, other=0.0)
    last_key = start + count - 1
    first_key = tl.maximum(start + 1 - WINDOW, 0) if WINDOW > 0 else 0
    keys += kv_head.to(tl.int64) * stride_head
    values += kv_head.to(tl.int64) * stride_head
    table = tables + tl.load(tile_offsets + tile)

    begin, middle_end = first_key // KEYS * KEYS, (start + 1) // KEYS * KEYS
    middle = begin
    peak, total = tl.full([ROWS], _FLOOR, tl.float32), tl.zeros([ROWS], tl.float32)
    mix = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    # First the keys that not all of the tokens see because of the window, then those that all see, then the causal end.
    if WINDOW > 0:
        all_seen = tl.cdiv(tl.maximum(last_key + 1 - WINDOW, 0), KEYS) * KEYS
        middle = tl.minimum(all_seen, tl.maximum(middle_end, begin))
        peak, total, mix = _attend(
            queries, start + token, peak, total, mix, keys, values, table, stride_block, stride_slot, begin, middle,
            first_key, last_key, scale, WINDOW, True, KEYS, BLOCK_SIZE, HEAD_DIM, DIM_PADDED,
        )  # fmt: skip
    peak, total, mix = _attend(
        queries, start + token, peak, total, mix, keys, values, table, stride_block, stride_slot, middle, middle_end,
        first_key, last_key, scale, WINDOW, False, KEYS, BLOCK_SIZE, HEAD_DIM, DIM_PADDED,
    )  # fmt: skip
    peak, total, mix = _attend(
        queries, start + token, peak, total, mix, keys, values, table, stride_block, stride_slot,
        tl.maximum(middle, middle_end), last_key + 1,
        first_key, last_key, scale, WINDOW, True, KEYS, BLOCK_SIZE, HEAD_DIM, DIM_PADDED,
    )  # fmt: skip
    tl.store(out + row[:, None] * out_stride_row + place, mix / total[:, None], mask=inside)


def tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """How many tokens a tile of a `ChunkWork` may have."""
    rows = _CHUNK_ROWS if head_dim <= _CHUNK_ROWS else _CHUNK_ROWS // 2
    return max(1, rows * num_kv_heads // num_heads)


def chunk_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads one after the other
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], a layer's cache
    values: torch.Tensor,  # the same, in the same strides
    work: ChunkWork,
    window: int,  # how many tokens each token sees, itself included; 0 is all
    out: torch.Tensor,  # [num_tokens, num_heads * head_dim]
) -> None:
    """Causal attention of new tokens, whose own keys are stored already, over their sequences' keys, read in place."""
    _, num_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    group = num_heads // kv_heads
    exact = query.dtype == torch.float32  # without tensor cores, and so with more registers for a product
    _chunk_kernel[(len(work.tile_rows), kv_heads)](
        query,
        keys,
        values,
        out,
        work.tile_rows,
        work.tile_counts,
        work.tile_starts,
        work.tile_offsets,
        work.tables,
        query.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        head_dim**-0.5 * _LOG2_E,
        GROUP=group,
        ROWS=_side(tile_tokens(num_heads, kv_heads, head_dim) * group),
        WINDOW=window,
        KEYS=16 if exact else _tile_keys(query),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=_side(head_dim),
        num_warps=16 if exact else 8,
        num_stages=3,
    )
