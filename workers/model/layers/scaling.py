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
    """Returns x * sigmoid(gate) of [num_rows, size] each, whose rows have any stride."""
    if cpu.usable(x):
        return gates.sigmoid_gated(x, gate)
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Returns relu(x) ** 2 of [num_rows, size] (arXiv 2109.08668)."""
    positive = torch.relu(x)
    return positive * positive
