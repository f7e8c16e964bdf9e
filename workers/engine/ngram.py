"""Drafts the tokens that followed an earlier occurrence of the last n-gram (prompt lookup).

Follows LLMA (arXiv 2304.04487). Knows nothing of steps or of other sequences.
"""

from collections.abc import Sequence
from typing import Final

from .config import SpeculativeConfig

_INDEXED_AT_ONCE: Final = 512  # tokens of a call; takes less than a millisecond
_FIRST_MEAN: Final = 1.0
_WEIGHT: Final = 0.25  # of the newest draft in the mean
_LEAST_MEAN: Final = 0.5  # accepted tokens of a draft; at this mean it costs what it saves
# Tokens of a sequence. While drafts do not pay, one is tried at two tokens of each interval.
_TRIAL_INTERVAL: Final = 16


class NgramIndex:
    """Finds the previous occurrence of the last n-gram in a growing list of tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        # By length, the longest first: the index of the token after an n-gram's last occurrence.
        self._following = {
            length: dict[tuple[int, ...], int]() for length in range(longest, shortest - 1, -1)
        }
        self._num_indexed = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """Returns the index of the token after the previous occurrence of the last n-gram.

        Takes the longest n-gram at the end of `tokens` that has occurred before, or returns None.
        `tokens` must extend the tokens of the last call. If it adds many tokens, a call indexes
        only some of them, and calls return None until all are indexed.
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
    """Drafts the next tokens of one sequence, by the number of recently accepted tokens.

    While drafts do not pay, it seldom drafts.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._mean_accepted = _FIRST_MEAN  # tokens of a draft

    def count(self, num_tokens: int, room: int) -> int:
        """Returns the number of tokens, at most `room`, that are worth drafting by any method.

        `num_tokens` is the current length of the sequence.
        """
        if self._mean_accepted < _LEAST_MEAN and num_tokens % _TRIAL_INTERVAL > 1:
            return 0
        return max(min(room, self._most, 1 + round(2 * self._mean_accepted)), 0)

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        """Returns at most `room` tokens that may follow `tokens`.

        `tokens` must extend the tokens of the last call.
        """
        count = self.count(len(tokens), room)
        if count < 1:
            return ()  # without reading the tokens, which a later draft does
        at = self._index.find(tokens)
        if at is None:
            return ()
        period = len(tokens) - at  # a text that repeats a short period is expected to continue it
        return tuple(tokens[at + number % period] for number in range(count))

    def record(self, num_accepted: int) -> None:
        """Records the number of accepted tokens of the last draft."""
        self._mean_accepted += _WEIGHT * (num_accepted - self._mean_accepted)
