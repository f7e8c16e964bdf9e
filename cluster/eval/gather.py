"""Many awaitables, a few at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


async def map_concurrently(work: Callable[[_T], Awaitable[_R]], items: Iterable[_T], concurrency: int) -> list[_R]:
    """The results of `work` in the order of `items`, at most `concurrency` under way at the same time. The first
    exception ends all that is under way and is raised."""
    slots = asyncio.Semaphore(concurrency)

    async def one(item: _T) -> _R:
        async with slots:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
