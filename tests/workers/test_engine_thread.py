"""The thread that steps an engine: order, errors, sleep and its end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tandem.tests.waits import WAIT
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Event, Preempted
from tandem.workers.serve.engine_thread import EngineThread
from tandem.workers.serve.watchdog import Watchdog


class PlayedEngine:
    """Has work for as many steps as `steps_left`; a step emits its number as an event."""

    def __init__(self) -> None:
        self.steps_left = 0
        self.num_steps = 0
        self.num_polls = 0
        self.fault: Exception | None = None
        self.stepping = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    @property
    def has_work(self) -> bool:
        self.num_polls += 1
        return self.steps_left > 0

    def step(self, emit: Callable[[list[Event]], None]) -> None:
        self.stepping.set()
        assert self.gate.wait(WAIT)
        if self.fault:
            raise self.fault
        self.steps_left -= 1
        self.num_steps += 1
        emit([Preempted(id=-self.num_steps)])
        emit([Preempted(id=self.num_steps)])


class Running:
    """An engine thread over a played engine."""

    def __init__(self) -> None:
        self.engine = PlayedEngine()
        self.events: list[int] = []
        self.failures: list[BaseException] = []
        engine = cast(Engine, self.engine)
        self.thread = EngineThread(engine, self.failures.append, Watchdog())

    def deliver(self, events: list[Event]) -> None:
        self.events += [event.id for event in events if isinstance(event, Preempted)]

    def give(self, steps: int) -> Callable[[Engine], None]:
        return lambda engine: setattr(engine, "steps_left", steps)

    async def held_in_a_step(self) -> None:
        """Waits until the thread stands at the closed gate, far from taking commands."""
        self.engine.gate.clear()
        self.thread.post(self.give(10**9))
        assert await asyncio.to_thread(self.engine.stepping.wait, WAIT)

    async def delivered(self, count: int) -> None:
        async with asyncio.timeout(WAIT):
            while len(self.events) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    one = Running()
    one.thread.start(one.deliver)
    try:
        yield one
    finally:
        one.engine.gate.set()
        await one.thread.stop(WAIT)


async def test_commands_keep_their_order_and_events_too() -> None:
    async with running() as one:
        ran: list[int] = []
        for number in range(50):
            one.thread.post(lambda engine, number=number: ran.append(number))  # type: ignore[misc]
        await one.thread.call(lambda engine: ran.append(50), WAIT)
        assert ran == list(range(51))
        one.thread.post(one.give(3))
        await one.delivered(6)
        assert one.events == [-1, 1, -2, 2, -3, 3]


async def test_what_a_call_raises_goes_to_its_caller_alone() -> None:
    async with running() as one:

        def fail(engine: Engine) -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await one.thread.call(fail, WAIT)
        await one.thread.call(lambda engine: None, WAIT)
        assert not one.failures


async def test_a_call_that_comes_too_late_times_out_and_its_error_is_dropped() -> None:
    async with running() as one:
        await one.held_in_a_step()
        with pytest.raises(TimeoutError):
            await one.thread.call(Engine.check_integrity, 0.02)  # which the played engine cannot do
        one.engine.gate.set()
        await one.thread.call(lambda engine: None, WAIT)
        assert not one.failures


async def test_an_idle_thread_sleeps() -> None:
    async with running() as one:
        one.thread.post(one.give(2))
        await one.delivered(4)
        await one.thread.call(lambda engine: None, WAIT)
        polls = one.engine.num_polls
        await asyncio.sleep(0.1)
        assert one.engine.num_polls - polls <= 2
        assert one.engine.num_steps == 2


async def test_stop_while_idle() -> None:
    one = Running()
    one.thread.start(one.deliver)
    await one.thread.call(lambda engine: None, WAIT)
    await one.thread.stop(WAIT)
    with pytest.raises(RuntimeError, match="has stopped"):
        await one.thread.call(lambda engine: None, WAIT)


async def test_stop_while_busy_ends_after_the_step() -> None:
    one = Running()
    one.thread.start(one.deliver)
    await one.held_in_a_step()
    with pytest.raises(TimeoutError):
        await one.thread.stop(0.05)
    one.engine.gate.set()
    await one.thread.stop(WAIT)
    assert one.engine.steps_left > 0


async def test_a_step_that_raises_ends_the_thread_and_fails_once() -> None:
    one = Running()
    one.engine.fault = ValueError("broken")
    one.thread.start(one.deliver)
    await one.held_in_a_step()
    async with asyncio.timeout(WAIT):
        waiting = asyncio.create_task(one.thread.call(lambda engine: None, WAIT))
        await asyncio.sleep(0)
        one.engine.gate.set()
        with pytest.raises(RuntimeError, match="has stopped") as raised:
            await waiting
        assert raised.value.__cause__ is one.engine.fault
        with pytest.raises(RuntimeError, match="has stopped"):
            await one.thread.call(lambda engine: None, WAIT)
    assert one.failures == [one.engine.fault]
    assert one.thread.failure is one.engine.fault
    await one.thread.stop(WAIT)


async def test_a_posted_command_that_raises_is_a_failure_of_the_engine() -> None:
    async with running() as one:

        def fail(engine: Engine) -> None:
            raise RuntimeError("out of order")

        one.thread.post(fail)
        async with asyncio.timeout(WAIT):
            while not one.failures:
                await asyncio.sleep(0.001)
        assert str(one.failures[0]) == "out of order"
