"""Wraps the C kernels that route tokens to experts (linear/experts.c)."""

from typing import Final, NamedTuple

import torch

from .calls import call
from .cpu import usable

MAX_EXPERTS: Final = 4096  # as in experts.c


class SortedChoices(NamedTuple):
    """Orders the choices of a step's tokens by expert, then by token."""

    # [1 + 2 * num_experts] int32: the number of chosen experts, then for each its number and the
    # end of its sorted rows.
    groups: torch.Tensor
    tokens: torch.Tensor  # [num_tokens * num_chosen] int32, the token of each sorted row
    places: torch.Tensor  # [num_tokens, num_chosen] int32, the sorted row of each choice


def can_route(scores: torch.Tensor) -> bool:
    """Returns True if the kernels support scores [num_tokens, num_experts]."""
    return usable(scores) and scores.shape[1] <= MAX_EXPERTS


def route(
    scores: torch.Tensor,  # [num_tokens, num_experts], contiguous
    num_chosen: int,
    *,
    softmax: bool,
    normalised: bool,
    factor: float = 1.0,
    bias: torch.Tensor | None = None,  # float32 [num_experts]; is added for the choice only
    num_groups: int = 1,
    num_chosen_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts with the highest scores: ascending int32 [num_tokens, num_chosen].

    Their weights, float32 of the same shape, are the scores, or with `softmax` the softmax of all.
    `normalised` weights add up to 1 before they are multiplied by the `factor`. Experts are chosen
    from the groups of adjacent experts with the highest sums of two scores. The weights of a token
    are NaN if one of its scores is not finite.
    """
    num_tokens, num_experts = scores.shape
    chosen = scores.new_empty(num_tokens, num_chosen, dtype=torch.int32)
    weights = scores.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    counts = (num_experts, num_chosen, num_groups, num_chosen_groups)
    options = (int(softmax), int(normalised), float(factor))
    call("route", scores.dtype, num_tokens, scores, bias, chosen, weights, *counts, *options)
    return chosen, weights


def sort_choices(chosen: torch.Tensor, num_experts: int) -> SortedChoices:
    """Sorts the choices [num_tokens, num_chosen], int32."""
    num_tokens, num_chosen = chosen.shape
    made = SortedChoices(
        groups=chosen.new_empty(1 + 2 * num_experts),
        tokens=chosen.new_empty(num_tokens * num_chosen),
        places=chosen.new_empty(num_tokens, num_chosen),
    )
    call("sort_choices", None, num_tokens, chosen, *made, num_experts, num_chosen)
    return made


def combine(
    y: torch.Tensor,  # [num_tokens * num_chosen, size], sorted
    places: torch.Tensor,  # of SortedChoices
    weights: torch.Tensor,  # float32 [num_tokens, num_chosen]
    residual: torch.Tensor | None = None,  # [num_tokens, size], contiguous
) -> torch.Tensor:
    """Returns the weighted sum of each token's outputs, added to `residual`: [num_tokens, size].

    Outputs are added in float32, by ascending expert.
    """
    num_tokens, num_chosen = places.shape
    size = y.shape[1]
    out = y.new_empty(num_tokens, size)
    call("combine", y.dtype, num_tokens, y, places, weights, residual, out, num_chosen, size)
    return out
