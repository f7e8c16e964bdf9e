"""The parts a decoder is made of: linear maps, norms, the gated MLP. Plain callables over loaded weights."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from .. import kernels
from ..kernels import cpu
from ..parallel import Shard
from ..weights import Weights


class Linear:
    """y = x W^T + b. In bfloat16 on CPUs the weight is packed once: for our own kernel where it is the faster, else in
    oneDNN's blocked form."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        self._num_outputs = weight.shape[0]
        self._bias = bias
        self._native = cpu.can_multiply(weight)
        self._packed = not self._native and _can_pack(weight)
        if self._native:
            self._weight = cpu.pack_linear(weight)
        else:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    @classmethod
    def load(cls, weights: Weights, *parts: tuple[str, slice]) -> "Linear":
        """Reads the given rows of the named maps, which take the same input, into one that gives their outputs side by
        side."""
        weight = weights.stack(*((f"{name}.weight", rows) for name, rows in parts))
        has_bias = weights.has(f"{parts[0][0]}.bias")
        return cls(weight, weights.stack(*((f"{name}.bias", rows) for name, rows in parts)) if has_bias else None)

    @classmethod
    def load_summand(cls, weights: Weights, name: str, shard: Shard, columns: slice) -> "Linear":
        """Reads the given columns of a map: the outputs of all ranks add up to its output."""
        weight = weights.take(f"{name}.weight", slice(None), columns)
        has_bias = shard.is_first and weights.has(f"{name}.bias")
        return cls(weight, weights.take(f"{name}.bias") if has_bias else None)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens, in] to [num_tokens, out], added to a residual of the same shape if there is one, maybe in
        place."""
        if self._native:
            return cpu.linear(x, self._weight, self._num_outputs, self._bias, residual)
        product = _packed_linear if self._packed else functional.linear
        if residual is not None and self._bias is None and not self._packed:
            return residual.addmm_(x, self._weight.t())
        y = product(x, self._weight, self._bias)
        return y if residual is None else residual + y

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """For an alternated weight, see cpu.alternate: silu(gate) * gated, [num_tokens, out / 2]."""
        return cpu.linear(x, self._weight, self._num_outputs, gated=True)


class RmsNorm:
    """Root mean square norm (arXiv 1910.07467) over the last dimension, in float32 as transformers computes it."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        self._kernels = kernels.of(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels:
            return self._kernels.rms_norm(x, self._weight, self._epsilon)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self._weight * (wide * scale).to(x.dtype)


class GatedMlp:
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, weights: Weights, prefix: str, shard: Shard) -> None:
        self._shard = shard
        names, rows = (f"{prefix}.gate_proj", f"{prefix}.up_proj"), shard.mlp_rows
        weight = weights.stack(*((f"{name}.weight", rows) for name in names))
        has_bias = weights.has(f"{names[0]}.bias")
        self._fused = not has_bias and cpu.can_gate(weight[: len(weight) // 2])
        if self._fused:
            weight.copy_(cpu.alternate(*weight.chunk(2)))  # and not `=`: what is packed next fills the copy's hole
        self._gate_up = Linear(weight, weights.stack(*((f"{name}.bias", rows) for name in names)) if has_bias else None)
        self._down = Linear.load_summand(weights, f"{prefix}.down_proj", shard, rows)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] to the same, added to `residual`."""
        inner = self._gate_up.gated(x) if self._fused else _gate(self._gate_up(x))
        return self._shard.add_up(self._down(inner, self._shard.residual(residual)))


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * intermediate] to [num_tokens, intermediate]."""
    if native := kernels.of(gate_up):
        return native.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _can_pack(weight: torch.Tensor) -> bool:
    fits = (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    return fits and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    no_scalars: Sequence[float] = []
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", no_scalars, "")
    return result
