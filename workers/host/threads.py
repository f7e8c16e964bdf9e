"""Counts usable cores, sets the time slices of threads, and runs blocking work in threads."""

import asyncio
import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_SHORTEST_SLICE: Final = 100_000  # nanoseconds, the kernel's least
_DEFAULT_SLICE: Final = 0


def go_first() -> None:
    """Asks the kernel for the shortest time slices for this process's threads.

    Threads that they start inherit the slices. A thread that a message wakes then interrupts a
    computing thread with a longer slice on its core. Otherwise it would wait for the end of that
    slice, about three milliseconds (EEVDF scheduler, Linux 6.12; older kernels ignore it).
    """
    with suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            _set_time_slice(int(thread), _SHORTEST_SLICE)


def let_others_first() -> None:
    """Gives the calling thread, which computes, the kernel's default time slice again.

    Threads that it starts inherit the slice.
    """
    _set_time_slice(threading.get_native_id(), _DEFAULT_SLICE)


def _set_time_slice(thread: int, nanoseconds: int) -> None:
    """Sets the time slice of a thread; does nothing if the system does not support or allow it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return
    with suppress(ProcessLookupError):  # the thread has ended
        policy = os.sched_getscheduler(thread)
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        if policy == os.SCHED_OTHER:
            # struct sched_attr: size, policy, flags, niceness, priority, runtime (here the slice),
            # deadline, period
            attributes = struct.pack("=IIQiIQQQ", 48, policy, 0, niceness, 0, nanoseconds, 0, 0)
            ctypes.CDLL(None).syscall(number, thread, attributes, 0)


def available_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that this process may use, at least 1.

    This is the size of its CPU set, bounded by the CPU quotas of its cgroup (v2 `cpu.max`, v1
    `cpu.cfs_quota_us`) and of the groups above it. Quotas are rounded down, because threads beyond
    a quota make all threads stop when it is used up. `root` holds proc and sys.
    """
    quotas = [quota for group in cgroups("cpu", root) if (quota := _quota(group)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in quotas)]))


def cgroups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Returns the cgroup folders (v1 and v2) of this process for a controller, with parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.strip("/")
        # In a container the path may be the host's path, but the mount shows only the container's
        # own part of it.
        found += [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return found


def _quota(group: Path) -> float | None:
    """Returns the CPU quota of one cgroup in cores, or None without a quota."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if int(quota) < 0 else int(quota) / int(period)
    return None


def settle(done: "asyncio.Future[Any]", result: object, error: BaseException | None = None) -> None:
    """Sets the result or the exception of a future, unless it is done, for example cancelled."""
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


LOAD_NICE: Final = 15
"""Niceness of starting a worker on CPUs, higher than in prefill.

A worker mostly starts to replace one that has died, while other workers on the same cores compute
the prompts and continue the streams of the dead one.
"""


def in_thread(work: Callable[[], T], name: str, *, nice: int = 0) -> "asyncio.Future[T]":
    """Runs `work` in its own daemon thread with `nice` added to its niceness.

    Nobody waits for the thread if the future is cancelled. The thread ends with `work`, unlike the
    thread of a pool. As long as a thread that has computed lives, libgomp counts its OpenMP team in
    addition to the engine's. Then it assumes that the machine is overcommitted and lets no thread
    spin.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            os.nice(nice)  # on Linux only for this thread and those that it starts
            result = work()
        except BaseException as raised:  # handed to the future
            error = raised
        with suppress(RuntimeError):  # the loop has closed, so nobody waits any more
            loop.call_soon_threadsafe(settle, done, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
