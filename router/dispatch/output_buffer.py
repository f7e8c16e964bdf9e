"""Buffers a request's output while its caller is away, such as sending to a slow client."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Final

from ...proto.errors import Cancelled
from ...proto.limits import MAX_UNREAD_BYTES
from ..request import TokenDelta, merge_deltas

_AWAY_SECONDS: Final = 0.1
"""How often the output is collected while the caller is away."""

_DELTA_BYTES: Final = 256
_SCORE_BYTES: Final = 128
_ALTERNATIVE_BYTES: Final = 16


class Wakeup(asyncio.Event):
    """Wakes the caller of a request when output may have come; calls `on_away` if it is away."""

    def __init__(self) -> None:
        super().__init__()
        self._is_awaited = False
        self._on_away: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, on_away: Callable[[], None]) -> None:
        """Sets the function to call while the caller is away, until `close`."""
        self._on_away = on_away

    def close(self) -> None:
        """Stops calling `on_away`. Idempotent."""
        self._on_away = None
        if self._timer is not None:
            self._timer.cancel()

    def set(self) -> None:
        """Wakes the caller, now or when it calls `sleep`."""
        super().set()
        if not self._is_awaited and self._timer is None and self._on_away is not None:
            self._timer = asyncio.get_running_loop().call_later(_AWAY_SECONDS, self._away)

    async def sleep(self, seconds: float | None) -> None:
        """Waits until `set` is called, at most for `seconds`; then clears the event."""
        self._is_awaited = True
        # A timeout costs time for each token, so there is one only if it is needed.
        bound = nullcontext() if seconds is None else asyncio.timeout(seconds)
        try:
            async with bound:
                await self.wait()
        except TimeoutError:
            pass
        finally:
            self._is_awaited = False
        self.clear()

    def _away(self) -> None:
        self._timer = None
        if not self._is_awaited and self._on_away is not None:
            self._on_away()


class OutputBuffer:
    """Holds the deltas that the caller has not taken; merges consecutive ones of a choice."""

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # an estimate of their memory
        self._runs: list[list[TokenDelta]] = []
        self._last: dict[int, list[TokenDelta]] = {}  # the last run of each choice

    def put(self, delta: TokenDelta) -> None:
        """Adds a delta."""
        for scores in delta.logprobs, delta.prompt_logprobs:
            if scores:
                self._num_bytes += len(scores) * (
                    _SCORE_BYTES + _ALTERNATIVE_BYTES * len(scores[-1].top_ids)
                )
        self._num_bytes += _DELTA_BYTES
        run = self._last.get(delta.choice)
        if run is not None and run[-1].first_index + len(run[-1].ids) == delta.first_index:
            run.append(delta)
        else:
            self._last[delta.choice] = run = [delta]
            self._runs.append(run)

    def take(self) -> Iterator[TokenDelta]:
        """Removes and yields all deltas."""
        runs = self._runs
        self._runs = []
        self._last = {}
        self._num_bytes = 0
        return map(merge_deltas, runs)

    def check_size(self) -> None:
        """Raises Cancelled if the deltas exceed the size that a client may leave unread."""
        if self._num_bytes > self._max_bytes:
            raise Cancelled(f"more than {self._max_bytes} bytes of the answer were left unread")
