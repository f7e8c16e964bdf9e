"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685): what they add to the rows of a step that use them."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from ..quant.base import LinearPartition
from ..quant.unquantized import UnquantizedLinearMethod

_RANK_UNIT: Final = 16  # ranks are padded to a multiple, which every kernel takes

Factors = tuple[torch.Tensor, torch.Tensor]
"""A [rank, inputs] and B [outputs, rank] of one map of a checkpoint, both whole."""


class LowRankMap:
    """Adds scale * B (A x) to a rank's part of the outputs of a layer. A row's sum does not depend on the other rows,
    where the products of the layers do not."""

    def __init__(
        self,
        partition: LinearPartition,
        factors: Callable[[str], Factors | None],
        scale: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        """`factors` returns those of a map by its name, None of one that is not adapted; of some it returns them. The
        maps of a layer are one here: their A lie below each other, and each B has the columns of its own A."""
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

        def method(weight: torch.Tensor) -> UnquantizedLinearMethod:
            return UnquantizedLinearMethod.from_tensors(weight.to(device, dtype), batch_invariant=batch_invariant)

        self._down, self._up = method(functional.pad(down, (0, 0, 0, padding))), method(up)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns y [num_rows, outputs], which may be overwritten, plus what x [num_rows, inputs] is mapped to."""
        return self._up.apply(self._down.apply(x), y)


class AdapterRows(NamedTuple):
    """Holds which rows of a step use an adapter."""

    rows: torch.Tensor  # [num_rows] int64, ascending
    maps: Mapping[int, LowRankMap]  # of the adapter, by the numbers of the layers that it changes


class LoraStep:
    """Knows the linear layers of a model that adapters may change, and the rows of the step under way that use one."""

    def __init__(self) -> None:
        self.layers: list[LinearPartition] = []
        self.adapters: tuple[AdapterRows, ...] = ()  # set for a step, and empty after it

    def add_layer(self, partition: LinearPartition) -> "LoraLayer":
        """Makes a layer one that adapters may change."""
        self.layers.append(partition)
        return LoraLayer(self, len(self.layers) - 1)


class LoraLayer:
    """Adds to one layer's outputs what the adapters of the step under way change."""

    def __init__(self, step: LoraStep, number: int) -> None:
        self._step = step
        self._number = number

    def changed_rows(self) -> torch.Tensor | None:
        """Returns the rows of the step that an adapter changes here, None if there are none."""
        found = [each.rows for each in self._step.adapters if self._number in each.maps]
        return torch.cat(found) if found else None

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs y [num_tokens, outputs], which may be overwritten, with what adapters add to them for the
        inputs x [num_tokens, inputs]."""
        for rows, maps in self._step.adapters:
            if own := maps.get(self._number):
                y.index_copy_(0, rows, own(x.index_select(0, rows), y.index_select(0, rows)))
        return y
