"""Tests that expedited steps wait for no other process."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from tandem.tests.workers.engine.fake import FakeExecutor
from tandem.workers.engine.plan import CpuShare, OnLayers, Samples, StepPlan
from tandem.workers.tp.nice_executor import NiceExecutor


class Noting(FakeExecutor):
    """Notes the niceness of each step."""

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


def test_expedited_steps_are_not_nice_if_that_is_allowed() -> None:
    noting, usual = Noting(), niceness()

    def run() -> bool:
        set_niceness(usual + 5)
        may = set_niceness(usual)
        set_niceness(usual + 5)
        executor = NiceExecutor(noting, 5)
        for is_expedited in (False, True, True, False):
            executor.launch(StepPlan(sequences=(), dropped=(), is_expedited=is_expedited))()
        return may

    with ThreadPoolExecutor(1) as thread:
        may = thread.submit(run).result()
    nice = usual + 5
    assert noting.found == ([nice, usual, usual, nice] if may else [nice] * 4)


def test_a_plan_changes_the_niceness_and_the_threads_of_later_steps() -> None:
    noting, usual, threads = Noting(), niceness(), torch.get_num_threads()

    def run() -> list[int]:
        executor, found = NiceExecutor(noting, 0), []
        for share in (None, CpuShare(nice=2, num_threads=3), None, CpuShare(nice=4), None):
            executor.launch(StepPlan(sequences=(), dropped=(), share=share))()
            found.append(torch.get_num_threads())
        return found

    try:
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(run).result() == [threads, 3, 3, threads, threads]
    finally:
        torch.set_num_threads(threads)
    assert noting.found == [usual, usual + 2, usual + 2, usual + 4, usual + 4]


class Hurried(FakeExecutor):
    """Is expedited by another thread in each step; notes the niceness before and after."""

    def __init__(self) -> None:
        super().__init__(4, 16)
        self.hurry_it: Callable[[], None] = lambda: None
        self.found: list[int] = []

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self.found.append(niceness())
        with ThreadPoolExecutor(1) as other:
            other.submit(self.hurry_it).result()
        self.found.append(niceness())
        return super().launch(plan, on_layers)


def test_a_running_step_becomes_less_nice_when_a_stream_waits_for_it() -> None:
    hurried, usual = Hurried(), niceness()

    def run() -> bool:
        set_niceness(usual + 5)
        may = set_niceness(usual)
        set_niceness(usual + 5)
        executor = NiceExecutor(hurried, 5)
        executor.expedite()  # before the first step there is nothing to expedite
        hurried.hurry_it = executor.expedite
        for _ in range(2):
            executor.launch(StepPlan(sequences=(), dropped=()))()
        return may

    with ThreadPoolExecutor(1) as thread:
        may = thread.submit(run).result()
    nice = usual + 5
    assert hurried.found == ([nice, usual] if may else [nice, nice]) * 2


_ENTER = """
import os, threading
from tandem.proto.identity import PeerIdentity
from tandem.workers.tp.rank import RankConfig, enter_engine_thread
def run():
    enter_engine_thread(RankConfig(model="", identity=PeerIdentity.generate(), nice=3))
    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_the_engine_s_thread_is_nicer_than_its_process_by_as_much_as_configured() -> None:
    """The process is nice itself; an absolute niceness below its own would not be allowed."""
    command = ["nice", "-n", "4", sys.executable, "-c", _ENTER]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(found) == min(os.getpriority(os.PRIO_PROCESS, 0) + 4, 19) + 3
