"""Runs the simulations of a plan, several at the same time.

A simulation keeps one core busy for seconds. Its result depends only on its arguments, so the
number of processes changes nothing but the time.
"""

import gc
import os
import signal
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from threading import RLock, Thread
from typing import Final, NamedTuple, Self

from ..sim.cost import ServiceCosts
from ..sim.result import SimulationResult
from ..sim.service import SimulatedService
from ..sim.simulate import simulate
from ..traces.read import TracedRequest

_LEAST_TOKENS: Final = 20_000
"""Tokens of a simulation that takes longer than the start of a process: about two seconds."""


class SimulationArguments(NamedTuple):
    """The arguments of `simulate`."""

    service: SimulatedService
    requests: Sequence[TracedRequest]
    costs: ServiceCosts
    seed: int


class Simulations:
    """Runs simulations in this process, and those that were started ahead in others.

    Use it as a context.
    """

    def __init__(self, num_processes: int = 1) -> None:
        """`num_processes` includes this one; the others start when they are needed."""
        self.num_others = num_processes - 1
        self._executor: ProcessPoolExecutor | None = None
        self._num_busy = 0  # other processes
        self._expected: dict[Hashable, SimulationArguments] = {}  # not begun; the next one first
        self._begun: dict[Hashable, Future[SimulationResult]] = {}  # and not asked for
        self._lock = RLock()  # a thread of the executor tells that a simulation has ended

    @classmethod
    def of(cls, requests: Sequence[TracedRequest]) -> Self:
        """Returns one that uses all cores, unless simulations of these requests are short."""
        num_tokens = sum(each.output_length for each in requests)
        return cls(len(os.sched_getaffinity(0)) if num_tokens >= _LEAST_TOKENS else 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._expected.clear()
        if self._executor is not None:
            self._executor.shutdown()

    def expect(self, simulations: Mapping[Hashable, SimulationArguments]) -> None:
        """Begins with simulations that `run` will be asked for, if there are other processes.

        Forgets those of an earlier call that are not among these.
        """
        with self._lock:
            self._begun = {key: each for key, each in self._begun.items() if key in simulations}
            self._expected = {
                key: each for key, each in simulations.items() if key not in self._begun
            }
        self._begin_more()

    def run(self, key: Hashable, arguments: SimulationArguments) -> SimulationResult:
        """Returns the result of a simulation; runs it here unless another process has begun it."""
        with self._lock:
            self._expected.pop(key, None)
            future = self._begun.pop(key, None)
        if future is not None:
            with suppress(BrokenProcessPool):
                return future.result()
        return simulate(*arguments)

    def _begin_more(self) -> None:
        """Gives an expected simulation to each process that has none.

        The executor gets no more than that, because it takes back nothing that waits for a process.
        """
        with self._lock:
            while self._expected and self._num_busy < self.num_others:
                self._executor = self._executor or ProcessPoolExecutor(
                    self.num_others,
                    get_context("spawn"),
                    initializer=_begin_process,
                    initargs=gc.get_threshold(),
                )
                key = next(iter(self._expected))
                try:
                    future = self._executor.submit(simulate, *self._expected.pop(key))
                except BrokenProcessPool:  # maybe memory was short
                    self.num_others = 0
                    return
                self._begun[key] = future
                self._num_busy += 1
                future.add_done_callback(self._ended)

    def _ended(self, future: Future[SimulationResult]) -> None:
        with self._lock:
            self._num_busy -= 1
        self._begin_more()


def _begin_process(*gc_threshold: int) -> None:
    """Lets this process end without a message when its parent ends or the user presses Ctrl-C."""
    gc.set_threshold(*gc_threshold)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, name="parent", daemon=True).start()
