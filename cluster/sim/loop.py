"""Runs asyncio on virtual time: it passes only when nothing is ready to run."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _IdleSelector(selectors.SelectSelector):
    """Returns from a wait at once, as if its timeout had passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing happens any more")
        if timeout > 0.0:
            self.now += timeout
        return []


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """Runs an event loop whose time begins at 0 and jumps to the next timer."""

    def __init__(self) -> None:
        self._idle = _IdleSelector()
        super().__init__(self._idle)

    def time(self) -> float:
        return self._idle.now


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in virtual time.

    Raises RuntimeError if `main` waits for something that no timer will bring.
    """
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(main)
