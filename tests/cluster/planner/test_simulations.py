"""Tests that other processes change nothing of a plan but the time, and never outlive it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from tandem.cluster.planner.search import Planner, SplitPlan, list_splits
from tandem.cluster.planner.simulations import SimulationArguments, Simulations
from tandem.cluster.planner.site import MeasuredSite, Split
from tandem.cluster.planner.workload import Objective, PlannedWorkload
from tandem.cluster.sim.result import SimulationResult
from tandem.cluster.sim.simulate import simulate
from tandem.tests.profiles import make_profile
from tandem.tests.waits import WAIT

OBJECTIVE = Objective(limits={"ttft": 1000.0, "tpot": 100.0})
WORKLOAD = PlannedWorkload.poisson(2.0, 128, 8, 20, seed=0)

pytestmark = pytest.mark.io


def arguments() -> SimulationArguments:
    service, costs = MeasuredSite(make_profile(1)).service(Split(0, 1))
    return SimulationArguments(service, WORKLOAD.requests, costs, 0)


def times(result: SimulationResult) -> list[tuple[float, float]]:
    return [(each.record.started, each.record.ended) for each in result.requests]


def figures(plan: SplitPlan) -> Mapping[str, Any]:
    assert plan.at_rate is not None
    return {"split": plan.split, "knee": plan.knee, "times": times(plan.at_rate.result)}


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_plan_is_the_same_with_any_number_of_processes() -> None:
    site = MeasuredSite(make_profile(1, 2))
    alone = Planner(site, WORKLOAD, OBJECTIVE).search(list_splits(2, [1]))
    with Simulations(3) as simulations:
        planner = Planner(site, WORKLOAD, OBJECTIVE, simulations=simulations)
        plans = planner.search(list_splits(2, [1]))
    assert [figures(each) for each in plans] == [figures(each) for each in alone]
    assert any(plan.knee for plan in plans)
    assert not multiprocessing.active_children()


def test_a_simulation_runs_here_if_its_process_was_killed() -> None:
    with Simulations(2) as simulations:
        simulations.expect({"a": arguments(), "b": arguments()})
        for process in multiprocessing.active_children():
            process.kill()
        assert times(simulations.run("a", arguments())) == times(simulate(*arguments()))
        simulations.expect({"c": arguments()})
        assert times(simulations.run("c", arguments())) == times(simulate(*arguments()))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_end_with_the_command(ending: signal.Signals) -> None:
    text = """
import multiprocessing, time
from tandem.cluster.planner.simulations import Simulations
from tandem.tests.cluster.planner.test_simulations import arguments
if __name__ == "__main__":
    with Simulations(3) as simulations:
        simulations.expect({1: arguments(), 2: arguments()})
        for number in (1, 2):
            simulations._begun[number].result()
        print(*(each.pid for each in multiprocessing.active_children()), flush=True)
        time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        os.kill(parent.pid, ending)
        parent.wait(WAIT)
        deadline = time.monotonic() + WAIT
        while any(runs(each) for each in children):
            assert time.monotonic() < deadline
            time.sleep(0.01)
