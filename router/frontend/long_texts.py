"""Runs what takes long for a long text off the event loop: by few threads, so that whoever sends many such texts keeps
waiting only those who send such, and holds Python's lock seldom."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

LONG_FROM: Final = 65_536
"""Characters or bytes. The longest texts take up to half a second."""

_T = TypeVar("_T")

_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="tandem-long")


async def in_thread(size: int, work: Callable[..., _T], *args: object) -> _T:
    """Returns the result of `work` with these arguments, which takes a thread: for a long text, of so many characters
    or bytes, one of those for long texts."""
    threads = _THREADS if size >= LONG_FROM else None
    return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *args))
