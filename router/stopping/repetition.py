"""Stops a completion that repeats itself, by its tokens."""

from collections.abc import Sequence


class RepetitionStop:
    """Finds the token at which the last `ngram` tokens have occurred `count` times in a row.

    Then the last `ngram` * `count` generated tokens are the same `ngram` tokens `count` times. This
    holds as soon as each of the last `ngram` * (`count` - 1) tokens equals the token `ngram` places
    before it. The tokens of the prompt do not count. Nothing is found before `min_tokens` tokens.
    """

    def __init__(self, ngram: int, count: int, min_tokens: int = 0) -> None:
        """`ngram` is at least 1, `count` at least 2."""
        self._ngram = ngram
        self._needed = ngram * (count - 1)
        self._num_unchecked = min_tokens
        self._last: list[int] = []  # the last `ngram` tokens, as a ring
        self._num_tokens = 0
        self._num_equal = 0  # tokens in a row that equal the token `ngram` places before

    def push(self, ids: Sequence[int]) -> int | None:
        """Returns how many of the next ids there are up to the end; None without an end.

        After an end, push no more.
        """
        for number, token in enumerate(ids, start=1):
            place = self._num_tokens % self._ngram
            if self._num_tokens < self._ngram:
                self._last.append(token)
            elif self._last[place] == token:
                self._num_equal += 1
            else:
                self._num_equal = 0
                self._last[place] = token
            self._num_tokens += 1
            if self._num_equal >= self._needed and self._num_tokens >= self._num_unchecked:
                return number
        return None
