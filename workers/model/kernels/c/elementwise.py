"""Computes torch's elementwise operators with kernels, so that steps that call torch are recorded.

A tensor has one row for each token of the step, along the dimension with the largest stride. So
results are laid out token by token, even if their shape is transposed.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from .build import SUFFIX
from .calls import OPERATORS, call

# The order is that of elementwise.c.
_OPERATIONS: Final = (
    "copy",
    "add",
    "sub",
    "mul",
    "neg",
    "silu",
    "gelu",
    "gelu_tanh",
    "tanh",
    "relu",
)
_aten = torch.ops.aten


def compute(operation: str, x: torch.Tensor, y: torch.Tensor | float | None = None) -> torch.Tensor:
    """Computes an operation with broadcasting.

    Raises NotImplementedError if there is no kernel for it.
    """
    shape = (
        torch.Size(np.broadcast_shapes(x.shape, y.shape))
        if isinstance(y, torch.Tensor)
        else x.shape
    )
    like = x.expand(shape)
    rows = _row_dimension(
        like if isinstance(y, float | int | None) or x.shape == shape else y.expand(shape)
    )
    order = [rows, *(dim for dim in range(len(shape)) if dim != rows)]
    out = x.new_empty([shape[dim] for dim in order]).permute(_inverse(order))
    _fill(out, rows, operation, like, y.expand(shape) if isinstance(y, torch.Tensor) else y)
    return out


def concatenate(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenates tensors as `torch.cat` does, but not along the tokens."""
    dim %= tensors[0].ndim
    rows = _row_dimension(tensors[0])
    if dim == rows:
        raise NotImplementedError("no kernel for concatenating along the tokens")
    shape = list(tensors[0].shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    order = [rows, *(each for each in range(len(shape)) if each != rows)]
    out = tensors[0].new_empty([shape[each] for each in order]).permute(_inverse(order))
    begin = 0
    for each in tensors:
        _fill(out.narrow(dim, begin, each.shape[dim]), rows, "copy", each, None)
        begin += each.shape[dim]
    return out


def _fill(
    out: torch.Tensor, rows: int, operation: str, x: torch.Tensor, y: torch.Tensor | float | None
) -> None:
    dims = [dim for dim in range(out.ndim) if dim != rows and out.shape[dim] > 1]
    tensors = [each for each in (out, x, y) if isinstance(each, torch.Tensor)]
    if len(dims) > 2 or {each.dtype for each in tensors} != {out.dtype} or out.dtype not in SUFFIX:
        raise NotImplementedError("no kernel for these shapes or dtypes")
    heads, last = ([None] * 2 + dims)[-2:]

    def strides(each: torch.Tensor) -> tuple[int, int, int]:
        at = [
            0 if dim is None or each.shape[dim] == 1 else each.stride(dim)
            for dim in (rows, heads, last)
        ]
        return at[0], at[1], at[2]

    x_row, x_head, x_last = strides(x)
    y_row, y_head, y_last = strides(y) if isinstance(y, torch.Tensor) else (0, 0, 0)
    out_row, out_head, out_last = strides(out)
    if last is not None and (x_last != 1 or out_last != 1 or y_last not in (0, 1)):
        raise NotImplementedError("no kernel for these strides")
    heads_and_dim = (
        1 if heads is None else out.shape[heads],
        1 if last is None else out.shape[last],
    )
    other = y if isinstance(y, torch.Tensor) else None
    number = 0.0 if y is None or other is not None else float(y)
    places = (x, x_row, x_head, other, y_row, y_head, y_last, out, out_row, out_head)
    call(
        "elementwise",
        out.dtype,
        out.shape[rows],
        *places,
        *heads_and_dim,
        _OPERATIONS.index(operation),
        number,
    )


def _row_dimension(tensor: torch.Tensor) -> int:
    return max(
        range(tensor.ndim), key=lambda dim: tensor.stride(dim) if tensor.shape[dim] > 1 else -1
    )


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _binary(operation: str) -> Any:
    def run(x: Any, y: Any, *, alpha: float = 1) -> torch.Tensor:
        if alpha != 1:
            raise NotImplementedError("no kernel for alpha")
        if not isinstance(x, torch.Tensor):  # occurs only for commutative operations
            x, y = y, x
        return compute(operation, x, y)

    return run


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    return compute("gelu_tanh" if approximate == "tanh" else "gelu", x)


OPERATORS.update(
    {
        _aten.add.Tensor: _binary("add"),
        _aten.sub.Tensor: _binary("sub"),
        _aten.mul.Tensor: _binary("mul"),
        _aten.neg.default: lambda x: compute("neg", x),
        _aten.silu.default: lambda x: compute("silu", x),
        _aten.gelu.default: _gelu,
        _aten.tanh.default: lambda x: compute("tanh", x),
        _aten.relu.default: lambda x: compute("relu", x),
        _aten.clone.default: lambda x, **kwargs: compute("copy", x),
        _aten.cat.default: concatenate,
    }
)
