"""Pools the hidden states of prompts to embeddings, chunk by chunk."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..engine.plan import Pooling, SequenceStep
from .sampling.logprobs import LogprobsTensors


class Pooler:
    """Follows the sequences whose embedding is wanted."""

    def __init__(self, normalize: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`normalize` maps hidden states [num_rows, hidden] to those after the last norm."""
        self._normalize = normalize
        self._kinds: dict[int, Pooling] = {}
        self._sums: dict[int, torch.Tensor] = {}  # of a mean, float32 [hidden]

    def admit(self, sequence_id: int, kind: Pooling | None) -> None:
        """Takes a sequence that begins; None: no embedding is wanted."""
        self.release(sequence_id)
        if kind is not None:
            self._kinds[sequence_id] = kind

    def release(self, sequence_id: int) -> None:
        """Forgets a sequence. Idempotent."""
        self._kinds.pop(sequence_id, None)
        self._sums.pop(sequence_id, None)

    def takes_part(self, steps: Iterable[SequenceStep]) -> bool:
        """Whether an embedding of one of these sequences is wanted."""
        return bool(self._kinds) and any(step.sequence_id in self._kinds for step in steps)

    def __call__(self, hidden: torch.Tensor, steps: Sequence[SequenceStep]) -> "Embeddings | None":
        """Takes the hidden states of a step, [num_tokens, hidden]; returns the embeddings of
        prompts that end in it.
        """
        ids: list[int] = []
        rows: list[torch.Tensor] = []
        end = 0
        for step in steps:
            start, end = end, end + len(step.token_ids)
            kind = self._kinds.get(step.sequence_id)
            if kind is None:
                continue
            if kind == "mean":
                total = self._normalize(hidden[start:end]).sum(0, dtype=torch.float32)
                self._sums[step.sequence_id] = self._sums.get(step.sequence_id, 0) + total
            if step.num_samples:
                num_tokens = step.start + len(step.token_ids)
                is_mean = kind == "mean"
                last = self._normalize(hidden[end - 1 : end])[0].float()
                ids.append(step.sequence_id)
                rows.append(self._sums[step.sequence_id] / num_tokens if is_mean else last)
        return Embeddings(ids, torch.stack(rows)) if rows else None


class Embeddings:
    """Holds the embeddings of a step on the device, [num_sequences, hidden], float32, and whose
    they are.
    """

    def __init__(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        self.ids = ids
        self.rows = rows


class StepOutput(NamedTuple):
    """Holds what the model computes in a step."""

    logits: torch.Tensor | None = None  # [num_sampled, vocab_size]
    prompts: LogprobsTensors | None = None  # those that are wanted
    chunks: torch.Tensor | None = None  # of `sum_chunks`
    embeddings: Embeddings | None = None
