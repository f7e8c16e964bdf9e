"""Computes the gated short convolutions of LFM2 (arXiv 2511.23404)."""

from typing import Final

import torch

from ...kv_cache.layout import StatePart
from ..config import ModelConfig, ShortConvConfig
from ..module import Module
from ..states import mixers
from ..states.steps import StepStates
from .causal_conv import CausalConv
from .linear import BuildOptions, ColumnParallelLinear, RowParallelLinear, split_outputs

_STATE: Final = "conv"


def short_conv_states(channels: int, width: int) -> tuple[StatePart, ...]:
    """Returns the state of a convolution of `width` inputs of each channel: the last inputs."""
    run = mixers.channels_of_head(channels)
    heads = channels // run
    row = (width - 1) * run
    return (StatePart(name=_STATE, num_heads=heads, num_kv_heads=heads, row=row, dtype="auto"),)


class ShortConv(Module):
    """Computes out(c * conv(b * x)); b, c and x are linear maps of the input.

    Ranks split the channels, in runs that act as heads.
    """

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        """Raises ValueError if the channels cannot be split over the ranks."""
        assert config.short_conv is not None
        own: ShortConvConfig = config.short_conv
        channels = config.hidden_size
        (state,) = config.layers[index].states
        heads = build.tp.kv_heads(state)
        run = channels // state.num_kv_heads
        kept = slice(heads[0] * run, (heads[-1] + 1) * run)
        self._index = index
        outputs = split_outputs(f"{prefix}.in_proj", [(channels, [kept])] * 3)
        self.in_proj = ColumnParallelLinear(outputs, channels, build, bias=own.has_bias)
        convolved = [(f"{prefix}.conv", channels, kept)]
        self.conv = CausalConv(convolved, own.width, build, bias=own.has_bias, silu=False)
        self.out_proj = RowParallelLinear(
            f"{prefix}.out_proj", channels, channels, kept, build, bias=own.has_bias
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, states: StepStates
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        b, c, x = self.in_proj(x).chunk(3, dim=1)
        memory = states.memory(self._index, _STATE)[:, 0]
        return self.out_proj(c * self.conv(b * x, [memory], states.steps), residual)
