"""Linear layers, each with its rank's part of the maps that the checkpoint has apart.

Column parallel layers split their outputs over the ranks, row parallel layers their inputs."""

from collections.abc import Sequence

import torch

from ...kv_cache.layout import LayerGeometry
from ..module import Module
from ..quant.base import LinearPartition
from .build import BuildOptions


class ColumnParallelLinear(Module):
    """Computes the rank's outputs of one or several maps of the same input, side by side."""

    def __init__(
        self,
        outputs: Sequence[tuple[str, int, slice]],  # name in the checkpoint, outputs of the whole, outputs kept
        num_inputs: int,
        *,
        bias: bool,
        build: BuildOptions,
        gated: bool = False,
    ) -> None:
        self.method = build.linear_method(outputs[0][0])
        partition = LinearPartition(outputs=tuple(outputs), num_inputs=num_inputs, has_bias=bias, gated=gated)
        self.method.create_weights(partition, build.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_tokens, num_inputs] to [num_tokens, outputs kept]."""
        return self.method.apply(x)


class QKVParallelLinear(ColumnParallelLinear):
    """Computes the rank's query heads, and the keys and the values of its KV slots."""

    def __init__(self, prefix: str, hidden_size: int, layer: LayerGeometry, *, bias: bool, build: BuildOptions) -> None:
        """Raises ValueError if the heads cannot be split over the ranks."""
        dim, tp = layer.head_dim, build.tp
        heads = tp.query_heads(layer)
        query = (f"{prefix}.q_proj", layer.num_heads * dim, slice(heads.start * dim, heads.stop * dim))
        keys_values = [
            (f"{prefix}.{name}", layer.num_kv_heads * dim, slice(head * dim, (head + 1) * dim))
            for name in ("k_proj", "v_proj")
            for head in tp.kv_heads(layer)
        ]
        super().__init__([query, *keys_values], hidden_size, bias=bias, build=build)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Computes the rank's part of a gated MLP's inner activations from the two maps gate and up."""

    def __init__(self, gate: str, up: str, hidden_size: int, size: int, *, bias: bool, build: BuildOptions) -> None:
        outputs = [(name, size, build.tp.part(size)) for name in (gate, up)]
        super().__init__(outputs, hidden_size, bias=bias, build=build, gated=True)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_tokens, hidden] to silu(gate(x)) * up(x), [num_tokens, the rank's part of size]."""
        return self.method.apply_gated(x)


class RowParallelLinear(Module):
    """Maps the rank's part of the inputs to a summand of the output, and sums these over the ranks."""

    def __init__(
        self, name: str, num_inputs: int, num_outputs: int, *, inputs: slice, bias: bool, build: BuildOptions
    ) -> None:
        """`inputs` are those that the rank has; rank 0 adds the bias."""
        self._tp = build.tp
        self.method = build.linear_method(name)
        partition = LinearPartition(
            outputs=((name, num_outputs, slice(None)),),
            num_inputs=num_inputs,
            inputs=inputs,
            has_bias=bias and build.tp.rank == 0,
        )
        self.method.create_weights(partition, build.dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Maps [num_tokens, inputs kept] to [num_tokens, num_outputs], added to `residual`, which may be
        overwritten."""
        return self._tp.all_reduce(self.method.apply(x, residual if self._tp.rank == 0 else None))
