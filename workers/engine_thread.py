"""Runs an engine in a thread of its own: commands go in, events come out."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from .engine.engine import Engine
from .engine.events import Event


class EngineThread:
    """Steps the engine whenever it has work, and waits on a condition when it has none.

    `deliver(events)` runs in the event loop, in order. `post(command)` runs the command in the thread between two
    steps, in order. If a step raises, the thread ends, `failed(error)` runs in the loop and `failure` is the exception.
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
        """Starts the thread."""
        self._thread.start()

    def post(self, command: Callable[[Engine], object]) -> None:
        """Runs `command(engine)` in the engine's thread before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call_in_loop(self, callback: Callable[[], None]) -> None:
        """Runs `callback` in the event loop; called from the engine's thread."""
        self._loop.call_soon_threadsafe(callback)

    async def call(self, command: Callable[[Engine], None], timeout: float) -> None:
        """Runs `command` like `post` and waits for it, up to `timeout` seconds. Raises what it raised, TimeoutError if
        it did not run in time, RuntimeError if the thread has ended."""
        result: Future[None] = Future()
        done = asyncio.wrap_future(result)

        def run(engine: Engine) -> None:
            if result.set_running_or_notify_cancel():  # else the caller has timed out
                try:
                    command(engine)
                    result.set_result(None)
                except Exception as error:  # handed to the caller
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

    async def stop(self, timeout: float) -> None:
        """Ends the thread after its current step. Raises TimeoutError if the step does not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout)
        if self._thread.is_alive():
            raise TimeoutError("the engine's step does not end")

    def _run(self) -> None:
        def emit(events: list[Event]) -> None:
            self._loop.call_soon_threadsafe(self._deliver, events)

        try:
            while self._take_commands():
                if events := self._engine.step(emit):
                    emit(events)
        except BaseException as error:  # any error ends the thread, and `failed` reports it
            self.failure = error
            self._loop.call_soon_threadsafe(self._failed, error)
        finally:
            self._loop.call_soon_threadsafe(self._ended.set_result, None)

    def _take_commands(self) -> bool:
        """Runs posted commands and waits until there is work; returns False when the thread is to end."""
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
