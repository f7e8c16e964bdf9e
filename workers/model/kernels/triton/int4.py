"""Restores weights of 4 bits from the layout of torch's `_weight_int4pack_mm`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final

import torch
import triton
import triton.language as tl

from . import FP_FUSION

_COLUMNS: Final = 1024  # inputs that a program restores


@triton.jit
def _restore_kernel(
    words,
    terms,
    out,
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # A program writes adjacent inputs of one output, and so reads each word up to 8 times: from the
    # cache. The order of words and numbers is in `quant.int4.pack`.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_inputs
    depth: tl.constexpr = 16 * TILES  # inputs of a block of words
    block = row // 8 * (num_inputs // depth) + column // depth
    lane = row % 8 * 4 + column % 8 // 2
    place = (block * 32 + lane) * (TILES // 2) + column % depth // 32
    word = tl.load(words + place, mask=inside, other=0)
    number = (word >> (column % 2 * 16 + column % 32 // 8 * 4)) & 15
    term = (column // GROUP * num_outputs + row) * 2
    scale = tl.load(terms + term, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(terms + term + 1, mask=inside, other=0.0).to(tl.float32)
    weight = (number - 8).to(tl.float32) * scale + zero
    tl.store(out + row * num_inputs + column, weight, mask=inside)


def restore(
    words: torch.Tensor,  # [num_outputs / 8, num_inputs / (16 * tiles), 32, tiles / 2] int32
    terms: torch.Tensor,  # [num_groups, num_outputs, 2], scale and zero of each group
) -> torch.Tensor:
    """Returns the weight [num_outputs, num_inputs] in the dtype of `terms`."""
    num_groups, num_outputs, _ = terms.shape
    num_inputs = words.numel() // num_outputs * 8
    out = terms.new_empty(num_outputs, num_inputs)
    _restore_kernel[(num_outputs, triton.cdiv(num_inputs, _COLUMNS))](
        words,
        terms,
        out,
        num_outputs,
        num_inputs,
        GROUP=num_inputs // num_groups,
        TILES=2 * words.shape[-1],
        COLUMNS=_COLUMNS,
        enable_fp_fusion=FP_FUSION,
    )
    return out
