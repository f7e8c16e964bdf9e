"""Multiplies by linear weights in FP8 (E4M3, arXiv 2209.05433)."""

from typing import Final

import torch

from ..kernels.c import cpu
from .base import LinearPartition, StackedForm
from .integer import MAX_GROUP
from .rounded import Numbers, RoundedLinearMethod, finite_scales, largest_group

SCALE_BYTES: Final = 4
STACK_UNIT: Final = 64  # inputs of a product of `kernels.triton.grouped`, in bfloat16
_LARGEST: Final = 448.0  # number in E4M3


def can_stack(partition: LinearPartition, dtype: torch.dtype, device_type: str, group: int) -> bool:
    """Returns True if a GPU multiplies an expert's weight in FP8 with scales of `group` inputs.

    The groups must consist of whole products of `kernels.triton.grouped`. Without a GPU here,
    assumes one with FP8.
    """
    inputs = partition.local_shape[1]
    return (
        device_type == "cuda"
        and dtype is torch.bfloat16
        and partition.is_expert
        and (group == inputs or (group % STACK_UNIT == 0 and inputs % group == 0))
        and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9))
    )


class Fp8LinearMethod(RoundedLinearMethod):
    """Keeps numbers in FP8.

    The kernel does not round x: it converts the numbers to bfloat16, which represents each of them,
    while it multiplies.
    """

    def __init__(self) -> None:
        super().__init__(bits=8, term_bytes=SCALE_BYTES)

    def stacked_form(self) -> StackedForm | None:
        if self._uses_kernel:
            return None
        numbers, scales, _ = self._packed
        return StackedForm(numbers.view(torch.float8_e4m3fn), scales, self._bias)

    def group_size(self, inputs: int) -> int:
        return largest_group(inputs, MAX_GROUP, 2)

    def can_multiply(self, inputs: int, group_size: int) -> bool:
        return cpu.can_multiply_fp8(inputs, group_size)

    def round(self, weight: torch.Tensor, group_size: int) -> Numbers:
        # [outputs, groups, group_size]
        groups = weight.to(torch.float32, copy=True).view(len(weight), -1, group_size)
        low, high = groups.aminmax(dim=-1)
        scales = finite_scales(torch.maximum(-low, high) / _LARGEST)
        groups.div_(scales[..., None]).clamp_(-_LARGEST, _LARGEST).nan_to_num_()
        return groups.to(torch.float8_e4m3fn).flatten(1).view(torch.uint8), scales, None

    def restore(self, numbers: Numbers) -> torch.Tensor:
        rounded, scales, _ = numbers
        # [outputs, groups, group_size]
        groups = rounded.view(torch.float8_e4m3fn).float().view(*scales.shape, -1)
        return (groups * scales[..., None]).flatten(1)

    def pack(self, numbers: Numbers) -> cpu.PackedNumbers:
        rounded, scales, _ = numbers
        return *cpu.pack_linear_fp8(rounded, scales), None

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        packed, scales, _ = self._packed
        return cpu.linear(x, packed, self._num_outputs, bias, residual, activation, scales)
