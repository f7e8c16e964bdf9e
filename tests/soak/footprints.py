"""Samples what the processes of a run use, and tells which of it grows without end."""

import math
import os
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import psutil

from tandem.tests.metrics_page import MetricsPage
from tandem.tests.service import status
from tandem.tests.soak.faults import processes
from tandem.tests.soak.samples import Points, grows, trend

_OF_MEMBERS: Final = ("MiB", "files", "threads", "tasks")
JUDGED: Final = {
    **dict.fromkeys(("router", "prefill", "decode"), _OF_MEMBERS),
    "client": ("files", "threads"),
}
"""Kinds of processes that must not grow, and in what; what Ray's own do is shown. The client is
this process, whose memory has the outcome of every stream.
"""

SHOWN: Final = (*JUDGED, "gcs")
LEAST: Final = {"MiB": 2.0, "files": 1.0, "threads": 1.0, "tasks": 1.0}
"""What is sampled, and how much it may grow in a run."""

_ANSWERED: Final = 0.8  # of the samples
_HOUR: Final = 3600.0
_SECONDS: Final = 10.0


@dataclass
class Footprints:
    """Collects samples, each of all processes. A member of the service has one name for its process
    and one for its asyncio tasks.
    """

    _points: dict[tuple[str, str, str], Points] = field(
        default_factory=dict
    )  # by kind, name and figure
    _num_samples: int = 0

    def sample(self, status_url: str) -> None:
        """Takes a sample; the service should be whole, and as busy as at the others."""
        self._num_samples += 1
        now = time.monotonic()
        for kind, found in processes().items():
            for process in found:
                with suppress(psutil.Error), process.oneshot():
                    self._add(now, kind, str(process.pid), "MiB", process.memory_info().rss / 2**20)
                    self._add(now, kind, str(process.pid), "files", process.num_fds())
                    self._add(now, kind, str(process.pid), "threads", process.num_threads())
        client = psutil.Process()
        self._add(now, "client", str(os.getpid()), "files", client.num_fds())
        self._add(now, "client", str(os.getpid()), "threads", client.num_threads())
        with suppress(OSError, ValueError):  # who answers has just been killed
            page = status(status_url)
            for worker in page["workers"]:
                self._add(now, worker["role"], worker["id"], "tasks", worker["num_tasks"])
            for router in page["routers"]:
                self._sample_router(now, router["id"], router["ops"])

    def _sample_router(self, now: float, router_id: str, address: str) -> None:
        with suppress(
            OSError, ValueError, AssertionError
        ):  # it has just been killed, or has just begun
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SECONDS) as answer:
                figures = MetricsPage(answer.read().decode())
            self._add(now, "router", router_id, "tasks", figures.value("tandem_tasks"))

    def rows(self) -> list[list[str]]:
        """Returns one row for each figure of a process that was there at the last sample: its
        first, middle and last value, and how fast it grows if it was there at all.
        """
        newest = max((points[-1][0] for points in self._points.values()), default=0.0)
        rows = []
        for (kind, name, figure), points in sorted(self._points.items()):
            if kind not in SHOWN or points[-1][0] != newest or len(points) < 2:
                continue
            values = " -> ".join(f"{points[place][1]:.0f}" for place in (0, len(points) // 2, -1))
            seconds = f"{newest - points[0][0]:.0f} s"
            rows.append([kind, name, seconds, figure, values, self._describe(kind, figure, points)])
        return rows

    def faults(self) -> list[str]:
        """Names what grows in processes that lived throughout; also kinds of which none did for
        seven samples, or of which something was not sampled.
        """
        judged = [
            (f"{kind} {name}: {figure}", points, LEAST[figure])
            for (kind, name, figure), points in sorted(self._points.items())
            if kind in JUDGED and self._is_long(figure, points)
        ]
        lived = {
            (kind, figure)
            for (kind, _, figure), points in self._points.items()
            if self._is_long(figure, points)
        }
        missing = [
            f"no {kind} lived through enough samples of {figure} to judge"
            for kind, figures in JUDGED.items()
            for figure in figures
            if (kind, figure) not in lived
        ]
        grown = [
            f"{what} grow ({_per_hour(points)})"
            for what, points, least in judged
            if grows(points, least)
        ]
        return missing + grown

    def _add(self, now: float, kind: str, name: str, figure: str, value: float) -> None:
        self._points.setdefault((kind, name, figure), []).append((now, value))

    def _is_long(self, figure: str, points: Points) -> bool:
        # Who answers for tasks may be killed, but not for long.
        least = _ANSWERED * self._num_samples if figure == "tasks" else self._num_samples
        return len(points) >= least and trend(points)[1] > -math.inf

    def _describe(self, kind: str, figure: str, points: Points) -> str:
        if not self._is_long(figure, points):
            return ""
        verdict = (
            ("grows" if grows(points, LEAST[figure]) else "flat") if kind in JUDGED else "Ray's"
        )
        return f"{_per_hour(points)}: {verdict}"


def _per_hour(points: Points) -> str:
    slope, surely = trend(points)
    return f"{slope * _HOUR:+.1f} an hour, at least {surely * _HOUR:+.1f}"
