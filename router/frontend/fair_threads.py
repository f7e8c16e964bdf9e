"""Runs CPU-bound work in threads in which callers take turns.

The caller that has used these threads for the least time is next (../fair_queue.py). So a caller
with much work delays another caller by the work that runs at that moment, not by its waiting work.
A text's characters count as microseconds until its work has been measured; tokenizing a text takes
about that long. The queue is bounded: when it is full, the caller with the longest backlog is
refused.

The end of this file lists the kinds of work, each with the size from which it leaves the event
loop. Knows nothing of tokens and templates.
"""

import asyncio
import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Final, TypeVar

from ...proto.errors import Overloaded
from ..due_order import QueueEntry
from ..fair_queue import FairQueue

LONG_FROM: Final = 65_536
"""Characters or bytes of a long text. The longest texts take a second or two to tokenize."""

_MAX_TASKS: Final = 1_024
_MAX_SIZE: Final = 32 * 2**20
"""Of all waiting texts: about half a minute of work for one thread."""

_MAX_SECONDS: Final = 60.0
_RETURN_SECONDS: Final = 5.0
_RELEASE_FROM: Final = 32_768  # characters or bytes
_MICROSECOND: Final = 1e-6

_REST_FROM_SECONDS: Final = 0.002
_MAX_REST_SECONDS: Final = 0.1

_T = TypeVar("_T")


@dataclass(eq=False, slots=True, kw_only=True)
class _Task(QueueEntry):
    """Waiting work."""

    work: Callable[[], Any]
    result: "Future[Any]"


class FairThreads:
    """Runs work in a bounded number of threads. Thread-safe; several event loops may use it."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        max_tasks: int = _MAX_TASKS,
        max_size: int = _MAX_SIZE,
        max_seconds: float = _MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`max_tasks` and `max_size` bound the queue, `max_seconds` the wait for a result."""
        self._num_threads = num_threads
        self._max_seconds = max_seconds
        self._clock = clock
        self._sleep = sleep
        self._queue: FairQueue[_Task] = FairQueue(max_tokens=max_size, max_requests=max_tasks)
        self._running: Counter[str] = Counter()  # tasks, by caller
        self._num_active = 0  # threads that run or look for work
        self._lock = Lock()  # of the queue and both counts
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, fairness_id: str, size: int, work: Callable[..., _T], *args: object) -> _T:
        """Returns the result of `work` with these arguments; `size` in characters or bytes.

        `fairness_id` names the caller, whose tasks run one after another while others wait. Raises
        any error of `work`, and Overloaded if the queue is full or the result takes too long. If
        the caller is cancelled, its waiting work does not run.
        """
        result: Future[_T] = Future()
        task = _Task(
            tenant=fairness_id,
            priority=0,
            num_tokens=max(size, 1),
            work=partial(work, *args),
            result=result,
        )
        scope = asyncio.timeout(self._max_seconds)
        try:
            self._push(task)
            async with scope:
                return await asyncio.wrap_future(result)
        except TimeoutError:
            if scope.expired():
                raise self._overloaded("waited too long to be prepared") from None
            raise
        finally:
            with self._lock:
                self._queue.remove(task)
            # An error refers to this frame. If the frame referred to the error, the text of a
            # refused request would stay in memory until the cycle is collected, for minutes.
            del task, result

    def _push(self, task: _Task) -> None:
        """Puts a task into the queue, and starts a thread if one is free. Raises Overloaded."""
        with self._lock:
            displaced = self._queue.push(task)
            starts = displaced is not None and self._num_active < self._num_threads
            self._num_active += starts
        if displaced is None:
            raise self._overloaded("too much waits to be prepared")
        for each in displaced:
            if each.result.set_running_or_notify_cancel():
                each.result.set_exception(self._overloaded("too much waits to be prepared"))
        if starts:
            self._threads.submit(self._work)

    def _work(self) -> None:
        """Runs one task after another until none waits.

        It rests after each task for as long as the task took. So texts take at most half of a core
        from the event loop and from the workers of this machine.
        """
        while (task := self._begin_next()) is not None:
            began = self._clock()
            try:
                finish = partial(task.result.set_result, task.work())
            except BaseException as error:  # for the caller to handle
                finish = partial(task.result.set_exception, error)
            seconds = self._clock() - began
            self._end(task, seconds)
            finish()
            del task, finish  # an error refers to this frame; see `run`
            if seconds >= _REST_FROM_SECONDS:
                self._sleep(min(seconds, _MAX_REST_SECONDS))

    def _begin_next(self) -> _Task | None:
        """Takes the next task. Without one the thread counts as free."""
        with self._lock:
            while self._queue:
                task = self._queue.pop()
                if task.result.set_running_or_notify_cancel():
                    self._count_running(task.tenant, 1)
                    return task
            self._num_active -= 1
            return None

    def _end(self, task: _Task, seconds: float) -> None:
        if task.num_tokens >= _RELEASE_FROM:
            _FREED.release_later()
        with self._lock:
            self._count_running(task.tenant, -1)
            self._queue.charge(task, round(seconds / _MICROSECOND) - task.num_tokens)

    def _count_running(self, tenant: str, num_tasks: int) -> None:
        self._running[tenant] += num_tasks
        self._queue.set_running(tenant, self._running[tenant])
        if not self._running[tenant]:
            del self._running[tenant]

    def _overloaded(self, message: str) -> Overloaded:
        """Returns the error for a refused task; the caller may retry when the queue is empty."""
        seconds = self._queue.num_tokens * _MICROSECOND / self._num_threads
        return Overloaded(
            f"{message}; send fewer or shorter prompts at a time",
            min(max(seconds, 1.0), _MAX_SECONDS),
        )


class _FreedMemory:
    """Returns freed memory to the system after work on large texts; glibc would keep most of it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._timer: threading.Timer | None = None

    def release_later(self) -> None:
        """Returns memory in some seconds, when the results are freed. Idempotent until then."""
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(_RETURN_SECONDS, self._trim)
                self._timer.daemon = True
                self._timer.start()

    def _trim(self) -> None:
        with self._lock:
            self._timer = None
        with suppress(AttributeError):  # another libc than glibc
            ctypes.CDLL(None).malloc_trim(0)  # without the interpreter's lock


_FREED: Final = _FreedMemory()

_SHARE: Final = max((os.cpu_count() or 1) // 2, 1)
"""Half of the cores: the event loop and the compute threads of workers need cores as well."""

# These threads have the priority of the event loop: a thread of a lower priority would keep the
# interpreter's lock for long when others have the cores.
_SHORT: Final = FairThreads("tandem-texts", min(_SHARE, 4))
_LONG: Final = FairThreads("tandem-long-texts", min(_SHARE, 2))
PARSER: Final = FairThreads("tandem-parse", 1)
"""One thread, since a parsed message takes several times the memory of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedWork:
    """A kind of CPU-bound work: small work runs in the event loop, larger work in threads."""

    thread_from: int  # the size from which it leaves the event loop
    threads: FairThreads | None = None  # None: asyncio's own, without turns
    long_threads: FairThreads | None = None  # from LONG_FROM on; None: the same threads

    async def run(self, fairness_id: str, size: int, work: Callable[..., _T], *args: object) -> _T:
        """Returns the result of `work` with these arguments; see FairThreads.run."""
        if size < self.thread_from:
            return work(*args)
        threads = self.long_threads if size >= LONG_FROM and self.long_threads else self.threads
        if threads is None:
            return await asyncio.to_thread(work, *args)
        return await threads.run(fairness_id, size, work, *args)


PARSING: Final = SizedWork(thread_from=16_384, threads=PARSER)
"""Messages, by their bytes; smaller messages take some milliseconds at most."""

TOKENIZING: Final = SizedWork(thread_from=4_096, threads=_SHORT, long_threads=_LONG)
"""Texts by their characters, or tokens to decode: 1 ms. A short text never waits for a long one."""

CHECKING: Final = SizedWork(thread_from=LONG_FROM, threads=_SHORT)
"""Prompts, by their bytes or tokens; even the largest take milliseconds only."""

COMPILING: Final = SizedWork(thread_from=1, threads=_SHORT)
"""Patterns of stop_regex, by the microseconds that they may take; 0 is no pattern."""

COPYING: Final = SizedWork(thread_from=4_096, threads=_SHORT)
"""Lists of token ids that are checked, scored or written into an answer, or characters of texts
that are written as JSON.
"""

SCORING: Final = SizedWork(thread_from=256)
"""Tokens of which log probabilities or text are made, in a few milliseconds.

With stop_regex a token counts more, by StopRules.token_cost: it may have 128 characters.
"""

WRITING: Final = SizedWork(thread_from=64)
"""Log probabilities that are written as JSON, in about a millisecond."""
