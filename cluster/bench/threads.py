"""Counts the busy threads of this machine during a measurement.

So a comparison can report the threads of both servers.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from time import perf_counter
from typing import Final, Self

import psutil

_BUSY_SHARE: Final = 0.25  # of a core


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Holds the CPU seconds of every thread of other processes on this machine, at one moment."""

    taken: float  # perf_counter seconds
    seconds: Mapping[tuple[int, int], float]  # by process and thread id
    names: Mapping[int, str]  # of the processes

    @classmethod
    def take(cls) -> Self:
        """Reads the times, except of processes that end meanwhile or that this user cannot read."""
        seconds: dict[tuple[int, int], float] = {}
        names: dict[int, str] = {}
        own = psutil.Process().pid
        for process in psutil.process_iter():
            if process.pid == own:
                continue
            try:
                threads = process.threads()
                names[process.pid] = PurePath((process.cmdline() or [process.name()])[0]).name
            except psutil.Error:
                continue
            seconds |= {
                (process.pid, thread.id): thread.user_time + thread.system_time
                for thread in threads
            }
        return cls(perf_counter(), seconds, names)

    def count_busy(self, since: "ThreadTimes") -> dict[str, int]:
        """Returns, by process name, the number of threads that used at least a quarter of a core.

        `since`: the times at the start of the period.
        """
        least = _BUSY_SHARE * (self.taken - since.taken)
        busy = (
            key
            for key, seconds in self.seconds.items()
            if seconds - since.seconds.get(key, 0.0) >= least
        )
        return dict(sorted(Counter(self.names[process] for process, _ in busy).items()))
