"""Blocking work beside an event loop, and the cores that this process may use."""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def in_thread(work: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Runs `work` in a daemon thread of its own, which ends with it; nobody waits for one that is given up.

    A pool's thread would stay: while a thread that has computed lives, libgomp counts its OpenMP team beside the
    engine's, takes the machine for overcommitted and lets no thread spin."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return  # whoever waited has given up
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:  # handed to whoever waits
            error = raised
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
