"""Pools the hidden states of prompts into embeddings, and collects the results of a step."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..engine.plan import Pooling, Samples, SequenceStep, StepPlan
from .device import to_host
from .sampling.finite import not_finite
from .sampling.logprobs import NUM_TENSORS, LogprobsTensors


class Pooler:
    """Computes the embeddings of the sequences that request one."""

    def __init__(self, normalize: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Takes `normalize`, the model's last norm over hidden states [num_rows, hidden]."""
        self._normalize = normalize
        self._kinds: dict[int, Pooling] = {}
        self._sums: dict[int, torch.Tensor] = {}  # for mean pooling, float32 [hidden]

    def admit(self, sequence_id: int, kind: Pooling | None) -> None:
        """Adds a sequence, or replaces it; does nothing else if `kind` is None."""
        self.release(sequence_id)
        if kind is not None:
            self._kinds[sequence_id] = kind

    def release(self, sequence_id: int) -> None:
        """Removes a sequence. Idempotent."""
        self._kinds.pop(sequence_id, None)
        self._sums.pop(sequence_id, None)

    def takes_part(self, steps: Iterable[SequenceStep]) -> bool:
        """Returns True if one of these sequences requests an embedding."""
        return bool(self._kinds) and any(step.sequence_id in self._kinds for step in steps)

    def __call__(self, hidden: torch.Tensor, steps: Sequence[SequenceStep]) -> "Embeddings | None":
        """Pools a step's hidden states [num_tokens, hidden].

        Returns the embeddings of the prompts that end in this step.
        """
        ids: list[int] = []
        rows: list[torch.Tensor] = []
        end = 0
        for step in steps:
            start = end
            end += len(step.token_ids)
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
    """Holds embeddings on the device, float32 [num_sequences, hidden], and their sequence ids."""

    def __init__(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        self.ids = ids
        self.rows = rows


class StepOutput(NamedTuple):
    """Holds the model's output of a step."""

    logits: torch.Tensor | None = None  # [num_sampled, vocab_size]
    prompts: LogprobsTensors | None = None  # log probabilities of prompt tokens
    chunks: torch.Tensor | None = None  # result of `sum_chunks`
    embeddings: Embeddings | None = None


def collect(
    plan: StepPlan,
    tokens: torch.Tensor,
    output: StepOutput,
    logprobs: LogprobsTensors | None,
    failed: dict[int, str],
) -> Callable[[], Samples]:
    """Queues the copy of tokens [num_samples] and other results to the host.

    The returned function waits for it.
    """
    prompts = output.prompts
    embeddings = output.embeddings
    computed = [each for each in (logprobs, prompts) if each is not None]
    sums = [] if output.chunks is None else [output.chunks]
    pooled = [] if embeddings is None else [embeddings.rows]
    wait = to_host(
        tokens, *sums, *pooled, *(tensor for each in computed for tensor in each.tensors)
    )

    def collect() -> Samples:
        sampled, *rest = wait()
        found = rest.pop(0) if sums else []
        rows = rest.pop(0) if pooled else []
        if min(sampled, default=0) < 0 or not all(map(math.isfinite, found)):
            failed.update(not_finite(plan, sampled, found))
        by_id = dict(zip(embeddings.ids, rows, strict=True)) if embeddings is not None else {}
        if not computed:
            return Samples(tokens=sampled, embeddings=by_id, failed=failed)
        by_sequence = iter(
            each.to_lists(*rest[NUM_TENSORS * index : NUM_TENSORS * (index + 1)])
            for index, each in enumerate(computed)
        )
        return Samples(
            tokens=sampled,
            logprobs=next(by_sequence) if logprobs is not None else {},
            prompt_logprobs=next(by_sequence) if prompts is not None else {},
            embeddings=by_id,
            failed=failed,
        )

    return collect
