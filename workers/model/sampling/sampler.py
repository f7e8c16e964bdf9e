"""Chooses the next tokens of a step's sequences, each by its own parameters, and says how likely the model held them.

Sequences that want nothing but temperature and filters cost what they would cost in a batch of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from ...engine.plan import SamplingParams, SequenceStep
from ..device import indices
from .draw import sample
from .grammar import Grammars
from .logprobs import Measured, measure
from .processors import LogitsProcessors

_GREEDY: Final = SamplingParams(temperature=0.0)
_MAX_SEED: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What a step draws, on the device."""

    tokens: torch.Tensor  # [num_draws], int64
    places: dict[int, int]  # of the draws that may be the pending tokens of the next step, by sequence
    logprobs: Measured | None
    failed: dict[int, str]  # why, by sequence, a draw is no continuation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    row: int  # of the logits
    number: int  # among the draws of that row
    params: SamplingParams
    position: int


class Sampler:
    """Used from one thread."""

    def __init__(
        self, vocab_size: int, end_ids: Sequence[int], grammars: Grammars | None, device: torch.device
    ) -> None:
        """`grammars`: None on ranks that do not lead. Of a sequence under a grammar the next step always has the token
        that the leader drew, so it does not matter what they draw."""
        self._params: dict[int, SamplingParams] = {}
        self._shaping = LogitsProcessors(vocab_size, end_ids, grammars, device)
        self._special: set[int] = set()  # who wants log probabilities or has its logits shaped
        self._device = device

    def admit(self, step: SequenceStep, params: SamplingParams) -> None:
        """Makes a sequence known, or anew."""
        self._params[step.sequence_id] = params
        self._shaping.admit(step, params)
        if params.logprobs is not None or step.sequence_id in self._shaping:
            self._special.add(step.sequence_id)
        else:
            self._special.discard(step.sequence_id)

    def release(self, sequence_id: int) -> None:
        """Idempotent."""
        self._params.pop(sequence_id, None)
        self._shaping.release(sequence_id)
        self._special.discard(sequence_id)

    def __call__(self, logits: torch.Tensor, steps: Sequence[SequenceStep]) -> SampledTokens:
        """logits [num_sequences, vocab_size] of the steps that draw, in their order."""
        params = [self._params[step.sequence_id] for step in steps]
        positions = [step.start + len(step.token_ids) for step in steps]
        num_draws = sum([step.num_samples for step in steps])
        if num_draws == len(steps) and not self._special:
            places = {step.sequence_id: row for row, step in enumerate(steps)}
            return SampledTokens(tokens=sample(logits, params, positions), places=places, logprobs=None, failed={})
        draws = [
            _Draw(row=row, number=number, params=_seeded(params[row], number), position=positions[row])
            for row, step in enumerate(steps)
            for number in range(step.num_samples)
        ]
        tokens = self._draw(logits, steps, draws)
        self._append(steps, draws, tokens)
        may_pend = [step.num_samples == 1 and not own.grammar for step, own in zip(steps, params, strict=True)]
        return SampledTokens(
            tokens=tokens,
            places={steps[each.row].sequence_id: place for place, each in enumerate(draws) if may_pend[each.row]},
            logprobs=self._measure(logits, steps, draws, tokens),
            failed=self._shaping.take_failures(),
        )

    def _draw(self, logits: torch.Tensor, steps: Sequence[SequenceStep], draws: Sequence[_Draw]) -> torch.Tensor:
        """[num_draws], each from its row of `logits`, or from what its sequence makes of it."""
        shaped = {row: place for place, row in enumerate(self._shaping.rows(steps))}
        which = [place for place, each in enumerate(draws) if each.row in shaped]
        tokens = torch.empty(len(draws), dtype=torch.int64, device=self._device)
        if len(which) < len(draws):
            # The shaped rows are drawn along, greedily, since leaving them out would be a copy of all others.
            params = [_GREEDY if each.row in shaped else each.params for each in draws]
            rows = self._expand(logits, [each.row for each in draws])
            tokens = sample(rows, params, [each.position for each in draws])
        if which:
            own = logits if len(shaped) == len(logits) else logits[indices(list(shaped), self._device)]
            scores = self._shaping.shape(own, [steps[row] for row in shaped])
            rows = self._expand(scores, [shaped[draws[place].row] for place in which])
            picked = sample(rows, [draws[place].params for place in which], [draws[place].position for place in which])
            tokens[indices(which, self._device)] = picked
        return tokens

    def _expand(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """A row of x for each draw."""
        return x if len(rows) == len(x) else x[indices(rows, self._device)]

    def _append(self, steps: Sequence[SequenceStep], draws: Sequence[_Draw], tokens: torch.Tensor) -> None:
        """Enters tokens [num_draws] where later steps depend on them, and lets go of those who need nothing more."""
        own: dict[int, int] = {}
        for place, each in enumerate(draws):
            sequence_id = steps[each.row].sequence_id
            if sequence_id in self._shaping:
                own.setdefault(sequence_id, place)
            elif each.params.logprobs is None:
                self._special.discard(sequence_id)
        if own:
            self._shaping.append(list(own), tokens[indices(list(own.values()), self._device)])

    def _measure(
        self, logits: torch.Tensor, steps: Sequence[SequenceStep], draws: Sequence[_Draw], tokens: torch.Tensor
    ) -> Measured | None:
        wanted = [place for place, each in enumerate(draws) if each.params.logprobs is not None]
        if not wanted:
            return None
        num_top = [(step, self._params[step.sequence_id].logprobs) for step in steps]
        owners = [(step.sequence_id, step.num_samples, count) for step, count in num_top if count is not None]
        rows = logits[indices([draws[place].row for place in wanted], self._device)]
        targets = tokens[indices(wanted, self._device)]
        return Measured(owners=owners, tensors=measure(rows, targets, max(count for _, _, count in owners)))


def _seeded(params: SamplingParams, number: int) -> SamplingParams:
    return replace(params, seed=(params.seed + number) & _MAX_SEED) if number else params
