"""Wraps the C kernels of gates (scan/gates.c); each row is computed without the others."""

import torch

from .calls import call


def delta_gates(
    a: torch.Tensor,  # [num_tokens, heads]
    b: torch.Tensor,  # the same
    rate: torch.Tensor,  # float32 [heads]
    bias: torch.Tensor,  # float32 [heads]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `states.mixers.delta_gates`."""
    rows, heads = a.shape
    decays = a.new_empty(rows, heads, dtype=torch.float32)
    betas = a.new_empty(rows, heads)
    places = (a, a.stride(0), b, b.stride(0), rate, bias, decays, betas)
    call("delta_gates", a.dtype, rows, *places, heads)
    return decays, betas


def gated_norm(
    x: torch.Tensor,  # [rows, heads, dim]
    z: torch.Tensor,  # the same
    weight: torch.Tensor,  # [dim] or [heads, dim]
    epsilon: float,
    *,
    gate_first: bool,
    squares: torch.Tensor | None = None,  # float32 [rows, heads], contiguous
    group_size: int = 0,
) -> torch.Tensor:
    """Computes `layers.norm.GatedRMSNorm`: [rows, heads, dim].

    With `squares`, these are the sums of the squares of `group_size` numbers, by which each head is
    normalized.
    """
    rows, heads, dim = x.shape
    out = x.new_empty(rows, heads, dim)
    weight_stride = 0 if weight.ndim == 1 else dim
    places = (x, x.stride(0), z, z.stride(0), weight, weight_stride, out)
    options = (float(epsilon), int(gate_first), squares, group_size or dim)
    call("gated_norm", x.dtype, rows, *places, heads, dim, *options)
    return out


def gated_squares(
    x: torch.Tensor,  # [rows, heads, dim]
    z: torch.Tensor,  # the same
) -> torch.Tensor:
    """Returns the sum of the squares of each head of x * silu(z): float32 [rows, heads]."""
    rows, heads, dim = x.shape
    out = x.new_empty(rows, heads, dtype=torch.float32)
    call("gated_squares", x.dtype, rows, x, x.stride(0), z, z.stride(0), out, heads, dim)
    return out


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Computes x * sigmoid(gate), [rows, dim], of x [rows, dim] and gate [rows, dim or 1]."""
    rows, dim = x.shape
    out = x.new_empty(rows, dim)
    is_shared = int(gate.shape[1] == 1)
    places = (x, x.stride(0), gate, gate.stride(0), out)
    call("sigmoid_gated", x.dtype, rows, *places, dim, is_shared)
    return out


def sigmoid_scores(
    x: torch.Tensor,  # [rows, inputs]
    weight: torch.Tensor,  # float32 [outputs, inputs]
) -> torch.Tensor:
    """Computes sigmoid(x W^T) in float32: [rows, outputs]."""
    rows, inputs = x.shape
    outputs = len(weight)
    out = x.new_empty(rows, outputs, dtype=torch.float32)
    call("sigmoid_scores", x.dtype, rows, x, x.stride(0), weight, out, outputs, inputs)
    return out
