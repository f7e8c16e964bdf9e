"""Gives steps their share of the CPUs: lower priority, except where an interrupted stream waits."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from ..engine.plan import CpuShare, DelegatingExecutor, Executor, OnLayers, Samples, StepPlan


class NiceExecutor(DelegatingExecutor):
    """Runs another executor's steps at a higher niceness; expedited steps at the process's own.

    Without it an interrupted stream would wait for all decodes on the same cores, and first for the
    current step. Lowering the niceness again takes CAP_SYS_NICE or RLIMIT_NICE. Without them all
    steps run at the higher niceness. A plan may change niceness and threads, because the worker has
    another role; the helpers of our kernels follow the thread that calls `launch`.
    """

    def __init__(self, executor: Executor, nice: int) -> None:
        """Adds `nice` to the niceness of the thread that calls `launch`, as its initial value."""
        super().__init__(executor)
        self._usual = usual_niceness()
        self._nice = self._current = self._usual + nice
        self._first_threads = torch.get_num_threads()
        self._thread: int | None = None  # kernel's id of the thread that calls `launch`

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self._thread = threading.get_native_id()
        if plan.share is not None:
            self._take(plan.share)
        self._become(self._usual if plan.is_expedited else self._nice)
        return self._executor.launch(plan, on_layers)

    def expedite(self) -> None:
        """Lowers the niceness of the current step; the next step's plan sets it again."""
        self._become(self._usual)

    def _take(self, share: CpuShare) -> None:
        self._nice = self._usual + share.nice
        torch.set_num_threads(share.num_threads or self._first_threads)

    def _become(self, niceness: int) -> None:
        if self._thread is not None and niceness != self._current:
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, self._thread, niceness)
                self._current = niceness


def usual_niceness() -> int:
    """Returns the niceness of this process's first thread."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())
