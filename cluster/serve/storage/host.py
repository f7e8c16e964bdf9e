"""Runs the store in a thread, so that a slow disk does not delay the directory beside it."""

import asyncio
import logging
import sqlite3
import threading
from typing import Any

from ....router.storage.config import StorageConfig
from ....router.storage.local import LocalStorage

log = logging.getLogger(__name__)


class StorageHost:
    """Opens a LocalStorage at the first call, in an event loop of its own."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store: LocalStorage | None = None

    async def call(self, method: str, *args: Any) -> Any:
        """Returns the result of a method of Storage.

        Raises OSError or sqlite3.Error if the database cannot be opened or written, for instance
        because its last owner has not ended yet; a later call tries again.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, name="tandem-storage", daemon=True
            ).start()
        work = asyncio.run_coroutine_threadsafe(self._call(method, args), self._loop)
        return await asyncio.wrap_future(work)

    async def _call(self, method: str, args: Any) -> Any:
        try:
            if self._store is None:
                self._store = LocalStorage(self._config)
            return await getattr(self._store, method)(*args)
        except (OSError, sqlite3.Error) as error:
            log.warning("the store of responses and batches fails: %s", error)
            raise
