"""Guesses the next tokens of a sequence from where its last ones came before: prompt lookup
decoding.

After LLMA (arXiv 2304.04487). Knows nothing of steps and of other sequences.
"""

from collections.abc import Sequence
from typing import Final

from .config import SpeculativeConfig

_INDEXED_AT_ONCE: Final = 512  # tokens; less than a millisecond
_FIRST_MEAN: Final = 1.0
_WEIGHT: Final = 0.25  # of the newest draft in the mean
_LEAST_MEAN: Final = 0.5  # accepted tokens of a draft, for which it costs about what it saves
# tokens of a sequence, at two of which a draft is tried while they do not pay
_TRIAL_INTERVAL: Final = 16


class NgramIndex:
    """Finds where the last n-gram of a growing list of tokens came before."""

    def __init__(self, shortest: int, longest: int) -> None:
        # By length, the longest first: what follows an n-gram's last occurrence, as an index of the
        # tokens.
        self._following = {
            length: dict[tuple[int, ...], int]() for length in range(longest, shortest - 1, -1)
        }
        self._num_indexed = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """Returns the index of what follows the last earlier occurrence of the longest n-gram at
        the end that has one. `tokens` are those of the last call and others; of many others only
        some are read, and until later calls have read the rest nothing is found.
        """
        end = min(len(tokens), self._num_indexed + _INDEXED_AT_ONCE)
        for length, following in self._following.items():
            for index in range(max(self._num_indexed, length), end):
                following[tuple(tokens[index - length : index])] = index
        self._num_indexed = max(self._num_indexed, end)
        if end < len(tokens):
            return None
        found = (each.get(tuple(tokens[-length:])) for length, each in self._following.items())
        return next((index for index in found if index is not None), None)


class Drafter:
    """Drafts the next tokens of one sequence: about as many as were right of late, and seldom any
    while that does not pay.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._mean_accepted = _FIRST_MEAN  # tokens of a draft

    def count(self, num_tokens: int, room: int) -> int:
        """Returns how many tokens, at most `room`, are worth guessing after `num_tokens`, by
        whatever means.
        """
        if self._mean_accepted < _LEAST_MEAN and num_tokens % _TRIAL_INTERVAL > 1:
            return 0
        return max(min(room, self._most, 1 + round(2 * self._mean_accepted)), 0)

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        """Returns at most `room` tokens that may follow `tokens`, which are those of the last call
        and others.
        """
        at = self._index.find(tokens)
        count = self.count(len(tokens), room)
        if at is None or count < 1:
            return ()
        period = len(tokens) - at  # a text that repeats itself at once is guessed to go on so
        return tuple(tokens[at + number % period] for number in range(count))

    def record(self, num_accepted: int) -> None:
        """Takes how many tokens of the last draft were right."""
        self._mean_accepted += _WEIGHT * (num_accepted - self._mean_accepted)
