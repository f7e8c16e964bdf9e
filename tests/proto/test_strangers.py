"""Tests the memory of the sweep; tests/workers and tests/router test the connections."""

import asyncio
import errno
import resource

import psutil
import pytest

from tandem.proto import strangers
from tandem.proto.strangers import StrangerSweep
from tandem.tests.waits import WAIT


async def sweep_until_all_are_forgotten(sweep: StrangerSweep) -> None:
    sweep.start()
    async with asyncio.timeout(WAIT):
        while sweep._known:
            await asyncio.sleep(0.005)
    sweep.stop()


@pytest.mark.io
async def test_peers_that_have_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while there are few connections."""
    monkeypatch.setattr(strangers, "_SWEEP_SECONDS", 0.01)
    most = psutil.Process().num_fds() + 100
    sweep = StrangerSweep(4 * most)
    for port in range(most + 1):
        sweep.admit(f"ipv4:192.0.2.1:{port}")
    await sweep_until_all_are_forgotten(sweep)


@pytest.mark.io
async def test_few_open_files_and_a_failed_round_do_not_prevent_sweeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process may have no file left for a round; with few files, the bounds are lower."""
    monkeypatch.setattr(strangers, "_SWEEP_SECONDS", 0.01)
    num_files = psutil.Process().num_fds()
    limits = (4 * num_files + 400, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    failed = list[bool]()

    def num_fds(_process: psutil.Process) -> int:
        failed.append(len(failed) < 2)
        if failed[-1]:
            raise OSError(errno.EMFILE, "Too many open files")
        return num_files

    monkeypatch.setattr(psutil.Process, "num_fds", num_fds)
    sweep = StrangerSweep(1_000_000)
    assert sweep.max_connections == limits[0] // 2
    for port in range(num_files + 101):
        sweep.admit(f"ipv4:192.0.2.1:{port}")
    await sweep_until_all_are_forgotten(sweep)
    assert failed[:3] == [True, True, False]


def test_without_a_limit_of_open_files_the_connections_alone_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert StrangerSweep(100).max_connections == 100
