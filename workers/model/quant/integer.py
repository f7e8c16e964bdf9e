"""Rounds linear weights to integers of 8 or 4 bits when they are loaded, each group of inputs with a scale."""

from collections.abc import Mapping
from typing import Any, Final, Self

import torch
from torch.nn import functional

from ..kernels import cpu
from ..module import Parameter
from .base import PlainLinearMethod

BITS: Final = {"int8": 8, "int4": 4}  # by quant_method
MAX_GROUP: Final = {8: 256, 4: 64}  # inputs of a group: the fewer, the closer; each costs a scale and a sum
UNIT: Final = 8  # inputs, of which a group has a multiple where there is a kernel


class IntegerLinearMethod(PlainLinearMethod):
    """Computes y = x W^T + b with W rounded to nearest, symmetrically, by groups of inputs (RTN in GPTQ, arXiv
    2210.17323). Where there is a kernel, x is rounded too, to 8 bits by the same groups (ZeroQuant, arXiv
    2206.01861)."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._is_tied = False

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> "IntegerLinearMethod":
        """See `LinearMethod.for_layer`. The head is kept in 8 bits: its rounding would reach every logit."""
        return cls(8 if name == "lm_head" else BITS[quantization["quant_method"]])

    @classmethod
    def from_numbers(
        cls,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        bias: torch.Tensor | None,  # [outputs]
        *,
        gated: bool,
    ) -> Self:
        """Returns a method over what `cpu.pack_linear_int` takes, ready to `apply`."""
        method = cls(bits)
        method._gated, method._bias, method._uses_kernel = gated, bias, True
        method._keep(numbers, scales, zeros)
        return method

    def tie(self, weight: Parameter) -> bool:
        """See `LinearMethod.tie`."""
        self._is_tied = super().tie(weight)
        return self._is_tied

    def process_after_load(self) -> None:
        """Rounds the weight, packs it where there is a kernel for it, and lets go of the plain form."""
        weight = self.weight.data
        del self.weight  # so that its memory is free as soon as it is rounded
        self._bias = self.bias.data if self.bias else None
        inputs = weight.shape[1]
        group_size = _group_size(inputs, self._bits)
        self._uses_kernel = cpu.usable(weight) and _has_kernel(weight.dtype, inputs, group_size)
        rounded, scales = round_weight(weight, self._bits, group_size)
        del weight
        self._keep(rounded, scales)

    def _keep(self, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> None:
        self._num_outputs = len(numbers)
        self._fuses_gate = self._gated and self._uses_kernel and self._bias is None and self._num_outputs % 32 == 0
        if self._fuses_gate:
            numbers, scales = (cpu.alternate(*each.chunk(2)) for each in (numbers, scales))
            zeros = zeros if zeros is None else cpu.alternate(*zeros.chunk(2))
        self._packed: cpu.PackedInt = numbers, scales, zeros
        if self._uses_kernel:
            self._packed = cpu.pack_linear_int(numbers, scales, self._bits, zeros)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        if self._fuses_gate:  # which has neither bias nor residual
            return cpu.apart(cpu.linear_int(x, self._packed, self._num_outputs))
        if self._uses_kernel:
            return cpu.linear_int(x, self._packed, self._num_outputs, self._bias, residual)
        rounded, scales, _ = self._packed
        y = functional.linear(x, restore_weight(rounded, scales, self._bits).to(x.dtype), self._bias)
        return y if residual is None else residual + y

    def apply_gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """See `LinearMethod.apply_gated`."""
        if self._fuses_gate:
            return cpu.linear_int(x, self._packed, self._num_outputs, activation=activation)
        return super().apply_gated(x, activation)

    def saved_bytes(self) -> int:
        """See `Module.saved_bytes`."""
        if self._is_tied:
            return 0
        weight = self.weight.data
        outputs, inputs = weight.shape
        group_size = _group_size(inputs, self._bits)
        bits = self._bits if _has_kernel(weight.dtype, inputs, group_size) else 8  # only the kernel's form is packed
        return weight.nbytes - outputs * (inputs * bits // 8 + 2 * inputs // group_size)


def _has_kernel(dtype: torch.dtype, inputs: int, group_size: int) -> bool:
    return dtype is torch.bfloat16 and cpu.can_multiply_int(inputs, group_size)


def _group_size(inputs: int, bits: int) -> int:
    """Returns the largest size that divides the inputs evenly and is not above the bound."""
    sizes = range(MAX_GROUP[bits], 0, -UNIT)
    return next((size for size in sizes if inputs % size == 0), inputs)


def round_weight(
    weight: torch.Tensor,  # [outputs, inputs]
    bits: int,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight as numbers 0..2**bits-1 with the zero in the middle, [outputs, inputs] uint8, and scales
    [outputs, groups] bfloat16. The scale of a group in which a weight is not finite is NaN."""
    groups = weight.to(torch.float32, copy=True).view(len(weight), -1, group_size)  # [outputs, groups, group_size]
    zero = 2 ** (bits - 1)
    low, high = groups.aminmax(dim=-1)
    scales = (torch.maximum(-low, high) / (zero - 1)).bfloat16()
    scales = scales.where(scales != 0, 1).where(scales.isfinite(), torch.nan)
    # In place: the groups are twice as large as the weight.
    groups.div_(scales.float()[..., None]).round_().clamp_(-zero, zero - 1).nan_to_num_().add_(zero)
    return groups.to(torch.uint8).flatten(1), scales


def restore_weight(rounded: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns what the numbers of `round_weight` stand for: [outputs, inputs] float32."""
    centred = rounded.float().view(*scales.shape, -1) - 2 ** (bits - 1)  # [outputs, groups, group_size]
    restored: torch.Tensor = (centred * scales.float()[..., None]).view_as(rounded)
    return restored
