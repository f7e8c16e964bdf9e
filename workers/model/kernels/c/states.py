"""Wraps the C kernels of layers that keep a state for each sequence (folder `scan`).

They take the rows of a step's sequences one after the other, and `address`, which describes the
sequences (`states.steps.StateSteps`). Memory of states is [num_slots, heads, numbers of a head].
The numbers of a head are contiguous. Matrices of [rows, columns] are stored in tiles of 16 columns,
[tiles, rows, 16]; the last tile has the columns that are left.
"""

from array import array
from functools import cache
from typing import Final

import torch

from .calls import call

MAX_ROWS: Final = 256  # as in scan.h
MAX_WIDTH: Final = 16  # as in conv.c


@cache
def _shape(*numbers: int) -> torch.Tensor:
    """Returns the numbers of a kernel's struct Shape; recorded calls keep the tensor alive."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)  # not recorded itself


def _strides(state: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes between the slots and between the heads of a state."""
    size = state.element_size()
    return state.stride(0) * size, state.stride(1) * size


def conv(
    x: torch.Tensor,  # [num_tokens, heads * columns]
    weight: torch.Tensor,  # [width, heads * columns], a slice of contiguous [width, channels]
    bias: torch.Tensor | None,  # [heads * columns]
    state: torch.Tensor,  # [num_slots, heads, (width - 1) * columns], the oldest input first
    address: torch.Tensor,
    out: torch.Tensor,  # as x
    *,
    silu: bool,
) -> None:
    """Convolves each channel of a sequence with its last `width` inputs."""
    width = weight.shape[0]
    heads = state.shape[1]
    numbers = (x.stride(0), out.stride(0), heads, x.shape[1] // heads, weight.stride(0), width)
    shape = _shape(*numbers, int(silu), *_strides(state))
    places = (x, weight, bias, out, state, address, shape)
    call("conv", x.dtype, x.shape[0], *places, shared=True)


def gated_delta(
    query: torch.Tensor,  # [num_tokens, key_heads, rows]
    key: torch.Tensor,  # the same
    value: torch.Tensor,  # [num_tokens, heads, columns]
    gate: torch.Tensor,  # float32 [num_tokens, heads] or, for each row, [num_tokens, heads, rows]
    beta: torch.Tensor,  # [num_tokens, heads]
    state: torch.Tensor,  # float32 [num_slots, heads, rows * columns]
    address: torch.Tensor,
    *,
    scale: float,
    normalizes: bool,
) -> torch.Tensor:
    """Computes `states.mixers.gated_delta`."""
    num_tokens, heads, columns = value.shape
    key_heads, rows = key.shape[1:]
    strides = tuple(each.stride(0) for each in (query, key, value, gate, beta))
    gates = rows if gate.ndim == 3 else 1
    numbers = (key_heads, heads, rows, columns, gates, int(normalizes), *_strides(state))
    out = value.new_empty(num_tokens, heads, columns)
    places = (query, key, value, gate, beta, out, state, address, _shape(*strides, *numbers))
    call("delta", value.dtype, num_tokens, *places, float(scale), shared=True)
    return out


def mamba2(
    x: torch.Tensor,  # [num_tokens, heads, columns]
    dt: torch.Tensor,  # [num_tokens, heads]
    b: torch.Tensor,  # [num_tokens, groups, rows]
    c: torch.Tensor,  # the same
    a: torch.Tensor,  # float32 [heads]
    d: torch.Tensor | None,  # float32 [heads]
    dt_bias: torch.Tensor | None,  # float32 [heads]
    state: torch.Tensor,  # float32 [num_slots, heads, rows * columns]
    address: torch.Tensor,
    *,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Computes `states.mixers.mamba2`."""
    num_tokens, heads, columns = x.shape
    groups, rows = b.shape[1:]
    strides = tuple(each.stride(0) for each in (x, dt, b, c))
    shape = _shape(*strides, groups, heads, rows, columns, *_strides(state))
    out = x.new_empty(num_tokens, heads, columns)
    places = (x, dt, b, c, a, d, dt_bias, out, state, address, shape)
    call("mamba2", x.dtype, num_tokens, *places, *map(float, limits), shared=True)
    return out


def mamba(
    x: torch.Tensor,  # [num_tokens, channels]
    dt: torch.Tensor,  # the same
    b: torch.Tensor,  # [num_tokens, rows]
    c: torch.Tensor,  # the same
    a: torch.Tensor,  # float32 [rows, channels]
    d: torch.Tensor | None,  # float32 [channels]
    z: torch.Tensor | None,  # [num_tokens, channels]
    dt_bias: torch.Tensor | None,  # float32 [channels]
    state: torch.Tensor,  # float32 [num_slots, heads, rows * columns], channels are heads * columns
    address: torch.Tensor,
) -> torch.Tensor:
    """Computes `states.mixers.mamba`."""
    num_tokens, channels = x.shape
    rows = a.shape[0]
    heads = state.shape[1]
    strides = tuple(0 if each is None else each.stride(0) for each in (x, dt, b, c, z))
    shape = _shape(*strides, heads, rows, channels // heads, *_strides(state))
    out = x.new_empty(num_tokens, channels)
    places = (x, dt, b, c, a, d, dt_bias, z, out, state, address, shape)
    call("mamba", x.dtype, num_tokens, *places, shared=True)
    return out
