"""Rotary position embedding (arXiv 2104.09864) and its scalings, as transformers computes them."""

import math

import torch

from .. import kernels
from ..config import RopeConfig
from ..kernels import cpu

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of each token's position, each [num_tokens, 1, head_dim]."""


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns the angle per position of each pair of dimensions: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config, frequencies, head_dim)
    return frequencies


class RotaryEmbedding:
    """Turns positions into the cosines and sines that `apply_rotary` takes."""

    def __init__(
        self, config: RopeConfig, head_dim: int, *, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Where there are kernels for CPUs, positions are below max_positions, and their sines lie in a table."""
        half = inverse_frequencies(config, head_dim).to(device)
        self._frequencies = torch.cat((half, half))  # [head_dim]
        self._scale = config.attention_factor
        # The minus of rotate_half, moved from the activations into the table.
        self._signed_scale = torch.full((head_dim,), self._scale, device=device)
        self._signed_scale[: head_dim // 2] *= -1
        self._dtype = dtype
        has_kernels = cpu.usable(self._frequencies.to(dtype))
        self._table = self._compute(torch.arange(max_positions)) if has_kernels else None

    def __call__(self, positions: torch.Tensor) -> CosSin:
        """Maps positions [num_tokens] to cosines and signed sines."""
        if self._table is None:
            return self._compute(positions)
        cos, sin = self._table
        positions = positions.int()
        return cpu.gather(cos, positions), cpu.gather(sin, positions)

    def _compute(self, positions: torch.Tensor) -> CosSin:
        angles = (positions.float()[:, None] * self._frequencies)[:, None]
        return (angles.cos() * self._scale).to(self._dtype), (angles.sin() * self._signed_scale).to(self._dtype)


def apply_rotary(heads: torch.Tensor, rotary: CosSin) -> torch.Tensor:
    """Rotates heads [num_tokens, num_heads, head_dim]; they may be overwritten."""
    cos, sin = rotary
    if native := kernels.of(heads):
        return native.rotate(heads, cos, sin)
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Scales as Llama 3.1: long waves are slowed by the factor, short ones kept, those between blended."""
    context = config.original_max_position
    waves = 2 * math.pi / frequencies
    scaled = torch.where(waves > context / config.low_freq_factor, frequencies / config.factor, frequencies)
    smooth = (context / waves - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = (waves >= context / config.high_freq_factor) & (waves <= context / config.low_freq_factor)
    return torch.where(between, blended, scaled)


def _yarn(config: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Scales as YaRN (arXiv 2309.00071): a ramp over the dimensions between keeping and slowing by the factor."""

    def dimension(num_rotations: float) -> float:
        turns = config.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / config.factor * ramp + frequencies * (1 - ramp)
