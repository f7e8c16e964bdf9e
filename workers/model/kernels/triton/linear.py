"""Computes linear layers in Triton; results do not depend on the number of rows.

cuBLAS selects different kernels, and so different orders of summation, for different sizes. See
"Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025). Tensors are as in
elementwise.py.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final

import torch
import triton
import triton.language as tl

from . import FP_FUSION
from .attention import INTERPRETED

# The same tile for every number of rows: with another one, tensor cores may add in another order.
_ROWS: Final = 64
_COLUMNS: Final = 64
_DEPTH_BYTES: Final = 128  # bytes of a row in one product


@triton.jit
def _linear_kernel(
    x,
    weight,
    bias,
    residual,
    out,  # contiguous
    num_rows,
    num_outputs,
    num_inputs,
    x_stride_row,
    weight_stride_row,
    residual_stride_row,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Programs with the same outputs are adjacent, so that a weight is read from memory once.
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row = row < num_rows
    is_column = column < num_outputs
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, num_inputs, DEPTH):
        inside = begin + depth < num_inputs
        place = x + row[:, None] * x_stride_row + (begin + depth)[None, :]
        left = tl.load(place, mask=is_row[:, None] & inside[None, :], other=0.0)
        place = weight + column[:, None] * weight_stride_row + (begin + depth)[None, :]
        right = tl.load(place, mask=is_column[:, None] & inside[None, :], other=0.0)
        if INTERPRETED:  # the interpreter cannot multiply bfloat16
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    written = is_row[:, None] & is_column[None, :]
    if HAS_RESIDUAL:
        place = residual + row[:, None] * residual_stride_row + column[None, :]
        sums += tl.load(place, mask=written, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * num_outputs + column[None, :], sums, mask=written)


def linear(
    x: torch.Tensor,  # [num_rows, num_inputs], any stride of rows
    weight: torch.Tensor,  # [num_outputs, num_inputs], any stride of rows
    bias: torch.Tensor | None,  # [num_outputs]
    residual: torch.Tensor | None,  # [num_rows, num_outputs]
) -> torch.Tensor:
    """Computes x W^T + bias + residual: [num_rows, num_outputs].

    Sums are in float32 and rounded once. The bits of a row do not depend on the other rows or their
    number.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    out = x.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    _linear_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_outputs, _COLUMNS))](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH_BYTES // x.element_size(),
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
        num_stages=4,
    )
    return out
