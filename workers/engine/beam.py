"""Chooses the hypotheses of a beam search from the log probabilities of candidate tokens.

Follows transformers' `GenerationMixin._beam_search` for one prompt without sampling. It also rounds
in the same way, so equal log probabilities give equal hypotheses and scores. Knows nothing of
sequences, blocks or steps.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from typing import Final

Candidate = tuple[int, float]
"""A possible next token and its log probability, float32."""

Move = tuple[int, int]
"""The index of a previous beam that continues, and its next token."""

Hypothesis = tuple[tuple[int, ...], float]
"""The tokens of a continuation and its score, float32.

The score of a running hypothesis is the sum of its log probabilities. The score of a finished one
includes the length penalty.
"""

_LEAST_FLOAT: Final = 2.0**-149


@dataclass(eq=False, kw_only=True)
class Beams:
    """Holds the `width` likeliest running hypotheses, in order, and the best finished ones.

    A hypothesis finishes with a stop token, which it keeps, or after max_tokens tokens. With early
    stopping, the search ends as soon as `width` hypotheses have finished. Otherwise it ends when
    the likeliest running hypothesis scores no more than the worst finished one.
    """

    width: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool = False
    min_tokens: int = 0
    late_ids: frozenset[int] = frozenset()  # excluded from the first min_tokens tokens
    _running: list[Hypothesis] = field(init=False, default_factory=lambda: [((), 0.0)])
    _finished: list[Hypothesis] = field(init=False, default_factory=list)
    _length: int = field(init=False, default=0)
    _max_running: int = field(init=False)

    def __post_init__(self) -> None:
        self._max_running = self.width

    @property
    def num_candidates(self) -> int:
        """Returns the number of likeliest tokens of each beam that `advance` needs.

        With this number, `width` candidates remain even if all stop tokens are likelier. So every
        next or finished hypothesis is among the candidates of all beams.
        """
        return self.width + max(1, len(self.stop_ids | self.late_ids))

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Move]:
        """Advances the search by one token and returns the moves that give the next beams.

        `candidates` holds the likeliest next tokens of each beam, in descending order. The beams
        have the order of the previous moves; at the start there is one beam. Returns `width` moves,
        or permanently fewer if there are fewer tokens than `num_candidates`. Returns no moves when
        the search is over.
        """
        self._length += 1
        # The sort is stable: earlier beams win ties.
        ranked = sorted(self._extend(candidates), key=lambda extended: -extended[0])
        is_last = self._length >= self.max_tokens
        ended = [c for c in ranked[: self.width] if is_last or c[2] in self.stop_ids]
        running = (
            [] if is_last else [c for c in ranked if c[2] not in self.stop_ids][: self._max_running]
        )
        self._max_running = len(running)
        finished = [(self._tokens(c), self._penalized(c[0])) for c in ended]
        self._finished = sorted(self._finished + finished, key=lambda hypothesis: -hypothesis[1])[
            : self.width
        ]
        self._running = [(self._tokens(c), c[0]) for c in running]
        return (
            [] if not running or self._is_done() else [(beam, token) for _, beam, token in running]
        )

    def best(self, count: int) -> list[Hypothesis]:
        """Returns the `count` best finished hypotheses, the best first; fewer before the end."""
        return self._finished[:count]

    def _extend(
        self, candidates: Sequence[Sequence[Candidate]]
    ) -> Iterator[tuple[float, int, int]]:
        """Yields the score, beam index and token of every extension by one token."""
        excluded = self.late_ids if self._length <= self.min_tokens else frozenset()
        for beam, ((_, score), row) in enumerate(zip(self._running, candidates, strict=True)):
            for token, logprob in row:
                if token not in excluded:
                    yield c_float(score + logprob).value, beam, token

    def _tokens(self, extended: tuple[float, int, int]) -> tuple[int, ...]:
        return (*self._running[extended[1]][0], extended[2])

    def _is_done(self) -> bool:
        """Returns True if enough hypotheses have finished and no running one can replace them."""
        if len(self._finished) < self.width:
            return False
        return self.early_stopping or self._penalized(self._running[0][1]) <= self._finished[-1][1]

    def _penalized(self, score: float) -> float:
        """Returns a score with the length penalty for the current length applied."""
        return c_float(
            score / max(c_float(self._length**self.length_penalty).value, _LEAST_FLOAT)
        ).value
