"""Multiplies by plain linear weights, which are packed for a kernel in bfloat16 on CPUs."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch.nn import functional

from .. import kernels
from ..kernels.c import cpu
from .base import LinearPartition, PackedForm, PlainLinearMethod

_Linear = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor
]
"""Maps x, weight, bias and residual like `kernels.triton.linear.linear`."""


class UnquantizedLinearMethod(PlainLinearMethod):
    """Computes y = x W^T + b.

    In bfloat16 on CPUs the weight is packed once: for our own kernel if it supports the processor,
    else in oneDNN's blocked form.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self._uses_kernel = False
        self._uses_onednn = False
        self._invariant_linear: _Linear | None = None

    @classmethod
    def from_tensors(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        batch_invariant: bool = False,
        gated: bool = False,
    ) -> Self:
        """Returns a method with a loaded weight [outputs, inputs] and bias [outputs].

        The weight may be overwritten. `apply` may be called at once.
        """
        method = cls(batch_invariant=batch_invariant)
        partition = LinearPartition(
            outputs=(("", len(weight), slice(None)),),
            num_inputs=weight.shape[1],
            has_bias=bias is not None,
            gated=gated,
        )
        method.create_weights(partition, weight.dtype)
        for parameter, data in zip(method.parameters(), (weight, bias), strict=False):
            if data is not None:
                parameter.data = data
        method.process_after_load()
        return method

    def process_after_load(self) -> None:
        """Packs the weight if a packed form is faster, and drops the plain form."""
        weight = self.weight.data
        self._num_outputs = weight.shape[0]
        self._bias = self.bias.data if self.bias else None
        self._uses_kernel = cpu.can_multiply(weight)
        self._uses_onednn = not self._uses_kernel and _onednn_can_pack(weight)
        if self.batch_invariant and kernels.on_gpu(weight):
            from ..kernels.triton.linear import linear  # imports Triton

            self._invariant_linear = linear
        self.fuses_gate = (
            self._gated and self._bias is None and cpu.can_gate(weight[: len(weight) // 2])
        )
        if self.fuses_gate:
            # Not rebound: the packed form then fills the hole of the copy.
            weight.copy_(cpu.alternate(*weight.chunk(2)))
        if self._uses_kernel:
            self._matrix = cpu.pack_linear(weight)
        elif self._uses_onednn:
            self._matrix = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            self._matrix = weight
        if self._matrix is not weight:
            del self.weight

    def plain_form(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        is_packed = self._uses_kernel or self._uses_onednn or self.fuses_gate
        return None if is_packed else (self._matrix, self._bias)

    def packed_form(self) -> PackedForm | None:
        if not self._uses_kernel:
            return None
        return PackedForm(self._matrix, None, None, self._num_outputs, self._bias, self.fuses_gate)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self.fuses_gate:  # then there is neither bias nor residual
            return cpu.apart(cpu.linear(x, self._matrix, self._num_outputs))
        if self._uses_kernel:
            return cpu.linear(x, self._matrix, self._num_outputs, self._bias, residual)
        if self._invariant_linear:
            return self._invariant_linear(x, self._matrix, self._bias, residual)
        if residual is not None and self._bias is None and not self._uses_onednn:
            return residual.addmm_(x, self._matrix.t())
        product = _onednn_linear if self._uses_onednn else functional.linear
        y = product(x, self._matrix, self._bias)
        return y if residual is None else residual + y

    def apply_gated(
        self, x: torch.Tensor, activation: str = "silu", residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.fuses_gate:
            return cpu.linear(x, self._matrix, self._num_outputs, None, residual, activation)
        return super().apply_gated(x, activation, residual)


def _onednn_can_pack(weight: torch.Tensor) -> bool:
    fits = (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    return fits and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Maps x [num_tokens, inputs] to [num_tokens, outputs].

    `weight` is in oneDNN's blocked form.
    """
    no_scalars: Sequence[float] = []
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, weight, bias, "none", no_scalars, ""
    )
    return result
