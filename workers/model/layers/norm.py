"""Root mean square norm."""

import torch

from .. import kernels
from ..module import Module, Parameter, WeightSlice


class RMSNorm(Module):
    """Normalises the last dimension (arXiv 1910.07467), in float32 as transformers computes it."""

    def __init__(self, name: str, size: int, epsilon: float, dtype: torch.dtype) -> None:
        self.weight = Parameter(WeightSlice(f"{name}.weight", (size,)), dtype=dtype)
        self._epsilon = epsilon

    def process_after_load(self) -> None:
        """Picks the kernel of the weight's device and dtype."""
        self._weight = self.weight.data
        self._kernels = kernels.of(self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [..., size] to the same shape."""
        if self._kernels:
            return self._kernels.rms_norm(x, self._weight, self._epsilon)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self._weight * (wide * scale).to(x.dtype)
