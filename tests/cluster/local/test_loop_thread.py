"""The event loop in a thread: whoever waits for work in it is woken."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tandem.cluster.local.llm import LocalStream, _stop
from tandem.cluster.local.loop_thread import LoopThread
from tandem.proto.errors import Cancelled, Unavailable
from tandem.tests.waits import WAIT

if TYPE_CHECKING:
    from tandem.cluster.local.engine import LocalEngine
    from tandem.router.frontend.prepared import PreparedRequest


def test_what_has_ended_says_so() -> None:
    loop = LoopThread("test-loop")
    assert loop.run(asyncio.sleep(0, "slept")) == "slept"
    loop.stop()
    loop.stop()
    with pytest.raises(Unavailable, match="the engine is closed"):
        loop.run(asyncio.sleep(0))


def test_work_that_a_stop_overtakes_ends() -> None:
    for _ in range(50):
        loop = LoopThread("test-loop")
        ended: list[bool] = []

        def work(loop: LoopThread = loop, ended: list[bool] = ended) -> None:
            with suppress(Unavailable, CancelledError):
                while True:
                    loop.run(asyncio.sleep(0))
            ended.append(True)

        callers = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for each in callers:
            each.start()
        loop.stop()
        for each in callers:
            each.join(WAIT)
        assert ended == [True] * 3


def test_a_forked_process_is_refused_instead_of_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has not inherited the thread."""
    loop = LoopThread("test-loop")
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 0)
        with pytest.raises(Unavailable, match="cannot be used in a forked process"):
            loop.run(asyncio.sleep(0))
        _stop(loop, cast("LocalEngine", None))
    assert loop.run(asyncio.sleep(0, "slept")) == "slept"
    loop.stop()


def test_a_stream_can_be_closed_while_another_thread_waits_for_its_next_delta() -> None:
    waiting, ended = threading.Event(), threading.Event()

    async def messages(*_: object) -> AsyncIterator[None]:
        try:
            waiting.set()
            await asyncio.Event().wait()
            yield
        finally:
            ended.set()

    loop = LoopThread("test-loop")
    llm: Any = SimpleNamespace(_loop=loop, _engine=SimpleNamespace(messages=messages))
    stream = LocalStream(llm, cast("PreparedRequest", None))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(next, stream)
        assert waiting.wait(WAIT)
        stream.close()
        assert ended.is_set()
        with pytest.raises(Cancelled, match="another thread has closed the stream"):
            reading.result(WAIT)
        with pytest.raises(Cancelled):  # also between two deltas
            pool.submit(next, stream).result(WAIT)
    stream.close()
    assert list(stream) == []
    loop.stop()
