"""Multiplies by linear weights in numbers of few bits; rounds plain weights to them."""

from abc import abstractmethod
from typing import Final, Self

import torch
from torch.nn import functional

from ..kernels.c import cpu
from ..module import Parameter
from .base import PackedForm, PlainLinearMethod

Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Numbers [outputs, inputs] uint8, or their bits, and their scales and zeros [outputs, groups].

Zeros are None if there are none or all are the same.
"""

_LARGEST_BITS: Final = 8  # of a number that is not packed for a kernel


class RoundedLinearMethod(PlainLinearMethod):
    """Computes y = x W^T + b with W as numbers and scales; a subclass defines the kind of numbers.

    Plain weights are rounded to nearest when they are loaded (RTN in GPTQ, arXiv 2210.17323).
    """

    def __init__(self, bits: int, term_bytes: int) -> None:
        """`term_bytes` is the size of a group's scale and zero."""
        self.bits = bits
        self._term_bytes = term_bytes
        self._is_tied = False

    @abstractmethod
    def group_size(self, inputs: int) -> int:
        """Returns the number of inputs that share a scale."""

    @abstractmethod
    def can_multiply(self, inputs: int, group_size: int) -> bool:
        """Returns True if a kernel supports the weight, for inputs in bfloat16."""

    @abstractmethod
    def round(self, weight: torch.Tensor, group_size: int) -> Numbers:
        """Rounds a weight [outputs, inputs].

        The scale of a group with a weight that is not finite is NaN.
        """

    @abstractmethod
    def restore(self, numbers: Numbers) -> torch.Tensor:
        """Returns the weight that the numbers stand for: [outputs, inputs] float32."""

    @abstractmethod
    def pack(self, numbers: Numbers) -> cpu.PackedNumbers:
        """Returns the numbers in the kernel's form."""

    @abstractmethod
    def multiply(
        self,
        x: torch.Tensor,  # [rows, inputs]
        bias: torch.Tensor | None = None,  # [outputs]
        residual: torch.Tensor | None = None,  # [rows, outputs]
        activation: str | None = None,
    ) -> torch.Tensor:
        """Calls the kernel with `_packed` and `_num_outputs`; see `cpu.linear`."""

    def take(
        self,
        numbers: Numbers,
        bias: torch.Tensor | None,
        *,
        gated: bool,
        uses_kernel: bool = True,
    ) -> Self:
        """Uses these numbers and a bias [outputs] instead of loading a weight; returns itself.

        With `uses_kernel`, a kernel must support the numbers. `apply` may be called at once.
        """
        self._gated = gated
        self._bias = bias
        self._uses_kernel = uses_kernel
        self._keep(numbers)
        return self

    def tie(self, weight: Parameter) -> bool:
        self._is_tied = super().tie(weight)
        return self._is_tied

    def process_after_load(self) -> None:
        """Rounds the weight, packs it if a kernel supports it, and drops the plain form."""
        weight = self.weight.data
        del self.weight  # so that its memory is free as soon as it is rounded
        self._bias = self.bias.data if self.bias else None
        inputs = weight.shape[1]
        group_size = self.group_size(inputs)
        has_kernel = self._has_kernel(weight.dtype, inputs, group_size)
        self._uses_kernel = cpu.usable(weight) and has_kernel
        rounded = self.round(weight, group_size)
        del weight
        self._keep(rounded)

    def _keep(self, numbers: Numbers) -> None:
        self._num_outputs = len(numbers[0])
        self.fuses_gate = (
            self._gated and self._uses_kernel and self._bias is None and self._num_outputs % 32 == 0
        )
        if self.fuses_gate:
            rounded, scales, zeros = numbers
            numbers = (
                cpu.alternate(*rounded.chunk(2)),
                cpu.alternate(*scales.chunk(2)),
                None if zeros is None else cpu.alternate(*zeros.chunk(2)),
            )
        self._packed: cpu.PackedNumbers = self.pack(numbers) if self._uses_kernel else numbers

    def packed_form(self) -> PackedForm | None:
        if not self._uses_kernel:
            return None
        return PackedForm(*self._packed, self._num_outputs, self._bias, self.fuses_gate)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self.fuses_gate:  # then there is neither bias nor residual
            return cpu.apart(self.multiply(x))
        if self._uses_kernel:
            return self.multiply(x, self._bias, residual)
        y = functional.linear(x, self.restore(self._packed).to(x.dtype), self._bias)
        return y if residual is None else residual + y

    def apply_gated(
        self, x: torch.Tensor, activation: str = "silu", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.fuses_gate:
            return self.multiply(x, None, residual, activation)
        return super().apply_gated(x, activation, residual)

    def saved_bytes(self) -> int:
        if self._is_tied:
            return 0
        weight = self.weight.data
        outputs, inputs = weight.shape
        group_size = self.group_size(inputs)
        bits = self.bits if self._has_kernel(weight.dtype, inputs, group_size) else _LARGEST_BITS
        row_bytes = inputs * bits // 8 + self._term_bytes * inputs // group_size
        return weight.nbytes - outputs * row_bytes

    def _has_kernel(self, dtype: torch.dtype, inputs: int, group_size: int) -> bool:
        if self.device_type != "cpu" or dtype is not torch.bfloat16:
            return False
        return self.can_multiply(inputs, group_size)


def finite_scales(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales with 1 in place of 0, and NaN in place of infinity."""
    return scales.where(scales != 0, 1).where(scales.isfinite(), torch.nan)


def largest_group(inputs: int, bound: int, unit: int) -> int:
    """Returns the largest multiple of `unit` up to `bound` that divides the inputs evenly.

    Returns all inputs if there is none.
    """
    return next((size for size in range(bound, 0, -unit) if inputs % size == 0), inputs)
