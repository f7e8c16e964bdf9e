"""Bounds waits by the deadline of a request."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..proto.errors import DeadlineExceeded

_T = TypeVar("_T")


def deadline_passed() -> DeadlineExceeded:
    """Returns the error of a request whose deadline has passed."""
    return DeadlineExceeded("the request's deadline passed")


def earlier(first: float | None, second: float | None) -> float | None:
    """Returns the earlier of two times; None stands for never."""
    times = [time for time in (first, second) if time is not None]
    return min(times, default=None)


async def before(
    deadline: float | None,
    result: Awaitable[_T],
    clock: Callable[[], float] = time.monotonic,
) -> _T:
    """Awaits `result`. Cancels it and raises DeadlineExceeded at `deadline`, a time of `clock`."""
    if deadline is None:
        return await result
    scope = asyncio.timeout(deadline - clock())
    try:
        async with scope:
            return await result
    except TimeoutError:
        if scope.expired():
            raise deadline_passed() from None
        raise
