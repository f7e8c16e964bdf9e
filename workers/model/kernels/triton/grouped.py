"""Multiplies each row by the weight of its expert in Triton; a row's result depends on no other.

The kernel is the one of linear.py for many weights. Weights in FP8 become numbers of x's dtype in
registers, which hold them exactly, and each group of inputs has a scale.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final

import torch
import triton
import triton.language as tl

from . import FP_FUSION
from .attention import INTERPRETED

# The same tile for every number of rows, as in linear.py.
_ROWS: Final = 64
_COLUMNS: Final = 64
_DEPTH_BYTES: Final = 128  # bytes of a row in one product
_HIDDEN: Final = 1024  # outputs of a token that a program adds

DEPTH: Final = 64
"""The inputs of one product in 16 bits; a group of inputs with a scale has a multiple of them."""


@triton.jit
def _grouped_kernel(
    x,
    weight,  # contiguous
    scales,
    bias,
    order,
    ends,
    out,  # contiguous
    num_experts,
    num_chosen,
    num_outputs,
    num_inputs,
    x_stride_row,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: the weight has no scales
    HAS_BIAS: tl.constexpr,
    FROM_TOKENS: tl.constexpr,  # rows of x are tokens; else rows of out are places
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # The tiles of an expert's rows follow those of the expert before it. A program finds its tile
    # from the ends, so the host need not know how many rows an expert has.
    tile = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + number, mask=number < num_experts, other=0)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < num_experts), other=0)
    num_tiles = (tl.maximum(end - begin, 0) + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    is_mine = number == expert
    first = tl.sum(tl.where(is_mine, begin + (tile - tiles_end + num_tiles) * ROWS, 0), 0)
    row = first + tl.arange(0, ROWS)
    is_row = row < tl.sum(tl.where(is_mine, end, 0), 0)
    # The launch has the largest number of tiles; a program without rows reads nothing.
    stop = tl.where(expert < num_experts, num_inputs, 0)
    place = tl.load(order + row, mask=is_row, other=0)
    if FROM_TOKENS:
        source = place // num_chosen
        target = row.to(tl.int64)
    else:
        source = row.to(tl.int64)
        target = place
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_outputs
    output = expert.to(tl.int64) * num_outputs + column
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, stop, DEPTH):
        inside = start + depth < num_inputs
        left = tl.load(
            x + source[:, None] * x_stride_row + (start + depth)[None, :],
            mask=is_row[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + output[:, None] * num_inputs + (start + depth)[None, :],
            mask=is_column[:, None] & inside[None, :],
            other=0.0,
        ).to(left.dtype)
        if INTERPRETED:  # the interpreter cannot multiply bfloat16
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        if GROUP:
            group = output * (num_inputs // GROUP) + start // GROUP
            scale = tl.load(scales + group, mask=is_column, other=0.0)
            sums += tl.dot(left, tl.trans(right), input_precision="ieee") * scale[None, :]
        else:
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    if HAS_BIAS:
        has_bias = column < tl.where(expert < num_experts, num_outputs, 0)
        sums += tl.load(bias + output, mask=has_bias, other=0.0).to(tl.float32)[None, :]
    written = is_row[:, None] & is_column[None, :]
    tl.store(out + target[:, None] * num_outputs + column[None, :], sums, mask=written)


@triton.jit
def _combine_kernel(
    outputs,
    weights,
    out,
    size,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    total = tl.zeros([COLUMNS], tl.float32)
    for each in range(CHOSEN):
        row = token * CHOSEN + each
        output = tl.load(outputs + row * size + column, mask=inside, other=0.0).to(tl.float32)
        total += output * tl.load(weights + row)
    tl.store(out + token * size + column, total, mask=inside)


def grouped_linear(
    x: torch.Tensor,  # [num_tokens or num_rows, num_inputs], any stride of rows
    weight: torch.Tensor,  # [num_experts, num_outputs, num_inputs] in x's dtype or E4M3
    scales: torch.Tensor | None,  # [num_experts, num_outputs, groups of inputs] float32
    bias: torch.Tensor | None,  # [num_experts, num_outputs]
    order: torch.Tensor,  # [num_rows] int64, the place of each row, sorted by expert
    ends: torch.Tensor,  # [num_experts] int32, the end of each expert's rows
    num_chosen: int,
    *,
    from_tokens: bool,
) -> torch.Tensor:
    """Computes x W^T + b with the weight and the bias of each row's expert.

    A token has `num_chosen` adjacent places. Returns [num_rows, num_outputs]: with `from_tokens`,
    the rows of x are tokens, and the results are sorted by expert; else the rows of x are sorted,
    and the results are in the order of places.
    """
    num_experts, num_outputs, num_inputs = weight.shape
    num_rows = len(order)
    out = x.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    group = 0 if scales is None else num_inputs // scales.shape[2]
    num_tiles = num_rows // _ROWS + min(num_experts, num_rows)
    _grouped_kernel[(num_tiles, triton.cdiv(num_outputs, _COLUMNS))](
        x,
        weight,
        weight if scales is None else scales,
        weight if bias is None else bias,
        order,
        ends,
        out,
        num_experts,
        num_chosen,
        num_outputs,
        num_inputs,
        x.stride(0),
        GROUP=group,
        HAS_BIAS=bias is not None,
        FROM_TOKENS=from_tokens,
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH_BYTES // x.element_size(),
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
        num_stages=4,
    )
    return out


def combine(
    outputs: torch.Tensor,  # [num_tokens * num_chosen, size], contiguous
    weights: torch.Tensor,  # [num_tokens, num_chosen] float32, contiguous
) -> torch.Tensor:
    """Adds the weighted outputs of each token's experts, in their order: [num_tokens, size].

    The sum is in float32 and rounded once.
    """
    num_tokens, num_chosen = weights.shape
    size = outputs.shape[1]
    out = outputs.new_empty(num_tokens, size)
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(size, _HIDDEN))](
            outputs,
            weights,
            out,
            size,
            CHOSEN=num_chosen,
            COLUMNS=_HIDDEN,
            enable_fp_fusion=FP_FUSION,
        )
    return out
