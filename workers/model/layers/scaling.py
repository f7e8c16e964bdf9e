"""Applies factors and soft caps to hidden states and logits."""

import torch

from ..kernels.c import cpu


def scaled(x: torch.Tensor, factor: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Returns factor * x + residual; x and residual are contiguous [num_rows, size]."""
    if cpu.usable(x):
        return cpu.scale(x, factor, residual)
    return x * factor if residual is None else torch.add(residual, x, alpha=factor)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns cap * tanh(x / cap), between -cap and cap, of contiguous x [num_rows, size]."""
    return cpu.soft_cap(x, cap) if cpu.usable(x) else torch.tanh(x / cap) * cap
