"""Multiplies rows in FP8 by weights in FP8 (W8A8) on GPUs, by torch's `_scaled_mm`."""

from typing import Final, Self

import torch

from .. import kernels
from ..module import Parameter
from .base import LinearMethod, LinearPartition, PlainLinearMethod, StackedForm
from .fp8 import SCALE_BYTES, Fp8LinearMethod, can_stack
from .unquantized import UnquantizedLinearMethod

_LARGEST: Final = 448.0  # number in E4M3
_TINY: Final = 2.0**-119  # the inverse of a smaller number could be infinite
_ALIGNMENT: Final = 16  # numbers of a row and of a column that `_scaled_mm` requires


def can_scale(
    partition: LinearPartition, dtype: torch.dtype, device_type: str, *, batch_invariant: bool
) -> bool:
    """Returns True if a GPU multiplies this weight in FP8.

    Not with `batch_invariant`, because the order of sums depends on the number of rows; nor the
    weights of experts, which are multiplied together. Without a GPU here, assumes one with FP8.
    """
    return (
        device_type == "cuda"
        and dtype is torch.bfloat16
        and not batch_invariant
        and not partition.is_expert
        and all(size % _ALIGNMENT == 0 for size in partition.local_shape)
        and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9))
    )


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [rows, size] to E4M3, and returns the scales of the rows, float32 [rows].

    The scale of a row that is not finite is NaN.
    """
    if kernels.on_gpu(x):
        from ..kernels.triton.elementwise import quantize_rows as launch  # imports Triton

        return launch(x)
    wide = x.float()
    peak = wide.abs().amax(-1)
    scale = (peak * (1 / _LARGEST)).clamp(min=_TINY)
    is_finite = peak.isfinite()
    numbers = torch.where(is_finite[:, None], wide * (1 / scale)[:, None], 0)
    return numbers.to(torch.float8_e4m3fn), scale.where(is_finite, torch.nan)


class ScaledLinearMethod(PlainLinearMethod):
    """Computes y = x W^T + b with a scale for each row of x and each output of W.

    Plain weights are rounded when they are loaded, unless `can_scale` returns False. Those of
    experts are kept for `kernels.triton.grouped`, which does not round x.
    """

    _other: LinearMethod | None = None  # that multiplies instead

    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        super().create_weights(partition, dtype)
        self._is_scaled = can_scale(
            partition, dtype, self.device_type, batch_invariant=self.batch_invariant
        )
        inputs = partition.local_shape[1]
        self._is_stacked = can_stack(partition, dtype, self.device_type, inputs)

    def tie(self, weight: Parameter) -> bool:
        return False

    @classmethod
    def from_numbers(
        cls, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> Self:
        """Returns a method with numbers [outputs, inputs] in E4M3 and scales [outputs]."""
        method = cls()
        method._keep(numbers, scales, bias)
        return method

    def process_after_load(self) -> None:
        weight = self.weight.data
        bias = self.bias.data if self.bias else None
        del self.weight
        if self._is_scaled:
            self._keep(*quantize_rows(weight), bias)
        elif self._is_stacked:
            numbers, scales = quantize_rows(weight)
            self._other = Fp8LinearMethod().take(
                (numbers.view(torch.uint8), scales[:, None], None),
                bias,
                gated=self._gated,
                uses_kernel=False,
            )
        else:
            self._other = UnquantizedLinearMethod.from_tensors(
                weight, bias, batch_invariant=self.batch_invariant, gated=self._gated
            )

    def _keep(self, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._numbers = numbers.contiguous()
        self._scales = scales.float().contiguous()[None]  # [1, outputs]
        self._bias = bias

    def plain_form(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return self._other.plain_form() if self._other else None

    def stacked_form(self) -> StackedForm | None:
        return self._other.stacked_form() if self._other else None

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._other:
            return self._other.apply(x, residual)
        numbers, scales = quantize_rows(x)
        y = torch._scaled_mm(
            numbers,
            self._numbers.t(),
            scale_a=scales[:, None],
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=x.dtype,
        )
        return y if residual is None else residual.add_(y)

    def saved_bytes(self) -> int:
        if not self._is_scaled and not self._is_stacked:
            return 0
        weight = self.weight.data
        return weight.nbytes - weight.numel() - SCALE_BYTES * len(weight)
