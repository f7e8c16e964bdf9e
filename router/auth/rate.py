"""Counts what a key may use: requests and tokens a minute, calls at a time.

Knows nothing of keys and of I/O. Each router counts by itself.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ...proto.errors import Overloaded

_MINUTE: Final = 60.0
_POLLS_PER_SECOND: Final = 10
"""Of the console's data with one key, and without one of all callers together. A page polls once a
second.
"""

Clock = Callable[[], float]


class TokenBucket:
    """Holds what is left of an amount a minute: it refills evenly, up to one minute's amount, or
    `most`.

    It may go below zero, since what a request takes is known only when it has ended; the debt is
    paid by time.
    """

    def __init__(self, per_minute: int, clock: Clock, most: int | None = None) -> None:
        self.per_minute = per_minute
        self._most = most
        self._clock = clock
        self._level = float(self.most)
        self._filled_at = clock()

    @property
    def most(self) -> int:
        return self.per_minute if self._most is None else self._most

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(
            self.most, self._level + max(now - self._filled_at, 0.0) * self.per_minute / _MINUTE
        )
        self._filled_at = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """Returns in how many seconds so much is left."""
        return max(level - self.level, 0.0) * _MINUTE / self.per_minute

    def resize(self, per_minute: int) -> None:
        """Changes the amount; what was taken stays taken."""
        self._level = min(self.level, per_minute)
        self.per_minute = per_minute


class Quota:
    """Bounds the calls of one key, or none. Lives in one event loop."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._max_streams: int | None = None
        self._polls = TokenBucket(round(_POLLS_PER_SECOND * _MINUTE), clock, 2 * _POLLS_PER_SECOND)
        self.num_streams = 0  # calls under way

    def resize(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        max_streams: int | None,
    ) -> None:
        """Sets the limits, None for no limit. Calls under way go on, also if they are more than is
        allowed now.
        """
        self._requests = self._resized(self._requests, requests_per_minute)
        self._tokens = self._resized(self._tokens, tokens_per_minute)
        self._max_streams = max_streams

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts one call, from its beginning to its end. Raises Overloaded if it is one too many."""
        if self._max_streams is not None and self.num_streams >= self._max_streams:
            raise Overloaded(f"the key's limit of {self._max_streams} calls at a time is reached")
        if self._requests is not None:
            _check(self._requests, "requests")
            self._requests.take(1)
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    def poll(self) -> None:
        """Counts one poll of the console's data, which no other limit counts. Raises Overloaded if
        it is one too many.
        """
        _check(self._polls, "polls")
        self._polls.take(1)

    def check_tokens(self) -> None:
        """Raises Overloaded if no token of the minute is left. What is begun before then may take
        more.
        """
        if self._tokens is not None:
            _check(self._tokens, "tokens")

    def take_tokens(self, num_tokens: int) -> None:
        """Counts tokens of a prompt or of completions."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def headers(self) -> dict[str, str]:
        """Returns the limits and what is left of them, in OpenAI's headers."""
        found = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level), 0))
                found[f"x-ratelimit-reset-{name}"] = (
                    f"{bucket.seconds_until(bucket.per_minute):.3f}s"
                )
        return found

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket


def _check(bucket: TokenBucket, name: str) -> None:
    if bucket.level < 1:
        raise Overloaded(
            f"the key's limit of {bucket.per_minute} {name} a minute is used up",
            bucket.seconds_until(1),
        )
