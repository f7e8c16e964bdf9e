"""Holds the weights of causal convolutions of layers that keep a state, and computes them."""

from collections.abc import Sequence

import torch

from ..module import Module, Parameter, WeightSlice
from ..states import mixers
from ..states.steps import StateSteps
from .linear import BuildOptions, Outputs


class CausalConv(Module):
    """Convolves each channel with its last `width` inputs.

    A rank has some of the channels.
    """

    def __init__(
        self,
        outputs: Sequence[Outputs],  # the channels that the rank keeps, in the order of its inputs
        width: int,
        build: BuildOptions,
        *,
        bias: bool,
        silu: bool,  # whether silu follows
    ) -> None:
        self._silu = silu
        taps = [
            WeightSlice(f"{name}.weight", (channels, 1, width), (kept,))
            for name, channels, kept in outputs
        ]
        self.weight = Parameter(*taps, dtype=build.dtype)
        self.bias: Parameter | None = None
        if bias:
            biases = [
                WeightSlice(f"{name}.bias", (channels,), (kept,))
                for name, channels, kept in outputs
            ]
            self.bias = Parameter(*biases, dtype=build.dtype)

    def process_after_load(self) -> None:
        """Transposes the taps, [width, channels], as kernels read them."""
        self._taps = self.weight.data.squeeze(1).t().contiguous()
        self._bias = self.bias.data if self.bias else None
        del self.weight

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, channels]
        parts: Sequence[torch.Tensor],  # the states of adjacent channels; see `mixers.conv`
        steps: StateSteps,
    ) -> torch.Tensor:
        """Convolves the tokens of all sequences: [num_tokens, channels]."""
        return mixers.conv(x, self._taps, self._bias, parts, steps, silu=self._silu)
