"""Applies a request's logits processors to raw logits, before temperature and filters.

The order is: logit_bias, bans of bad words and (before min_length) of stop ids; repetition penalty;
frequency and presence penalty; watermark; grammar. So penalties scale a bias, as in transformers,
but not a watermark, and nothing undoes a ban. If all tokens are banned, the sequence can only end:
end tokens may be sampled. If its grammar does not allow the end there, the sequence fails.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...engine.plan import SamplingParams, SequenceStep
from ..device import copy_to_device, indices, take_rows, to_device
from .grammar import GrammarMatchers
from .grammar_cache import GrammarCache
from .gumbel import Adjustments
from .penalties import BANNED, LEAST_SCORE, BadWords, Penalties, RowPool
from .watermark import Watermarks

_Additions = tuple[torch.Tensor, torch.Tensor]
"""Token ids, int64 [n], and the additions to their scores, float32 [n]."""


class LogitsProcessors:
    """Holds the state of the sequences that use any logits processor, and applies them."""

    def __init__(
        self,
        vocab_size: int,
        end_ids: Sequence[int],
        grammars: GrammarCache | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self._end_ids = indices(end_ids, device)
        self._shifts = to_device(torch.arange(8, dtype=torch.uint8), device)
        self._always: set[int] = set()  # sequences that use more than `_stops`
        self._typical: set[int] = set()  # sequences with typical sampling
        self._biases: dict[int, _Additions] = {}
        # The length from which stop ids may be sampled, and their bans, by sequence.
        self._stops: dict[int, tuple[int, _Additions]] = {}
        self._penalties = Penalties(vocab_size, device)
        self._bad_words = BadWords(device)
        self._watermarks = Watermarks(device)
        self.matchers = GrammarMatchers(grammars, vocab_size)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._always or sequence_id in self._stops

    def admit(self, step: SequenceStep, params: SamplingParams) -> None:
        """Adds a sequence, or replaces it, if it uses any logits processor."""
        self._forget(step.sequence_id)
        prompt = step.history[: step.num_prompt]
        completion = step.history[step.num_prompt :]
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._biases[step.sequence_id] = self._additions(ids, values)
        if params.stop_ids and step.start + len(step.token_ids) < params.min_length:
            additions = self._additions(params.stop_ids, [BANNED] * len(params.stop_ids))
            self._stops[step.sequence_id] = (params.min_length, additions)
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        ):
            self._penalties.admit(step.sequence_id, params, prompt, completion)
        if params.bad_words:
            self._bad_words.admit(step.sequence_id, params.bad_words, step.history)
        if params.watermark is not None:
            self._watermarks.admit(step.sequence_id, params.watermark, step.history)
        if params.grammar:
            self.matchers.admit(
                step.sequence_id,
                params.grammar,
                step.history,
                step.num_prompt,
                params.grammar_owner,
            )
        else:
            self.matchers.release(step.sequence_id)
        if params.logit_bias or params.needs_history:
            self._always.add(step.sequence_id)
        if params.typical_p < 1:
            self._typical.add(step.sequence_id)

    def release(self, sequence_id: int) -> None:
        """Removes a sequence, if it is there."""
        self._forget(sequence_id)
        self.matchers.release(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        """Removes a sequence, except its matcher, which may exist before the sequence."""
        self._always.discard(sequence_id)
        self._typical.discard(sequence_id)
        self._biases.pop(sequence_id, None)
        self._stops.pop(sequence_id, None)
        for feature in (self._penalties, self._bad_words, self._watermarks):
            feature.release(sequence_id)

    def rows(self, steps: Sequence[SequenceStep]) -> list[int]:
        """Returns the rows of the sampling sequences whose logits change in this step."""
        rows = []
        for row, step in enumerate(steps):
            if (
                step.sequence_id in self._stops
                and step.start + len(step.token_ids) >= self._stops[step.sequence_id][0]
            ):
                del self._stops[step.sequence_id]
            if step.sequence_id in self:
                rows.append(row)
        return rows

    def adjusted_rows(self, steps: Sequence[SequenceStep], rows: Sequence[int]) -> set[int]:
        """Returns which of `rows` need only `adjustments` instead of `apply`.

        Those are the rows of sequences that use only penalties, without a draft, and grammars.
        """
        drafted = {step.sequence_id for step in steps if step.num_draft}
        return {
            row
            for row in rows
            if not self._needs_scores(steps[row].sequence_id, steps[row].sequence_id in drafted)
        }

    def _needs_scores(self, sequence_id: int, is_drafted: bool) -> bool:
        return (
            sequence_id in self._biases
            or sequence_id in self._stops
            or sequence_id in self._bad_words
            or sequence_id in self._watermarks
            or sequence_id in self._typical
            or (is_drafted and sequence_id in self._penalties)
        )

    def adjustments(self, steps: Sequence[SequenceStep | None]) -> Adjustments:
        """Returns the penalties and masks of steps; None for a step without."""
        constrained = [
            step for step in steps if step is not None and step.sequence_id in self.matchers
        ]
        if constrained:
            masks = to_device(self.matchers.masks(constrained), self._device)
        else:
            masks = torch.empty(1, 1, dtype=torch.int32, device=self._device)
        numbers = iter(range(len(constrained)))
        counts, in_prompt, _ = self._penalties.tensors
        return Adjustments(
            counts=counts,
            in_prompt=in_prompt,
            masks=masks,
            penalty_rows=[
                -1 if step is None else self._penalties.row_of(step.sequence_id) for step in steps
            ],
            mask_rows=[
                -1 if step is None or step.sequence_id not in self.matchers else next(numbers)
                for step in steps
            ],
        )

    def apply(self, logits: torch.Tensor, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Returns float32 scores [num_rows, vocab_size] for the logits of `rows`.

        The logits are not modified.
        """
        scores = logits.to(torch.float32, copy=True)
        ids = [step.sequence_id for step in steps]
        self._apply_additions(scores, ids, steps)
        for feature in (self._penalties, self._watermarks):
            rows, own = _members(ids, feature)
            if rows:
                drafts = [steps[row].draft for row in rows]
                part = feature.apply(take_rows(scores, rows), own, drafts)
                scores = _replaced(scores, rows, part)
        rows, own = _members(ids, self.matchers)
        masks = torch.empty(0, 0, dtype=torch.int32)
        if rows:
            masks = self.matchers.masks([steps[row] for row in rows])
            bans = self._unpack(~masks, scores.shape[1])
            # Added, because filling a scattered mask takes ten times as long on a CPU.
            part = take_rows(scores, rows).add_(bans, alpha=BANNED)
            scores = _replaced(scores, rows, part)
        # A grammar alone always allows a token.
        banning = {each for each in ids if each in self._stops or each in self._bad_words}
        if banning:
            is_dead = scores.amax(-1, keepdim=True) < LEAST_SCORE
            scores[:, self._end_ids] = scores[:, self._end_ids].masked_fill_(is_dead, 0.0)
            if not banning.isdisjoint(own):
                is_own_dead = take_rows(is_dead, rows)[:, 0].tolist()  # waits for the device
                dead = [number for number, each in enumerate(is_own_dead) if each]
                self.matchers.fail_unfinished([own[number] for number in dead], masks[dead])
        return scores

    def _unpack(self, bits: torch.Tensor, num_bits: int) -> torch.Tensor:
        """Unpacks bits: int32 [num_rows, ceil(num_bits / 32)] to uint8 [num_rows, num_bits].

        The bits are on the host, the result is on the device.
        """
        if self._device.type == "cpu":  # eight times as fast as the code below
            octets = bits.numpy().view(np.uint8)
            return torch.from_numpy(
                np.unpackbits(octets, axis=1, count=num_bits, bitorder="little")
            )
        octets_device = to_device(bits, self._device).view(torch.uint8)
        return ((octets_device[:, :, None] >> self._shifts) & 1).flatten(1)[:, :num_bits]

    def append(
        self, sequence_ids: Sequence[int], tokens: torch.Tensor, holds: torch.Tensor
    ) -> None:
        """Appends to each sequence its token of [num_sequences] where `holds` is true.

        Both tensors are on the device.
        """
        for feature in (self._penalties, self._bad_words, self._watermarks):
            rows, own = _members(sequence_ids, feature)
            if rows:
                feature.append(own, take_rows(tokens, rows), take_rows(holds, rows))

    def _additions(self, ids: Sequence[int], values: Sequence[float]) -> _Additions:
        values_device = to_device(torch.tensor(values, dtype=torch.float32), self._device)
        return indices(ids, self._device), values_device

    def _apply_additions(
        self, scores: torch.Tensor, ids: Sequence[int], steps: Sequence[SequenceStep]
    ) -> None:
        parts = [(row, self._biases[each]) for row, each in enumerate(ids) if each in self._biases]
        parts += [
            (row, self._stops[each][1]) for row, each in enumerate(ids) if each in self._stops
        ]
        if parts:
            rows_of_ids = np.repeat([row for row, _ in parts], [len(ids) for _, (ids, _) in parts])
            rows_device = copy_to_device([rows_of_ids], self._device)[0].long()
            tokens, values = (
                torch.cat(each) for each in zip(*(additions for _, additions in parts), strict=True)
            )
            scores.index_put_((rows_device, tokens), values, accumulate=True)
        rows, own = _members(ids, self._bad_words)
        if rows:
            rows_device, tokens, values = self._bad_words.bans(
                rows, own, [steps[row].draft for row in rows]
            )
            scores.index_put_((rows_device, tokens), values, accumulate=True)


def _members(ids: Sequence[int], feature: RowPool | GrammarMatchers) -> tuple[list[int], list[int]]:
    """Returns the rows and ids of the sequences that use a feature."""
    rows = [row for row, sequence_id in enumerate(ids) if sequence_id in feature]
    return rows, [ids[row] for row in rows]


def _replaced(x: torch.Tensor, rows: Sequence[int], part: torch.Tensor) -> torch.Tensor:
    """Returns x with `part` in some rows; may write to x."""
    if len(rows) == len(x):
        return part
    x[indices(rows, x.device)] = part
    return x
