"""Loads experts' linear maps from one checkpoint tensor, in its dtype or in MXFP4."""

from collections.abc import Iterator

import torch

from ..module import Module, Parameter, WeightSlice
from ..quant.base import LinearMethod
from ..quant.mxfp4 import BLOCK, BLOCK_BYTES, NAN, dequantize
from ..quant.unquantized import UnquantizedLinearMethod
from .linear import BuildOptions


def inputs_together(*, is_mxfp4: bool) -> int:
    """Returns the number of adjacent inputs that must stay on one rank."""
    return BLOCK if is_mxfp4 else 1


class StackedMap(Module):
    """Holds one linear map of each expert, loaded from one tensor of the checkpoint."""

    def __init__(
        self,
        name: str,
        num_experts: int,
        sizes: tuple[int, int],
        kept: tuple[slice, slice],
        build: BuildOptions,
        *,
        is_mxfp4: bool,
        bias: bool,
    ) -> None:
        """Takes `sizes`, the numbers of outputs and inputs, and the slices `kept` by this rank.

        If `is_mxfp4`, the kept inputs are whole blocks.
        """
        outputs, inputs = sizes
        kept_outputs, kept_inputs = kept
        self._build = build
        self.maps: list[LinearMethod] = []  # by expert, after loading
        self.weight: Parameter | None = None  # [num_experts, inputs, outputs]
        self.blocks: Parameter | None = None  # [num_experts, outputs, blocks of inputs, bytes]
        self.scales: Parameter | None = None  # [num_experts, outputs, blocks of inputs]
        if is_mxfp4:
            shape = (num_experts, outputs, inputs // BLOCK)
            begin, end, _ = kept_inputs.indices(inputs)
            blocks = slice(begin // BLOCK, end // BLOCK)
            part = (slice(None), kept_outputs, blocks)
            self.blocks = Parameter(
                WeightSlice(f"{name}_blocks", (*shape, BLOCK_BYTES), part), dtype=torch.uint8
            )
            self.blocks.num_bytes = 2 * self.blocks.data.numel() * build.dtype.itemsize
            self.scales = Parameter(
                WeightSlice(f"{name}_scales", shape, part, below=NAN), dtype=torch.uint8
            )
            self.scales.num_bytes = 0
        else:
            shape = (num_experts, inputs, outputs)
            self.weight = Parameter(
                WeightSlice(name, shape, (slice(None), kept_inputs, kept_outputs)),
                dtype=build.dtype,
            )
        self.bias: Parameter | None = None
        if bias:
            rows = WeightSlice(f"{name}_bias", (num_experts, outputs), (slice(None), kept_outputs))
            self.bias = Parameter(rows, dtype=build.dtype)

    def process_after_load(self) -> None:
        """Creates the linear method of each expert, in the model's dtype."""
        for number, weight in enumerate(self._weights()):
            bias = self.bias.data[number].clone() if self.bias else None
            invariant = self._build.batch_invariant
            self.maps.append(
                UnquantizedLinearMethod.from_tensors(weight, bias, batch_invariant=invariant)
            )
        self.weight = None
        self.blocks = None
        self.scales = None
        self.bias = None

    def _weights(self) -> Iterator[torch.Tensor]:
        """Yields the weights [outputs, inputs] of each expert."""
        if self.weight:
            yield from (weight.t().contiguous() for weight in self.weight.data)
        elif self.blocks and self.scales:
            for blocks, scales in zip(self.blocks.data, self.scales.data, strict=True):
                yield dequantize(blocks, scales, self._build.dtype)
