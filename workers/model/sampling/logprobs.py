"""Log probabilities of tokens under the model's own distribution: log_softmax of its logits, in float32."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import torch

from ...engine.plan import SampledLogprobs, SequenceStep
from ..device import ship

_ROWS_AT_ONCE: Final = 64
"""Positions of prompts whose logits are held at once: of 150,000 tokens they take 40 MB, and twice that in passing."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def measure(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Tensors:
    """logits [num_rows, vocab_size] and a token of each row, int64 [num_rows], to the token's log probability
    [num_rows], the largest ones [num_rows, num_top], descending, and their tokens; float32, but for tokens."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    ids = _top(logits, num_top)
    return logits.gather(1, targets[:, None]).sub_(total).squeeze(1), logits.gather(1, ids).sub_(total), ids


def _top(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """The tokens [num_rows, num_top] of the largest of logits, float32 [num_rows, vocab_size], the largest first; of
    equals, which are many in bfloat16, the lower number first: a search must not depend on who else is in the batch."""
    num_rows, vocab_size = logits.shape
    width = min(num_top, vocab_size)
    if width == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(width)
    least = values[:, -1:]
    # `topk` takes any of those that equal the least: take the first of them instead.
    downward = torch.arange(vocab_size, 0, -1, dtype=torch.float32, device=logits.device)
    equals = torch.where(logits == least, downward, 0).topk(width).indices
    places = torch.arange(width, device=logits.device) - (values > least).sum(-1, keepdim=True)
    ids = torch.where(places < 0, ids, equals.gather(1, places.clamp(min=0)))
    ids = ids.sort(-1).values
    return ids.gather(1, logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Log probabilities on the device, and whose they are."""

    owners: Sequence[tuple[int, int, int]]  # in the order of rows: sequence id, number of rows, alternatives wanted
    tensors: Tensors  # as `measure` gives them

    def read(
        self, chosen: Iterable[float], values: Iterable[list[float]], ids: Iterable[list[int]]
    ) -> dict[int, list[SampledLogprobs]]:
        """What the tensors hold, by sequence id."""
        rows = zip(chosen, values, ids, strict=True)
        return {
            sequence_id: [
                SampledLogprobs(logprob=logprob, top=tuple(zip(row_ids[:num_top], row_values[:num_top], strict=True)))
                for logprob, row_values, row_ids in islice(rows, count)
            ]
            for sequence_id, count, num_top in self.owners
        }


def measure_prompts(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    steps: Sequence[SequenceStep],
    num_top: dict[int, int],
) -> Measured | None:
    """The prompt tokens that follow those of the step, of the sequences in `num_top`, by the alternatives wanted.

    hidden [num_tokens, hidden] of all steps, which `head` makes logits [num_rows, vocab_size] of. None if nothing that
    is wanted follows."""
    owners: list[tuple[int, int, int]] = []
    rows: list[int] = []
    targets: list[int] = []
    first = 0
    for step in steps:
        follows = following(step) if step.sequence_id in num_top else ()
        if follows:
            owners.append((step.sequence_id, len(follows), num_top[step.sequence_id]))
            rows += range(first, first + len(follows))
            targets += follows
        first += len(step.token_ids)
    if not rows:
        return None
    most = max(wanted for _, _, wanted in owners)
    rows_there, targets_there = ship([np.array(rows), np.array(targets)], hidden.device)
    parts = [
        measure(head(hidden[some_rows]), some_targets.long(), most)
        for some_rows, some_targets in zip(
            torch.split(rows_there, _ROWS_AT_ONCE), torch.split(targets_there, _ROWS_AT_ONCE), strict=True
        )
    ]
    chosen, values, ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Measured(owners=owners, tensors=(chosen, values, ids))


def following(step: SequenceStep) -> tuple[int, ...]:
    """The known prompt tokens that follow the step's first, second, ... token."""
    last = () if step.next_prompt_token is None else (step.next_prompt_token,)
    return step.token_ids[1:] + last
