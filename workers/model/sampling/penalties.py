"""Applies penalties and bad words, which depend on a sequence's previous tokens.

Those tokens are kept on the device, where a sampled token is appended at once: the host may not
know it yet when the next step is launched. Only sequences that use a feature have memory for it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from ....proto.limits import MAX_BAD_WORD_TOKENS
from ...engine.plan import SamplingParams
from ..device import copy_to_device, indices, to_device

BANNED: Final = -1e28
"""Added to the score of a token that must not be sampled; finite, so that it never becomes NaN."""

LEAST_SCORE: Final = -1e20
"""A lower score belongs to a banned token, whatever penalties were applied since."""

_WIDTH: Final = MAX_BAD_WORD_TOKENS
_ANY_TOKEN: Final = -1  # pads a prefix of fewer tokens than _WIDTH - 1
_NO_TOKEN: Final = -2  # before the first token of a sequence


class RowPool:
    """Allocates rows of device tensors to sequences.

    The number of rows is the largest number ever allocated at once, rounded up to a power of two.
    """

    def __init__(self, device: torch.device, *columns: tuple[int, torch.dtype]) -> None:
        """Takes for each tensor the length of a row and the dtype."""
        self.device = device
        self.tensors = [
            torch.zeros(0, length, dtype=dtype, device=device) for length, dtype in columns
        ]
        self._allocated: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._allocated

    def allocate(self, sequence_id: int) -> list[torch.Tensor]:
        """Returns the sequence's row of each tensor; the caller must overwrite old content."""
        if sequence_id not in self._allocated:
            if not self._free:
                self._grow()
            self._allocated[sequence_id] = self._free.pop()
        return [tensor[self._allocated[sequence_id]] for tensor in self.tensors]

    def release(self, sequence_id: int) -> None:
        """Frees the sequence's row, if it has one."""
        if sequence_id in self._allocated:
            self._free.append(self._allocated.pop(sequence_id))

    def row_of(self, sequence_id: int) -> int:
        """Returns the sequence's row; -1 if it has none."""
        return self._allocated.get(sequence_id, -1)

    def rows_of(self, sequence_ids: Sequence[int]) -> torch.Tensor:
        """Returns the sequences' rows, int64 [num_sequences]; all have one."""
        return indices([self._allocated[sequence_id] for sequence_id in sequence_ids], self.device)

    def _grow(self) -> None:
        size = len(self.tensors[0])
        more = max(size, 1)
        self.tensors = [
            torch.cat((tensor, tensor.new_zeros(more, tensor.shape[1]))) for tensor in self.tensors
        ]
        self._free = list(range(size, size + more))


class Penalties(RowPool):
    """Applies repetition, presence and frequency penalties.

    The repetition penalty (arXiv 1909.05858) applies to tokens of prompt and completion. Presence
    and frequency penalty, as OpenAI defines them, apply to tokens of the completion.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(
            device, (vocab_size, torch.int32), (vocab_size, torch.bool), (3, torch.float32)
        )

    def admit(
        self,
        sequence_id: int,
        params: SamplingParams,
        prompt: Sequence[int],
        completion: Sequence[int],
    ) -> None:
        """Adds a sequence, or replaces it."""
        counts, in_prompt, factors = self.allocate(sequence_id)
        sampled = indices(completion, counts.device)
        counts.zero_().index_add_(0, sampled, torch.ones_like(sampled, dtype=torch.int32))
        in_prompt.zero_().index_fill_(0, indices(prompt, counts.device), True)
        own = torch.tensor(
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        )
        factors.copy_(to_device(own, counts.device))

    def apply(
        self, scores: torch.Tensor, sequence_ids: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Applies the penalties to float32 scores [num_sequences, vocab_size].

        `drafts` are draft tokens that follow the sequences' tokens.
        """
        rows = self.rows_of(sequence_ids)
        counts, in_prompt, factors = (tensor[rows] for tensor in self.tensors)
        if any(drafts):
            places = [(row, token) for row, draft in enumerate(drafts) for token in draft]
            guessed = tuple(indices(each, self.device) for each in zip(*places, strict=True))
            counts.index_put_(
                guessed, torch.ones_like(guessed[0], dtype=torch.int32), accumulate=True
            )
        repetition, presence, frequency = factors[:, :, None].unbind(1)  # [num_sequences, 1] each
        is_sampled = counts > 0
        scaled = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(is_sampled | in_prompt, scaled, scores)
        return scores.sub_(frequency * counts).sub_(presence * is_sampled)

    def append(
        self, sequence_ids: Sequence[int], tokens: torch.Tensor, holds: torch.Tensor
    ) -> None:
        """Appends to each sequence its token of [num_sequences] where `holds` is true."""
        rows = self.rows_of(sequence_ids)
        self.tensors[0].index_put_((rows, tokens), holds.to(torch.int32), accumulate=True)


class LastTokens(RowPool):
    """Keeps the last tokens of sequences."""

    def __init__(self, width: int, device: torch.device) -> None:
        """Keeps `width` tokens of each sequence."""
        super().__init__(device, (width, torch.int64))
        self._width = width

    def start(self, sequence_id: int, history: Sequence[int]) -> None:
        """Adds a sequence, or replaces it. `history` has all its tokens."""
        (tail,) = self.allocate(sequence_id)
        known = list(history[-self._width :])
        tail.copy_(indices([_NO_TOKEN] * (self._width - len(known)) + known, tail.device))

    def read(self, sequence_ids: Sequence[int], drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns the last tokens [num_sequences, width], with draft tokens that follow them."""
        tails = self.tensors[0][self.rows_of(sequence_ids)]
        for row, draft in enumerate(drafts):
            if draft:
                tails[row] = torch.cat((tails[row], indices(draft, self.device)))[-self._width :]
        return tails

    def append(
        self, sequence_ids: Sequence[int], tokens: torch.Tensor, holds: torch.Tensor
    ) -> None:
        """Appends to each sequence its token of [num_sequences] where `holds` is true."""
        rows = self.rows_of(sequence_ids)
        tails = self.tensors[0][rows]
        self.tensors[0][rows] = torch.where(
            holds[:, None], torch.cat((tails[:, 1:], tokens[:, None]), dim=1), tails
        )


class BadWords(LastTokens):
    """Bans the last token of a bad word if the preceding tokens are the rest of the word."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(_WIDTH - 1, device)
        # [num_words, _WIDTH] by sequence, padded at the front with _ANY_TOKEN.
        self._words: dict[int, torch.Tensor] = {}

    def admit(
        self, sequence_id: int, words: Iterable[Sequence[int]], history: Sequence[int]
    ) -> None:
        """Adds a sequence, or replaces it. Each word has 1 to MAX_BAD_WORD_TOKENS tokens."""
        self.start(sequence_id, history)
        table = torch.tensor([[_ANY_TOKEN] * (_WIDTH - len(word)) + list(word) for word in words])
        self._words[sequence_id] = to_device(table, self.device)

    def release(self, sequence_id: int) -> None:
        """Removes a sequence, if it is there."""
        super().release(sequence_id)
        self._words.pop(sequence_id, None)

    def bans(
        self, rows: Sequence[int], sequence_ids: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns rows, token ids and additions to their scores, each [num_words].

        `rows` are the rows of the sequences; `drafts` are draft tokens that follow their tokens.
        """
        words = [self._words[sequence_id] for sequence_id in sequence_ids]
        sequence_of = np.repeat(np.arange(len(rows)), [len(table) for table in words])
        row_device, sequence_device = copy_to_device(
            [np.asarray(rows)[sequence_of], sequence_of], self.device
        )
        table = torch.cat(words)
        tails = self.read(sequence_ids, drafts)[sequence_device]
        prefixes = table[:, :-1]
        is_next = ((prefixes == tails) | (prefixes == _ANY_TOKEN)).all(-1)
        return row_device.long(), table[:, -1], is_next * BANNED
