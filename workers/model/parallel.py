"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): which part of each weight a rank holds, and how ranks add up.

Query heads, the MLP's intermediate dimension and the vocabulary are split; what a rank computes from its part is a
summand of the layer's output, or some columns of the logits. Norms are everybody's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ..kv_cache.sharding import kv_heads, part
from .config import ModelConfig


class Group(Protocol):
    """The ranks of one model. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, on each; x may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x, of one shape, on each."""
        ...


class Shard:
    """A rank's part of a model. `config` has its own head counts, and everything else of the whole model."""

    def __init__(self, config: ModelConfig, group: Group | None = None) -> None:
        """No group is the whole model. Raises ValueError if the model's heads cannot be split so."""
        self._group = group
        tp, rank = (group.size, group.rank) if group else (1, 0)
        heads = kv_heads(config.num_heads, config.num_kv_heads, tp, rank)
        self.config = replace(config, num_heads=config.num_heads // tp, num_kv_heads=len(heads))
        self.is_first = rank == 0
        dim = config.head_dim
        self.query_rows = _rows(part(config.num_heads, tp, rank), dim)
        self.kv_rows = [_rows(range(head, head + 1), dim) for head in heads]
        self.mlp_rows = _rows(part(config.intermediate_size, tp, rank))
        self.vocab = part(config.vocab_size, tp, rank)
        self._vocab_sizes = [len(part(config.vocab_size, tp, each)) for each in range(tp)]

    def add_up(self, summand: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks have computed; `summand` may be overwritten."""
        return self._group.all_reduce(summand) if self._group else summand

    def residual(self, x: torch.Tensor) -> torch.Tensor | None:
        """x on the one rank that adds it to its summand."""
        return x if self.is_first else None

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """table [len(vocab), hidden], the rank's rows; token_ids [num_tokens]. Returns [num_tokens, hidden]."""
        if self._group is None:
            return table[token_ids]
        local = token_ids - self.vocab.start
        mine = (local >= 0) & (local < len(self.vocab))
        return self._group.all_reduce(table[local.where(mine, 0)] * mine[:, None])

    def join(self, logits: torch.Tensor) -> torch.Tensor:
        """The rank's columns [num_rows, len(vocab)] to all [num_rows, vocab_size]."""
        if self._group is None:
            return logits
        padded = torch.nn.functional.pad(logits, (0, max(self._vocab_sizes) - logits.shape[1]))
        parts = zip(self._group.all_gather(padded), self._vocab_sizes, strict=True)
        return torch.cat([columns[:, :size] for columns, size in parts], dim=1)


def _rows(units: Sequence[int], size: int = 1) -> slice:
    """The rows of contiguous units that have `size` rows each."""
    return slice(units[0] * size, (units[-1] + 1) * size)
