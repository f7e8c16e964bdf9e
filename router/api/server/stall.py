"""Ends streams whose clients do not read."""

import asyncio
from types import TracebackType

from ....proto.errors import Cancelled
from ....proto.limits import STALL_SECONDS


class StallTimer:
    """Scope of the writes of one stream, each between `begin` and `end`.

    If a write takes longer than `seconds`, the scope cancels it and raises Cancelled. One timer for
    the stream costs less than a timer for each write.
    """

    def __init__(self, seconds: float = STALL_SECONDS) -> None:
        self._seconds = seconds
        self._since: float | None = None  # the start of the current write
        self._has_expired = False

    def __enter__(self) -> "StallTimer":
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if not self._has_expired or not isinstance(error, asyncio.CancelledError):
            return
        if not self._task.uncancel():  # nobody else has cancelled the task
            raise Cancelled(f"the client has read nothing for {self._seconds:g} seconds") from None

    def begin(self) -> None:
        """Marks the start of a write."""
        self._since = self._loop.time()

    def end(self) -> None:
        """Marks the end of the write."""
        self._since = None

    def _check(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since >= self._seconds:
            self._has_expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(since + self._seconds, self._check)
