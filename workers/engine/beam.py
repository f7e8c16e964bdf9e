"""Beam search without a model: which hypotheses go on with which tokens, and which are the best in the end.

Follows transformers' `GenerationMixin._beam_search` for one prompt without sampling, rounding included, so that equal
log probabilities give equal hypotheses and scores. Knows nothing of sequences, blocks or steps.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import Final

Candidate = tuple[int, float]
"""A token that may come next, and its log probability, float32."""

Move = tuple[int, int]
"""The place of the beam that goes on, among those before, and the token it goes on with."""

_LEAST_FLOAT: Final = 2.0**-149


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A continuation of the prompt: one that goes on, or one that has ended."""

    tokens: tuple[int, ...]
    score: float  # float32: the sum of its log probabilities; of one that has ended, with the length penalty


class Beams:
    """The `width` likeliest continuations so far, the likeliest first, and the best of those that have ended.

    A continuation ends with a stop token, which it keeps, or with max_tokens tokens. With early stopping the search
    ends as soon as `width` have ended; else once the likeliest that goes on is worth no more than the worst of them.
    """

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        min_tokens: int = 0,
        late_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`late_ids` are no candidates for the first min_tokens tokens."""
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._min_tokens = min_tokens
        self._late_ids = late_ids
        self._running = [Hypothesis(tokens=(), score=0.0)]
        self._ended: list[Hypothesis] = []
        self._length = 0
        self._most_running = width

    @property
    def num_candidates(self) -> int:
        """How many of a beam's likeliest tokens `advance` has to know: `width` are left of them even if all stop tokens
        are likelier, and whatever can become a beam or end as one is among those of all beams."""
        return self._width + max(1, len(self._stop_ids | self._late_ids))

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Move]:
        """Takes the next tokens of each beam, in the order of the moves before, the likeliest first; at the start there
        is one beam. Returns how the beams of the next step come about: `width` of them, or fewer for good if there are
        fewer tokens than `num_candidates`; none when the search is over."""
        self._length += 1
        ranked = sorted(self._continue(candidates), key=lambda continued: -continued[0])  # of equals the earlier beam's
        over = self._length >= self._max_tokens
        ended = [c for c in ranked[: self._width] if over or c[2] in self._stop_ids]
        going = [] if over else [c for c in ranked if c[2] not in self._stop_ids][: self._most_running]
        self._most_running = len(going)
        self._end([Hypothesis(tokens=self._tokens(c), score=self._worth(c[0])) for c in ended])
        self._running = [Hypothesis(tokens=self._tokens(c), score=c[0]) for c in going]
        return [] if not going or self._is_settled() else [(place, token) for _, place, token in going]

    def best(self, count: int) -> list[Hypothesis]:
        """The best that have ended, the best first; `count` of them once the search is over."""
        return self._ended[:count]

    def _continue(self, candidates: Sequence[Sequence[Candidate]]) -> Iterator[tuple[float, int, int]]:
        """The score of every continuation by one token, the place of its beam, and the token."""
        barred = self._late_ids if self._length <= self._min_tokens else frozenset()
        for place, (beam, row) in enumerate(zip(self._running, candidates, strict=True)):
            for token, logprob in row:
                if token not in barred:
                    yield c_float(beam.score + logprob).value, place, token

    def _tokens(self, continued: tuple[float, int, int]) -> tuple[int, ...]:
        return (*self._running[continued[1]].tokens, continued[2])

    def _end(self, hypotheses: list[Hypothesis]) -> None:
        self._ended = sorted(self._ended + hypotheses, key=lambda hypothesis: -hypothesis.score)[: self._width]

    def _is_settled(self) -> bool:
        """Whether enough have ended, and going on is not worth it."""
        if len(self._ended) < self._width:
            return False
        return self._early_stopping or self._worth(self._running[0].score) <= self._ended[-1].score

    def _worth(self, score: float) -> float:
        """A score with the length penalty of the current length."""
        return c_float(score / max(c_float(self._length**self._length_penalty).value, _LEAST_FLOAT)).value
