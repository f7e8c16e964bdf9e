"""Lets a test steer a worker in another process: a few numbers in a file that both map into
memory.
"""

import mmap
import struct
import time
from pathlib import Path
from typing import Final

from tandem.workers.engine.plan import StepPlan

NEVER: Final = 1 << 60
_NUMBER: Final = struct.Struct("<q")
_FIELDS: Final = (
    "hold_from",
    "is_held",
    "num_holds",
    "num_submits",
    "num_suspends",
    "refusals",
    "starves",
)
_POLL_SECONDS: Final = 0.001


class Control:
    """Maps the numbers. The test writes `hold_from`, `refusals` and `starves`, the worker the
    others.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def __repr__(self) -> str:
        return ", ".join(f"{name}: {self._read(name)}" for name in _FIELDS)

    def clear(self) -> None:
        """Lets the worker run freely."""
        for name in _FIELDS:
            self._write(name, NEVER if name == "hold_from" else 0)

    def release(self) -> None:
        """Lets every step start."""
        self.hold_from = NEVER

    def close(self) -> None:
        """Unmaps the file."""
        self._memory.close()

    @property
    def hold_from(self) -> int:
        """Returns the position in a sequence from which on no step starts."""
        return self._read("hold_from")

    @hold_from.setter
    def hold_from(self, position: int) -> None:
        self._write("hold_from", position)

    @property
    def is_held(self) -> bool:
        """Returns whether a step waits to start."""
        return bool(self._read("is_held"))

    @property
    def num_holds(self) -> int:
        """Returns how many steps have waited to start since `clear`."""
        return self._read("num_holds")

    @property
    def num_submits(self) -> int:
        """Returns how many submits the worker has got since `clear`."""
        return self._read("num_submits")

    @property
    def num_suspends(self) -> int:
        """Returns how many requests the worker was told to suspend since `clear`."""
        return self._read("num_suspends")

    @property
    def refusals(self) -> int:
        """Returns how many submits the worker is still to refuse because it is full."""
        return self._read("refusals")

    @refusals.setter
    def refusals(self, count: int) -> None:
        self._write("refusals", count)

    @property
    def starves(self) -> bool:
        """Returns whether a running sequence gets no more blocks."""
        return bool(self._read("starves"))

    @starves.setter
    def starves(self, value: bool) -> None:
        self._write("starves", int(value))

    def count_submit(self) -> None:
        """Counts a submit, in the worker."""
        self._write("num_submits", self.num_submits + 1)

    def count_suspend(self) -> None:
        """Counts a suspend, in the worker."""
        self._write("num_suspends", self.num_suspends + 1)

    def wait(self, plan: StepPlan) -> None:
        """Blocks the engine's thread as long as a step of the plan is at `hold_from` or beyond."""
        furthest = max(
            (step.start + len(step.token_ids) - 1 for step in plan.sequences), default=-1
        )
        if plan.sequences and furthest >= self.hold_from:
            self._write("is_held", 1)
            self._write("num_holds", self.num_holds + 1)
            while furthest >= self.hold_from:
                time.sleep(_POLL_SECONDS)
            self._write("is_held", 0)

    def _read(self, name: str) -> int:
        (value,) = _NUMBER.unpack_from(self._memory, 8 * _FIELDS.index(name))
        return int(value)

    def _write(self, name: str, value: int) -> None:
        _NUMBER.pack_into(self._memory, 8 * _FIELDS.index(name), value)
