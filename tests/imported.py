"""Finds out what a process imports."""

import subprocess
import sys
from typing import Final

PACKAGES: Final = frozenset(
    {
        "grpc",
        "numpy",
        "ray",
        "sacrebleu",
        "torch",
        "torch._dynamo",
        "transformers",
    }
)
"""Modules whose import takes long, or that a part of Tandem must do without."""


def imported(code: str, *arguments: str) -> set[str]:
    """Runs code in a new process; returns those of PACKAGES that it has imported.

    Fails if the code prints anything.
    """
    report = f"\nimport sys\nprint(*({set(PACKAGES)!r} & sys.modules.keys()))\n"
    command = [sys.executable, "-c", code + report, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    return set(line.split())
