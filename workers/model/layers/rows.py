"""Holds rows that replace the embeddings of tokens, such as those of an image."""

from collections.abc import Iterable
from typing import NamedTuple

import torch


class EmbeddingRows(NamedTuple):
    """Holds the rows that replace embeddings in one step.

    The values are those of transformers' inputs_embeds: a model that scales embeddings after the
    lookup scales the rows as well.
    """

    places: torch.Tensor  # [num_rows]: the indices of the tokens in the step
    rows: torch.Tensor  # [num_rows, hidden]

    def put(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [num_tokens, hidden] with the rows in their places."""
        return embeddings.index_copy(0, self.places, self.rows.to(embeddings.dtype))


class SequenceRows:
    """Holds the rows of each sequence until it is released."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By sequence: the position of the first row, and the rows [num_rows, hidden].
        self._held: dict[int, tuple[int, torch.Tensor]] = {}

    def hold(self, sequence_id: int, first: int, rows: torch.Tensor) -> None:
        """Replaces the embeddings of a sequence's tokens from position `first` on.

        `rows` are [num_rows, hidden]. A step that computes these positions uses them.
        """
        self._held[sequence_id] = (first, rows.to(self._device))

    def release(self, sequence_id: int) -> None:
        self._held.pop(sequence_id, None)

    def of_step(self, steps: Iterable[tuple[int, int, int]]) -> EmbeddingRows | None:
        """Returns the rows for the tokens of a step; None if there are none.

        `steps` has, for each sequence, its id, the position of its first token in the step and the
        number of its tokens.
        """
        if not self._held:
            return None
        places: list[int] = []
        found: list[torch.Tensor] = []
        begin = 0  # of the sequence's tokens in the step
        for sequence_id, start, num_tokens in steps:
            first, rows = self._held.get(sequence_id, (0, None))
            if rows is not None:
                kept = range(max(first, start), min(first + len(rows), start + num_tokens))
                places += (begin + position - start for position in kept)
                found.append(rows[kept.start - first :][: len(kept)])
            begin += num_tokens
        if not places:
            return None
        return EmbeddingRows(torch.tensor(places, device=self._device), torch.cat(found))
