"""Keeps a request going whose caller is busy elsewhere, such as with a client that does not read
its stream.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Final

from ...proto.errors import Cancelled
from ...proto.limits import MAX_UNREAD_BYTES
from ..request import TokenDelta, merge_deltas

_AWAY_SECONDS: Final = 0.1
"""How often what has come is looked at in the caller's place; tokens that come meanwhile are
merged.
"""

_DELTA_BYTES: Final = 256
_SCORE_BYTES: Final = 128
_ALTERNATIVE_BYTES: Final = 16


class Wakeup(asyncio.Event):
    """Wakes the caller of a request when something may have come; while nobody waits, calls
    `on_away` now and then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_awaited = False
        self._on_away: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, on_away: Callable[[], None]) -> None:
        """Has `on_away` called, until `close`."""
        self._on_away = on_away

    def close(self) -> None:
        """Calls nothing any more. Idempotent."""
        self._on_away = None
        if self._timer is not None:
            self._timer.cancel()

    def set(self) -> None:
        """Wakes the caller, who may come later."""
        super().set()
        if not self._is_awaited and self._timer is None and self._on_away is not None:
            self._timer = asyncio.get_running_loop().call_later(_AWAY_SECONDS, self._away)

    async def sleep(self, seconds: float | None) -> None:
        """Waits until something may have come, or for so long at most; then forgets it."""
        self._is_awaited = True
        try:
            async with (
                nullcontext() if seconds is None else asyncio.timeout(seconds)
            ):  # which costs, for each token
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
    """Holds the deltas that the caller has not taken yet; of one choice, those that follow each
    other become one.
    """

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # about as much memory as they take
        self._runs: list[list[TokenDelta]] = []
        self._last: dict[int, list[TokenDelta]] = {}  # by choice: of `_runs`

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
        """Yields all deltas, and holds none of them any more."""
        runs, self._runs, self._last, self._num_bytes = self._runs, [], {}, 0
        return map(merge_deltas, runs)

    def check_size(self) -> None:
        """Raises Cancelled if more waits than a client may leave unread."""
        if self._num_bytes > self._max_bytes:
            raise Cancelled(f"more than {self._max_bytes} bytes of the answer were left unread")
