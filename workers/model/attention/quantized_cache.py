"""Quantizes keys and values to 8 bits with one scale per token and head, in plain torch.

The C kernels do the same; see kernels/c/pieces.c and kernels/c/attention/tile_attention_scaled.h.
"""

from typing import Final

import torch

from ...kv_cache.layout import SCALE_BYTES

# The largest number by the dtype of the cache's rows; see `kv.store.ITEMS`.
_LARGEST: Final = {torch.int8: 127, torch.uint8: 448}
_TINY: Final = 2.0**-119  # the inverse of a smaller number could be infinite


def quantize(heads: torch.Tensor, item: torch.dtype) -> torch.Tensor:
    """Quantizes vectors [.., head_dim] to cache rows [.., head_dim + SCALE_BYTES] of dtype `item`.

    A vector that is not finite gets an infinite scale, so attention reads infinity or NaN.
    """
    wide = heads.float()
    peak = wide.abs().amax(-1, keepdim=True).nan_to_num(torch.inf, torch.inf)
    scale = (peak * (1 / _LARGEST[item])).bfloat16()
    scale = torch.where(scale.float() < _TINY, 0, scale)
    factor = torch.where(scale > 0, 1 / scale.float(), 0)
    numbers = torch.where(factor > 0, wide * factor, 0)
    rounded = (
        numbers.round().to(item)
        if item is torch.int8
        else numbers.to(torch.float8_e4m3fn).view(item)
    )
    return torch.cat((rounded, scale.view(item)), dim=-1)


def dequantize(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the vectors that cache rows represent, [.., head_dim] in `dtype`."""
    numbers = rows[..., :-SCALE_BYTES]
    if rows.dtype is torch.uint8:
        numbers = numbers.view(torch.float8_e4m3fn)
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return (numbers.float() * scale.float()).to(dtype)
