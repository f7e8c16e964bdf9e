"""The cores that a process may use, by its CPU set and its cgroups, and the time slices of its
threads.
"""

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.tests.waits import WAIT
from tandem.workers.host.threads import available_cores, go_first, in_thread, let_others_first


def make_root(folder: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A root with this `proc/self/cgroup` and these files below `sys/fs/cgroup`."""
    contents = {"proc/self/cgroup": cgroup} | {
        f"sys/fs/cgroup/{name}": text for name, text in files.items()
    }
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


V1 = "11:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n"
CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "no quota": ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
    "no file": ("0::/\n", {}, 8),
    "v2": ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
    "v2, part of a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    "v2, rounded down": ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
    "v2, more than the CPU set": ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
    "v2, of a group": (
        "0::/a/b\n",
        {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "max 100000\n"},
        2,
    ),
    "v2, of the group above": (
        "0::/a/b\n",
        {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"},
        4,
    ),
    "v2, the group is outside": ("0::/../x\n", {"cpu.max": "200000 100000\n"}, 2),
    "v2, not a number": ("0::/\n", {"cpu.max": "many\n"}, 8),
    "v1": (
        V1,
        {"cpu/docker/x/cpu.cfs_quota_us": "200000\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"},
        2,
    ),
    "v1, of the container": (
        V1,
        {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        2,
    ),
    "v1, no quota": (
        V1,
        {"cpu/docker/x/cpu.cfs_quota_us": "-1\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"},
        8,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cores_are_bounded_by_quotas_and_the_cpu_set(tmp_path: Path, name: str) -> None:
    cgroup, files, cores = CASES[name]
    assert available_cores(make_root(tmp_path, cgroup, files)) == cores


def test_without_cgroups_the_cpu_set_counts_and_not_the_machine(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 8


def test_this_process_has_cores() -> None:
    assert available_cores() >= 1


async def test_work_in_a_thread_of_its_own_is_nicer_than_the_rest_of_the_process() -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert await in_thread(lambda: os.getpriority(os.PRIO_PROCESS, 0), "test", nice=3) == min(
        here + 3, 19
    )
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


def time_slice(thread: int) -> int:
    """Returns the time slice of a thread in nanoseconds, as the kernel has it."""
    buffer = ctypes.create_string_buffer(48)
    assert (
        ctypes.CDLL(None).syscall(
            {"x86_64": 315, "aarch64": 275}[platform.machine()], thread, buffer, 48, 0
        )
        == 0
    )
    return int(struct.unpack("=IIQiIQQQ", buffer.raw)[5])


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="the kernel has no time slices of threads",
)
def test_threads_that_communicate_interrupt_those_that_compute() -> None:
    found: dict[str, int] = {}
    ending = threading.Event()

    def run(name: str, prepare: Callable[[], None], wait: threading.Event) -> None:
        prepare()
        assert wait.wait(WAIT)
        found[name] = time_slice(threading.get_native_id())

    def start(name: str, prepare: Callable[[], None] = lambda: None) -> threading.Thread:
        thread = threading.Thread(target=run, args=(name, prepare, ending))
        thread.start()
        return thread

    usual = time_slice(threading.get_native_id())
    threads = [start("before")]
    try:
        go_first()
        threads += [start("after"), start("computes", let_others_first)]
    finally:
        let_others_first()
        ending.set()
    for thread in threads:
        thread.join(WAIT)
    assert found == {"before": 100_000, "after": 100_000, "computes": usual}
    assert time_slice(threading.get_native_id()) == usual > 100_000
