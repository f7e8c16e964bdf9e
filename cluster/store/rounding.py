"""Rounds linear weights to integers with one scale for each output and group of inputs.

Rounds to nearest, or by GPTQ (arXiv 2210.17323), where weights that are not rounded yet compensate
for the errors of rounded ones. After GPTQ, coordinate descent (QuantEase, arXiv 2309.01885)
alternates with the best scales for the numbers found.
"""

from dataclasses import dataclass
from typing import Final

import torch

_DAMPING: Final = 0.01  # of the mean of the Hessian's diagonal
_COLUMNS: Final = 128  # columns whose errors are applied to the later columns together
_SHARES: Final = tuple(1 - step / 50 for step in range(25))  # of a group's range to try
# Of coordinate descent; each sweep changes about half as many numbers as the one before.
_SWEEPS: Final = 4
_REFITS: Final = 3  # of the scales, each followed by coordinate descent
_MAX_NUMBERS: Final = 2**24  # of the equations that are solved at once, to save memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Describes the numbers of a rounded weight: 0 to 2**bits - 1.

    The middle number stands for 0, or with zero points one number for each group. Groups of
    `group_size` inputs share a scale.
    """

    bits: int
    group_size: int
    zero_points: bool

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """Holds a weight as numbers: (number - zero) * scale."""

    numbers: torch.Tensor  # [outputs, inputs] uint8
    scales: torch.Tensor  # [outputs, groups] bfloat16
    zeros: torch.Tensor  # [outputs, groups] uint8

    def restored(self) -> torch.Tensor:
        """Returns the weight that the numbers represent, [outputs, inputs] float32."""
        groups = self.numbers.float().view(*self.scales.shape, -1)  # [outputs, groups, group_size]
        restored: torch.Tensor = (groups - self.zeros[..., None]) * self.scales.float()[..., None]
        return restored.flatten(1)


def round_to_nearest(weight: torch.Tensor, grid: Grid) -> Rounded:
    """Rounds a weight [outputs, inputs]; each group's range is the range of its weights."""
    groups = weight.float().reshape(len(weight), -1, grid.group_size)
    low, high = groups.aminmax(dim=-1)
    scales, zeros = _fit(low, high, grid, reach=0.0)
    numbers = _nearest(groups, scales[..., None], zeros[..., None], grid).flatten(1)
    return Rounded(
        numbers=numbers.to(torch.uint8), scales=scales.bfloat16(), zeros=zeros.to(torch.uint8)
    )


def round_to_best_range(weight: torch.Tensor, importance: torch.Tensor, grid: Grid) -> Rounded:
    """Rounds a weight [outputs, inputs]; each group's range is that with the least errors.

    `importance` [inputs] weighs the squared error of each input.
    """
    groups = weight.float().reshape(len(weight), -1, grid.group_size)
    scales, zeros = _search(weight.float(), importance, grid)
    numbers = _nearest(groups, scales[..., None], zeros[..., None], grid).flatten(1)
    return Rounded(
        numbers=numbers.to(torch.uint8), scales=scales.bfloat16(), zeros=zeros.to(torch.uint8)
    )


def round_by_gptq(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> Rounded:
    """Rounds a weight [outputs, inputs] by GPTQ.

    `hessian` [inputs, inputs] is the sum of x x^T over the inputs x of a calibration text. Columns
    are rounded in the order of its diagonal, with scales found before ("static" order).
    """
    inputs = weight.shape[1]
    diagonal = hessian.diagonal()
    damped = damp(hessian)
    order = diagonal.argsort(descending=True)
    ordered = damped[order][:, order]
    factor = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(ordered)), upper=True
    ).float()
    scales, zeros = _search(weight.float(), diagonal, grid)
    columns = weight.float().t()[order].contiguous()  # [inputs, outputs]
    group = order // grid.group_size  # [inputs]
    scale = scales.t()[group]  # [inputs, outputs]
    zero = zeros.t()[group]  # [inputs, outputs]
    numbers = torch.empty_like(columns)  # [inputs, outputs]
    for begin in range(0, inputs, _COLUMNS):
        end = min(begin + _COLUMNS, inputs)
        errors = torch.empty(end - begin, len(weight))
        for at in range(begin, end):
            numbers[at] = _nearest(columns[at], scale[at], zero[at], grid)
            errors[at - begin] = (columns[at] - (numbers[at] - zero[at]) * scale[at]) / factor[
                at, at
            ]
            columns[at + 1 : end] -= factor[at, at + 1 : end, None] * errors[at - begin]
        columns[end:] -= factor[begin:end, end:].t() @ errors
    restored = torch.empty_like(numbers)
    restored[order] = numbers
    numbers = restored.t().contiguous()
    wide = weight.float()
    sums = damped.float()
    _descend(wide, numbers, scales, zeros, sums, grid)
    for _ in range(_REFITS):
        scales = _refit(wide, numbers, scales, zeros, sums)
        _descend(wide, numbers, scales, zeros, sums, grid)
    return Rounded(
        numbers=numbers.to(torch.uint8), scales=scales.bfloat16(), zeros=zeros.to(torch.uint8)
    )


def damp(hessian: torch.Tensor) -> torch.Tensor:
    """Returns an invertible Hessian [inputs, inputs] float64, also for inputs that are always 0."""
    diagonal = hessian.diagonal().double()
    return hessian.double() + (_DAMPING * diagonal.mean().clamp(min=1e-6) + (diagonal == 0)).diag()


def _descend(
    weight: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
) -> None:
    """Changes the numbers of a weight one input at a time, if that reduces the error of an output.

    `numbers` and `weight` [outputs, inputs]; `scales` and `zeros` [outputs, groups]; `hessian`
    [inputs, inputs], damped.
    """
    groups = numbers.view(*scales.shape, -1)
    restored = ((groups - zeros[..., None]) * scales[..., None]).flatten(1)  # [outputs, inputs]
    slopes = (weight - restored) @ hessian  # [outputs, inputs]
    for _ in range(_SWEEPS):
        for at in range(weight.shape[1]):
            scale = scales[:, at // grid.group_size]  # [outputs]
            zero = zeros[:, at // grid.group_size]  # [outputs]
            best = _nearest(restored[:, at] + slopes[:, at] / hessian[at, at], scale, zero, grid)
            (changed,) = torch.nonzero(best != numbers[:, at], as_tuple=True)
            steps = (best - numbers[:, at])[changed] * scale[changed]  # [changed]
            numbers[changed, at] = best[changed]
            restored[changed, at] += steps
            slopes[changed] -= steps[:, None] * hessian[at]


def _refit(
    weight: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    hessian: torch.Tensor,
) -> torch.Tensor:
    """Returns the scales [outputs, groups] that minimize the error of a weight for given numbers.

    The scales of one output solve a system of linear equations, so parts of the outputs are solved
    one after another. Shapes as in `_descend`.
    """
    steps = numbers.view(*scales.shape, -1) - zeros[..., None]  # [outputs, groups, group_size]
    by_group = hessian.view(len(hessian), *steps.shape[1:])  # [inputs, groups, group_size]
    wanted = (steps * (weight @ hessian).view_as(steps)).sum(-1)  # [outputs, groups]
    unused = (steps == 0).all(-1)  # their scales do not matter
    solved = torch.empty_like(scales)
    num_rows = max(1, _MAX_NUMBERS // scales.shape[1] ** 2)
    for begin in range(0, len(scales), num_rows):
        part = slice(begin, begin + num_rows)
        products = _products(steps[part], by_group).double()
        solved[part] = torch.linalg.solve(
            products + unused[part].double().diag_embed(), wanted[part].double()
        )
    return _positive(solved).where((solved > 0) & ~unused, scales)


def _products(steps: torch.Tensor, by_group: torch.Tensor) -> torch.Tensor:
    """Returns the products of the groups of outputs, [outputs, groups, groups].

    `steps` [outputs, groups, group_size]; `by_group` is the Hessian, [inputs, groups, group_size].
    """
    products = torch.empty(*steps.shape[:2], steps.shape[1])
    for group, rows in enumerate(torch.split(by_group, steps.shape[2])):
        moved = torch.einsum("oi,igj->ogj", steps[:, group], rows)
        products[:, group] = (moved * steps).sum(-1)
    return products


def _search(
    weight: torch.Tensor, importance: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and zeros [outputs, groups] with the least weighted errors.

    `importance` [inputs] weighs the error of each input. Some large weights are clipped for that.
    """
    groups = weight.reshape(len(weight), -1, grid.group_size)
    weights = importance.view(-1, grid.group_size)
    low, high = groups.aminmax(dim=-1)
    best = torch.empty_like(low)
    zeros = torch.empty_like(low)
    least = torch.full_like(low, torch.inf)
    for share in _SHARES:
        scale, zero = _fit(low * share, high * share, grid, reach=0.5)
        numbers = _nearest(groups, scale[..., None], zero[..., None], grid)
        errors = groups - (numbers - zero[..., None]) * scale[..., None]
        total = (errors.square_() * weights).sum(-1)
        is_less = total < least
        best = torch.where(is_less, scale, best)
        zeros = torch.where(is_less, zero, zeros)
        least = torch.minimum(total, least)
    return best, zeros


def _fit(
    low: torch.Tensor, high: torch.Tensor, grid: Grid, reach: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and zeros for numbers that reach from `low` to `high`, of any shape.

    Scales have the precision of bfloat16, and are 1 for groups of zeros. `reach`: by how much of a
    step a weight may exceed the numbers.
    """
    if not grid.zero_points:
        steps = grid.largest - grid.middle + reach
        return _positive(torch.maximum(-low, high) / steps), torch.full_like(low, grid.middle)
    low = low.clamp(max=0)
    high = high.clamp(min=0)
    scales = _positive((high - low) / grid.largest)
    return scales, (-low / scales).round_().clamp_(0, grid.largest)


def _positive(scales: torch.Tensor) -> torch.Tensor:
    return scales.bfloat16().float().where(scales > 0, 1)


def _nearest(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid
) -> torch.Tensor:
    return (weight / scales).add_(zeros).round_().clamp_(0, grid.largest)
