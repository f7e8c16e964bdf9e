"""The memory that a process may take, by what the host has and by its cgroups."""

import sys
from pathlib import Path

import pytest

from tandem.workers.host.memory import available_memory

MIB = 2**20
HOST = "MemTotal:        9216 kB\nMemAvailable:    8192 kB\nSwapTotal: 0 kB\n"
STAT = f"anon 5\ninactive_file {MIB}\ntotal_inactive_file {2 * MIB}\n"
V2 = {"memory.max": f"{6 * MIB}\n", "memory.current": f"{4 * MIB}\n", "memory.stat": STAT}
V1 = {
    "memory.limit_in_bytes": f"{6 * MIB}\n",
    "memory.usage_in_bytes": f"{4 * MIB}\n",
    "memory.stat": STAT,
}
CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "no cgroup": ("", {}, 8),
    "v2, no limit": (
        "0::/a\n",
        {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/memory.stat": STAT},
        8,
    ),
    "v2": ("0::/a\n", {f"a/{name}": text for name, text in V2.items()}, 3),
    "v2, of the group above": ("0::/a/b\n", {f"a/{name}": text for name, text in V2.items()}, 3),
    "v2, over its limit": ("0::/\n", V2 | {"memory.current": f"{9 * MIB}\n"}, 0),
    "v1": ("4:memory:/a\n3:cpu:/b\n", {f"memory/a/{name}": text for name, text in V1.items()}, 4),
    "v1, another controller": (
        "3:cpu:/a\n",
        {f"memory/a/{name}": text for name, text in V1.items()},
        8,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_memory_is_bounded_by_the_host_and_its_cgroups(tmp_path: Path, name: str) -> None:
    cgroup, files, mebibytes = CASES[name]
    contents = {"proc/meminfo": HOST, "proc/self/cgroup": cgroup}
    for file, text in (
        contents | {f"sys/fs/cgroup/{file}": text for file, text in files.items()}
    ).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert available_memory(tmp_path) == mebibytes * MIB


def test_this_process_has_memory() -> None:
    assert 0 < available_memory() < sys.maxsize
