"""Normalizes the last dimension, in float32."""

import torch
from torch.nn import functional

from .. import kernels
from ..kernels.c import cpu
from ..module import Module, Parameter, WeightSlice


class RMSNorm(Module):
    """Normalizes by the root mean square (arXiv 1910.07467).

    Rounds to x's dtype before it multiplies by the weight, as transformers does for Llama. For
    Gemma, OLMo 2 and gpt-oss, transformers multiplies in float32 and rounds once; in bfloat16 this
    differs by one rounding.
    """

    def __init__(
        self, name: str, size: int, epsilon: float, dtype: torch.dtype, *, offset: float = 0.0
    ) -> None:
        """Takes the `offset` that is added to the weight: 1 in Gemma's checkpoints."""
        self.weight = Parameter(WeightSlice(f"{name}.weight", (size,)), dtype=dtype)
        self._epsilon = epsilon
        self._offset = offset

    def process_after_load(self) -> None:
        """Selects the kernels for the weight's device and dtype."""
        self._weight = self.weight.data
        self._kernels = kernels.of(self._weight)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps x [..., size] to the same shape and adds the contiguous `residual`."""
        if self._kernels:
            return self._kernels.rms_norm(x, self._weight, self._epsilon, self._offset, residual)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        normed = (wide * scale).to(x.dtype)
        result = (
            ((self._weight.float() + self._offset) * normed).to(x.dtype)
            if self._offset
            else self._weight * normed
        )
        return result if residual is None else residual + result


class LayerNorm(Module):
    """Subtracts the mean and divides by the standard deviation (arXiv 1607.06450); no bias."""

    def __init__(self, name: str, size: int, epsilon: float, dtype: torch.dtype) -> None:
        self.weight = Parameter(WeightSlice(f"{name}.weight", (size,)), dtype=dtype)
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [num_rows, size] to the same shape."""
        weight = self.weight.data
        if cpu.usable(weight):
            return cpu.layer_norm(x, weight, self._epsilon)
        return functional.layer_norm(
            x.float(), weight.shape, weight.float(), None, self._epsilon
        ).to(x.dtype)
