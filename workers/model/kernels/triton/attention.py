"""Holds the common code of the Triton attention kernels for decodes and for chunks.

As in elementwise.py, all tensors are on one device, in float32, bfloat16 or float16, and their last
dimension is contiguous; nothing waits for the device. Softmax is in base 2 and online (arXiv
2205.14135). A program computes one KV head and all query heads that share it, so that keys and
values are read once; if these are too many for its registers, it computes some of them. A
sequence's result does not depend on the rest of the batch, bit by bit.

With latent attention, keys are rows whose first VALUE_DIM elements are also the value. Then these
and the rest of the row are two tiles, and the first is read once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

import math
import os
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

# Of the keys of one product, so that three decode programs fit a multiprocessor.
_TILE_BYTES: Final = 16_384
# Programs with longer heads compute at most _WIDE_HEADS query heads of a token, so that sums and
# addresses fit into the registers.
MAX_NARROW_DIM: Final = 256
_WIDE_HEADS: Final = 16
LOG2_E: Final = math.log2(math.e)

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Below any score, but finite, because the difference of two infinities would be NaN.
FLOOR = tl.constexpr(-1e30)


class Scoring(NamedTuple):
    """Describes which keys a token sees and how they are scored; see `AttentionOptions`."""

    window: int  # number of tokens that each token sees, including itself; 0: all
    scale: float
    soft_cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # float32 [num_heads]

    @property
    def factors(self) -> tuple[float, float]:
        """Returns the factors of scores before and after the soft cap; the latter is for base 2."""
        if self.soft_cap:
            return self.scale / self.soft_cap, self.soft_cap * LOG2_E
        return 1.0, self.scale * LOG2_E


class Scales(NamedTuple):
    """Holds the scales of a quantized cache, bfloat16 [num_blocks, num_kv_heads, block_size].

    They follow the numbers of their block and head: strides in elements are half of the numbers'.
    """

    keys: torch.Tensor
    values: torch.Tensor


@triton.jit
def nothing_attended(ROWS: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Returns the initial peak, total and mix of `attend`."""
    mix = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    return tl.full([ROWS], FLOOR, tl.float32), tl.zeros([ROWS], tl.float32), mix


@triton.jit
def _dequantize(numbers, scales, known, dtype: tl.constexpr):
    scale = tl.load(scales, mask=known, other=0.0).to(tl.float32)
    return (numbers.to(tl.float32) * scale[:, None]).to(dtype)


@triton.jit
def _scores(
    scores,  # products of queries and keys
    known,
    key,
    position,
    cap_scale,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    if CAPPED:
        scores = 2 * tl.sigmoid(2 * scores * cap_scale) - 1  # tanh
    if MASKED:
        seen = known & (key <= position)
        if WINDOW > 0:
            seen &= key > position - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def attend(
    query,  # [ROWS, DIM_PADDED]
    query_rest,  # [ROWS, REST_PADDED] the elements from VALUE_DIM on, if REST is not 0
    positions,  # [ROWS] of the queries
    peak,  # [ROWS] the greatest score so far, in base 2
    total,  # [ROWS] sum of the weights so far, relative to the peak
    mix,  # [ROWS, DIM_PADDED] weighted sum of the values so far, relative to the peak
    keys,  # of one head
    values,
    key_scales,
    value_scales,
    table,
    stride_block,
    stride_slot,
    begin,  # a multiple of KEYS
    end,
    first_key,  # the first key that any query sees
    last_key,
    cap_scale,  # factor of scores before the soft cap
    scale,  # factor after it, for base 2
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # False: all queries see all keys
    SCALED: tl.constexpr,  # the cache is quantized
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    REST: tl.constexpr,  # elements of a row after its value; 0: keys and values are apart
    REST_PADDED: tl.constexpr,
):
    """Continues over the keys [begin, end); returns the new peak, total and mix."""
    columns = tl.arange(0, DIM_PADDED)
    key = begin + tl.arange(0, KEYS)
    block = tl.load(table + key // BLOCK_SIZE, mask=(key >= first_key) & (key < end), other=0)
    for _ in range(begin, end, KEYS):
        known = (key >= first_key) & (key <= last_key) if MASKED else key >= 0
        place = (block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_slot)[
            :, None
        ] + columns[None, :]
        # A slot that no query sees may hold anything, and zero times NaN is NaN.
        loaded = known[:, None] & (columns < VALUE_DIM)[None, :]
        key_tile = tl.load(keys + place, mask=loaded, other=0.0)
        value_tile = key_tile if REST > 0 else tl.load(values + place, mask=loaded, other=0.0)
        if SCALED:
            slot = block.to(tl.int64) * (stride_block // 2) + key % BLOCK_SIZE
            key_tile = _dequantize(key_tile, key_scales + slot, known, query.dtype)
            value_tile = _dequantize(value_tile, value_scales + slot, known, query.dtype)
        if INTERPRETED:  # the interpreter cannot multiply bfloat16
            query = query.to(tl.float32)
            key_tile = key_tile.to(tl.float32)
            value_tile = value_tile.to(tl.float32)
        products = tl.dot(query, tl.trans(key_tile), input_precision="ieee")
        if REST > 0:
            rest_columns = VALUE_DIM + tl.arange(0, REST_PADDED)
            rest_place = (block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_slot)[
                :, None
            ] + rest_columns[None, :]
            rest_loaded = known[:, None] & (rest_columns < VALUE_DIM + REST)[None, :]
            rest_tile = tl.load(keys + rest_place, mask=rest_loaded, other=0.0)
            if INTERPRETED:
                query_rest = query_rest.to(tl.float32)
                rest_tile = rest_tile.to(tl.float32)
            products = tl.dot(query_rest, tl.trans(rest_tile), products, input_precision="ieee")
        scores = _scores(
            products,
            known[None, :],
            key[None, :],
            positions[:, None],
            cap_scale,
            CAPPED,
            WINDOW,
            MASKED,
        )
        higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -higher[:, None]))
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, axis=1)
        mix = tl.dot(
            weights.to(value_tile.dtype), value_tile, mix * fade[:, None], input_precision="ieee"
        )
        peak = higher
        # Loads block numbers one tile ahead; otherwise the keys would wait for them.
        key += KEYS
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
    return peak, total, mix


def padded(length: int) -> int:
    """Returns the padded length of a matrix side for tensor cores."""
    return max(16, int(triton.next_power_of_2(length)))


def tile_keys(query: torch.Tensor, value_dim: int, *, scaled: bool) -> int:
    """Returns the number of keys of one product, which divides the length of a split.

    With scales it is half as many, because the conversion needs registers.
    """
    most = min(128, _TILE_BYTES // (query.element_size() * padded(value_dim)))
    return max(16, most // 2 if scaled else most)


def heads_of_program(group: int, head_dim: int, most: int) -> int:
    """Returns how many of the `group` query heads that share a KV head a program computes.

    It divides the group and is at most `most`.
    """
    most = min(most, _WIDE_HEADS) if head_dim > MAX_NARROW_DIM else most
    return max(heads for heads in range(1, min(group, most) + 1) if group % heads == 0)
