"""Defines the interface of attention backends over a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """Describes which tokens of one sequence a step computes."""

    # The block tables, in the order of `plan_tables`, each with indices up to the last token's.
    # Blocks whose tokens have all left the table's window may belong to other sequences.
    tables: Sequence[Sequence[int]]
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOptions:
    """Describes how a layer turns scores into attention weights.

    `LayerGeometry.window` defines which keys a query sees.
    """

    scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    # Scores become soft_cap * tanh(score / soft_cap), as in Gemma 2.
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """float32 [num_heads] of this rank: the score of an additional key without a value (gpt-oss).
    """

    def scale_of(self, head_dim: int) -> float:
        """Returns the factor of the scores."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN: Final = AttentionOptions()


class StepAttention(Protocol):
    """Computes attention for one step; its layers share token slots, block tables and masks."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Stores the step's keys and values, then computes causal attention.

        Each token sees all stored keys of its sequence, or those within the layer's window.
        `query` is [num_tokens, num_heads, head_dim], `key` is [num_tokens, num_kv_heads, head_dim],
        and `value` is [num_tokens, num_kv_heads, value_dim]: of a latent layer it must be the first
        elements of `key`, of any other layer it has head_dim elements. Both are None for a layer
        that reads another layer's cache: it stores nothing. Sequences are in the order of the plan.
        Returns [num_tokens, num_heads * value_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Computes attention over a `PagedKv`.

    Rows of the cache that no token of a sequence sees may hold anything, also NaN.
    """

    @property
    def scratch_bytes_per_block(self) -> int:
        """Returns the bytes of device memory that steps need for each block of the KV cache."""
        ...

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        """Prepares a step over the given sequences, whose tokens are concatenated."""
        ...
