"""Runs the store in a thread, so that a slow disk does not delay the directory beside it."""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from ....router.storage.config import StorageConfig
from ....router.storage.local import LocalStorage

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0
"""The time after a failure to open the store in which it is not opened again."""
MAX_CALLS: Final = 500
"""Calls at a time: half as many as the directory's actor takes. So a slow disk leaves it calls for
the members.
"""


class StorageHost:
    """Opens a LocalStorage at the first call, in an event loop of its own."""

    def __init__(self, config: StorageConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_calls = 0  # that have not ended
        # The rest belongs to the thread.
        self._store: LocalStorage | None = None
        self._failure = ""  # of the last attempt to open the store
        self._next_attempt = 0.0  # by the clock

    async def call(self, method: str, *args: Any) -> Any:
        """Returns the result of a method of Storage.

        Raises OSError or sqlite3.Error if the database cannot be opened or written, for instance
        because its last owner has not ended yet; a call after RETRY_SECONDS tries again. Raises
        OSError beyond MAX_CALLS.
        """
        if self._num_calls >= MAX_CALLS:
            raise OSError(f"the store of responses and batches is slow: {MAX_CALLS} calls wait")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, name="tandem-storage", daemon=True
            ).start()
        self._num_calls += 1
        try:
            work = asyncio.run_coroutine_threadsafe(self._call(method, args), self._loop)
            return await asyncio.wrap_future(work)
        finally:
            self._num_calls -= 1

    async def _call(self, method: str, args: Any) -> Any:
        store = self._store if self._store is not None else self._open()
        try:
            return await getattr(store, method)(*args)
        except (OSError, sqlite3.Error) as error:
            log.warning("the store of responses and batches fails: %s", error)
            raise

    def _open(self) -> LocalStorage:
        """Opens the store; soon after a failure, only repeats the error."""
        if self._clock() < self._next_attempt:
            raise OSError(self._failure)
        try:
            self._store = LocalStorage(self._config)
        except (OSError, sqlite3.Error) as error:
            self._failure = str(error)
            self._next_attempt = self._clock() + RETRY_SECONDS
            log.warning("the store of responses and batches cannot be opened: %s", error)
            raise
        return self._store
