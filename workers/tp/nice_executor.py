"""Has steps on a CPU wait for other processes on its cores, but not those for which a stream stands
still.
"""

import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from ..engine.plan import Constrained, Executor, OnLayers, Samples, StepPlan


class NiceExecutor(Executor):
    """Runs another executor's steps nicer than the process, the urgent ones as nice as that.

    A stream that was interrupted would else wait for all that decodes on the same cores, and first
    for the step under way. To become less nice again takes CAP_SYS_NICE, or RLIMIT_NICE: without
    them all steps are nice.
    """

    def __init__(self, executor: Executor, nice: int) -> None:
        """`nice`: by how much nicer the thread that calls `launch` is at first."""
        self._executor = executor
        self._usual = usual_niceness()
        self._nice = self._current = self._usual + nice
        self._thread: int | None = None  # the one that calls `launch`, as the kernel numbers it

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """See `Executor.launch`."""
        self._thread = threading.get_native_id()
        self._become(self._usual if plan.is_expedited else self._nice)
        return self._executor.launch(plan, on_layers)

    def expedite(self) -> None:
        """See `Executor.expedite`. The next step is as nice as its plan says."""
        self._become(self._usual)

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """See `Executor.prepare_masks`."""
        return self._executor.prepare_masks(sequences, seconds)

    def _become(self, niceness: int) -> None:
        if self._thread is not None and niceness != self._current:
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, self._thread, niceness)
                self._current = niceness


def usual_niceness() -> int:
    """Returns the niceness of this process's first thread."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())
