"""Detects an engine that makes no progress or computes NaN."""

import time
from collections import deque
from collections.abc import Callable
from queue import Full
from typing import Final

from ..engine.engine import Engine
from ..engine.events import Event, Failed, NewTokens, Preempted
from ..engine.plan import (
    DelegatingExecutor,
    Executor,
    OnLayers,
    Samples,
    SamplingParams,
    StepPlan,
)
from ..engine.sequence import SequenceSpec, Task

CANARY_ID: Final = -1  # the canary's sequence id; requests have ids from 0 on

_CANARY: Final = SequenceSpec(  # a prefill and a decode
    id=CANARY_ID,
    task=Task.COLOCATED,
    tokens=(0,),
    max_tokens=2,
    sampling=SamplingParams(temperature=0.0),
)

# Maximum of the stalled time that counts between two reads: twice the period of Serve's health
# checks.
_COUNTED_SECONDS: Final = 4.0
_MAX_STEPS: Final = 4_096  # that are kept until they are read


class Watchdog:
    """Holds the time of the engine thread's last progress, 0 while the thread is idle.

    Progress is the start of a command or a step, or the end of some layers of a step. The thread
    writes the time, the event loop reads it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # The seconds and tokens of the last steps; the thread appends, the event loop removes.
        self.steps: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS)
        self.clock = clock
        self._stamp = 0.0
        self._computed = clock()  # when the last step ended
        self._seen = 0.0  # the stamp at the last call of `stalled_seconds`
        self._looked = 0.0  # the time of that call
        self._stalled = 0.0

    def mark(self) -> None:
        """Records progress."""
        self._stamp = self.clock()

    def rest(self) -> None:
        """Records that the thread is idle."""
        self._stamp = 0.0

    def end_step(self, started: float, num_tokens: int) -> None:
        """Records a step that has ended."""
        self._computed = self.clock()
        self.steps.append((self._computed - started, num_tokens))

    def idle_seconds(self) -> float:
        """Returns the seconds since the last step; 0 while the thread works.

        Commands do not count: an idle worker gets some every few seconds, such as those that read
        its metrics.
        """
        return 0.0 if self._stamp else self.clock() - self._computed

    def stalled_seconds(self) -> float:
        """Returns the seconds of work without progress.

        At most 4 seconds between two calls count. A longer time between calls means that the whole
        process, or its machine, was stopped.
        """
        now = self.clock()
        stamp = self._stamp
        if stamp != self._seen:
            self._seen = stamp
            self._stalled = 0.0
        if stamp:
            self._stalled += min(now - max(stamp, self._looked), _COUNTED_SECONDS)
        self._looked = now
        return self._stalled


class WatchedExecutor(DelegatingExecutor):
    """Records the progress and the durations of another executor's steps.

    Reported layers count as progress, so a long chunk does not count as a hang.
    """

    def __init__(self, executor: Executor, progress: Watchdog) -> None:
        super().__init__(executor)
        self._progress = progress

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        def report(num_layers: int) -> None:
            self._progress.mark()
            if on_layers is not None:
                on_layers(num_layers)

        started = self._progress.clock()
        collect = self._executor.launch(plan, report)

        def finish() -> Samples:
            samples = collect()
            self._progress.end_step(started, plan.num_tokens)
            return samples

        return finish


class Canary:
    """Runs a fixed sequence on the engine to tell a worker's fault from a request's fault.

    A request for which the model computes NaN may be the only such request. The canary's prompt is
    always the same. If the model computes NaN for it, the worker is broken. So no request can make
    a healthy worker fail by its own NaN. Lives in the event loop.
    """

    def __init__(
        self,
        post: Callable[[Callable[[Engine], object]], None],
        call_in_loop: Callable[[Callable[[], None]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Makes a canary that calls `failed` if the model computes NaN for it.

        For `post` and `call_in_loop` see EngineThread.
        """
        self._post = post
        self._call_in_loop = call_in_loop
        self._failed = failed
        self._is_running = False
        # The last run found a full queue or was preempted, so the canary must run again.
        self.is_due = False

    def run(self) -> None:
        """Starts the canary unless it is running.

        If the engine's queue is full, the canary does not run and stays due. Such an engine is
        busy, and `Watchdog` detects whether it hangs.
        """
        if not self._is_running:
            self._is_running = True
            self.is_due = False
            self._post(self._submit)

    def observe(self, event: Event) -> None:
        """Handles an event of the canary's sequence."""
        if isinstance(event, Failed):
            self._end(is_due=False)
            self._failed(RuntimeError(f"the canary has failed: {event.reason}"))
        elif isinstance(event, Preempted):
            self._end(is_due=True)
        elif isinstance(event, NewTokens) and event.finish is not None:
            self._end(is_due=False)

    def _submit(self, engine: Engine) -> None:
        """Submits the canary in the engine's thread; only the engine's own errors may escape."""
        try:
            engine.submit(_CANARY)
        except Full:
            self._call_in_loop(lambda: self._end(is_due=True))

    def _end(self, is_due: bool) -> None:
        self._is_running = False
        self.is_due = is_due
