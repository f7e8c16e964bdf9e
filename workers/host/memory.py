"""Measures the memory that this process may still allocate."""

import sys
from contextlib import suppress
from pathlib import Path

from .threads import cgroups


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process may still allocate.

    This is the host's available memory, bounded by the limits of the process's cgroup and of the
    groups above it (v2 `memory.max`, v1 `memory.limit_in_bytes`). `root` holds proc and sys.
    """
    left = [rest for group in cgroups("memory", root) if (rest := _left(group)) is not None]
    with suppress(OSError):  # not on Linux
        lines = (root / "proc/meminfo").read_text().splitlines()
        left += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min(left, default=sys.maxsize))


def _left(group: Path) -> int | None:
    """Returns the bytes that the limit of one cgroup leaves, or None without a limit.

    File pages that are not in use count as free.
    """
    for limit, usage, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # a cgroup of the other version, or without a limit
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return most - used + int(counts.get(unused, 0))
    return None
