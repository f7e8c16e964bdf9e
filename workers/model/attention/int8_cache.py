"""Rounds keys and values to int8 with a scale for each token and head, and back, in plain torch.

The C kernels do the same; see kernels/pieces.c and kernels/tile_attention_int8.c."""

from typing import Final

import torch

from ...kv_cache.layout import SCALE_BYTES

_LARGEST: Final = 127
_TINY: Final = 2.0**-119  # the inverse of less might be infinite


def quantize(heads: torch.Tensor) -> torch.Tensor:
    """Rounds vectors [.., head_dim] to rows of the cache, int8 [.., head_dim + SCALE_BYTES].

    The scale of a vector that is not finite is infinite, and so is what attention reads with it, or NaN."""
    wide = heads.float()
    peak = wide.abs().amax(-1, keepdim=True).nan_to_num(torch.inf, torch.inf)
    scale = (peak / _LARGEST).bfloat16()
    scale = torch.where(scale.float() < _TINY, 0, scale)
    factor = torch.where(scale > 0, 1 / scale.float(), 0)
    numbers = (wide * factor).round().nan_to_num(0, 0, 0).to(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8)), dim=-1)


def dequantize(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what rows of the cache stand for, [.., head_dim] in `dtype`."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return (rows[..., :-SCALE_BYTES].float() * scale.float()).to(dtype)
