"""Rounds linear weights to integers of 8 or 4 bits when they are loaded, each group of inputs with
a scale.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from ..kernels.c import cpu
from .rounded import Numbers, RoundedLinearMethod, finite_scales, largest_group

BITS: Final = {"int8": 8, "int4": 4}  # by quant_method
MAX_GROUP: Final = 64  # inputs of a group: the fewer, the closer; each costs a scale and a sum
_GROUPS: Final = {
    8: MAX_GROUP,
    4: 32,
}  # by bits: as large or, where that does not divide the inputs, smaller
UNIT: Final = 8  # inputs, of which a group has a multiple where there is a kernel


class IntegerLinearMethod(RoundedLinearMethod):
    """Keeps integers, in 4 bits with zero points between the numbers, too (as Q4_1 of llama.cpp has
    them). Where there is a kernel, x is rounded too, to 8 or 16 bits by the same groups (ZeroQuant,
    arXiv 2206.01861).
    """

    def __init__(self, bits: int, input_bits: int = 8) -> None:
        super().__init__(bits, term_bytes=3 if bits == 4 else 2)
        self._input_bits = input_bits

    @classmethod
    def for_layer(cls, quantization: Mapping[str, Any], name: str) -> "IntegerLinearMethod":
        """See `LinearMethod.for_layer`."""
        return cls.for_head() if name == "lm_head" else cls(BITS[quantization["quant_method"]])

    @classmethod
    def for_head(cls) -> "IntegerLinearMethod":
        """Returns the method of the head, which is kept in 8 bits, and its inputs in 16: their
        rounding would reach every logit, and a prompt has few.
        """
        return cls(8, input_bits=16)

    def group_size(self, inputs: int) -> int:
        """See `RoundedLinearMethod.group_size`."""
        return largest_group(inputs, _GROUPS[self._bits], UNIT)

    def can_multiply(self, inputs: int, group_size: int) -> bool:
        """See `RoundedLinearMethod.can_multiply`."""
        return cpu.can_multiply_int(inputs, group_size)

    def round(self, weight: torch.Tensor, group_size: int) -> Numbers:
        """See `RoundedLinearMethod.round`."""
        return round_weight(weight, self._bits, group_size)

    def restore(self, numbers: Numbers) -> torch.Tensor:
        """See `RoundedLinearMethod.restore`."""
        return restore_weight(*numbers, self._bits)

    def pack(self, numbers: Numbers) -> cpu.PackedNumbers:
        """See `RoundedLinearMethod.pack`."""
        return cpu.pack_linear_int(*numbers, self._bits)

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """See `RoundedLinearMethod.multiply`."""
        return cpu.linear_int(
            x, self._packed, self._num_outputs, bias, residual, activation, self._input_bits
        )


def round_weight(
    weight: torch.Tensor,  # [outputs, inputs]
    bits: int,
    group_size: int,
) -> Numbers:
    """Returns the weight as numbers 0..2**bits-1, [outputs, inputs] uint8, scales [outputs, groups]
    bfloat16, and of 4 bits zeros [outputs, groups] uint8, in 16ths of a number; None: the zero is
    in the middle. The scale of a group in which a weight is not finite is NaN.
    """
    groups = weight.to(torch.float32, copy=True).view(
        len(weight), -1, group_size
    )  # [outputs, groups, group_size]
    largest, middle = 2**bits - 1, 2 ** (bits - 1)
    low, high = groups.aminmax(dim=-1)
    if bits == 4:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = finite_scales(((high - low) / largest).bfloat16())
        zeros = (-low / scales.float() * 16).round().nan_to_num().clamp(0, 255) / 16
    else:
        scales = finite_scales((torch.maximum(-low, high) / (largest - middle)).bfloat16())
        zeros = torch.full_like(low, middle)
    # In place: the groups are twice as large as the weight.
    groups.div_(scales.float()[..., None]).add_(zeros[..., None]).round_().clamp_(
        0, largest
    ).nan_to_num_()
    return (
        groups.to(torch.uint8).flatten(1),
        scales,
        (zeros * 16).to(torch.uint8) if bits == 4 else None,
    )


def restore_weight(
    rounded: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Returns what the numbers of `round_weight` stand for: [outputs, inputs] float32."""
    groups = rounded.float().view(*scales.shape, -1)  # [outputs, groups, group_size]
    centred = groups - (2 ** (bits - 1) if zeros is None else zeros[..., None] / 2 ** (8 - bits))
    restored: torch.Tensor = (centred * scales.float()[..., None]).view_as(rounded)
    return restored
