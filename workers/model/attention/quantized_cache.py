"""Rounds keys and values to 8 bits with a scale for each token and head, and back, in plain torch.

The C kernels do the same; see kernels/pieces.c and kernels/tile_attention_scaled.h."""

from typing import Final

import torch

from ...kv_cache.layout import SCALE_BYTES

_LARGEST: Final = {torch.int8: 127, torch.uint8: 448}  # by what rows have, see `kv_store.ITEMS`
_TINY: Final = 2.0**-119  # the inverse of less might be infinite


def quantize(heads: torch.Tensor, item: torch.dtype) -> torch.Tensor:
    """Rounds vectors [.., head_dim] to rows of the cache, [.., head_dim + SCALE_BYTES]; `item` is
    their dtype.

    The scale of a vector that is not finite is infinite, and so is what attention reads with it, or
    NaN.
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
    """Returns what rows of the cache stand for, [.., head_dim] in `dtype`."""
    numbers = rows[..., :-SCALE_BYTES]
    if rows.dtype is torch.uint8:
        numbers = numbers.view(torch.float8_e4m3fn)
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return (numbers.float() * scale.float()).to(dtype)
