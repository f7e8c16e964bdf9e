"""The parts a decoder is made of: linear maps, norms, the gated MLP. Plain callables over loaded weights."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from . import kernels
from .weights import Weights


class Linear:
    """y = x W^T + b. On CPUs in bfloat16 the weight is stored in oneDNN's blocked form, a third faster to run."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    @classmethod
    def load(cls, weights: Weights, *names: str) -> "Linear":
        """Reads the named maps, which take the same input, into one that gives their outputs side by side."""
        weight = torch.cat([weights.take(f"{name}.weight") for name in names])
        has_bias = weights.has(f"{names[0]}.bias")
        return cls(weight, torch.cat([weights.take(f"{name}.bias") for name in names]) if has_bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in] to [num_tokens, out]."""
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


class RmsNorm:
    """Root mean square norm (arXiv 1910.07467) over the last dimension, in float32 as transformers computes it."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        self._native = kernels.usable(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._native:
            return kernels.rms_norm(x.contiguous(), self._weight, self._epsilon)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self._weight * (wide * scale).to(x.dtype)


class GatedMlp:
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._gate_up = Linear.load(weights, f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self._down = Linear.load(weights, f"{prefix}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] to the same."""
        gate_up = self._gate_up(x)  # [num_tokens, 2 * intermediate]
        if kernels.usable(gate_up):
            return self._down(kernels.silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._down(functional.silu(gate) * up)


def _can_pack() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    no_scalars: Sequence[float] = []
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", no_scalars, "")
    return result
