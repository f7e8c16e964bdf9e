"""Tests that urgent steps wait for no other process."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tandem.tests.workers.engine.fake import FakeExecutor
from tandem.workers.engine.plan import OnLayers, Samples, StepPlan
from tandem.workers.tp.nice_executor import NiceExecutor


class Noting(FakeExecutor):
    """Notes how nice each step is."""

    def __init__(self) -> None:
        super().__init__(4, 16)
        self.found: list[int] = []

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self.found.append(niceness())
        return super().launch(plan, on_layers)


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def set_niceness(value: int) -> bool:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), value)
    except PermissionError:
        return False
    return True


def test_urgent_steps_are_not_nice_where_that_is_allowed() -> None:
    noting, usual = Noting(), niceness()

    def run() -> bool:
        set_niceness(usual + 5)
        may = set_niceness(usual)
        set_niceness(usual + 5)
        executor = NiceExecutor(noting, usual + 5)
        for is_urgent in (False, True, True, False):
            executor.launch(StepPlan(sequences=(), dropped=(), is_urgent=is_urgent))()
        return may

    with ThreadPoolExecutor(1) as thread:
        may = thread.submit(run).result()
    nice = usual + 5
    assert noting.found == ([nice, usual, usual, nice] if may else [nice] * 4)
