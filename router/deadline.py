"""Awaiting something no longer than a request may last."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from ..proto.errors import DeadlineExceeded

_T = TypeVar("_T")


def deadline_passed() -> DeadlineExceeded:
    """The error of every request that is late."""
    return DeadlineExceeded("the request's deadline passed")


async def before(deadline: float | None, result: Awaitable[_T]) -> _T:
    """Awaits `result`; raises DeadlineExceeded, having cancelled it, if time.monotonic() passes `deadline`."""
    if deadline is None:
        return await result
    scope = asyncio.timeout(deadline - time.monotonic())
    try:
        async with scope:
            return await result
    except TimeoutError:
        if scope.expired():
            raise deadline_passed() from None
        raise
