"""Applies factors, gates and soft caps to hidden states and logits."""

import torch

from ..kernels.c import cpu, gates


def scaled(x: torch.Tensor, factor: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Returns factor * x + residual; x and residual are contiguous [num_rows, size]."""
    if cpu.usable(x):
        return cpu.scale(x, factor, residual)
    return x * factor if residual is None else torch.add(residual, x, alpha=factor)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns cap * tanh(x / cap), between -cap and cap, of contiguous x [num_rows, size]."""
    return cpu.soft_cap(x, cap) if cpu.usable(x) else torch.tanh(x / cap) * cap


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(gate) of x [num_rows, size]; gate has the same shape or [num_rows, 1].

    The rows have any stride.
    """
    if cpu.usable(x):
        return gates.sigmoid_gated(x, gate)
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Returns relu(x) ** 2 of contiguous [num_rows, size] (arXiv 2109.08668)."""
    if cpu.usable(x):
        return cpu.relu_squared(x)
    positive = torch.relu(x)
    return positive * positive


def clamped_gate(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Returns gpt-oss's (up + 1) * gate * sigmoid(alpha * gate), [num_rows, size].

    x [num_rows, 2 * size] has gate and up in turn. The gate is at most `limit`, up within it.
    """
    if cpu.usable(x):
        return cpu.clamped_gate(x, alpha, limit)
    gate = x[:, ::2].clamp(max=limit)
    up = x[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)
