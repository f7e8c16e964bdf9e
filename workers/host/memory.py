"""Measures the memory of the host that this process may use."""

import sys
from contextlib import suppress
from pathlib import Path

from .threads import cgroups


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process may still allocate.

    This is the host's available memory, bounded by the limits of the process's cgroup and of the
    groups above it (v2 `memory.max`, v1 `memory.limit_in_bytes`). `root` holds proc and sys.
    """
    left = [limit - used for limit, used in _cgroups(root)]
    return max(0, min([*left, *_meminfo("MemAvailable:", root)], default=sys.maxsize))


def total_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of the host's memory, bounded by the same limits."""
    limits = [limit for limit, _ in _cgroups(root)]
    return min([*limits, *_meminfo("MemTotal:", root)], default=sys.maxsize)


def _meminfo(name: str, root: Path) -> list[int]:
    with suppress(OSError):  # not on Linux
        lines = (root / "proc/meminfo").read_text().splitlines()
        return [int(line.split()[1]) * 1024 for line in lines if line.startswith(name)]
    return []


def _cgroups(root: Path) -> list[tuple[int, int]]:
    return [found for group in cgroups("memory", root) if (found := _limit_and_use(group))]


def _limit_and_use(group: Path) -> tuple[int, int] | None:
    """Returns the limit of one cgroup and the bytes in use, or None without a limit.

    File pages that are not in use count as free.
    """
    for limit, usage, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # a cgroup of the other version, or without a limit
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return most, used - int(counts.get(unused, 0))
    return None
