"""Stores responses, files and batches in one database, for all routers of a service."""

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from .batches import Batches
from .config import StorageConfig
from .database import ENTRY_BYTES, Database
from .interface import (
    MAX_FILES,
    MAX_RESPONSES,
    MAX_WAIT_SECONDS,
    Batch,
    BatchLine,
    KeyUsage,
    LineAnswer,
    LineKey,
    Owner,
    Page,
    StoredFile,
    StoredResponse,
)
from .usage import UsageTable

_FIND_FILE: Final = (
    "SELECT id, name, purpose, size, created, expires FROM files "
    "WHERE tenant = ? AND id = ? AND expires > ?"
)
_OLDEST_FILES: Final = (
    "SELECT id, name, purpose, size, created, expires FROM files "
    "WHERE tenant = ? AND expires > ? AND (purpose = ? OR ? = '') AND number > "
    "COALESCE((SELECT number FROM files WHERE tenant = ? AND id = ?), -1) "
    "ORDER BY number ASC LIMIT ?"
)
_NEWEST_FILES: Final = (
    "SELECT id, name, purpose, size, created, expires FROM files "
    "WHERE tenant = ? AND expires > ? AND (purpose = ? OR ? = '') AND number < "
    "COALESCE((SELECT number FROM files WHERE tenant = ? AND id = ?), 9e18) "
    "ORDER BY number DESC LIMIT ?"
)


class LocalStorage:
    """Implements Storage within one process. Not thread-safe: use it on one event loop."""

    def __init__(
        self,
        config: StorageConfig = StorageConfig(),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the database. Raises OSError or sqlite3.Error."""
        self._database = Database(config, clock)
        self._batches = Batches(self._database, monotonic)
        self._usage = UsageTable(self._database)
        self._has_lines = asyncio.Event()  # set when requests may have become free

    def __repr__(self) -> str:
        return "tandem store of responses, files and batches"

    def check_integrity(self) -> None:
        """Raises AssertionError unless the counts equal the sizes of the entries."""
        self._database.check_integrity()

    def close(self) -> None:
        self._database.close()

    async def keep_response(self, tenant: str, stored: StoredResponse) -> bool:
        size = len(stored.body) + len(stored.items) + ENTRY_BYTES
        with self._database.transaction() as database:
            if not database.has_room(tenant, size):
                return False
            database.execute(
                "REPLACE INTO responses (tenant, id, expires, size, body, items) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                tenant,
                stored.response_id,
                database.clock() + database.keep_seconds,
                size,
                stored.body,
                stored.items,
            )
            database.execute(
                "DELETE FROM responses WHERE number IN (SELECT number FROM responses "
                "WHERE tenant = ? ORDER BY number DESC LIMIT -1 OFFSET ?)",
                tenant,
                MAX_RESPONSES,
            )
        return True

    async def find_response(self, tenant: str, response_id: str) -> StoredResponse | None:
        row = self._database.one(
            "SELECT body, items FROM responses WHERE tenant = ? AND id = ? AND expires > ?",
            tenant,
            response_id,
            self._database.clock(),
        )
        if row is None:
            return None
        return StoredResponse(response_id=response_id, body=row[0], items=row[1])

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        return self._delete(
            "DELETE FROM responses WHERE tenant = ? AND id = ? AND expires > ?",
            tenant,
            response_id,
        )

    async def add_file(
        self, tenant: str, name: str, purpose: str, content: bytes, seconds: int | None = None
    ) -> StoredFile | None:
        with self._database.transaction() as database:
            database.delete_expired()  # which do not count
            (count,) = database.one("SELECT COUNT(*) FROM files WHERE tenant = ?", tenant)
            size = len(content) + ENTRY_BYTES
            if count >= MAX_FILES or not database.has_room(tenant, size):
                return None
            created = int(database.clock())
            kept = min(seconds or database.keep_seconds, database.keep_seconds)
            stored = StoredFile(
                file_id=f"file-{uuid.uuid4().hex}",
                name=name,
                purpose=purpose,
                size=len(content),
                created=created,
                expires=created + int(kept),
            )
            database.execute(
                "INSERT INTO files (tenant, id, expires, size, created, name, purpose, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                tenant,
                stored.file_id,
                stored.expires,
                size,
                created,
                name,
                purpose,
                content,
            )
        return stored

    async def find_file(self, tenant: str, file_id: str) -> StoredFile | None:
        row = self._database.one(
            _FIND_FILE,
            tenant,
            file_id,
            self._database.clock(),
        )
        return None if row is None else _file(row)

    async def list_files(self, tenant: str, page: Page, purpose: str = "") -> list[StoredFile]:
        rows = self._database.execute(
            _OLDEST_FILES if page.is_ascending else _NEWEST_FILES,
            tenant,
            self._database.clock(),
            purpose,
            purpose,
            tenant,
            page.after,
            page.limit,
        )
        return list(map(_file, rows))

    async def read_file(self, tenant: str, file_id: str, offset: int, size: int) -> bytes | None:
        row = self._database.one(
            "SELECT number FROM files WHERE tenant = ? AND id = ? AND expires > ?",
            tenant,
            file_id,
            self._database.clock(),
        )
        if row is None:
            return None
        with self._database.connection.blobopen("files", "content", row[0], readonly=True) as blob:
            blob.seek(min(offset, len(blob)))
            return blob.read(size)

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        return self._delete(
            "DELETE FROM files WHERE tenant = ? AND id = ? AND expires > ?", tenant, file_id
        )

    async def add_batch(self, batch: Batch, lines: Sequence[bytes]) -> Batch | None:
        added = self._batches.add(batch, lines)
        self._has_lines.set()
        return added

    async def find_batch(self, tenant: str, batch_id: str) -> Batch | None:
        return self._batches.find(tenant, batch_id)

    async def list_batches(self, tenant: str, page: Page) -> list[Batch]:
        return self._batches.list_page(tenant, page)

    async def cancel_batch(self, tenant: str, batch_id: str) -> Batch | None:
        return self._batches.cancel(tenant, batch_id)

    async def claim(
        self, runner: str, holding: Collection[LineKey], most: int, wait: float
    ) -> list[BatchLine]:
        claimed = self._batches.claim(runner, holding, most)
        if claimed or wait <= 0:
            return claimed
        self._has_lines.clear()
        try:
            async with asyncio.timeout(min(wait, MAX_WAIT_SECONDS)):
                await self._has_lines.wait()
        except TimeoutError:
            pass
        if not self._batches.has_lease(runner):  # it has stopped: nobody reads the reply
            return []
        return self._batches.claim(runner, holding, most)

    async def answer(self, answer: LineAnswer) -> None:
        self._batches.answer(answer)

    async def release(self, runner: str) -> None:
        self._batches.release(runner)
        self._has_lines.set()

    async def add_usage(self, source: str, number: int, usage: Sequence[KeyUsage]) -> None:
        self._usage.add(source, number, usage)

    async def find_usage(self, since: str, owner: Owner | None = None) -> list[KeyUsage]:
        return self._usage.find(since, owner)

    def _delete(self, statement: str, tenant: str, entry_id: str) -> bool:
        """Deletes an entry; returns False if it does not exist."""
        deleted = self._database.execute(
            statement,
            tenant,
            entry_id,
            self._database.clock(),
        )
        return deleted.rowcount > 0


def _file(row: Sequence[Any]) -> StoredFile:
    file_id, name, purpose, size, created, expires = row
    return StoredFile(
        file_id=file_id,
        name=name,
        purpose=purpose,
        size=size - ENTRY_BYTES,
        created=created,
        expires=expires,
    )
