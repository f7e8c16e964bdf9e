"""Computes LoRA adapters (arXiv 2106.09685) for the rows of a step that use them."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from ..kernels.c import cpu
from ..kernels.c.low_rank import LowRankRows, add_low_rank
from ..quant.base import LinearMethod, LinearPartition
from ..quant.unquantized import UnquantizedLinearMethod

_RANK_UNIT: Final = 16  # ranks are padded to a multiple of this, which every kernel supports

Factors = tuple[torch.Tensor, torch.Tensor]
"""A [rank, inputs] and B [outputs, rank] of one weight of the checkpoint, not split over ranks."""


def combine_factors(
    partition: LinearPartition,
    factors: Callable[[str], Factors | None],
    scale: float,
    *,
    alternates: bool,
) -> Factors:
    """Combines the factors of a layer's weights into one pair of a rank's part, in float32.

    `factors` returns the factors of a weight by its name, or None if the adapter does not change
    it; at least one weight of the layer has factors. Their A are stacked, and each B, times
    `scale`, uses the columns of its own A. With `alternates`, gate and up outputs alternate; see
    `LinearMethod.fuses_gate`.
    """
    names = list(dict.fromkeys(name for name, *_ in partition.outputs))
    found = {name: each for name in names if (each := factors(name)) is not None}
    ranks = [len(a) for a, _ in found.values()]
    begins = dict(zip(found, (sum(ranks[:index]) for index in range(len(ranks))), strict=True))
    padding = -sum(ranks) % _RANK_UNIT
    down = torch.cat([a[:, partition.inputs].float() for a, _ in found.values()])
    sizes = [len(range(*kept.indices(size))) for _, size, kept in partition.outputs]
    up = torch.zeros(sum(sizes), sum(ranks) + padding)
    for rows, (name, _, kept) in zip(torch.split(up, sizes), partition.outputs, strict=True):
        if name in found:
            b = found[name][1]
            rows[:, begins[name] : begins[name] + b.shape[1]] = b[kept].float() * scale
    if alternates:
        up = cpu.alternate(*up.chunk(2))
    return functional.pad(down, (0, 0, 0, padding)), up


class LowRankMap:
    """Adds B (A x) to a rank's part of a layer's outputs by two linear methods.

    A row's sum does not depend on the other rows if the products of the layers do not either. On
    CPUs in bfloat16, `kernels.c.low_rank` does the same for all adapters of a step.
    """

    def __init__(
        self, factors: Factors, *, dtype: torch.dtype, device: torch.device, batch_invariant: bool
    ) -> None:
        """Takes the combined factors of a layer."""

        def method(weight: torch.Tensor) -> UnquantizedLinearMethod:
            return UnquantizedLinearMethod.from_tensors(
                weight.to(device, dtype), batch_invariant=batch_invariant
            )

        down, up = factors
        self.num_outputs = len(up)
        self._down = method(down)
        self._up = method(up)

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Returns y [num_rows, outputs] plus the adapter's output for x [num_rows, inputs].

        y may be overwritten; None stands for zeros.
        """
        return self._up.apply(self._down.apply(x), y)


class AdapterRows(NamedTuple):
    """Describes which rows of a step use an adapter."""

    rows: slice | torch.Tensor  # [num_rows] int64, ascending; a slice if they are adjacent
    maps: Mapping[int, LowRankMap]  # by the number of the layer


class LowRankShape(NamedTuple):
    """Describes which layers have low-rank terms in a step, and their largest rank."""

    layers: frozenset[int] = frozenset()
    width: int = 0  # as in `add_low_rank`

    def includes(self, other: "LowRankShape") -> bool:
        """Returns True if a step of this shape can compute the terms of the other."""
        return self.layers >= other.layers and self.width >= other.width

    def joined(self, other: "LowRankShape") -> "LowRankShape":
        """Returns the smallest shape that includes both."""
        return LowRankShape(self.layers | other.layers, max(self.width, other.width))


class LoraStep:
    """Holds the linear layers that adapters may change, and the adapters of the running step."""

    def __init__(self) -> None:
        self.layers: list[tuple[LinearPartition, LinearMethod]] = []
        # Both are set for a step. At most one is: kernels compute the terms, or the linear methods
        # of `AdapterRows`.
        self.adapters: tuple[AdapterRows, ...] = ()
        self.shape: LowRankShape | None = None
        self.rows = LowRankRows()  # of the kernels

    def add_layer(self, partition: LinearPartition, method: LinearMethod) -> "LoraLayer":
        """Registers a layer that adapters may change."""
        self.layers.append((partition, method))
        return LoraLayer(self, len(self.layers) - 1, partition.local_shape[0])


class LoraLayer:
    """Applies the adapters of the running step to one layer."""

    def __init__(self, step: LoraStep, number: int, num_outputs: int) -> None:
        self._step = step
        self._number = number
        self._num_outputs = num_outputs

    def add(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor | None:
        """Adds the adapters' outputs for x [num_tokens, inputs] to y [num_tokens, outputs].

        y may be overwritten. Without y they are added to zeros, or None is returned if no adapter
        of the step changes this layer. A layer's product uses the result as its residual: zeros
        change no bit of a row.
        """
        if (shape := self._step.shape) is not None:
            if self._number not in shape.layers:
                return y
            return add_low_rank(
                x,
                y,
                self._num_outputs,
                layer=self._number,
                rows_of=self._step.rows,
                width=shape.width,
            )
        for rows, maps in self._step.adapters:
            if own := maps.get(self._number):
                if rows == slice(0, len(x)):
                    return own(x, y)
                if y is None:
                    y = x.new_zeros(len(x), own.num_outputs)
                y[rows] = own(x[rows], y[rows])
        return y
