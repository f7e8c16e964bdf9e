"""Adds up what the requests of each API key used, by day."""

from collections.abc import Sequence
from dataclasses import astuple, fields
from datetime import UTC, datetime, timedelta
from typing import Final

from .database import Database
from .interface import KeyUsage, Owner

KEPT_DAYS: Final = 400
MAX_ROWS: Final = 100_000
"""Rows of one answer: each key has one row a day."""

_FIELDS: Final = [field.name for field in fields(KeyUsage)]
_MAX_SOURCES: Final = 1_024

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS key_usage (
    day TEXT,
    key_name TEXT,
    tenant TEXT,
    requests INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key_name, tenant)
)
"""
_SOURCES: Final = """
CREATE TABLE IF NOT EXISTS key_usage_sources (
    place INTEGER PRIMARY KEY,
    source TEXT UNIQUE,
    last_number INTEGER NOT NULL
)
"""
_ADD: Final = """
INSERT INTO key_usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests,
    failed = failed + excluded.failed,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    generated_tokens = generated_tokens + excluded.generated_tokens
"""


def day_of(seconds: float) -> str:
    """Returns the day in UTC of a time in seconds since the epoch, as 2026-11-27."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


class UsageTable:
    """Holds the counts in the table of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute(_TABLE)
        database.execute(_SOURCES)

    def add(self, source: str, number: int, usage: Sequence[KeyUsage]) -> None:
        """Adds the counts of a report, unless it has been added before.

        `number` increases with each report of a source, which repeats a report without an answer.
        The store remembers it with the counts: it may restart between their commit and its answer.
        """
        with self._database.transaction() as database:
            row = database.one("SELECT last_number FROM key_usage_sources WHERE source = ?", source)
            if row is not None and number <= row[0]:
                return
            for each in usage:
                database.execute(_ADD, *astuple(each))
            oldest = datetime.fromtimestamp(database.clock(), UTC) - timedelta(days=KEPT_DAYS)
            database.execute("DELETE FROM key_usage WHERE day < ?", oldest.date().isoformat())
            database.execute(
                "REPLACE INTO key_usage_sources (source, last_number) VALUES (?, ?)", source, number
            )
            database.execute(
                "DELETE FROM key_usage_sources WHERE place IN "
                "(SELECT place FROM key_usage_sources ORDER BY place DESC LIMIT -1 OFFSET ?)",
                _MAX_SOURCES,
            )

    def find(self, since: str, owner: Owner | None) -> list[KeyUsage]:
        """Returns the counts from a day on, the newest first; of one key, or of all."""
        rows = self._database.execute(
            "SELECT * FROM key_usage WHERE day >= ? AND (? OR (key_name = ? AND tenant = ?)) "
            "ORDER BY day DESC, key_name, tenant LIMIT ?",
            since,
            owner is None,
            owner.key_name if owner else "",
            owner.tenant if owner else "",
            MAX_ROWS,
        )
        return [KeyUsage(**dict(zip(_FIELDS, row, strict=True))) for row in rows]
