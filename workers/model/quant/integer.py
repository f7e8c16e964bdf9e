"""Rounds linear weights to integers of 8 or 4 bits when they are loaded, each group of inputs with a scale."""

from collections.abc import Mapping
from typing import Any, Final, Self

import torch
from torch.nn import functional

from ..kernels import cpu
from ..module import Parameter
from .base import PlainLinearMethod

BITS: Final = {"int8": 8, "int4": 4}  # by quant_method
MAX_GROUP: Final = 64  # inputs of a group: the fewer, the closer; each costs a scale and a sum
_GROUPS: Final = {8: MAX_GROUP, 4: 32}  # by bits: as large or, where that does not divide the inputs, smaller
UNIT: Final = 8  # inputs, of which a group has a multiple where there is a kernel


class IntegerLinearMethod(PlainLinearMethod):
    """Computes y = x W^T + b with W rounded to nearest by groups of inputs (RTN in GPTQ, arXiv 2210.17323), in 4 bits
    with zero points between the numbers, too (as Q4_1 of llama.cpp has them). Where there is a kernel, x is rounded
    too, to 8 or 16 bits by the same groups (ZeroQuant, arXiv 2206.01861)."""

    def __init__(self, bits: int, input_bits: int = 8) -> None:
        self._bits, self._input_bits = bits, input_bits
        self._is_tied = False

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> "IntegerLinearMethod":
        """See `LinearMethod.for_layer`. The head is kept in 8 bits, and its inputs in 16: their rounding would reach
        every logit, and a prompt has few."""
        return cls(8, input_bits=16) if name == "lm_head" else cls(BITS[quantization["quant_method"]])

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
        rounded = round_weight(weight, self._bits, group_size)
        del weight
        self._keep(*rounded)

    def _keep(self, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        self._num_outputs = len(numbers)
        self.fuses_gate = self._gated and self._uses_kernel and self._bias is None and self._num_outputs % 32 == 0
        if self.fuses_gate:
            numbers, scales = (cpu.alternate(*each.chunk(2)) for each in (numbers, scales))
            zeros = zeros if zeros is None else cpu.alternate(*zeros.chunk(2))
        self._packed: cpu.PackedInt = numbers, scales, zeros
        if self._uses_kernel:
            self._packed = cpu.pack_linear_int(numbers, scales, zeros, self._bits)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        if self.fuses_gate:  # which has neither bias nor residual
            return cpu.apart(self._multiply(x))
        if self._uses_kernel:
            return self._multiply(x, self._bias, residual)
        y = functional.linear(x, restore_weight(*self._packed, self._bits).to(x.dtype), self._bias)
        return y if residual is None else residual + y

    def apply_gated(
        self, x: torch.Tensor, activation: str = "silu", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `LinearMethod.apply_gated`."""
        if self.fuses_gate:
            return self._multiply(x, None, residual, activation)
        return super().apply_gated(x, activation, residual)

    def _multiply(
        self,
        x: torch.Tensor,  # [rows, inputs]
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """See `cpu.linear_int`."""
        return cpu.linear_int(x, self._packed, self._num_outputs, bias, residual, activation, self._input_bits)

    def saved_bytes(self) -> int:
        """See `Module.saved_bytes`."""
        if self._is_tied:
            return 0
        weight = self.weight.data
        outputs, inputs = weight.shape
        group_size = _group_size(inputs, self._bits)
        bits = self._bits if _has_kernel(weight.dtype, inputs, group_size) else 8  # only the kernel's form is packed
        scale_bytes = 3 if self._bits == 4 else 2  # with the zero
        return weight.nbytes - outputs * (inputs * bits // 8 + scale_bytes * inputs // group_size)


def _has_kernel(dtype: torch.dtype, inputs: int, group_size: int) -> bool:
    return dtype is torch.bfloat16 and cpu.can_multiply_int(inputs, group_size)


def _group_size(inputs: int, bits: int) -> int:
    """Returns the largest size that divides the inputs evenly and is not above the bound."""
    sizes = range(_GROUPS[bits], 0, -UNIT)
    return next((size for size in sizes if inputs % size == 0), inputs)


def round_weight(
    weight: torch.Tensor,  # [outputs, inputs]
    bits: int,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the weight as numbers 0..2**bits-1, [outputs, inputs] uint8, scales [outputs, groups] bfloat16, and of 4
    bits zeros [outputs, groups] uint8, in 16ths of a number; None: the zero is in the middle. The scale of a group in
    which a weight is not finite is NaN."""
    groups = weight.to(torch.float32, copy=True).view(len(weight), -1, group_size)  # [outputs, groups, group_size]
    largest, middle = 2**bits - 1, 2 ** (bits - 1)
    low, high = groups.aminmax(dim=-1)
    if bits == 4:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = _positive((high - low) / largest)
        zeros = (-low / scales.float() * 16).round().nan_to_num().clamp(0, 255) / 16
    else:
        scales = _positive(torch.maximum(-low, high) / (largest - middle))
        zeros = torch.full_like(low, middle)
    # In place: the groups are twice as large as the weight.
    groups.div_(scales.float()[..., None]).add_(zeros[..., None]).round_().clamp_(0, largest).nan_to_num_()
    return groups.to(torch.uint8).flatten(1), scales, (zeros * 16).to(torch.uint8) if bits == 4 else None


def _positive(scales: torch.Tensor) -> torch.Tensor:
    scales = scales.bfloat16()
    return scales.where(scales != 0, 1).where(scales.isfinite(), torch.nan)


def restore_weight(rounded: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Returns what the numbers of `round_weight` stand for: [outputs, inputs] float32."""
    groups = rounded.float().view(*scales.shape, -1)  # [outputs, groups, group_size]
    centred = groups - (2 ** (bits - 1) if zeros is None else zeros[..., None] / 2 ** (8 - bits))
    restored: torch.Tensor = (centred * scales.float()[..., None]).view_as(rounded)
    return restored
