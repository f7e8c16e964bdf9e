"""Defines the interface of attention backends over a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """Says which tokens of one sequence a step computes."""

    blocks: Sequence[int]  # the block table, long enough for start + num_tokens tokens
    start: int
    num_tokens: int


class StepAttention(Protocol):
    """Computes the attention of one step, with what its layers share: slots, block tables, masks."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Stores the step's keys and values, then attends causally to all that the sequences have stored.

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] of this layer,
        sequences in the order of the plan; returns [num_tokens, num_heads * head_dim]."""
        ...


class AttentionBackend(Protocol):
    """Computes attention over a `PagedKv`."""

    reads_whole_blocks: bool
    """Whether what lies past a sequence's end in its last block must be finite numbers."""

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        """Prepares a step over the given sequences, whose tokens lie one after the other."""
        ...
