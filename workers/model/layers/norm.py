"""Normalizes the last dimension, in float32."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from .. import kernels
from ..kernels.c import cpu, gates
from ..module import Module, Parameter, WeightSlice
from ..parallel import TensorParallel


class RMSNorm(Module):
    """Normalizes by the root mean square (arXiv 1910.07467).

    Rounds to x's dtype before it multiplies by the weight, as transformers does for Llama. For
    Gemma, OLMo 2 and gpt-oss, transformers multiplies in float32 and rounds once; in bfloat16 this
    differs by one rounding.
    """

    def __init__(
        self,
        name: str,
        size: int,
        epsilon: float,
        dtype: torch.dtype,
        *,
        offset: float = 0.0,
        order: Sequence[slice] = (slice(None),),
    ) -> None:
        """Takes the `offset` that is added to the weight: 1 in Gemma's checkpoints.

        `order` is the order of x's dimensions; see `rotary.rotated_order`.
        """
        slices = [WeightSlice(f"{name}.weight", (size,), (part,)) for part in order]
        self.weight = Parameter(*slices, dtype=dtype)
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


class GatedRMSNorm(Module):
    """Normalizes each head by its root mean square and multiplies it by silu of a gate.

    If the gate comes first, the gated head is normalized. The result is rounded once.
    """

    def __init__(
        self,
        weight: WeightSlice,  # [dim], or [kept heads * dim]
        dim: int,
        epsilon: float,
        dtype: torch.dtype,
        *,
        gate_first: bool = False,
    ) -> None:
        self.weight = Parameter(weight, dtype=dtype)
        self._dim = dim
        self._epsilon = epsilon
        self._gate_first = gate_first

    def process_after_load(self) -> None:
        """Splits a weight of several heads."""
        weight = self.weight.data
        self._weight = weight if weight.numel() == self._dim else weight.view(-1, self._dim)

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Maps x and gate [num_tokens, heads, dim] to the same shape; their rows have any stride.

        The elements of a row are contiguous.
        """
        if cpu.usable(x):
            return gates.gated_norm(
                x, gate, self._weight, self._epsilon, gate_first=self._gate_first
            )
        gated = x.float() * functional.silu(gate.float())
        normed = gated if self._gate_first else x.float()
        scale = torch.rsqrt(normed.square().mean(-1, keepdim=True) + self._epsilon)
        return (self._weight.float() * (gated * scale)).to(x.dtype)


class SharedGatedRMSNorm(Module):
    """Computes a GatedRMSNorm, gate first, of groups of heads that ranks share.

    Each rank adds up the squares of each of its heads. All ranks add up the heads of a group in one
    order.
    """

    def __init__(
        self,
        weight: WeightSlice,  # [kept heads * dim]
        dim: int,
        group_size: int,  # numbers that are normalized together
        epsilon: float,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        self.weight = Parameter(weight, dtype=dtype)
        self._dim = dim
        self._group_size = group_size
        self._epsilon = epsilon
        self._tp = tp

    def process_after_load(self) -> None:
        """Splits the weight into heads, [kept heads, dim]."""
        self._weight = self.weight.data.view(-1, self._dim)

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Maps x and gate [num_tokens, kept heads, dim] to the same shape, as `GatedRMSNorm`."""
        native = cpu.usable(x)
        gated = x if native else x.float() * functional.silu(gate.float())
        own = gates.gated_squares(x, gate) if native else gated.square().sum(-1)
        squares = self._of_groups(own)
        if native:
            return gates.gated_norm(
                x,
                gate,
                self._weight,
                self._epsilon,
                gate_first=True,
                squares=squares,
                group_size=self._group_size,
            )
        scale = torch.rsqrt(squares / self._group_size + self._epsilon)
        return (self._weight.float() * (gated * scale[:, :, None])).to(x.dtype)

    def _of_groups(self, squares: torch.Tensor) -> torch.Tensor:
        """Maps the sums of the kept heads to those of their groups, float32 [num_tokens, heads]."""
        num_tokens, kept = squares.shape
        heads = torch.cat(self._tp.all_gather(squares), dim=1)
        together = self._group_size // self._dim
        sums = heads.view(num_tokens, -1, together).sum(-1).repeat_interleave(together, dim=1)
        return sums.narrow(1, self._tp.rank * kept, kept).contiguous()


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
