"""Computes norms, activations and rotations in Triton, and stores keys and values.

Tensors are on one device, in float32, bfloat16 or float16, and their last dimension is contiguous.
Nothing here waits for the device or reads data on the host, so that everything can be captured in a
CUDA graph after a first run.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# What Triton compiles has no Python types: its arguments are scalars and blocks of the device.

from typing import Final

import torch
import triton
import triton.language as tl

from . import FP_FUSION
from .attention import Scales

_COLUMNS: Final = 1024  # columns of a row that one program gates
_HEADS: Final = 16  # heads that one program rotates
LARGEST: Final = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""The largest number of a quantized cache."""


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    residual,  # contiguous
    out,  # contiguous
    x_stride_row,
    x_stride_head,
    epsilon,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, DIM_PADDED)
    inside = columns < DIM
    wide = tl.load(
        x + row * x_stride_row + head * x_stride_head + columns, mask=inside, other=0.0
    ).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + epsilon)
    # Rounded before the product with the weight, as transformers does for Llama.
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    place = (row * tl.num_programs(1) + head) * DIM + columns
    result = normed * factor
    if HAS_RESIDUAL:
        result += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, result, mask=inside)


def rms_norm(
    x: torch.Tensor,  # [rows, dim] or [rows, heads, dim], any strides but the last
    weight: torch.Tensor,  # [dim]
    epsilon: float,
    offset: float = 0.0,  # added to the weight
    residual: torch.Tensor | None = None,  # of x's shape, contiguous; is added
) -> torch.Tensor:
    """Normalizes the last dimension by its root mean square, in float32.

    Returns a contiguous tensor of x's shape.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, head_stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    dim = x.shape[-1]
    padded = triton.next_power_of_2(dim)
    _rms_norm_kernel[(x.shape[0], heads)](
        x,
        weight,
        x if residual is None else residual,
        out,
        x.stride(0),
        head_stride,
        epsilon,
        offset,
        HAS_RESIDUAL=residual is not None,
        DIM=dim,
        DIM_PADDED=padded,
        enable_fp_fusion=FP_FUSION,
        num_warps=min(max(padded // 512, 1), 16),
    )
    return out


@triton.jit
def _gated_kernel(x, out, x_stride_row, dim, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < dim
    gate = tl.load(x + row * x_stride_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride_row + dim + columns, mask=inside, other=0.0).to(tl.float32)
    # The tanh in GELU (arXiv 1606.08415) is a sigmoid of twice its argument. Rounded before the
    # product, as torch does.
    slope = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    active = (gate * tl.sigmoid(slope)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + columns, active * up, mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up of [rows, 2 * dim], gates first: contiguous [rows, dim]."""
    return _gated(x, gelu=False)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes gelu(gate) * up like `silu_mul`, with the tanh form of GELU."""
    return _gated(x, gelu=True)


def _gated(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    rows = x.shape[0]
    dim = x.shape[1] // 2
    out = x.new_empty(rows, dim)
    grid = (rows, triton.cdiv(dim, _COLUMNS))
    _gated_kernel[grid](
        x,
        out,
        x.stride(0),
        dim,
        GELU=gelu,
        COLUMNS=_COLUMNS,
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
    )
    return out


@triton.jit
def _rotate_kernel(
    heads,
    cos,
    sin,
    heads_stride_token,
    heads_stride_head,
    cos_stride_token,
    sin_stride_token,
    num_heads,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF_PADDED)[None, :]
    left = heads + token * heads_stride_token + head * heads_stride_head + pair
    inside = (head < num_heads) & (pair < HALF)
    x = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(left + HALF, mask=inside, other=0.0).to(tl.float32)
    cosines = cos + token * cos_stride_token + pair
    sines = sin + token * sin_stride_token + pair
    in_table = pair < HALF
    cos_x = tl.load(cosines, mask=in_table, other=0.0).to(tl.float32)
    cos_y = tl.load(cosines + HALF, mask=in_table, other=0.0).to(tl.float32)
    sin_x = tl.load(sines, mask=in_table, other=0.0).to(tl.float32)
    sin_y = tl.load(sines + HALF, mask=in_table, other=0.0).to(tl.float32)
    tl.store(left, x * cos_x + y * sin_x, mask=inside)
    tl.store(left + HALF, y * cos_y + x * sin_y, mask=inside)


def rotate(
    heads: torch.Tensor,  # [num_tokens, num_heads, head_dim], any strides but the last
    cos: torch.Tensor,  # [num_tokens, 1, head_dim], of a RotaryEmbedding
    sin: torch.Tensor,  # the same, signed
) -> torch.Tensor:
    """Rotates heads in place by their tokens' positions, in float32; returns them."""
    num_tokens, num_heads, head_dim = heads.shape
    _rotate_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        heads,
        cos,
        sin,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        sin.stride(0),
        num_heads,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS,
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
    )
    return heads


@triton.jit
def _store_heads(heads, target, scales, inside, LARGEST: tl.constexpr):
    """Stores heads [HEADS, DIM], quantized if LARGEST, the largest number, is not 0.

    Rounds as `quantized_cache.quantize`, to the last bit. Does not use Triton's conversions, which
    do not round to the nearest in its interpreter.
    """
    if LARGEST == 0:
        tl.store(target, heads, mask=inside)
    else:
        wide = heads.to(tl.float32)
        # A vector with NaN or infinity gets an infinite scale.
        peaks = tl.where(tl.abs(wide) < float("inf"), tl.abs(wide), float("inf"))
        bits = (tl.max(peaks, axis=1) * (1 / LARGEST)).to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1) & -0x10000  # to bfloat16
        scale = rounded.to(tl.float32, bitcast=True)
        # The inverse of a smaller one could be infinite.
        scale = tl.where(scale < 2.0**-119, 0.0, scale)
        factor = tl.where(scale > 0, tl.div_rn(1.0, tl.maximum(scale, 2.0**-119)), 0.0)[:, None]
        numbers = tl.where(factor > 0, wide * factor, 0.0)
        if LARGEST == 127:
            magic = 1.5 * 2.0**23  # the sum is rounded to a whole number
            tl.store(target, (numbers + magic - magic).to(tl.int8), mask=inside)
        else:
            code = _to_e4m3(numbers).to(tl.uint8)
            tl.store(target, code.to(tl.float8e4nv, bitcast=True), mask=inside)
        tl.store(scales, scale.to(tl.bfloat16), mask=tl.max(inside.to(tl.int32), axis=1) > 0)


@triton.jit
def _quantize_kernel(
    x,
    out,  # bytes, contiguous
    scales,
    x_stride_row,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, DIM_PADDED)
    inside = columns < DIM
    wide = tl.load(x + row * x_stride_row + columns, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.where(tl.abs(wide) < float("inf"), tl.abs(wide), float("inf")), axis=0)
    is_finite = peak < float("inf")
    scale = tl.maximum(peak * (1 / 448), 2.0**-119)  # the inverse of a smaller one may be infinite
    numbers = tl.where(is_finite, wide * tl.div_rn(1.0, scale), 0.0)
    tl.store(out + row * DIM + columns, _to_e4m3(numbers).to(tl.uint8), mask=inside)
    tl.store(scales + row, tl.where(is_finite, scale, float("nan")))


def quantize_rows(
    x: torch.Tensor,  # [rows, dim], any stride of rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds rows to E4M3: contiguous [rows, dim], and their scales, float32 [rows].

    The scale of a row that is not finite is NaN.
    """
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(dim)
    _quantize_kernel[(rows,)](
        x,
        out,
        scales,
        x.stride(0),
        DIM=dim,
        DIM_PADDED=padded,
        enable_fp_fusion=FP_FUSION,
        num_warps=min(max(padded // 1024, 1), 16),
    )
    return out.view(torch.float8_e4m3fn), scales


@triton.jit
def _to_e4m3(numbers):
    """Rounds numbers below 464 to the nearest in E4M3; returns their bits."""
    bits = numbers.to(tl.int32, bitcast=True)
    # The last of three bits of mantissa gets a carry; the exponent's bias is 7 instead of 127.
    normal = ((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9, the last bit of 2^14.
    small = (tl.abs(numbers) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    magnitude = tl.where(tl.abs(numbers) < 2.0**-6, small, normal)
    return magnitude | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["slots"])
def _store_kv_kernel(
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    key_stride_token,
    value_stride_token,
    stride_block,
    stride_head,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.arange(0, HEADS_PADDED)
        column = tl.arange(0, DIM_PADDED)[None, :]
        inside = (head < KV_HEADS)[:, None] & (column < HEAD_DIM)
        source = head[:, None] * HEAD_DIM + column
        # In 64 bits, because a cache may have more than 2^31 elements.
        start = (slot // BLOCK_SIZE).to(tl.int64) * stride_block + head * stride_head
        target = (start + (slot % BLOCK_SIZE) * stride_slot)[:, None] + column
        scale = start // 2 + slot % BLOCK_SIZE
        heads = tl.load(key + token * key_stride_token + source, mask=inside, other=0.0)
        _store_heads(heads, keys + target, key_scales + scale, inside, LARGEST)
        if HAS_VALUES:
            heads = tl.load(value + token * value_stride_token + source, mask=inside, other=0.0)
            _store_heads(heads, values + target, value_scales + scale, inside, LARGEST)


def store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], heads one after the other
    value: torch.Tensor,  # the same
    keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], a layer's cache
    values: torch.Tensor | None,  # the same, in the same strides; None: only keys are written
    # [num_tokens] int32, block * block_size + offset; negative for padding
    slots: torch.Tensor,
    scales: Scales | None = None,  # of a quantized cache
) -> None:
    """Writes the step's keys and values to their token slots; skips negative slots."""
    num_tokens, kv_heads, head_dim = key.shape
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        keys,
        keys if values is None else values,
        *(scales or (key, key)),
        slots,
        key.stride(0),
        value.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        BLOCK_SIZE=keys.shape[2],
        KV_HEADS=kv_heads,
        HEADS_PADDED=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim),
        LARGEST=LARGEST.get(keys.dtype, 0),
        HAS_VALUES=values is not None,
        enable_fp_fusion=FP_FUSION,
        num_warps=4,
    )
