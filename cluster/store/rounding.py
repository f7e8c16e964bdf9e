"""Rounds linear weights to integers with a scale for each output and group of inputs: to nearest, or by GPTQ (arXiv
2210.17323), which lets the weights that are not rounded yet make up for the errors of those that are."""

from typing import Final

import torch

_DAMPING: Final = 0.01  # of the mean of the Hessian's diagonal
_COLUMNS: Final = 128  # whose errors reach the columns behind them at once
_SHARES: Final = tuple(1 - step / 50 for step in range(20))  # of a group's largest weight that are tried as its range

Rounded = tuple[torch.Tensor, torch.Tensor]
"""Numbers [outputs, inputs] int8, from -2**(bits-1) to 2**(bits-1)-1, and scales [outputs, groups] bfloat16."""


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> Rounded:
    """Rounds a weight [outputs, inputs], so that the largest number of each group is the largest that there is."""
    groups = weight.float().view(len(weight), -1, group_size)
    scales = _positive(groups.abs().amax(-1) / _largest(bits))
    return _nearest(groups, scales[..., None], bits).flatten(1).to(torch.int8), scales.bfloat16()


def round_by_gptq(weight: torch.Tensor, hessian: torch.Tensor, bits: int, group_size: int) -> Rounded:
    """Rounds a weight [outputs, inputs]. `hessian` [inputs, inputs] is the sum of x x^T over the inputs x of a
    calibration text. Columns are rounded in the order of its diagonal, with scales found before ("static" order)."""
    inputs = weight.shape[1]
    diagonal = hessian.diagonal().double()
    damping = _DAMPING * diagonal.mean().clamp(min=1e-6) + (diagonal == 0)
    order = diagonal.argsort(descending=True)
    ordered = (hessian.double() + damping.diag())[order][:, order]
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(ordered)), upper=True).float()
    scales = _search_scales(weight.float(), diagonal.float(), bits, group_size)
    columns, of_column = weight.float().t()[order].contiguous(), scales.t()[order // group_size]
    numbers = torch.empty_like(columns)  # [inputs, outputs]
    for begin in range(0, inputs, _COLUMNS):
        end = min(begin + _COLUMNS, inputs)
        errors = torch.empty(end - begin, len(weight))
        for at in range(begin, end):
            numbers[at] = _nearest(columns[at], of_column[at], bits)
            errors[at - begin] = (columns[at] - numbers[at] * of_column[at]) / factor[at, at]
            columns[at + 1 : end] -= factor[at, at + 1 : end, None] * errors[at - begin]
        columns[end:] -= factor[begin:end, end:].t() @ errors
    restored = torch.empty_like(numbers)
    restored[order] = numbers
    return restored.t().to(torch.int8).contiguous(), scales.bfloat16()


def _search_scales(weight: torch.Tensor, importance: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Returns the scales [outputs, groups] whose errors, each weighed by the `importance` [inputs] of its input, are
    the least: some large weights are cut for that."""
    groups, weights = weight.view(len(weight), -1, group_size), importance.view(-1, group_size)
    largest = groups.abs().amax(-1)
    best, least = torch.empty_like(largest), torch.full_like(largest, torch.inf)
    for share in _SHARES:
        scales = _positive(largest * share / (_largest(bits) + 0.5))
        errors = groups - _nearest(groups, scales[..., None], bits) * scales[..., None]
        total = (errors.square_() * weights).sum(-1)
        best, least = torch.where(total < least, scales, best), torch.minimum(total, least)
    return best


def _largest(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


def _positive(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales as bfloat16 has them; 1 for groups of zeros."""
    return scales.bfloat16().float().where(scales > 0, 1)


def _nearest(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    return (weight / scales).round_().clamp_(-_largest(bits) - 1, _largest(bits))
