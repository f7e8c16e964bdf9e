"""Computes a result once for all who ask at about the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

_LONGEST_SECONDS: Final = 1.0


class SharedResult(Generic[_T]):
    """Holds the last result of `compute`. Who asks while it is computed, or is fresh, gets the
    same.
    """

    def __init__(
        self, compute: Callable[[], Awaitable[_T]], seconds: float = 0.0, share: float = 1.0
    ) -> None:
        """A result is fresh for `seconds`, or, up to a second, so long that to compute results
        takes no more than `share` of the time.
        """
        self._compute = compute
        self._seconds = seconds
        self._share = share
        self._task: asyncio.Task[_T] | None = None
        self._fresh_until = 0.0

    async def get(self) -> _T:
        """Returns a result that is fresh. Raises what `compute` raised."""
        if self._task is None or (self._task.done() and time.monotonic() >= self._fresh_until):
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._task)

    async def _run(self) -> _T:
        begun = time.monotonic()
        try:
            return await self._compute()
        finally:
            now = time.monotonic()
            rest = min((now - begun) * (1 / self._share - 1), _LONGEST_SECONDS)
            self._fresh_until = max(begun + self._seconds, now + rest)
