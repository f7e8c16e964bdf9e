"""Computes log probabilities of tokens: log_softmax of the model's logits, in float32."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import torch

from ...engine.plan import SampledLogprobs, SequenceStep
from ..device import copy_to_device

_ROWS_AT_ONCE: Final = 64
"""Prompt positions whose logits are in memory at once.

With a vocabulary of 150,000 they take 40 MB, and twice that while log probabilities are computed.
"""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
NUM_TENSORS: Final = 4


def compute_logprobs(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Tensors:
    """Computes log probabilities of `targets` and of the most likely tokens.

    Takes logits [num_rows, vocab_size] and targets int64 [num_rows]. Returns the targets' log
    probabilities [num_rows], their ranks from 1 [num_rows], the largest log probabilities
    [num_rows, num_top] in descending order, and their tokens. Log probabilities are float32. Equal
    tokens all have the rank of the first.
    """
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    ids = _top(logits, num_top)
    chosen = logits.gather(1, targets[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    return chosen.sub(total).squeeze(1), ranks, logits.gather(1, ids).sub_(total), ids


def _top(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """Returns the tokens [num_rows, num_top] of the largest float32 logits, largest first.

    Among equal logits, which are frequent in bfloat16, the lower id comes first: a beam search must
    not depend on the batch.
    """
    num_rows, vocab_size = logits.shape
    width = min(num_top, vocab_size)
    if width == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(width)
    least = values[:, -1:]
    # `topk` selects any of the logits that equal the smallest: select the first of them instead.
    downward = torch.arange(vocab_size, 0, -1, dtype=torch.float32, device=logits.device)
    equals = torch.where(logits == least, downward, 0).topk(width).indices
    ranks = torch.arange(width, device=logits.device) - (values > least).sum(-1, keepdim=True)
    ids = torch.where(ranks < 0, ids, equals.gather(1, ranks.clamp(min=0)))
    ids = ids.sort(-1).values
    return ids.gather(1, logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """Holds log probabilities on the device, and their sequences."""

    # In the order of rows: id, number of rows, requested alternatives. A sequence with a draft
    # occurs more than once.
    sequences: Sequence[tuple[int, int, int]]
    tensors: Tensors  # result of `compute_logprobs`

    def to_lists(
        self,
        chosen: Iterable[float],
        ranks: Iterable[int],
        values: Iterable[list[float]],
        ids: Iterable[list[int]],
    ) -> dict[int, list[SampledLogprobs]]:
        """Returns log probabilities by sequence id; the arguments are the tensors as lists."""
        rows = zip(chosen, ranks, values, ids, strict=True)
        found: dict[int, list[SampledLogprobs]] = {}
        for sequence_id, count, num_top in self.sequences:
            found.setdefault(sequence_id, []).extend(
                SampledLogprobs(
                    logprob=logprob,
                    rank=rank,
                    top=tuple(zip(row_ids[:num_top], row_values[:num_top], strict=True)),
                )
                for logprob, rank, row_values, row_ids in islice(rows, count)
            )
        return found


def compute_prompt_logprobs(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    steps: Sequence[SequenceStep],
    num_top: dict[int, int],
) -> LogprobsTensors | None:
    """Computes log probabilities of the prompt tokens that follow the step's tokens.

    `num_top` has the number of requested alternatives by sequence; other sequences are left out.
    `head` maps rows of hidden [num_tokens, hidden] to logits [num_rows, vocab_size]. Returns None
    if no known prompt token follows.
    """
    sequences: list[tuple[int, int, int]] = []
    rows: list[int] = []
    targets: list[int] = []
    first = 0
    for step in steps:
        last = () if step.next_prompt_token is None else (step.next_prompt_token,)
        # The known prompt tokens after the step's first, second, ... token.
        follows = () if step.num_draft else step.token_ids[1:] + last
        if follows and step.sequence_id in num_top:
            sequences.append((step.sequence_id, len(follows), num_top[step.sequence_id]))
            rows += range(first, first + len(follows))
            targets += follows
        first += len(step.token_ids)
    if not rows:
        return None
    most = max(wanted for _, _, wanted in sequences)
    rows_device, targets_device = copy_to_device([np.array(rows), np.array(targets)], hidden.device)
    parts = [
        compute_logprobs(head(hidden[some_rows]), some_targets.long(), most)
        for some_rows, some_targets in zip(
            torch.split(rows_device, _ROWS_AT_ONCE),
            torch.split(targets_device, _ROWS_AT_ONCE),
            strict=True,
        )
    ]
    chosen, ranks, values, ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return LogprobsTensors(sequences=sequences, tensors=(chosen, ranks, values, ids))
