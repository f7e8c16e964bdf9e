"""Runs an event loop in a separate thread, for callers that block."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from ...proto.errors import Unavailable

T = TypeVar("T")

CLOSED: Final = "the engine is closed"
_FORKED: Final = (
    "an LLM cannot be used in a forked process; start the process by spawn and make an LLM there"
)
_END_SECONDS: Final = 30.0


class LoopThread:
    """Runs coroutines for threads that wait for them, until `stop` or the end of the process."""

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        # Guards _stopping: work that is enqueued before it is set will be cancelled and will end.
        self._lock = threading.Lock()
        self._stopping = False
        self._waiting: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_inherited(self) -> bool:
        """Returns True in a forked process, which has a copy of this object without the thread."""
        return os.getpid() != self._process

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`, which runs in the loop.

        Raises Unavailable after `stop` and in a forked process.

        An interrupt of the waiting caller, such as KeyboardInterrupt, cancels the work and is
        raised when the work has ended.
        """
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _hand_over(task, ended))

        if self.is_inherited:
            work.close()
            raise Unavailable(_FORKED)
        with self._lock:
            if self._stopping:
                work.close()
                raise Unavailable(CLOSED)
            self._waiting.add(ended)
            self._loop.call_soon_threadsafe(start)
        try:
            return ended.result()
        except BaseException:
            with suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            with suppress(BaseException):
                ended.result(_END_SECONDS)
            raise
        finally:
            self._waiting.discard(ended)

    def stop(self) -> None:
        """Cancels all work in the loop, and ends the thread. Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            ended = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
            for each in tuple(self._waiting):  # if the work has not ended
                each.cancel()


async def _cancel_all() -> None:
    """Cancels all other tasks, also the ones that gRPC leaves behind, and waits for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _hand_over(task: "asyncio.Task[T]", ended: "Future[T]") -> None:
    if task.cancelled():
        ended.cancel()
    elif error := task.exception():
        ended.set_exception(error)
    else:
        ended.set_result(task.result())
