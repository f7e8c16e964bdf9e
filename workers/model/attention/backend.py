"""Defines the interface of attention backends over a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """Says which tokens of one sequence a step computes."""

    blocks: Sequence[int]  # the block table, long enough for start + num_tokens tokens
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOptions:
    """Says how a layer weighs the keys that a query sees; which these are, its
    `LayerGeometry.window` says.
    """

    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap), as Gemma 2's
    sinks: torch.Tensor | None = None
    """float32 [num_heads] of this rank: the score of one key more, without a value, as gpt-oss's.
    """

    def scale_of(self, head_dim: int) -> float:
        """Returns the factor of the scores."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN: Final = AttentionOptions()


class StepAttention(Protocol):
    """Computes the attention of one step, with what its layers share: slots, block tables, masks."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Stores the step's keys and values, then attends causally to all that the sequences have
        stored, or as far back as the layer's window reaches.

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]
        of this layer, sequences in the order of the plan; returns [num_tokens, num_heads *
        head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Computes attention over a `PagedKv`."""

    reads_whole_blocks: bool
    """Whether what lies past a sequence's end in its last block must be finite numbers."""

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        """Prepares a step over the given sequences, whose tokens lie one after the other."""
        ...
