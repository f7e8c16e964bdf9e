"""Watches whether the engine of a worker makes progress, and whether it computes numbers."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from queue import Full
from typing import Final

from ..engine.engine import Engine
from ..engine.events import Event, Failed, NewTokens, Preempted
from ..engine.plan import (
    Constrained,
    DraftRequest,
    Executor,
    OnLayers,
    Samples,
    SamplingParams,
    StepPlan,
)
from ..engine.sequence import SequenceSpec, Task

CANARY_ID: Final = -1  # of the canary's sequence; requests have ids from 0 on

_CANARY: Final = SequenceSpec(  # a prefill and a decode
    id=CANARY_ID,
    task=Task.COLOCATED,
    tokens=(0,),
    max_tokens=2,
    sampling=SamplingParams(temperature=0.0),
)

# at most, between two looks; twice the period of Serve's health checks
_COUNTED_SECONDS: Final = 4.0
_MAX_STEPS: Final = 4_096  # that are remembered until somebody takes them

StepLog = deque[tuple[float, int]]
"""The last steps: the seconds and the tokens of each. The engine's thread appends, the event loop
takes.
"""


def new_step_log() -> StepLog:
    return deque(maxlen=_MAX_STEPS)


class Watchdog:
    """Holds when the engine's thread last began a command or a step, or finished layers of one; 0
    while it is idle.

    The thread writes it, the event loop reads it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stamp = 0.0
        self._rested = clock()  # when it last became idle
        self._seen = 0.0  # the stamp at the last look, and when that was
        self._looked = 0.0
        self._stalled = 0.0

    def mark(self) -> None:
        """Stamps progress."""
        self._stamp = self._clock()

    def rest(self) -> None:
        """Ends the work: the thread is idle."""
        self._stamp, self._rested = 0.0, self._clock()

    def idle_seconds(self) -> float:
        """Returns for how long there has been no work."""
        return 0.0 if self._stamp else self._clock() - self._rested

    def stalled_seconds(self) -> float:
        """Returns for how long there has been work without progress.

        A time in which nobody looked counts only in part: then the whole process, or its machine,
        was held up.
        """
        now, stamp = self._clock(), self._stamp
        if stamp != self._seen:
            self._seen, self._stalled = stamp, 0.0
        if stamp:
            self._stalled += min(now - max(stamp, self._looked), _COUNTED_SECONDS)
        self._looked = now
        return self._stalled


class WatchedExecutor(Executor):
    """Marks the progress of another executor's steps: where it reports layers, a long chunk is no
    hang. Logs each.
    """

    def __init__(
        self, executor: Executor, progress: Watchdog, steps: StepLog | None = None
    ) -> None:
        self._executor = executor
        self._progress = progress
        self._steps = new_step_log() if steps is None else steps

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """See `Executor.launch`."""

        def report(num_layers: int) -> None:
            self._progress.mark()
            if on_layers is not None:
                on_layers(num_layers)

        started = time.monotonic()
        collect = self._executor.launch(plan, report)

        def finish() -> Samples:
            samples = collect()
            self._steps.append((time.monotonic() - started, plan.num_tokens))
            return samples

        return finish

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """See `Executor.prepare_masks`."""
        return self._executor.prepare_masks(sequences, seconds)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        """See `Executor.propose`."""
        return self._executor.propose(requests)

    def expedite(self) -> None:
        """See `Executor.expedite`."""
        self._executor.expedite()


class Canary:
    """Has the engine compute a sequence of the worker's own, which tells a worker's fault from a
    request's.

    A request for which the model computes NaN may be the only one. The canary's prompt is always
    the same: where the model computes NaN for it, the worker is broken. So no request can make a
    sound worker fail by its own NaN. Lives in the event loop.
    """

    def __init__(
        self,
        post: Callable[[Callable[[Engine], object]], None],
        call_in_loop: Callable[[Callable[[], None]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`post` and `call_in_loop`: see EngineThread. `failed` is called if the model computes NaN
        for the canary.
        """
        self._post = post
        self._call_in_loop = call_in_loop
        self._failed = failed
        self._is_running = False
        self.is_due = False  # it did not find a place, or was preempted, since it was last wanted

    def run(self) -> None:
        """Starts the canary unless it is under way. In an engine whose queue is full it does not
        find a place: that engine is busy, and `Watchdog` tells whether it is stuck. The canary then
        stays due.
        """
        if not self._is_running:
            self._is_running, self.is_due = True, False
            self._post(self._submit)

    def observe(self, event: Event) -> None:
        """Takes an event of the canary's sequence."""
        if isinstance(event, Failed):
            self._end(is_due=False)
            self._failed(RuntimeError(f"the canary has failed: {event.reason}"))
        elif isinstance(event, Preempted):
            self._end(is_due=True)
        elif isinstance(event, NewTokens) and event.finish is not None:
            self._end(is_due=False)

    def _submit(self, engine: Engine) -> None:
        """Submits the canary, in the engine's thread, where no error may escape that is not the
        engine's own.
        """
        try:
            engine.submit(_CANARY)
        except Full:
            self._call_in_loop(lambda: self._end(is_due=True))

    def _end(self, is_due: bool) -> None:
        self._is_running, self.is_due = False, is_due
