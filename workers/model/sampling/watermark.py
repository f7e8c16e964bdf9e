"""Adds the bias of a watermark to the scores of green tokens (arXiv 2301.10226).

Which tokens are green is a function of the key and the previous tokens: neither the batch, the
device nor the number of ranks changes it. The previous tokens are kept on the device, as in
penalties.py. A token is green with the probability gamma, each by itself, so that the number of
green tokens in other texts has a binomial distribution. The paper fixes the number of green tokens
in the vocabulary instead, which would need a sort of the vocabulary for each token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ....proto.hashing import (
    green_bits,
    green_threshold,
    hash_context,
    hash_token_ids,
)
from ....proto.limits import MAX_WATERMARK_CONTEXT
from ...engine.plan import Watermark
from ..device import indices, take_rows
from ..kernels.c import cpu
from .penalties import LastTokens


class Watermarks(LastTokens):
    """Holds the watermarks of sequences and their last tokens."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(MAX_WATERMARK_CONTEXT, device)
        self._watermarks: dict[int, Watermark] = {}

    def admit(self, sequence_id: int, watermark: Watermark, history: Sequence[int]) -> None:
        """Adds a sequence, or replaces it. `history` has all its tokens."""
        self.start(sequence_id, history)
        self._watermarks[sequence_id] = watermark

    def release(self, sequence_id: int) -> None:
        """Removes a sequence, if it is there."""
        super().release(sequence_id)
        self._watermarks.pop(sequence_id, None)

    def apply(
        self, scores: torch.Tensor, sequence_ids: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Returns float32 scores [num_sequences, vocab_size] with the bias of green tokens.

        `drafts` are draft tokens that follow the sequences' tokens.
        """
        tails = self.read(sequence_ids, drafts)
        rows_of: dict[Watermark, list[int]] = {}  # a service has one watermark, unless it changed
        for row, sequence_id in enumerate(sequence_ids):
            rows_of.setdefault(self._watermarks[sequence_id], []).append(row)
        if len(rows_of) == 1:
            return _add_bias(scores, tails, *rows_of)
        marked = scores.clone()
        for watermark, rows in rows_of.items():
            part = _add_bias(take_rows(scores, rows), take_rows(tails, rows), watermark)
            marked[indices(rows, self.device)] = part
        return marked


def _add_bias(scores: torch.Tensor, tails: torch.Tensor, watermark: Watermark) -> torch.Tensor:
    """Adds delta to float32 scores [num_rows, vocab_size] of the tokens that are green after tails.

    `tails` are the last tokens, [num_rows, MAX_WATERMARK_CONTEXT]. The scores are not modified.
    """
    contexts = tails[:, -watermark.context_width :]
    threshold = green_threshold(watermark.gamma)
    if cpu.usable(scores):
        key = torch.from_numpy(np.frombuffer(watermark.key, np.int64).copy())
        return cpu.add_green(scores, contexts.contiguous(), key, threshold, watermark.delta)
    hashes = hash_context(watermark.key, contexts.unbind(1))[:, None]  # [num_rows, 1]
    ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    first = (hashes >> 32).to(torch.int32)
    bits = green_bits(hash_token_ids(ids, first, hashes.to(torch.int32)))
    return scores + (bits < threshold) * watermark.delta
