"""Defines linear layers and the token embedding, each with its rank's part of the checkpoint.

Column-parallel layers split their outputs over the ranks, row-parallel layers their inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...kv_cache.layout import LayerGeometry
from ..kernels.c import cpu
from ..module import Module, Parameter, WeightSlice
from ..parallel import TensorParallel
from ..quant.base import LinearMethodOf, LinearPartition
from ..quant.side_by_side import method_of_maps
from ..quant.unquantized import UnquantizedLinearMethod
from .lora import LoraStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Holds the options for building a model's tree."""

    dtype: torch.dtype  # that the model computes in
    tp: TensorParallel
    linear_method: LinearMethodOf
    batch_invariant: bool = False  # see `UnquantizedLinearMethod`
    lora: LoraStep = field(
        default_factory=LoraStep
    )  # registers the layers that adapters may change


Outputs = tuple[str, int, slice]
"""A weight's name in the checkpoint, its number of outputs, and the slice that is kept."""


class ColumnParallelLinear(Module):
    """Computes the rank's outputs of one or several linear maps of the same input."""

    def __init__(
        self,
        outputs: Sequence[Outputs],
        num_inputs: int,
        build: BuildOptions,
        *,
        bias: bool = False,
        gated: bool = False,  # the maps are gate and up; see `LinearMethod.apply_gated`
    ) -> None:
        self.method = method_of_maps(
            build.linear_method, list(dict.fromkeys(name for name, *_ in outputs))
        )
        partition = LinearPartition(
            outputs=tuple(outputs), num_inputs=num_inputs, has_bias=bias, gated=gated
        )
        self.method.create_weights(partition, build.dtype)
        self._lora = build.lora.add_layer(partition, self.method)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_tokens, num_inputs] to [num_tokens, kept outputs]."""
        return self.method.apply(x, self._lora.add(x))

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Maps x [num_tokens, num_inputs] to activation(gate) * up, [num_tokens, kept / 2]."""
        return self.method.apply_gated(x, activation, self._lora.add(x))


def qkv_outputs(
    prefix: str,
    layer: LayerGeometry,
    tp: TensorParallel,
    order: Sequence[slice] | None = None,
    *,
    fused: bool = False,
    gated: bool = False,
) -> list[Outputs]:
    """Returns the outputs of a layer's query, key and value projections that a rank keeps.

    These are its query heads, and the keys and values of its KV heads. `order` is the order of a
    head's dimensions; see `rotated_order`. A `fused` checkpoint has one weight, qkv_proj. In the
    q_proj of a `gated` one, each query head is followed by its gate; gates come last in the result.
    Raises ValueError as `check_split`.
    """
    dim = layer.head_dim
    heads = tp.query_heads(layer)
    kv_heads = tp.kv_heads(layer)
    unordered = [slice(0, dim)]
    step = 2 if gated else 1  # heads of q_proj for each query head
    queries = range(step * heads.start, step * heads.stop, step)
    num_queries = step * layer.num_heads * dim
    maps: list[tuple[str, int, Sequence[int], Sequence[slice]]] = [
        ("q_proj", num_queries, queries, order or unordered),
        ("k_proj", layer.num_kv_heads * dim, kv_heads, order or unordered),
        ("v_proj", layer.num_kv_heads * dim, kv_heads, unordered),
    ]
    if gated:
        maps.append(("q_proj", num_queries, [head + 1 for head in queries], unordered))
    outputs: list[Outputs] = []
    total = sum(size for _, size, *_ in maps)
    first = 0
    for name, size, numbers, parts in maps:
        where, begin = ("qkv_proj", first) if fused else (name, 0)
        for at in (begin + number * dim for number in numbers):
            kept = [slice(at + part.start, at + part.stop, part.step) for part in parts]
            outputs += [(f"{prefix}.{where}", total if fused else size, each) for each in kept]
        first += size
    return _joined(outputs)


def gate_up_outputs(
    prefix: str, size: int, part: slice, names: Sequence[str] = ("gate_proj", "up_proj")
) -> list[Outputs]:
    """Returns the outputs of an MLP's gate and up projections that a rank keeps.

    A fused checkpoint has one name for both.
    """
    if len(names) == 2:
        return [(f"{prefix}.{name}", size, part) for name in names]
    return split_outputs(f"{prefix}.{names[0]}", [(size, [part])] * 2)


def split_outputs(name: str, maps: Sequence[tuple[int, Sequence[slice]]]) -> list[Outputs]:
    """Returns the outputs that a rank keeps of a weight that holds several maps, one by one.

    `maps` has each map's number of outputs and the slices of them that are kept.
    """
    total = sum(size for size, _ in maps)
    outputs: list[Outputs] = []
    begin = 0
    for size, kept in maps:
        outputs += [
            (name, total, slice(begin + part.start, begin + part.stop, part.step)) for part in kept
        ]
        begin += size
    return _joined(outputs)


def _joined(outputs: Sequence[Outputs]) -> list[Outputs]:
    """Joins adjacent outputs, so that they are read at once."""
    joined: list[Outputs] = []
    for name, size, kept in outputs:
        if joined and joined[-1][:2] == (name, size):
            before = joined[-1][2]
            if before.step is kept.step is None and before.stop == kept.start:
                joined[-1] = (name, size, slice(before.start, kept.stop))
                continue
        joined.append((name, size, kept))
    return joined


class RowParallelLinear(Module):
    """Maps the rank's part of the inputs to partial sums, and reduces them over the ranks."""

    def __init__(
        self,
        name: str,
        num_outputs: int,
        num_inputs: int,
        inputs: slice,
        build: BuildOptions,
        *,
        bias: bool,
    ) -> None:
        """Takes `inputs`, the slice of inputs that the rank has; rank 0 adds the bias."""
        self._tp = build.tp
        self.method = build.linear_method(name)
        outputs = ((name, num_outputs, slice(None)),)
        has_bias = bias and build.tp.rank == 0
        partition = LinearPartition(
            outputs=outputs, num_inputs=num_inputs, inputs=inputs, has_bias=has_bias
        )
        self.method.create_weights(partition, build.dtype)
        self._lora = build.lora.add_layer(partition, self.method)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Maps [num_tokens, kept inputs] to [num_tokens, num_outputs] and adds `residual`.

        The residual may be overwritten.
        """
        return self._tp.all_reduce(
            self.method.apply(x, self._lora.add(x, residual if self._tp.rank == 0 else None))
        )


class VocabParallelEmbedding(Module):
    """Looks up token embeddings; each rank has its part of the vocabulary."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, build: BuildOptions) -> None:
        self._tp = build.tp
        self._vocab = build.tp.part(vocab_size)
        rows = WeightSlice(f"{name}.weight", (vocab_size, hidden_size), (self._vocab,))
        self.weight = Parameter(rows, dtype=build.dtype)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps token_ids [num_tokens] to [num_tokens, hidden]."""
        table = self.weight.data  # [the rank's part of the vocabulary, hidden]
        if self._tp.group is None:
            return cpu.gather(table, token_ids.int()) if cpu.usable(table) else table[token_ids]
        local = token_ids - self._vocab.start
        is_local = (local >= 0) & (local < len(table))
        return self._tp.all_reduce(table[local.where(is_local, 0)] * is_local[:, None])


class ParallelLMHead(Module):
    """Computes logits; each rank computes its part of the vocabulary."""

    def __init__(
        self, name: str, size: tuple[int, int], build: BuildOptions, tied: Parameter | None = None
    ) -> None:
        """Takes `size` (vocabulary and hidden size), and the embedding's weight if it is `tied`."""
        self._tp = build.tp
        self._vocab_size = size[0]
        self.method = build.linear_method(name)
        if tied:
            if not self.method.tie(tied):
                self.method = UnquantizedLinearMethod(batch_invariant=build.batch_invariant)
                self.method.tie(tied)
        else:
            outputs = ((name, size[0], build.tp.part(size[0])),)
            self.method.create_weights(
                LinearPartition(outputs=outputs, num_inputs=size[1]), build.dtype
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_rows, hidden] to the logits [num_rows, vocab_size], gathered from all ranks."""
        return self._tp.gather_logits(self.method.apply(x), self._vocab_size)
