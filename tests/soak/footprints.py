"""Samples memory, open files and threads of the processes of a run, to show that none of them only grows."""

import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from tandem.tests.soak.faults import processes


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Holds what one process used at one moment."""

    at: float
    rss: int  # bytes
    num_fds: int
    num_threads: int


@dataclass
class Footprints:
    """Collects samples of all processes of the cluster."""

    _samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)  # by kind and pid

    def sample(self) -> None:
        now = time.monotonic()
        for kind, found in processes().items():
            for process in found:
                with suppress(psutil.Error), process.oneshot():
                    sample = Sample(
                        at=now,
                        rss=process.memory_info().rss,
                        num_fds=process.num_fds(),
                        num_threads=process.num_threads(),
                    )
                    self._samples.setdefault((kind, process.pid), []).append(sample)

    def rows(self) -> list[list[str]]:
        """Returns one row for each process that was there at the last sample: start and end of what it used."""
        last = max((samples[-1].at for samples in self._samples.values()), default=0.0)
        rows = []
        for (kind, pid), samples in sorted(self._samples.items()):
            first, end = samples[0], samples[-1]
            if end.at != last or end is first:
                continue
            rows.append(
                [
                    *(kind, str(pid), f"{end.at - first.at:.0f} s"),
                    f"{first.rss >> 20} -> {samples[len(samples) // 2].rss >> 20} -> {end.rss >> 20} MiB",
                    f"{first.num_fds} -> {end.num_fds}",
                    f"{first.num_threads} -> {end.num_threads}",
                ]
            )
        return rows
