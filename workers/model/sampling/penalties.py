"""What depends on the tokens of a sequence so far: repetition, presence and frequency penalties, and bad words.

Those tokens are kept on the device, where a drawn one is entered at once: the host may not know it yet when the next
step is launched. Only sequences that use a feature hold memory for it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from ....proto.limits import MAX_BAD_WORD_TOKENS
from ...engine.plan import SamplingParams
from ..device import indices, ship, to_device

BANNED: Final = -1e28
"""Added to the score of a token that must not be drawn. Finite, so that nothing makes NaN of it."""

LEAST_SCORE: Final = -1e20
"""What is below it was banned, whatever penalties have made of the score since."""

_WIDTH: Final = MAX_BAD_WORD_TOKENS
_ANYTHING: Final = -1  # in a prefix of fewer tokens than _WIDTH - 1
_NOTHING: Final = -2  # before the first token of a sequence


class Slots:
    """Rows of device tensors that sequences hold while they are known. There are as many as were ever held at once,
    rounded up to a power of two."""

    def __init__(self, device: torch.device, *columns: tuple[int, torch.dtype]) -> None:
        """Of each tensor the length of a row, and its dtype."""
        self.device = device
        self.tensors = [torch.zeros(0, length, dtype=dtype, device=device) for length, dtype in columns]
        self._held: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._held

    def hold(self, sequence_id: int) -> list[torch.Tensor]:
        """The sequence's row of each tensor, to be written; what is in it is anybody's."""
        if sequence_id not in self._held:
            if not self._free:
                self._grow()
            self._held[sequence_id] = self._free.pop()
        return [tensor[self._held[sequence_id]] for tensor in self.tensors]

    def release(self, sequence_id: int) -> None:
        """Idempotent."""
        if sequence_id in self._held:
            self._free.append(self._held.pop(sequence_id))

    def of(self, sequence_ids: Sequence[int]) -> torch.Tensor:
        """Row numbers, int64 [num_sequences]."""
        return indices([self._held[sequence_id] for sequence_id in sequence_ids], self.device)

    def _grow(self) -> None:
        size = len(self.tensors[0])
        more = max(size, 1)
        self.tensors = [torch.cat((tensor, tensor.new_zeros(more, tensor.shape[1]))) for tensor in self.tensors]
        self._free = list(range(size, size + more))


class Penalties:
    """Repetition penalty (arXiv 1909.05858) for what prompt or completion hold; presence and frequency penalty, as
    OpenAI defines them, for what the completion holds."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._slots = Slots(device, (vocab_size, torch.int32), (vocab_size, torch.bool), (3, torch.float32))

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slots

    def admit(self, sequence_id: int, params: SamplingParams, prompt: Sequence[int], completion: Sequence[int]) -> None:
        """Makes a sequence known, or anew."""
        counts, in_prompt, factors = self._slots.hold(sequence_id)
        drawn = indices(completion, counts.device)
        counts.zero_().index_add_(0, drawn, torch.ones_like(drawn, dtype=torch.int32))
        in_prompt.zero_().index_fill_(0, indices(prompt, counts.device), True)
        own = torch.tensor((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
        factors.copy_(to_device(own, counts.device))

    def release(self, sequence_id: int) -> None:
        """Idempotent."""
        self._slots.release(sequence_id)

    def apply(self, scores: torch.Tensor, sequence_ids: Sequence[int]) -> torch.Tensor:
        """Returns scores [num_sequences, vocab_size], float32, with the penalties."""
        slots = self._slots.of(sequence_ids)
        counts, in_prompt, factors = (tensor[slots] for tensor in self._slots.tensors)
        repetition, presence, frequency = factors[:, :, None].unbind(1)  # [num_sequences, 1] each
        is_drawn = counts > 0
        scaled = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(is_drawn | in_prompt, scaled, scores)
        return scores.sub_(frequency * counts).sub_(presence * is_drawn)

    def append(self, sequence_ids: Sequence[int], tokens: torch.Tensor) -> None:
        """tokens [num_sequences], one more of each."""
        slots = self._slots.of(sequence_ids)
        self._slots.tensors[0].index_put_((slots, tokens), torch.ones_like(slots, dtype=torch.int32), accumulate=True)


class BadWords:
    """Token sequences that are not to be completed: the last token of each is banned behind all its others."""

    def __init__(self, device: torch.device) -> None:
        self._slots = Slots(device, (_WIDTH - 1, torch.int64))  # the last tokens of each sequence
        self._words: dict[int, torch.Tensor] = {}  # [num_words, _WIDTH], each with _ANYTHING before it

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slots

    def admit(self, sequence_id: int, words: Iterable[Sequence[int]], history: Sequence[int]) -> None:
        """Makes a sequence known, or anew. Each word has 1 to MAX_BAD_WORD_TOKENS tokens."""
        (tail,) = self._slots.hold(sequence_id)
        known = history[-(_WIDTH - 1) :]
        tail.copy_(indices([_NOTHING] * (_WIDTH - 1 - len(known)) + list(known), tail.device))
        table = torch.tensor([[_ANYTHING] * (_WIDTH - len(word)) + list(word) for word in words])
        self._words[sequence_id] = to_device(table, tail.device)

    def release(self, sequence_id: int) -> None:
        """Idempotent."""
        self._slots.release(sequence_id)
        self._words.pop(sequence_id, None)

    def bans(self, rows: Sequence[int], sequence_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows, token ids and additions [num_words] to the scores of sequences that have these rows."""
        words = [self._words[sequence_id] for sequence_id in sequence_ids]
        owners = np.repeat(np.arange(len(rows)), [len(table) for table in words])
        row_of, owner_of = ship([np.asarray(rows)[owners], owners], self._slots.device)
        table = torch.cat(words)
        tails = self._slots.tensors[0][self._slots.of(sequence_ids)[owner_of]]
        prefixes = table[:, :-1]
        is_next = ((prefixes == tails) | (prefixes == _ANYTHING)).all(-1)
        return row_of.long(), table[:, -1], is_next * BANNED

    def append(self, sequence_ids: Sequence[int], tokens: torch.Tensor) -> None:
        """tokens [num_sequences], one more of each."""
        slots = self._slots.of(sequence_ids)
        tails = self._slots.tensors[0]
        tails[slots] = torch.cat((tails[slots][:, 1:], tokens[:, None]), dim=1)
