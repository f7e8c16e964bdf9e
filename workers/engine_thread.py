"""One thread that steps an engine, and the two ways across its border: commands in, events out."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from .engine.engine import Engine
from .engine.events import Event


class EngineStopped(RuntimeError):
    """The engine's thread has ended; it runs no more commands."""


class EngineThread:
    """Steps the engine whenever it has work, and sleeps on a condition when it has none.

    `deliver(events)` runs in the event loop, in order, at most twice a step. `post(command)` runs the command in the
    thread between two steps; commands keep their order. If a step raises, the thread ends, `failed()` runs in the loop
    and `failure` holds the exception.
    """

    def __init__(
        self, engine: Engine, *, deliver: Callable[[list[Event]], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Callable[[Engine], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Callable[[Engine], object]) -> None:
        """Runs `command(engine)` in the engine's thread before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def tell(self, callback: Callable[[], None]) -> None:
        """From the engine's thread: runs `callback` in the event loop."""
        self._loop.call_soon_threadsafe(callback)

    async def call(self, command: Callable[[Engine], None], timeout: float) -> None:
        """Like `post`, but returns when the command has run. Raises what it raised, TimeoutError if it did not run in
        time, EngineStopped if it never will."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run(engine: Engine) -> None:
            error: Exception | None = None
            try:
                command(engine)
            except Exception as raised:  # handed to the caller, not swallowed
                error = raised
            self._loop.call_soon_threadsafe(_settle, done, error)

        self.post(run)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait((done, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise EngineStopped("the engine has stopped") from self.failure
            done.result()
        finally:
            done.cancel()

    async def stop(self, timeout: float) -> None:
        """Ends the thread after its current step. Raises TimeoutError if the step does not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout)
        if self._thread.is_alive():
            raise TimeoutError("the engine's step does not end")

    def _run(self) -> None:
        try:
            while self._take_commands():
                if events := self._engine.step(self._emit):
                    self._emit(events)
        except BaseException as error:  # whatever it was, the worker is no longer healthy and must say so
            self.failure = error
            self._loop.call_soon_threadsafe(self._failed, error)
        finally:
            self._loop.call_soon_threadsafe(self._ended.set_result, None)

    def _emit(self, events: list[Event]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _take_commands(self) -> bool:
        """Runs what was posted and waits until there is work; False when the thread is to end."""
        while True:
            with self._wake:
                while not (self._commands or self._stopping or self._engine.has_work):
                    self._wake.wait()
                if self._stopping:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command(self._engine)
            if self._engine.has_work:
                return True


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return  # whoever called has given up
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
