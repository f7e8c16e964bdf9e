"""Runs many awaitables with bounded concurrency."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


async def map_concurrently(
    work: Callable[[_T], Awaitable[_R]], items: Iterable[_T], concurrency: int
) -> list[_R]:
    """Returns the results of `work` in the order of `items`, at most `concurrency` calls at a time.

    The first exception cancels all calls and is raised.
    """
    permits = asyncio.Semaphore(concurrency)

    async def one(item: _T) -> _R:
        async with permits:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
