"""Enforces the limits of a key: requests and tokens per minute, and concurrent calls.

Knows nothing of keys and I/O. Each router counts separately.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ...proto.errors import KeyLimitReached

_MINUTE: Final = 60.0
_POLLS_PER_SECOND: Final = 10
"""The limit for the console's data, for each key and for all callers without a key together.

A page polls once a second.
"""

Clock = Callable[[], float]


class TokenBucket:
    """Refills evenly with `per_minute`, up to `burst` or the amount of one minute.

    The level may be negative, because the tokens of a request are known only at its end. The bucket
    then refills from there.
    """

    def __init__(self, per_minute: int, clock: Clock, burst: int | None = None) -> None:
        self.per_minute = per_minute
        self._burst = burst
        self._clock = clock
        self._level = float(self.burst)
        self._filled_at = clock()

    @property
    def burst(self) -> int:
        return self.per_minute if self._burst is None else self._burst

    @property
    def level(self) -> float:
        now = self._clock()
        refilled = max(now - self._filled_at, 0.0) * self.per_minute / _MINUTE
        self._level = min(self.burst, self._level + refilled)
        self._filled_at = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """Returns the seconds until the bucket has refilled to `level`."""
        return max(level - self.level, 0.0) * _MINUTE / self.per_minute

    def resize(self, per_minute: int) -> None:
        """Changes the rate; the level stays, limited to one minute of the new rate."""
        self._level = min(self.level, per_minute)
        self.per_minute = per_minute


class Quota:
    """Enforces the limits of one key, if it has any; used in one event loop."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._max_streams: int | None = None
        self._polls = TokenBucket(round(_POLLS_PER_SECOND * _MINUTE), clock, 2 * _POLLS_PER_SECOND)
        self.num_streams = 0  # running calls

    def resize(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        max_streams: int | None,
    ) -> None:
        """Sets the limits; None is no limit. Running calls go on even beyond the new limits."""
        self._requests = self._resized(self._requests, requests_per_minute)
        self._tokens = self._resized(self._tokens, tokens_per_minute)
        self._max_streams = max_streams

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts a call while it runs. Raises KeyLimitReached if it exceeds a limit."""
        if self._max_streams is not None and self.num_streams >= self._max_streams:
            raise KeyLimitReached(
                f"the key's limit of {self._max_streams} concurrent calls is reached"
            )
        if self._requests is not None:
            _check(self._requests, "requests")
            self._requests.take(1)
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    def poll(self) -> None:
        """Counts one poll of the console's data. Raises KeyLimitReached if it exceeds the limit.

        No other limit counts polls.
        """
        _check(self._polls, "polls")
        self._polls.take(1)

    def check_tokens(self) -> None:
        """Raises KeyLimitReached if no token is left; a running call may use more than is left."""
        if self._tokens is not None:
            _check(self._tokens, "tokens")

    def take_tokens(self, num_tokens: int) -> None:
        """Counts tokens of a prompt or a completion."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def headers(self) -> dict[str, str]:
        """Returns the limits and the remaining amounts, in OpenAI's headers."""
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
        raise KeyLimitReached(
            f"the key's limit of {bucket.per_minute} {name} a minute is used up",
            bucket.seconds_until(1),
        )
