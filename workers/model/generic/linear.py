"""Computes the `torch.nn.Linear` of a transformers model, or a rank's part, by packed weights."""

import torch
from torch import nn

from ..parallel import TensorParallel
from ..quant.unquantized import UnquantizedLinearMethod


class PackedLinear:
    """Computes x W^T + b.

    Split inputs are summed over the ranks; split outputs may be gathered.
    """

    def __init__(
        self,
        plain: nn.Linear,
        tp: TensorParallel,
        *,
        split_input: bool = False,  # the inputs are whole, and this rank uses its part
        sums: bool = False,
        gathers: bool = False,
    ) -> None:
        """`plain` has this rank's part of the loaded weight; packing empties it."""
        self._tp = tp
        self._sums = sums
        self._gathers = gathers
        self._num_outputs = plain.out_features  # of the whole map
        self._inputs = tp.part(plain.in_features) if split_input else None
        bias = None if plain.bias is None or (sums and tp.rank) else plain.bias.data
        self._method = UnquantizedLinearMethod.from_tensors(plain.weight.data, bias)
        if not hasattr(self._method, "weight"):  # some code looks at the dtype
            plain.weight = nn.Parameter(plain.weight.new_empty(0), requires_grad=False)

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
