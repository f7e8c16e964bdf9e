"""Multiplies each row by the weight of its expert in one launch, without waiting for the device."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import torch
from torch.nn import functional

from ..quant.base import LinearMethod

_ALIGNMENT: Final = 16  # bytes of a row that grouped_mm requires
_MAJORS: Final = (9, 10)  # compute capabilities for which torch has a kernel, in bfloat16


class ExpertRows(NamedTuple):
    """Orders the rows of a step by expert; a token has a row for each of its experts."""

    order: torch.Tensor  # [num_rows] int64, the row's place in `chosen`, flattened
    experts: torch.Tensor  # [num_rows] int64, ascending
    ends: torch.Tensor  # [num_experts] int32, the end of each expert's rows

    @classmethod
    def sort(cls, chosen: torch.Tensor, num_experts: int) -> Self:
        """Orders the rows of `chosen`, [num_tokens, num_chosen], the experts of each token."""
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, device=chosen.device)
        # Not bincount, which waits for the device.
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        return cls(order, experts, ends)


class GroupedLinear:
    """Computes y = x W^T + b with the weight and the bias of each row's expert."""

    def __init__(self, methods: list[LinearMethod]) -> None:
        """Copies the experts' weights into one tensor and empties the list.

        Requires `can_group`.
        """
        weights, biases = zip(*(_plain(each) for each in methods), strict=True)
        methods.clear()
        self._weight = torch.stack(weights).transpose(1, 2)  # [num_experts, inputs, outputs]
        # [num_experts, outputs]
        self._bias = None if biases[0] is None else torch.stack(biases)

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """Maps x [num_rows, inputs], sorted by expert, to [num_rows, outputs]."""
        y = functional.grouped_mm(x, self._weight, offs=rows.ends)
        return y if self._bias is None else y + self._bias[rows.experts]


def can_group(methods: Sequence[LinearMethod]) -> bool:
    """Returns True if the experts' weights are plain, with rows of whole multiples of 16 bytes."""
    forms = [each.plain_form() for each in methods]
    return all(
        form is not None
        and all(size * form[0].itemsize % _ALIGNMENT == 0 for size in form[0].shape)
        for form in forms
    )


def launches_only(weight: torch.Tensor) -> bool:
    """Returns True if torch multiplies groups in one kernel on the weight's GPU.

    For other GPUs and dtypes `grouped_mm` copies the ends of the groups to the host and multiplies
    group by group (torch's GroupedBlas.cpp).
    """
    if weight.device.type != "cuda" or weight.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in _MAJORS


def _plain(method: LinearMethod) -> tuple[torch.Tensor, torch.Tensor | None]:
    form = method.plain_form()
    assert form is not None
    return form
