"""Computes the `torch.nn.Linear` of a transformers model, or a rank's part, by a linear method."""

from dataclasses import replace

import torch
from torch import nn

from ..module import Module, WeightSlice
from ..parallel import TensorParallel
from ..quant.base import LinearMethod, LinearPartition
from ..quant.unquantized import UnquantizedLinearMethod


class LinearSource(Module):
    """Holds the linear method of a module whose weight is quantized, or rounded at loading."""

    def __init__(
        self, name: str, plain: nn.Linear, method: LinearMethod, partition: LinearPartition
    ) -> None:
        """Creates the method's weights on `meta`.

        Newer checkpoints of multimodal models have the `name` of the module.
        """
        self.name = name  # of the module
        self.method = method
        self._plain = plain
        method.create_weights(partition, plain.weight.dtype)
        for parameter in method.parameters():
            parameter.slices = tuple(map(self._with_other_names, parameter.slices))

    def _with_other_names(self, part: WeightSlice) -> WeightSlice:
        suffixes = [each.rpartition(".")[2] for each in (part.name, *part.other_names)]
        others = [f"{self.name}.{suffix}" for suffix in suffixes]
        return replace(part, other_names=(*part.other_names, *others))

    def empty(self, device: torch.device) -> None:
        """Removes weight and bias of the module: the method has them."""
        empty_weight(self._plain, device)
        self._plain.register_parameter("bias", None)


def empty_weight(plain: nn.Linear, device: torch.device) -> None:
    """Replaces a module's weight by an empty one, because some code looks at the dtype."""
    empty = torch.empty(0, dtype=plain.weight.dtype, device=device)
    plain.weight = nn.Parameter(empty, requires_grad=False)


def plain_method(plain: nn.Linear, *, has_bias: bool) -> LinearMethod:
    """Returns the method of a module with this rank's part of the loaded weight.

    Packing empties the module's weight.
    """
    bias = plain.bias.data if has_bias and plain.bias is not None else None
    method = UnquantizedLinearMethod.from_tensors(plain.weight.data, bias)
    if not hasattr(method, "weight"):
        empty_weight(plain, plain.weight.device)
    return method


class PackedLinear:
    """Computes x W^T + b.

    Split inputs are summed over the ranks; split outputs may be gathered.
    """

    def __init__(
        self,
        plain: nn.Linear,
        method: LinearMethod,
        tp: TensorParallel,
        *,
        split_input: bool = False,  # the inputs are whole, and this rank uses its part
        sums: bool = False,
        gathers: bool = False,
    ) -> None:
        """`method` has this rank's part of the weight of `plain`."""
        self._tp = tp
        self._sums = sums
        self._gathers = gathers
        self._num_outputs = plain.out_features  # of the whole map
        self._inputs = tp.part(plain.in_features) if split_input else None
        self._method = method

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        if self._inputs is not None:
            x = x[..., self._inputs]
        y = self._method.apply(x.reshape(-1, x.shape[-1]))
        if self._sums:
            y = self._tp.all_reduce(y)
        if self._gathers:
            y = self._tp.gather_logits(y, self._num_outputs)
        return y.view(*x.shape[:-1], y.shape[-1])
