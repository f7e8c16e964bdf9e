"""Reloads files of keys and certificates when they change."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from ...proto.errors import InvalidArgument

_log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0

_T = TypeVar("_T")


class FileWatch(Generic[_T]):
    """Loads a value from files, and again when a file is replaced or changed.

    If the new value cannot be loaded, the old one stays in use, and each check tries again: the
    reason may pass, for example too many open files. A check costs one stat per file and second,
    and detects a changed link to a folder as well.
    """

    def __init__(
        self, paths: Sequence[Path], load: Callable[[], _T], use: Callable[[_T], None]
    ) -> None:
        """Loads the value and passes it to `use`.

        `load` raises InvalidArgument; later it runs in a thread. `use` runs in the event loop.
        """
        self._paths = paths
        self._load = load
        self._use = use
        self._seen = self._stamps()  # before `load`: the next check finds a change made meanwhile
        self._problem = ""  # the reason why the files as they are now are not in use
        use(load())

    async def run(self) -> None:
        """Checks the files until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Checks the files once and reloads them after a change. Logs each new problem once."""
        found = self._stamps()
        if found == self._seen:
            self._problem = ""
            return
        try:
            value = await asyncio.to_thread(self._load)
        except InvalidArgument as error:
            if self._problem != (problem := str(error)):
                self._problem = problem
                _log.warning(
                    "a changed file cannot be loaded, so its earlier content stays in use: %s",
                    problem,
                )
        else:
            self._seen = found
            self._problem = ""
            self._use(value)

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
