"""Samples the next tokens of a step's sequences, with parameters per sequence.

Sequences that use only temperature and filters cost as much as in a batch of their own.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from ...engine.plan import Constrained, SamplingParams, SequenceStep
from .. import kernels
from ..device import indices, take_rows
from .grammar_cache import GrammarCache
from .gumbel import drawn_scores, sample
from .logprobs import LogprobsTensors, compute_logprobs
from .processors import LogitsProcessors

_GREEDY: Final = SamplingParams(temperature=0.0)
_MAX_SEED: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Holds the samples of a step on the device."""

    tokens: torch.Tensor  # [num_samples], int64; -1 where the logits are not finite
    # Row of `tokens` by sequence, for tokens that the next step may use as its pending token.
    rows: dict[int, int]
    logprobs: LogprobsTensors | None
    failed: dict[int, str]  # reason by sequence: its samples are invalid and it cannot continue


class _Processed(NamedTuple):
    """Holds what the logits processors make of some rows of logits."""

    numbers: dict[int, int]  # row of `scores` by row of the logits
    scores: torch.Tensor  # [num_processed, vocab_size]


class _Sample(NamedTuple):
    """Describes how one token is sampled."""

    row: int  # row of the logits
    params: SamplingParams
    position: int


class Sampler:
    """Holds the sampling state of sequences. Used from one thread."""

    def __init__(
        self,
        vocab_size: int,
        end_ids: Sequence[int],
        grammars: GrammarCache | None,
        device: torch.device,
        broadcast: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Takes `grammars` on rank 0 only, and `broadcast`, which returns rank 0's tokens.

        The next step of a sequence with a grammar always has rank 0's token, so the samples of
        other ranks do not matter. `broadcast` maps tokens [num_samples] to those of rank 0.
        """
        self._params: dict[int, SamplingParams] = {}
        self._processors = LogitsProcessors(vocab_size, end_ids, grammars, device)
        self._special: set[int] = set()  # sequences with log probabilities or logits processors
        self._device = device
        self._broadcast = broadcast or (lambda tokens: tokens)

    def admit(self, step: SequenceStep, params: SamplingParams) -> None:
        """Adds a sequence, or replaces it."""
        self._params[step.sequence_id] = params
        self._processors.admit(step, params)
        if params.logprobs is not None or step.sequence_id in self._processors:
            self._special.add(step.sequence_id)
        else:
            self._special.discard(step.sequence_id)

    def release(self, sequence_id: int) -> None:
        """Removes a sequence, if it is there."""
        self._params.pop(sequence_id, None)
        self._processors.release(sequence_id)
        self._special.discard(sequence_id)

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """Implements `Executor.prepare_masks`."""
        return self._processors.matchers.prepare(sequences, seconds)

    def __call__(self, logits: torch.Tensor, steps: Sequence[SequenceStep]) -> SampledTokens:
        """Samples from logits [num_sequences, vocab_size], in the order of the sampling steps."""
        params = [self._params[step.sequence_id] for step in steps]
        positions = [step.start + len(step.token_ids) for step in steps]
        num_samples = sum([step.num_samples for step in steps])
        if num_samples == len(steps) and not self._special:
            rows = {step.sequence_id: row for row, step in enumerate(steps)}
            tokens = self._broadcast(sample(logits, params, positions))
            return SampledTokens(tokens=tokens, rows=rows, logprobs=None, failed={})
        samples = [
            _Sample(
                row,
                replace(own, seed=(own.seed + number) & _MAX_SEED) if number else own,
                positions[row],
            )
            for row, (step, own) in enumerate(zip(steps, params, strict=True))
            for number in range(step.num_samples)
        ]
        adjusted, processed = self._process(logits, steps)
        tokens = self._broadcast(self._sample(logits, steps, samples, adjusted, processed))
        known = tokens.clamp(min=0)
        self._append(steps, samples, known)
        may_pend = [
            step.num_samples == 1 and not own.grammar
            for step, own in zip(steps, params, strict=True)
        ]
        return SampledTokens(
            tokens=tokens,
            rows={
                steps[each.row].sequence_id: index
                for index, each in enumerate(samples)
                if may_pend[each.row]
            },
            logprobs=self._logprobs(logits, steps, samples, known, processed),
            failed=self._processors.matchers.take_failures(),
        )

    def _process(
        self, logits: torch.Tensor, steps: Sequence[SequenceStep]
    ) -> tuple[set[int], _Processed]:
        """Applies the logits processors.

        Returns the rows whose `adjustments` the GPU's sampler applies instead, and the others.
        """
        rows = self._processors.rows(steps)
        adjusted: set[int] = set()
        if kernels.on_gpu(logits):
            plain = [
                row for row in rows if not self._params[steps[row].sequence_id].processed_logprobs
            ]
            adjusted = self._processors.adjusted_rows(steps, plain)
        index = {
            row: number for number, row in enumerate(row for row in rows if row not in adjusted)
        }
        if not index:
            return adjusted, _Processed(index, logits[:0])
        own = take_rows(logits, list(index))
        scores = self._processors.apply(own, [steps[row] for row in index])
        return adjusted, _Processed(index, scores)

    def _sample(
        self,
        logits: torch.Tensor,
        steps: Sequence[SequenceStep],
        samples: Sequence[_Sample],
        adjusted: Collection[int],
        processed: _Processed,
    ) -> torch.Tensor:
        """Returns tokens [num_samples], each from its row of logits or processed scores."""
        which = [number for number, each in enumerate(samples) if each.row in processed.numbers]
        tokens = torch.empty(len(samples), dtype=torch.int64, device=self._device)
        if len(which) < len(samples):
            # Processed rows are also sampled here, greedily: leaving them out would copy all other
            # rows.
            params = [_GREEDY if each.row in processed.numbers else each.params for each in samples]
            adjustments = None
            if adjusted:
                adjustments = self._processors.adjustments(
                    [steps[each.row] if each.row in adjusted else None for each in samples]
                )
            own = take_rows(logits, [each.row for each in samples])
            tokens = sample(own, params, [each.position for each in samples], adjustments)
        if which:
            own = take_rows(
                processed.scores, [processed.numbers[samples[number].row] for number in which]
            )
            own_samples = [samples[number] for number in which]
            params = [each.params for each in own_samples]
            positions = [each.position for each in own_samples]
            tokens[indices(which, self._device)] = sample(own, params, positions)
        return tokens

    def _append(
        self, steps: Sequence[SequenceStep], samples: Sequence[_Sample], tokens: torch.Tensor
    ) -> None:
        """Appends tokens [num_samples] to the sequences whose later steps depend on them.

        Of a draft, appends the accepted tokens and the token after them. Sequences that need no
        special treatment any more are removed from `_special`.
        """
        # Index of each sequence's sample, by the number of draft tokens before it.
        rounds: dict[int, dict[int, int]] = {}
        for index, each in enumerate(samples):
            step = steps[each.row]
            if step.sequence_id in self._processors:
                rounds.setdefault(step.num_draft, {}).setdefault(step.sequence_id, index)
            elif each.params.logprobs is None:
                self._special.discard(step.sequence_id)
        holds = torch.ones_like(tokens, dtype=torch.bool)  # [num_samples]
        for number, own in sorted(rounds.items()):
            at = indices(list(own.values()), self._device)
            if number:  # the token of the draft before it is the sample before it
                guesses = indices(
                    [steps[samples[index].row].draft[-1] for index in own.values()], self._device
                )
                holds[at] = holds[at - 1] & (tokens[at - 1] == guesses)
            self._processors.append(list(own), tokens[at], holds[at])

    def _logprobs(
        self,
        logits: torch.Tensor,
        steps: Sequence[SequenceStep],
        samples: Sequence[_Sample],
        tokens: torch.Tensor,
        processed: _Processed,
    ) -> LogprobsTensors | None:
        wanted = [index for index, each in enumerate(samples) if each.params.logprobs is not None]
        if not wanted:
            return None
        num_top = [(step, self._params[step.sequence_id].logprobs) for step in steps]
        sequences = [
            (step.sequence_id, step.num_samples, count)
            for step, count in num_top
            if count is not None
        ]
        rows = logits[indices([samples[index].row for index in wanted], self._device)]
        drawn = [
            number
            for number, index in enumerate(wanted)
            if samples[index].params.processed_logprobs
        ]
        if drawn:
            rows = rows.float()
        for number in drawn:
            each = samples[wanted[number]]
            is_processed = each.row in processed.numbers
            own = processed.scores[processed.numbers[each.row]] if is_processed else rows[number]
            rows[number] = drawn_scores(own[None], [each.params])[0]
        targets = tokens[indices(wanted, self._device)]
        largest = max(count for _, _, count in sequences)
        return LogprobsTensors(
            sequences=sequences, tensors=compute_logprobs(rows, targets, largest)
        )
