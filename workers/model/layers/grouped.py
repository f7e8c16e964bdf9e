"""Multiplies each row by the weight of its expert: in one launch on GPUs, in one call on CPUs."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import torch
from torch.nn import functional

from ..kernels.c import cpu
from ..kernels.c.experts import SortedChoices
from ..quant.base import LinearMethod, PackedForm, StackedForm

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
        experts, order = chosen.flatten().long().sort(stable=True)
        numbers = torch.arange(num_experts, device=chosen.device)
        # Not bincount, which waits for the device.
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        return cls(order, experts, ends)


class GroupedLinear:
    """Computes y = x W^T + b with the weight and the bias of each row's expert.

    torch's `grouped_mm` multiplies plain weights by rows that are sorted by expert. The results of
    our kernel depend on no other row, and it multiplies weights in FP8, too.
    """

    def __init__(self, methods: list[LinearMethod]) -> None:
        """Copies the experts' weights into one tensor and empties the list.

        Requires `can_stack`.
        """
        forms = [form for each in methods if (form := each.stacked_form()) is not None]
        methods.clear()
        self._weight = torch.stack([form.weight for form in forms])  # [experts, outputs, inputs]
        self._scales = _stack([form.scales for form in forms])  # [experts, outputs, groups]
        self._bias = _stack([form.bias for form in forms])  # [experts, outputs]

    def sorted(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """Maps x [num_rows, inputs], sorted by expert, to [num_rows, outputs] by torch."""
        y = functional.grouped_mm(x, self._weight.transpose(1, 2), offs=rows.ends)
        return y if self._bias is None else y + self._bias[rows.experts]

    def from_tokens(self, x: torch.Tensor, rows: ExpertRows, num_chosen: int) -> torch.Tensor:
        """Maps tokens x [num_tokens, inputs] to rows [num_rows, outputs], sorted by expert."""
        return self._multiply(x, rows, num_chosen, from_tokens=True)

    def to_places(self, x: torch.Tensor, rows: ExpertRows, num_chosen: int) -> torch.Tensor:
        """Maps x [num_rows, inputs], sorted by expert, to [num_rows, outputs] by place."""
        return self._multiply(x, rows, num_chosen, from_tokens=False)

    def _multiply(
        self, x: torch.Tensor, rows: ExpertRows, num_chosen: int, *, from_tokens: bool
    ) -> torch.Tensor:
        from ..kernels.triton.grouped import grouped_linear  # imports Triton

        return grouped_linear(
            x,
            self._weight,
            self._scales,
            self._bias,
            rows.order,
            rows.ends,
            num_chosen,
            from_tokens=from_tokens,
        )


class PackedExperts:
    """Computes y = x W^T + b with the weight and the bias of each row's expert, by C kernels.

    A row's result has the bits of the expert's own linear method.
    """

    def __init__(self, methods: list[LinearMethod]) -> None:
        """Copies the experts' weights into one tensor and empties the list.

        Requires `can_pack`.
        """
        forms = [form for each in methods if (form := each.packed_form()) is not None]
        methods.clear()
        self.alternates = forms[0].alternates
        self._num_outputs = forms[0].num_outputs
        # [experts, outputs]
        self._bias = _stack([form.bias for form in forms])
        # Experts follow each other panel by panel.
        self._weight = torch.cat([form.weight for form in forms])
        self._scales = _join([form.scales for form in forms])
        self._zeros = _join([form.zeros for form in forms])

    def multiply(
        self, x: torch.Tensor, choices: SortedChoices, activation: str | None = None
    ) -> torch.Tensor:
        """Maps sorted rows x [num_rows, inputs] to [num_rows, outputs].

        Gates come before ups. With `activation`, which requires `alternates`, the result is
        activation(gate) * up, [num_rows, outputs / 2].
        """
        y = self._multiply(x, choices.groups, activation)
        return cpu.apart(y) if self.alternates and activation is None else y

    def _multiply(
        self, x: torch.Tensor, groups: torch.Tensor, activation: str | None
    ) -> torch.Tensor:
        """Returns the outputs as the weight has them: gate and up alternate with `alternates`."""
        if self._scales is not None and self._scales.dtype is torch.bfloat16:
            numbers = (self._weight, self._scales, self._zeros)
            return cpu.linear_int(
                x, numbers, self._num_outputs, self._bias, activation=activation, groups=groups
            )
        return cpu.linear(
            x,
            self._weight,
            self._num_outputs,
            self._bias,
            activation=activation,
            scales=self._scales,
            groups=groups,
        )


def can_pack(methods: Sequence[LinearMethod]) -> bool:
    """Returns True if a C kernel multiplies the weights of all experts in one call."""
    forms = [each.packed_form() for each in methods]
    return None not in forms and len({_packed_shape(form) for form in forms if form}) == 1


def add_outputs(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of each token's outputs, [num_tokens, size].

    Takes `outputs` [num_tokens * num_chosen, size] and `weights` [num_tokens, num_chosen] float32.
    """
    from ..kernels.triton.grouped import combine  # imports Triton

    return combine(outputs, weights)


def can_stack(methods: Sequence[LinearMethod]) -> bool:
    """Returns True if the experts' weights fit into one tensor."""
    forms = [each.stacked_form() for each in methods]
    return None not in forms and len({_shape(form) for form in forms if form}) == 1


def multiplies_in_one_launch(methods: Sequence[LinearMethod]) -> bool:
    """Returns True if torch's `grouped_mm` multiplies these weights in one kernel.

    It requires plain weights with rows of whole multiples of 16 bytes. For other GPUs and dtypes it
    copies the ends of the groups to the host and multiplies group by group (torch's
    GroupedBlas.cpp).
    """
    form = methods[0].stacked_form()
    if form is None or form.scales is not None:
        return False
    weight = form.weight
    if any(size * weight.itemsize % _ALIGNMENT for size in weight.shape):
        return False
    if weight.device.type != "cuda" or weight.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in _MAJORS


def _shape(form: StackedForm) -> tuple[object, ...]:
    """Returns the shapes and the dtype, which are equal in the weights of one tensor."""
    scales, bias = (None if each is None else each.shape for each in (form.scales, form.bias))
    return form.weight.shape, form.weight.dtype, scales, bias


def _stack(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [each for each in tensors if each is not None]
    return torch.stack(given) if given else None


def _packed_shape(form: PackedForm) -> tuple[object, ...]:
    """Returns the shapes and dtypes, which are equal in the weights of one `PackedExperts`."""
    tensors = (form.weight, form.scales, form.zeros, form.bias)
    shapes = [None if each is None else (each.shape, each.dtype) for each in tensors]
    return form.num_outputs, form.alternates, *shapes


def _join(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [each for each in tensors if each is not None]
    return torch.cat(given) if given else None
