"""Measures the memory that this process may still take."""

import sys
from contextlib import suppress
from pathlib import Path

from .threads import cgroups


def available_memory(root: Path = Path("/")) -> int:
    """Returns in bytes what the host has available, but no more than the limits of this process's
    cgroup and of the groups above it leave (v2 `memory.max`, v1 `memory.limit_in_bytes`). `root`
    holds proc and sys.
    """
    left = [rest for group in cgroups("memory", root) if (rest := _left(group)) is not None]
    with suppress(OSError):  # not on Linux
        lines = (root / "proc/meminfo").read_text().splitlines()
        left += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min(left, default=sys.maxsize))


def _left(group: Path) -> int | None:
    """Returns what the limit of one cgroup leaves; None if it has none. File pages that are not in
    use do not count.
    """
    for limit, usage, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # of the other version, or without a limit
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return most - used + int(counts.get(unused, 0))
    return None
