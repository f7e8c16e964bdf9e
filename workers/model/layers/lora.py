"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685): what they add to the rows of a step
that use them.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from ..kernels.c import cpu
from ..quant.base import LinearMethod, LinearPartition
from ..quant.unquantized import UnquantizedLinearMethod

_RANK_UNIT: Final = 16  # ranks are padded to a multiple, which every kernel takes

Factors = tuple[torch.Tensor, torch.Tensor]
"""A [rank, inputs] and B [outputs, rank] of one map of a checkpoint, both whole."""


class LowRankMap:
    """Adds scale * B (A x) to a rank's part of the outputs of a layer. A row's sum does not depend
    on the other rows, where the products of the layers do not.
    """

    def __init__(
        self,
        partition: LinearPartition,
        factors: Callable[[str], Factors | None],
        scale: float,
        *,
        alternates: bool,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        """`factors` returns those of a map by its name, None of one that is not adapted; of some it
        returns them. The
        maps of a layer are one here: their A lie below each other, and each B has the columns of
        its own A. `alternates`: its outputs are as `LinearMethod.fuses_gate` says.
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
        self.num_outputs = len(up)

        def method(weight: torch.Tensor) -> UnquantizedLinearMethod:
            return UnquantizedLinearMethod.from_tensors(
                weight.to(device, dtype), batch_invariant=batch_invariant
            )

        self._down, self._up = method(functional.pad(down, (0, 0, 0, padding))), method(up)

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Returns y [num_rows, outputs], which may be overwritten, zeros if None, plus what x
        [num_rows, inputs] is mapped to.
        """
        return self._up.apply(self._down.apply(x), y)


class AdapterRows(NamedTuple):
    """Holds which rows of a step use an adapter."""

    rows: slice | torch.Tensor  # [num_rows] int64, ascending; a slice where they follow each other
    maps: Mapping[int, LowRankMap]  # of the adapter, by the numbers of the layers that it changes


class LoraStep:
    """Knows the linear layers of a model that adapters may change, and the rows of the step under
    way that use one.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[LinearPartition, LinearMethod]] = []
        self.adapters: tuple[AdapterRows, ...] = ()  # set for a step, and empty after it

    def add_layer(self, partition: LinearPartition, method: LinearMethod) -> "LoraLayer":
        """Makes a layer one that adapters may change."""
        self.layers.append((partition, method))
        return LoraLayer(self, len(self.layers) - 1)


class LoraLayer:
    """Computes what the adapters of the step under way add to one layer's outputs."""

    def __init__(self, step: LoraStep, number: int) -> None:
        self._step = step
        self._number = number

    def add(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor | None:
        """Returns y [num_tokens, outputs], which may be overwritten, with what adapters map x
        [num_tokens, inputs] to; without y what they add to zeros, None if they change nothing here.

        A layer's product takes it as its residual: zeros change no bit of a row.
        """
        for rows, maps in self._step.adapters:
            if own := maps.get(self._number):
                if rows == slice(0, len(x)):
                    return own(x, y)
                if y is None:
                    y = x.new_zeros(len(x), own.num_outputs)
                y[rows] = own(x[rows], y[rows])
        return y
