"""Quantizes keys and values to 8 or 4 bits with scales for each token and head, in plain torch.

The C kernels do the same; see kernels/c/pieces.c and kernels/c/attention/tile_attention_scaled.h.
"""

from typing import Final

import torch

from ...kv_cache.layout import INT4_GROUP, INT4_SCALE_BYTES, SCALE_BYTES

# The largest number by the dtype of the cache.
_LARGEST: Final = {"int8": 127, "fp8": 448, "int4": 15}
_TINY: Final = 2.0**-119  # the inverse of a smaller number could be infinite


def quantize(heads: torch.Tensor, cache_dtype: str) -> torch.Tensor:
    """Quantizes vectors [.., head_dim] to cache rows [.., head_bytes] of the dtype in `ITEMS`.

    A vector that is not finite gets an infinite scale, so attention reads infinity or NaN.
    """
    if cache_dtype == "int4":
        return _quantize_int4(heads.float())
    wide = heads.float()
    peak = wide.abs().amax(-1, keepdim=True).nan_to_num(torch.inf, torch.inf)
    scale = (peak * (1 / _LARGEST[cache_dtype])).bfloat16()
    scale = torch.where(scale.float() < _TINY, 0, scale)
    factor = torch.where(scale > 0, 1 / scale.float(), 0)
    numbers = torch.where(factor > 0, wide * factor, 0)
    rounded = (
        numbers.round().to(torch.int8)
        if cache_dtype == "int8"
        else numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    )
    return torch.cat((rounded, scale.view(rounded.dtype)), dim=-1)


def dequantize(
    rows: torch.Tensor, cache_dtype: str, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the vectors that cache rows [.., head_bytes] represent, [.., head_dim] in `dtype`."""
    if cache_dtype == "int4":
        return _dequantize_int4(rows, head_dim).to(dtype)
    numbers = rows[..., :-SCALE_BYTES]
    if cache_dtype == "fp8":
        numbers = numbers.view(torch.float8_e4m3fn)
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return (numbers.float() * scale.float()).to(dtype)


def _quantize_int4(wide: torch.Tensor) -> torch.Tensor:
    """Quantizes vectors [.., head_dim] float32 by groups; see kernels/c/common.h for the rows."""
    is_finite = wide.isfinite().all(-1, keepdim=True)
    packed = []
    scales = []
    for group in torch.split(wide, INT4_GROUP, dim=-1):
        low = group.amin(-1, keepdim=True).bfloat16()
        low = torch.where(low.float().abs() < _TINY, 0, low)
        span = (group.amax(-1, keepdim=True) - low.float()).clamp(min=0)
        scale = (span * (1 / _LARGEST["int4"])).bfloat16()
        scale = torch.where(scale.float() < _TINY, 0, scale)
        is_known = is_finite & scale.isfinite()
        factor = torch.where(is_known & (scale > 0), 1 / scale.float(), 0)
        numbers = torch.where(factor > 0, (group - low.float()) * factor, 0)
        rounded = numbers.round().clamp(0, _LARGEST["int4"]).to(torch.uint8)
        half = group.shape[-1] // 2
        packed.append(rounded[..., :half] | rounded[..., half:] << 4)
        pair = torch.cat((scale, low), dim=-1).where(is_known, torch.inf)
        scales.append(pair.view(torch.uint8))
    return torch.cat((*packed, *scales), dim=-1)


def _dequantize_int4(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the vectors of such rows, [.., head_dim] float32."""
    numbers = torch.split(rows[..., : head_dim // 2], INT4_GROUP // 2, dim=-1)
    scales = torch.split(rows[..., head_dim // 2 :], INT4_SCALE_BYTES, dim=-1)
    found = []
    for packed, pair in zip(numbers, scales, strict=True):
        scale, low = torch.split(pair.contiguous().view(torch.bfloat16).float(), 1, dim=-1)
        found.append(torch.cat((packed & 15, packed >> 4), dim=-1).float() * scale + low)
    return torch.cat(found, dim=-1)
