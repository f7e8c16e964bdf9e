"""Runs an engine in its own thread, which takes commands and delivers events."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from ..engine.engine import Engine
from ..engine.events import Event
from .watchdog import Watchdog


class EngineRunner(ABC):
    """Runs commands on an engine between its steps, for the worker's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.failure: BaseException | None = None

    @abstractmethod
    def post(self, command: Callable[[Engine], object]) -> None:
        """Runs `command(engine)` before the engine's next step."""

    @abstractmethod
    def call_in_loop(self, callback: Callable[[], None]) -> None:
        """Runs `callback` in the event loop; called by commands."""

    def expedite(self) -> None:
        """Raises the priority of the running step; see `Executor.expedite`."""
        self._engine.expedite()

    async def call(self, command: Callable[[Engine], None], timeout: float) -> None:
        """Runs `command` like `post` and waits for its end, up to `timeout` seconds.

        Raises the command's own exception, TimeoutError if it did not run in time, and RuntimeError
        if the thread has ended.
        """
        result: Future[None] = Future()
        done = asyncio.wrap_future(result)

        def run(engine: Engine) -> None:
            if result.set_running_or_notify_cancel():  # else the caller has timed out
                try:
                    command(engine)
                    result.set_result(None)
                except Exception as error:  # passed on to the caller
                    result.set_exception(error)

        self.post(run)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait((done, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise RuntimeError("the engine has stopped") from self.failure
            done.result()
        finally:
            done.cancel()

    async def settle(self, timeout: float) -> None:
        """Waits for the end of the step that was in flight when the last command ran.

        That step may still load blocks from host memory which the command has found. Raises the
        same errors as `call`.
        """
        await self.call(lambda engine: None, timeout)


class EngineThread(EngineRunner):
    """Steps the engine whenever it has work, and otherwise waits on a condition.

    `post(command)` runs commands in the thread between two steps, in order. If a step raises, the
    thread ends, `failed(error)` runs in the event loop and `failure` holds the exception.
    """

    def __init__(
        self,
        engine: Engine,
        failed: Callable[[BaseException], None],
        progress: Watchdog,
    ) -> None:
        """Makes a thread that does not run yet; it marks `progress` at each command and step."""
        super().__init__(engine)
        self._progress = progress
        self._failed = failed
        self._commands: deque[Callable[[Engine], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False

    def start(self, deliver: Callable[[list[Event]], None]) -> None:
        """Starts the thread.

        `deliver(events)` runs in the event loop, in order, as soon as a step knows the events.
        """
        call_in_loop: Callable[..., object] = self._loop.call_soon_threadsafe
        emit = partial(call_in_loop, deliver)
        self._thread = threading.Thread(
            target=self._run, args=(emit,), name="tandem-engine", daemon=True
        )
        self._thread.start()

    def post(self, command: Callable[[Engine], object]) -> None:
        """Runs `command(engine)` in the engine's thread before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call_in_loop(self, callback: Callable[[], None]) -> None:
        """Runs `callback` in the event loop; called from the engine's thread."""
        self._loop.call_soon_threadsafe(callback)

    async def stop(self, timeout: float) -> None:
        """Ends the thread after its current step; raises TimeoutError if that takes too long."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        # Not in another thread, because a process that is ending cannot start threads.
        await asyncio.wait((self._ended,), timeout=timeout)
        if not self._ended.done():
            raise TimeoutError("the engine's step does not end")
        self._thread.join()

    def end(self, timeout: float) -> bool:
        """Ends the thread after its current step; returns False if that takes too long.

        Blocks the calling thread, which is not the event loop's.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self, emit: Callable[[list[Event]], object]) -> None:
        try:
            while self._take_commands():
                self._engine.step(emit)
        except BaseException as error:  # any error ends the thread, and `failed` reports it
            self.failure = error
            self._loop.call_soon_threadsafe(self._failed, error)
        finally:
            self._loop.call_soon_threadsafe(self._ended.set_result, None)

    def _take_commands(self) -> bool:
        """Runs posted commands and waits until there is work; returns False to end the thread."""
        while True:
            with self._wake:
                while not (self._commands or self._stopping or self._engine.has_work):
                    self._progress.rest()
                    self._wake.wait()
                if self._stopping:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                self._progress.mark()
                command(self._engine)
            self._progress.mark()
            if self._engine.has_work:
                return True
