"""Opens the database of the store, counts the bytes of each tenant, and makes room.

Triggers count the bytes, so a count and the entries that it counts change in one transaction.
"""

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .config import StorageConfig

FILE_NAME: Final = "storage.db"
ENTRY_BYTES: Final = 256
"""Bytes that an entry counts beside its content."""

_GIB: Final = 2**30
_VERSION: Final = 1

_TABLES: Final = """
CREATE TABLE usage (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE responses (
    tenant TEXT, id TEXT, expires REAL, size INTEGER, body BLOB, items BLOB,
    number INTEGER PRIMARY KEY AUTOINCREMENT, UNIQUE (tenant, id)
);
CREATE TABLE files (
    tenant TEXT, id TEXT, expires REAL, size INTEGER, created INTEGER, name TEXT, purpose TEXT,
    content BLOB, number INTEGER PRIMARY KEY AUTOINCREMENT, UNIQUE (tenant, id)
);
CREATE TABLE batches (
    tenant TEXT, id TEXT UNIQUE, expires REAL, size INTEGER, status TEXT, deadline REAL, facts TEXT,
    number INTEGER PRIMARY KEY AUTOINCREMENT
);
CREATE TABLE lines (
    tenant TEXT, batch TEXT, line INTEGER, size INTEGER, request BLOB, answer BLOB,
    has_failed INTEGER, PRIMARY KEY (batch, line)
);
CREATE INDEX open_lines ON lines (batch, line) WHERE answer IS NULL;
CREATE INDEX batches_by_status ON batches (status);
CREATE INDEX responses_by_expiry ON responses (expires);
CREATE INDEX files_by_expiry ON files (expires);
CREATE INDEX batches_by_expiry ON batches (expires);
"""
_COUNTED: Final = ("responses", "files", "batches", "lines")
_SIZES: Final = (
    "SELECT tenant, SUM(size) FROM (SELECT tenant, size FROM responses UNION ALL "
    "SELECT tenant, size FROM files UNION ALL SELECT tenant, size FROM batches UNION ALL "
    "SELECT tenant, size FROM lines) GROUP BY tenant"
)
_TRIGGERS: Final = """
CREATE INDEX {table}_by_tenant ON {table} (tenant, size);
CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN
    INSERT INTO usage VALUES (new.tenant, new.size)
    ON CONFLICT DO UPDATE SET bytes = bytes + new.size;
END;
CREATE TRIGGER {table}_removed AFTER DELETE ON {table} BEGIN
    UPDATE usage SET bytes = bytes - old.size WHERE tenant = old.tenant;
    DELETE FROM usage WHERE tenant = old.tenant AND bytes = 0;
END;
CREATE TRIGGER {table}_changed AFTER UPDATE OF size ON {table} BEGIN
    UPDATE usage SET bytes = bytes + new.size - old.size WHERE tenant = old.tenant;
END;
"""


class Database:
    """Holds the connection. Not thread-safe: use it on one event loop."""

    def __init__(self, config: StorageConfig, clock: Callable[[], float] = time.time) -> None:
        """Opens or makes the database in the configured folder, which one process at a time owns.

        Raises OSError or sqlite3.Error, at once if another process owns the folder.
        """
        self.clock = clock  # seconds since the epoch
        self.keep_seconds = config.keep_seconds
        self._tenant_bytes = int(config.tenant_gb * _GIB)
        self._total_bytes = int(config.total_gb * _GIB)
        path = ":memory:"
        if config.folder is not None:
            os.makedirs(config.folder, mode=0o700, exist_ok=True)
            path = str(Path(config.folder) / FILE_NAME)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # No timeout: waiting for another owner would delay the calls of all routers.
        self.connection = sqlite3.connect(
            path, timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            self._set_up()
        except sqlite3.Error as error:
            self.connection.close()
            # The lowest byte is the kind of an error.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise sqlite3.OperationalError(
                    f"storage.folder: the database in {config.folder} is in use by another "
                    "process; give each service a folder of its own"
                ) from error
            raise

    def _set_up(self) -> None:
        """Takes the lock of the file until `close`, and makes the tables of a new database."""
        # A lock that is never given up also needs no shared memory, which network disks lack.
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "secure_delete = FAST"):
            self.execute(f"PRAGMA {pragma}")
        self.execute("PRAGMA synchronous = NORMAL")  # no commit is lost unless the machine fails
        self.execute("PRAGMA recursive_triggers = ON")  # REPLACE deletes with its trigger
        if not self.one("PRAGMA user_version")[0]:
            triggers = "".join(_TRIGGERS.format(table=table) for table in _COUNTED)
            self.connection.executescript(
                f"BEGIN; {_TABLES} {triggers} PRAGMA user_version = {_VERSION}; COMMIT;"
            )

    def close(self) -> None:
        self.connection.close()

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self.connection.execute(statement, values)

    def one(self, statement: str, *values: Any) -> Any:
        """Returns the first row, or None."""
        return self.execute(statement, *values).fetchone()

    def transaction(self) -> "Transaction":
        """Returns a context manager: all statements within it count, or none."""
        return Transaction(self)

    def used(self, tenant: str) -> int:
        """Returns the bytes of a tenant."""
        row = self.one("SELECT bytes FROM usage WHERE tenant = ?", tenant)
        return 0 if row is None else int(row[0])

    def has_room(self, tenant: str, size: int) -> bool:
        """Returns True if `size` bytes fit now; deletes expired entries and the oldest responses.

        If all tenants together have too much, the tenant with the most bytes loses its responses.
        No response is deleted if the bytes do not fit in the end.
        """
        self.delete_expired()
        self.execute("SAVEPOINT room")
        fits = self._make_room(tenant, size)
        if not fits:
            self.execute("ROLLBACK TO room")
        self.execute("RELEASE room")
        return fits

    def _make_room(self, tenant: str, size: int) -> bool:
        """Deletes the oldest responses until `size` bytes fit; returns False if they never do."""
        excess = self.used(tenant) + size - self._tenant_bytes
        if excess > 0 and not self._delete_responses(tenant, excess):
            return False
        while (excess := self._total() + size - self._total_bytes) > 0:
            row = self.one(
                "SELECT tenant FROM usage WHERE tenant IN (SELECT tenant FROM responses) "
                "ORDER BY bytes DESC LIMIT 1"
            )
            if row is None or size > self._total_bytes:
                return False
            largest = str(row[0])
            if self.used(largest) < self.used(tenant):
                return False
            self._delete_oldest(largest)
        return True

    def delete_expired(self) -> None:
        """Deletes the entries that are too old; a batch that still runs stays."""
        now = self.clock()
        self.execute("DELETE FROM responses WHERE expires <= ?", now)
        self.execute("DELETE FROM files WHERE expires <= ?", now)
        self.execute(
            "DELETE FROM batches WHERE expires <= ? "
            "AND status NOT IN ('in_progress', 'cancelling')",
            now,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless the counts equal the sizes of the entries."""
        counted = dict(self.execute("SELECT tenant, bytes FROM usage").fetchall())
        found = dict(self.execute(_SIZES).fetchall())
        assert counted == found, (counted, found)

    def _total(self) -> int:
        return int(self.one("SELECT COALESCE(SUM(bytes), 0) FROM usage")[0])

    def _delete_responses(self, tenant: str, num_bytes: int) -> bool:
        """Deletes a tenant's oldest responses of this size; none if they are not enough."""
        row = self.one("SELECT COALESCE(SUM(size), 0) FROM responses WHERE tenant = ?", tenant)
        if row[0] < num_bytes:
            return False
        least = self.used(tenant) - num_bytes
        while self.used(tenant) > least:
            self._delete_oldest(tenant)
        return True

    def _delete_oldest(self, tenant: str) -> None:
        self.execute(
            "DELETE FROM responses WHERE number = "
            "(SELECT MIN(number) FROM responses WHERE tenant = ?)",
            tenant,
        )


class Transaction:
    """Begins at entry; commits at exit, or takes everything back after an exception."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> Database:
        self._database.execute("BEGIN IMMEDIATE")
        return self._database

    def __exit__(self, kind: object, *_error: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")
