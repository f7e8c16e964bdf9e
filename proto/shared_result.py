"""Computes a result once for all callers that ask at about the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

_LONGEST_SECONDS: Final = 1.0


class SharedResult(Generic[_T]):
    """Holds the last result of `compute`.

    Callers share the result that is being computed or is still fresh.
    """

    def __init__(
        self, compute: Callable[[], Awaitable[_T]], seconds: float = 0.0, share: float = 1.0
    ) -> None:
        """Keeps a result fresh for `seconds`, or longer if `share` requires it.

        Computations take at most `share` of the time: for this, a result stays fresh for up to one
        second after its computation.
        """
        self._compute = compute
        self._seconds = seconds
        self._share = share
        self._task: asyncio.Task[_T] | None = None
        self._fresh_until = 0.0

    async def get(self) -> _T:
        """Returns a fresh result. Raises the exceptions of `compute`."""
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
