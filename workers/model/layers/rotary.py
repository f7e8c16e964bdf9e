"""Computes rotary embeddings (arXiv 2104.09864) and their scalings, as transformers does."""

import math
from typing import Final

import torch
from torch.nn import functional

from .. import kernels
from ..config import RopeConfig
from ..kernels.c import cpu

_TABLE_ROWS: Final = 4_096  # rows of a table that are computed at once

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of each token's position, each [num_tokens, 1, head_dim]."""


def rotated_order(config: RopeConfig | None, head_dim: int) -> list[slice]:
    """Returns the order in which a query or key head's dimensions are loaded for `apply_rotary`.

    `apply_rotary` rotates all dimensions, in pairs that are half a head apart. Products of queries
    and keys do not depend on the order of dimensions. So models that pair neighbours, or rotate
    only some dimensions, are loaded in this order.
    """
    if config is None or (config.rotated == 1.0 and not config.interleaved):
        return [slice(0, head_dim)]
    num_rotated = config.num_rotated(head_dim)
    half = num_rotated // 2
    middle = (num_rotated + head_dim) // 2
    pairs = (slice(0, num_rotated, 2), slice(1, num_rotated, 2))
    first, second = pairs if config.interleaved else (slice(0, half), slice(half, num_rotated))
    order = [first, slice(num_rotated, middle), second, slice(middle, head_dim)]
    return [part for part in order if part.start < part.stop]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns the angle per position of each pair of rotated dimensions: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "longrope":
        return 1.0 / (torch.tensor(config.factors) * config.theta**exponents)
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config, frequencies, head_dim)
    return frequencies


class RotaryEmbedding:
    """Maps positions to the cosines and sines that `apply_rotary` uses."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Builds a table if there are CPU kernels; positions must then be below `max_positions`."""
        num_rotated = config.num_rotated(head_dim)
        rest = (0, (head_dim - num_rotated) // 2)  # dimensions of each half that are not rotated
        half = functional.pad(inverse_frequencies(config, num_rotated), rest).to(device)
        self._frequencies = torch.cat((half, half))  # [head_dim]
        scale = functional.pad(
            torch.full((num_rotated // 2,), config.attention_factor), rest, value=1.0
        ).to(device)
        self._scale = torch.cat((scale, scale))
        # The minus sign of rotate_half is in the table instead of in the activations.
        self._signed_scale = torch.cat((-scale, scale))
        self._dtype = dtype
        has_kernels = cpu.usable(self._frequencies.to(dtype))
        self._table = self._make_table(max_positions) if has_kernels else None

    def __call__(self, positions: torch.Tensor) -> CosSin:
        """Maps positions [num_tokens] to cosines and signed sines."""
        if self._table is None:
            return self._compute(positions)
        cos, sin = self._table
        positions = positions.int()
        return cpu.gather(cos, positions), cpu.gather(sin, positions)

    def _make_table(self, num_positions: int) -> CosSin:
        """Returns the cosines and signed sines of all positions, computed a few at a time.

        The angles of all positions in float32 would take several times the bytes of the table.
        """
        size = (num_positions, 1, len(self._frequencies))
        cos = torch.empty(size, dtype=self._dtype)
        sin = torch.empty(size, dtype=self._dtype)
        for begin in range(0, num_positions, _TABLE_ROWS):
            rows = slice(begin, min(begin + _TABLE_ROWS, num_positions))
            cos[rows], sin[rows] = self._compute(torch.arange(rows.start, rows.stop))
        return cos, sin

    def _compute(self, positions: torch.Tensor) -> CosSin:
        angles = (positions.float()[:, None] * self._frequencies)[:, None]
        cos = angles.cos() * self._scale
        sin = angles.sin() * self._signed_scale
        return cos.to(self._dtype), sin.to(self._dtype)


def apply_rotary(heads: torch.Tensor, rotary: CosSin) -> torch.Tensor:
    """Rotates heads [num_tokens, num_heads, head_dim], which may be overwritten."""
    cos, sin = rotary
    if native := kernels.of(heads):
        return native.rotate(heads, cos, sin)
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Scales frequencies as Llama 3.1: divides low ones by the factor, keeps high ones.

    Frequencies in between are interpolated.
    """
    context = config.original_max_position
    waves = 2 * math.pi / frequencies
    scaled = torch.where(
        waves > context / config.low_freq_factor, frequencies / config.factor, frequencies
    )
    smooth = (context / waves - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = (waves >= context / config.high_freq_factor) & (
        waves <= context / config.low_freq_factor
    )
    return torch.where(between, blended, scaled)


def _yarn(config: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Scales frequencies as YaRN (arXiv 2309.00071).

    A ramp over the dimensions leads from unchanged frequencies to frequencies divided by the
    factor.
    """

    def dimension(num_rotations: float) -> float:
        turns = config.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low = dimension(config.beta_fast)
    high = dimension(config.beta_slow)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / config.factor * ramp + frequencies * (1 - ramp)
