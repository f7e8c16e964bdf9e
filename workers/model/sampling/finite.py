"""Detects NaN and infinity before they reach a client or the prefix cache."""

import itertools
import math
from collections.abc import Sequence

import torch

from ...engine.plan import NOT_FINITE, SequenceStep, StepPlan


def _is_chunk(step: SequenceStep) -> bool:
    """Returns True if the step has tokens whose logits are not used."""
    return len(step.token_ids) > 1 + step.num_draft or not step.num_samples


def sum_chunks(hidden: torch.Tensor, steps: Sequence[SequenceStep]) -> torch.Tensor | None:
    """Returns the sum of each chunk of hidden states [num_tokens, hidden], float32 [num_chunks].

    A sum is not finite if the KV cache of one of the chunk's tokens is not, because a token reads
    its own KV cache in every layer. Logits would show this only for the last token, and too late
    for the prefix cache, which caches the blocks of each chunk.
    """
    ends = itertools.accumulate(len(step.token_ids) for step in steps)
    parts = [
        hidden[end - len(step.token_ids) : end]
        for step, end in zip(steps, ends, strict=True)
        if _is_chunk(step)
    ]
    return torch.stack([part.sum(dtype=torch.float32) for part in parts]) if parts else None


def not_finite(plan: StepPlan, tokens: Sequence[int], chunks: Sequence[float]) -> dict[int, str]:
    """Returns the failed sequences with the reason.

    A sequence fails if it has a negative token or a chunk whose sum is not finite.
    """
    sampled = iter(tokens)
    sums = iter(chunks)
    failed = {}
    for step in plan.sequences:
        is_finite = min(itertools.islice(sampled, step.num_samples), default=0) >= 0
        if _is_chunk(step):
            is_finite &= math.isfinite(next(sums))
        if not is_finite:
            failed[step.sequence_id] = NOT_FINITE
    return failed
