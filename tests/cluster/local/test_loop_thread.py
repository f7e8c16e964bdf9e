"""The event loop in a thread: whoever waits for work in it is woken."""

import asyncio
import threading
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from tandem.cluster.local.loop_thread import LoopThread
from tandem.proto.errors import Unavailable
from tandem.tests.waits import WAIT


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
