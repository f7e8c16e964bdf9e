"""How long tests wait.

Four processes of tests share two cores with whole services, where a process may get no core for
seconds. A wait for something that has to happen ends as soon as it has, so a generous deadline
costs time only in a test that fails; all such waits have the same one.
"""

import subprocess
import threading
from typing import Final

WAIT: Final = 60.0
"""Seconds within which anything has happened that has to happen."""

NEVER: Final = 10 * WAIT
"""Seconds of a timeout of the code under test that is not to end anything before WAIT is over."""

START: Final = 2 * WAIT
"""Seconds within which a process has started that imports torch and loads a model."""

SLOW_STEP: Final = 1.2 * WAIT / 1000
"""Seconds of a fake model's step: a request for 1,000 tokens does not end by itself before WAIT."""


def line_of(process: subprocess.Popen[str]) -> str:
    """Returns the next line of a process, which is killed if none comes within START."""
    assert process.stdout is not None
    timer = threading.Timer(START, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
