"""Triton attention for GPUs: what the kernels of single tokens (decode.py) and of chunks
(chunk.py) share.

As in gpu.py, all tensors are on one device, in float32, bfloat16 or float16, and their last
dimension is contiguous; nothing waits for the device. Softmax is in base 2 and online (arXiv
2205.14135). A program takes one KV head and all query heads that share it, so that keys and values
are read once. A sequence's result depends on nothing else in the batch, to the bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

import math
import os
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

_TILE_BYTES: Final = (
    16_384  # of the keys of one product: so that three programs of decoding fit a multiprocessor
)
LOG2_E: Final = math.log2(math.e)

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
FLOOR = tl.constexpr(
    -1e30
)  # below any score, and finite: the difference of two infinities would be NaN


class Scoring(NamedTuple):
    """Says which keys a token sees and how their scores are made; see `AttentionOptions`."""

    window: int  # how many tokens each token sees, itself included; 0 is all
    scale: float
    soft_cap: float = 0.0  # 0 is none
    sinks: torch.Tensor | None = None  # float32 [num_heads]

    @property
    def factors(self) -> tuple[float, float]:
        """Returns the factors of scores before and after the soft cap, the last one into base 2."""
        if self.soft_cap:
            return self.scale / self.soft_cap, self.soft_cap * LOG2_E
        return 1.0, self.scale * LOG2_E


@triton.jit
def nothing_attended(ROWS: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Returns the peak, total and mix that `attend` begins with."""
    mix = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    return tl.full([ROWS], FLOOR, tl.float32), tl.zeros([ROWS], tl.float32), mix


@triton.jit
def _scores(
    query, key_tile, known, key, position, cap_scale, CAPPED: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee")
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
    cap_scale,  # of scores before the soft cap
    scale,  # after it, into base 2
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # False: all queries see all keys
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
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
        loaded = known[:, None] & (columns < HEAD_DIM)[None, :]
        key_tile = tl.load(keys + place, mask=loaded, other=0.0)
        value_tile = tl.load(values + place, mask=loaded, other=0.0)
        if INTERPRETED:  # it cannot multiply bfloat16
            query, key_tile, value_tile = (
                query.to(tl.float32),
                key_tile.to(tl.float32),
                value_tile.to(tl.float32),
            )
        scores = _scores(
            query,
            key_tile,
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
        key += KEYS  # one tile ahead: else the keys would wait for it
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
    return peak, total, mix


def padded(length: int) -> int:
    """Returns what a side of a matrix that tensor cores multiply is padded to."""
    return max(16, int(triton.next_power_of_2(length)))


def tile_keys(query: torch.Tensor) -> int:
    """Returns how many keys one product takes; a split is a whole number of them."""
    return min(128, max(16, _TILE_BYTES // (query.element_size() * padded(query.shape[-1]))))
