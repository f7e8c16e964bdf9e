"""Reads files again when they change: keys and certificates are replaced while the service runs."""

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
    """Loads a value from files, and again when one of them is another or has changed; a value that
    cannot be loaded leaves the one before. Looking costs one stat a file and second; a change of a
    link to a folder is seen, too.
    """

    def __init__(
        self, paths: Sequence[Path], load: Callable[[], _T], use: Callable[[_T], None]
    ) -> None:
        """Loads at once. `load` runs in a thread later on, and raises InvalidArgument; `use` gets
        what it returns, in the event loop.
        """
        self._paths = paths
        self._load = load
        self._use = use
        self._seen = self._stamps()  # before the files are read: a change meanwhile is found later
        use(load())

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Looks once."""
        found = self._stamps()
        if found == self._seen:
            return
        self._seen = found
        try:
            value = await asyncio.to_thread(self._load)
        except InvalidArgument as error:
            _log.warning("the change is not taken: %s", error)
        else:
            self._use(value)

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
