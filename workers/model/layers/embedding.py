"""The token embedding and the output head, whose vocabulary is split over the ranks."""

import torch

from ..module import Module, Parameter, WeightSlice
from ..quant.unquantized import UnquantizedLinearMethod
from .build import BuildOptions
from .linear import ColumnParallelLinear


class VocabParallelEmbedding(Module):
    """Looks up token embeddings; each rank has the rows of its part of the vocabulary."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, build: BuildOptions) -> None:
        self._tp = build.tp
        self._vocab = build.tp.part(vocab_size)
        self.weight = Parameter(
            WeightSlice(f"{name}.weight", (vocab_size, hidden_size), (self._vocab,)), dtype=build.dtype
        )

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps token_ids [num_tokens] to [num_tokens, hidden]."""
        table = self.weight.data  # [the rank's part of the vocabulary, hidden]
        if self._tp.group is None:
            return table[token_ids]
        local = token_ids - self._vocab.start
        is_local = (local >= 0) & (local < len(table))
        return self._tp.all_reduce(table[local.where(is_local, 0)] * is_local[:, None])


class ParallelLMHead(ColumnParallelLinear):
    """Computes logits; each rank those of its part of the vocabulary."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        build: BuildOptions,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        """`tied` is the embedding whose weight is the head's, too; then the checkpoint has no tensor for the head."""
        self._tp = build.tp
        self._vocab_size = vocab_size
        if tied is None:
            super().__init__([(name, vocab_size, build.tp.part(vocab_size))], hidden_size, bias=False, build=build)
        else:
            method = UnquantizedLinearMethod()
            method.weight = tied.weight
            self.method = method

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_rows, hidden] to the logits [num_rows, vocab_size], gathered from all ranks."""
        return self._tp.gather_logits(self.method.apply(x), self._vocab_size)
