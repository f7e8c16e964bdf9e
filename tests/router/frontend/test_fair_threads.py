"""Tests that callers take turns in threads by their use of them, and that queues are bounded."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from tandem.proto.errors import Overloaded
from tandem.router.frontend.fair_threads import FairThreads
from tandem.tests.waits import WAIT


class Work:
    """Records the tasks that begin, and holds each until it may end."""

    def __init__(self) -> None:
        self.began = list[str]()
        self.may_end = threading.Semaphore(0)
        self._changed = threading.Condition()

    def run(self, name: str) -> str:
        with self._changed:
            self.began.append(name)
            self._changed.notify_all()
        assert self.may_end.acquire(timeout=WAIT)
        return name

    async def begun(self, num_tasks: int) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: len(self.began) >= num_tasks, WAIT)

        assert await asyncio.to_thread(wait)


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.may_end.release(1_000)  # no thread stays


def start(
    threads: FairThreads, work: Work, fairness_id: str, name: str, size: int = 1
) -> "asyncio.Task[str]":
    return asyncio.create_task(threads.run(fairness_id, size, work.run, name))


async def test_another_caller_waits_for_the_job_that_runs_and_for_no_other(work: Work) -> None:
    threads = FairThreads("test", 1)
    many = [start(threads, work, "mallory", f"m{number}") for number in range(20)]
    await work.begun(1)
    other = start(threads, work, "ada", "a")
    await asyncio.sleep(0)  # it has its place
    work.may_end.release(21)
    assert await other == "a"
    assert await asyncio.gather(*many) == [f"m{number}" for number in range(20)]
    assert work.began[:2] == ["m0", "a"]


async def test_what_counts_is_the_time_that_work_takes_and_not_its_size(work: Work) -> None:
    """Small texts that take long cost their caller as many turns as large ones."""
    now = [0.0]

    def run(name: str, seconds: float) -> None:
        work.run(name)
        now[0] += seconds

    threads = FairThreads("test", 1, clock=lambda: now[0])
    slow = [
        asyncio.create_task(threads.run("mallory", 1, run, f"m{number}", 1.0))
        for number in range(3)
    ]
    await work.begun(1)
    quick = [
        asyncio.create_task(threads.run("ada", 500, run, f"a{number}", 0.001))
        for number in range(3)
    ]
    await asyncio.sleep(0)  # they have their places
    work.may_end.release(6)
    await asyncio.gather(*slow, *quick)
    assert work.began == ["m0", "a0", "a1", "a2", "m1", "m2"]


async def test_a_thread_rests_for_as_long_as_a_task_took() -> None:
    """Otherwise a flood of texts would take a core from the event loop and the workers."""
    now, rests = [0.0], list[float]()

    def run(seconds: float) -> None:
        now[0] += seconds

    def sleep(seconds: float) -> None:
        rests.append(seconds)

    threads = FairThreads("test", 1, clock=lambda: now[0], sleep=sleep)
    for seconds in (0.001, 0.02, 7.0, 0.001):
        await threads.run("ada", 1, run, seconds)
    await threads.run("ada", 1, run, 0.0)  # the thread has ended its rest after the task before
    assert rests == pytest.approx([0.02, 0.1])


async def test_threads_go_to_different_callers(work: Work) -> None:
    threads = FairThreads("test", 2)
    tasks = [start(threads, work, "mallory", f"m{number}") for number in range(4)]
    await work.begun(2)
    tasks += [start(threads, work, "ada", f"a{number}") for number in range(2)]
    await asyncio.sleep(0)
    work.may_end.release(1)
    await work.begun(3)
    assert work.began[2] == "a0"
    work.may_end.release(5)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(("max_tasks", "max_size"), [(4, 1_000), (1_000, 40)])
async def test_a_full_queue_refuses_the_caller_with_the_longest_backlog(
    work: Work, max_tasks: int, max_size: int
) -> None:
    threads = FairThreads("test", 1, max_tasks=max_tasks, max_size=max_size)
    many = [start(threads, work, "mallory", f"m{number}", size=10) for number in range(5)]
    await work.begun(1)
    with pytest.raises(Overloaded, match="too much waits to be prepared") as caught:
        await threads.run("mallory", 10, work.run, "more")
    assert caught.value.retry_after >= 1
    other = start(threads, work, "ada", "a", size=10)  # takes the place of the last one
    with pytest.raises(Overloaded, match="too much waits"):
        await many.pop()
    work.may_end.release(5)
    assert await asyncio.gather(other, *many) == ["a", "m0", "m1", "m2", "m3"]
    assert work.began[:2] == ["m0", "a"]


async def test_cancelled_work_that_waits_does_not_run(work: Work) -> None:
    threads = FairThreads("test", 1, max_tasks=1)
    first = start(threads, work, "ada", "first")
    await work.begun(1)
    waiting = start(threads, work, "ada", "waiting")
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    last = start(threads, work, "ada", "last")  # has the place of the cancelled one
    await asyncio.sleep(0)
    work.may_end.release(2)
    assert [await first, await last] == work.began == ["first", "last"]
    assert not threads._queue


async def test_a_wait_has_an_end(work: Work) -> None:
    threads = FairThreads("test", 1, max_seconds=0.01)
    first = asyncio.create_task(FairThreads.run(threads, "ada", 1, work.run, "first"))
    with pytest.raises(Overloaded, match="waited too long"):
        await first
    assert not threads._queue


async def test_an_error_is_the_caller_s(work: Work) -> None:
    threads = FairThreads("test", 1)

    def fail() -> None:
        raise TimeoutError("of the work itself")

    with pytest.raises(TimeoutError, match="of the work itself"):
        await threads.run("ada", 1, fail)
    work.may_end.release()
    assert await threads.run("ada", 1, work.run, "next") == "next"
    assert not threads._running


def test_several_event_loops_share_the_threads(work: Work) -> None:
    threads, found = FairThreads("test", 2), list[str]()
    work.may_end.release(40)

    async def run(turn: str) -> None:
        found.extend(
            await asyncio.gather(*(threads.run(turn, 1, work.run, f"{turn}{i}") for i in range(10)))
        )

    loops = [threading.Thread(target=asyncio.run, args=(run(turn),)) for turn in "abcd"]
    for each in loops:
        each.start()
    for each in loops:
        each.join(WAIT)
    assert (
        sorted(found)
        == sorted(f"{turn}{i}" for turn in "abcd" for i in range(10))
        == sorted(work.began)
    )
    assert not threads._queue
    assert not threads._running


class Text:
    """Stands for the text of a request: a str cannot be referred to weakly."""


async def test_a_refused_text_is_freed_without_the_garbage_collector() -> None:
    """4 MiB of each refused message stayed in memory until a rare full collection."""

    def refuse(_text: Text) -> None:
        raise ValueError("refused")

    threads = FairThreads("test", 1)
    gc.collect()
    gc.disable()
    try:
        text = Text()
        is_freed = weakref.ref(text)
        with pytest.raises(ValueError, match="refused"):
            await threads.run("eve", 1, refuse, text)
        del text
        await threads.run("eve", 1, int)  # the thread has let go of its last task
        await asyncio.sleep(0)
        assert is_freed() is None
    finally:
        gc.enable()
