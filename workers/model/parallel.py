"""Splits a model over tensor parallel ranks (Megatron-LM, arXiv 1909.08053).

Query heads, the MLP's intermediate size and the vocabulary are split. A rank computes a summand of
a layer's output, or some columns of the logits. Norms are replicated.
"""

from dataclasses import replace
from typing import Protocol

import torch

from ..kv_cache.layout import LayerGeometry, StatePart
from ..kv_cache.sharding import kv_heads, part, query_heads


class Group(Protocol):
    """Performs the collective operations of a model's ranks.

    Every rank makes the same calls in the same order.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of x over the ranks; x may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's x, all of one shape."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's x, of the same shape on every rank; x may be overwritten."""
        ...


class TensorParallel:
    """Splits a model's dimensions for one rank, and reduces or gathers the ranks' results."""

    def __init__(self, group: Group | None = None, *, rank: int = 0, size: int = 1) -> None:
        """Allows building a tree for any `rank`; without a group only `size` 1 can run."""
        self.group = group
        self.rank = group.rank if group else rank
        self.size = group.size if group else size

    def part(self, size: int) -> slice:
        """Returns the rank's part of a dimension."""
        mine = part(size, self.size, self.rank)
        return slice(mine.start, mine.stop)

    def query_heads(self, layer: LayerGeometry) -> slice:
        """Returns the rank's query heads. Raises ValueError as `check_split`."""
        heads = query_heads(layer.num_heads, self.size, self.rank)
        return slice(heads.start, heads.stop)

    def kv_heads(self, layer: LayerGeometry | StatePart) -> tuple[int, ...]:
        """Returns the rank's KV heads, or heads of a state; none if the layer has no attention.

        Raises ValueError as `check_split`.
        """
        if not layer.num_kv_heads:
            return ()
        return kv_heads(layer.num_heads, layer.num_kv_heads, self.size, self.rank)

    def kv_copies(self, layer: LayerGeometry) -> tuple[int, ...]:
        """Returns for each of the rank's KV heads its number of copies on all ranks.

        Raises ValueError as `check_split`.
        """
        ranks = range(self.size)
        held = [
            head
            for rank in ranks
            for head in kv_heads(layer.num_heads, layer.num_kv_heads, self.size, rank)
        ]
        return tuple(held.count(head) for head in self.kv_heads(layer))

    def local_geometry(self, layer: LayerGeometry) -> LayerGeometry:
        """Returns the layer with this rank's head counts. Raises ValueError as `check_split`."""
        return replace(
            layer, num_heads=layer.num_heads // self.size, num_kv_heads=len(self.kv_heads(layer))
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of x over the ranks; x may be overwritten."""
        return self.group.all_reduce(x) if self.group else x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's x, all of one shape."""
        return self.group.all_gather(x) if self.group else [x]

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Joins the ranks' columns [num_rows, len(part(vocab_size))] to [num_rows, vocab_size]."""
        if self.group is None:
            return logits
        sizes = [len(part(vocab_size, self.size, rank)) for rank in range(self.size)]
        padded = torch.nn.functional.pad(logits, (0, max(sizes) - logits.shape[1]))
        parts = zip(self.group.all_gather(padded), sizes, strict=True)
        return torch.cat([columns[:, :size] for columns, size in parts], dim=1)
