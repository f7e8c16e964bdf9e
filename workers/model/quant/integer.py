"""Multiplies by linear weights in integers of 8 or 4 bits, each group of inputs with a scale."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from ..kernels.c import cpu
from .rounded import Numbers, RoundedLinearMethod, finite_scales, largest_group

BITS: Final = {"int8": 8, "int4": 4}  # by quant_method
# Inputs of a group. A smaller group is more accurate, but each group costs a scale and a sum.
MAX_GROUP: Final = 64
ZERO_UNIT: Final = 16  # parts of a number in which zeros of 4 bits are counted
UNIT: Final = 8  # the kernel's groups have a multiple of these inputs
# The largest group of inputs by bits.
_GROUPS: Final = {8: MAX_GROUP, 4: 32}


class IntegerLinearMethod(RoundedLinearMethod):
    """Keeps integers of 8 or 4 bits.

    With 4 bits, zero points lie between the numbers, as in Q4_1 of llama.cpp. The kernel rounds x
    to 8 or 16 bits by the same groups (ZeroQuant, arXiv 2206.01861).
    """

    def __init__(self, bits: int, input_bits: int = 8) -> None:
        super().__init__(bits, term_bytes=3 if bits == 4 else 2)
        self._input_bits = input_bits

    @classmethod
    def for_head(cls) -> "IntegerLinearMethod":
        """Returns the method of the head: 8 bits, with inputs in 16.

        Rounding of its inputs would reach every logit, and only few tokens of a prompt reach the
        head.
        """
        return cls(8, input_bits=16)

    def group_size(self, inputs: int) -> int:
        return largest_group(inputs, _GROUPS[self.bits], UNIT)

    def can_multiply(self, inputs: int, group_size: int) -> bool:
        return cpu.can_multiply_int(inputs, group_size)

    def round(self, weight: torch.Tensor, group_size: int) -> Numbers:
        return round_weight(weight, self.bits, group_size)

    def restore(self, numbers: Numbers) -> torch.Tensor:
        return restore_weight(*numbers, self.bits)

    def pack(self, numbers: Numbers) -> cpu.PackedNumbers:
        return cpu.pack_linear_int(*numbers, self.bits)

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        return cpu.linear_int(
            x, self._packed, self._num_outputs, bias, residual, activation, self._input_bits
        )


def integer_method(quantization: Mapping[str, Any], name: str) -> IntegerLinearMethod:
    """Returns the method of a layer whose plain weight is rounded to integers."""
    if name == "lm_head":
        return IntegerLinearMethod.for_head()
    return IntegerLinearMethod(BITS[quantization["quant_method"]])


def round_weight(
    weight: torch.Tensor,  # [outputs, inputs]
    bits: int,
    group_size: int,
) -> Numbers:
    """Rounds a weight to numbers 0..2**bits-1, [outputs, inputs] uint8.

    Returns the numbers, the scales [outputs, groups] in bfloat16 and, for 4 bits, the zeros
    [outputs, groups] uint8 in 16ths of a number; None: the zero is in the middle. The scale of a
    group with a weight that is not finite is NaN.
    """
    # [outputs, groups, group_size]
    groups = weight.to(torch.float32, copy=True).view(len(weight), -1, group_size)
    largest = 2**bits - 1
    middle = 2 ** (bits - 1)
    low, high = groups.aminmax(dim=-1)
    if bits == 4:
        low = low.clamp(max=0)
        high = high.clamp(min=0)
        scales = finite_scales(((high - low) / largest).bfloat16())
        zeros = (-low / scales.float() * ZERO_UNIT).round().nan_to_num().clamp(0, 255) / ZERO_UNIT
    else:
        scales = finite_scales((torch.maximum(-low, high) / (largest - middle)).bfloat16())
        zeros = torch.full_like(low, middle)
    # In place: the groups are twice as large as the weight.
    groups.div_(scales.float()[..., None]).add_(zeros[..., None])
    groups.round_().clamp_(0, largest).nan_to_num_()
    numbers = groups.to(torch.uint8).flatten(1)
    return numbers, scales, (zeros * ZERO_UNIT).to(torch.uint8) if bits == 4 else None


def restore_weight(
    rounded: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Returns the weight [outputs, inputs] float32 of numbers from `round_weight`."""
    groups = rounded.float().view(*scales.shape, -1)  # [outputs, groups, group_size]
    centred = groups - (2 ** (bits - 1) if zeros is None else zeros[..., None] / 2 ** (8 - bits))
    restored: torch.Tensor = (centred * scales.float()[..., None]).view_as(rounded)
    return restored
