"""Keeps batches: their requests, the runners that answer them now, and their answers.

A runner claims requests. It holds them while it claims again within LEASE_SECONDS; after that, any
runner may claim them. The first answer to a request counts, so each has exactly one line in the
files of the batch, whichever routers die. The holders are not in the database: after a restart of
the storage, runners repeat with their next claim which requests they hold.
"""

import json
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from .database import ENTRY_BYTES, Database
from .interface import (
    BATCH_SECONDS,
    FINISHED,
    MAX_ANSWER_BYTES,
    MAX_BATCHES,
    Batch,
    BatchLine,
    BatchStatus,
    LineAnswer,
    LineKey,
    Owner,
    Page,
)

LEASE_SECONDS: Final = 15.0
"""Three times the longest wait of a claim."""

_OLDEST_BATCHES: Final = (
    "SELECT facts FROM batches WHERE tenant = ? AND number > COALESCE("
    "(SELECT number FROM batches WHERE tenant = ? AND id = ?), -1) ORDER BY number ASC LIMIT ?"
)
_NEWEST_BATCHES: Final = (
    "SELECT facts FROM batches WHERE tenant = ? AND number < COALESCE("
    "(SELECT number FROM batches WHERE tenant = ? AND id = ?), 9e18) ORDER BY number DESC LIMIT ?"
)
_OUTPUT_PURPOSE: Final = "batch_output"


class Batches:
    """Keeps the batches of one database."""

    def __init__(self, database: Database, monotonic: Callable[[], float]) -> None:
        self._database = database
        self._monotonic = monotonic
        self._seen: dict[str, float] = {}  # by runner, the time of its last claim
        self._holders: dict[LineKey, str] = {}  # the runner that answers a request

    def add(self, batch: Batch, lines: Sequence[bytes]) -> Batch | None:
        """Stores a batch and its requests; returns None without room.

        At the bound of their number, the oldest batch that has ended makes room.
        """
        tenant = batch.owner.tenant
        facts = json.dumps(asdict(batch))
        size = sum(map(len, lines)) + len(facts) + ENTRY_BYTES * (len(lines) + 1)
        with self._database.transaction() as database:
            database.delete_expired()  # which do not count
            (count,) = database.one("SELECT COUNT(*) FROM batches WHERE tenant = ?", tenant)
            is_full = count >= MAX_BATCHES
            oldest = self._oldest_ended(tenant) if is_full else None
            # Asked for room last, because this deletes responses.
            if (is_full and oldest is None) or not database.has_room(tenant, size):
                return None
            if oldest is not None:
                database.execute("DELETE FROM batches WHERE number = ?", oldest)
            database.execute(
                "INSERT INTO batches (tenant, id, expires, size, status, deadline, facts) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                tenant,
                batch.batch_id,
                batch.created + BATCH_SECONDS + database.keep_seconds,
                len(facts) + ENTRY_BYTES,
                batch.status,
                batch.expires,
                facts,
            )
            database.connection.executemany(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?, NULL, 0)",
                (
                    (tenant, batch.batch_id, number, len(line) + ENTRY_BYTES, line)
                    for number, line in enumerate(lines)
                ),
            )
        return batch

    def find(self, tenant: str, batch_id: str) -> Batch | None:
        row = self._database.one(
            "SELECT facts FROM batches WHERE tenant = ? AND id = ?", tenant, batch_id
        )
        return None if row is None else _batch(row[0])

    def list_page(self, tenant: str, page: Page) -> list[Batch]:
        rows = self._database.execute(
            _OLDEST_BATCHES if page.is_ascending else _NEWEST_BATCHES,
            tenant,
            tenant,
            page.after,
            page.limit,
        )
        return [_batch(facts) for (facts,) in rows]

    def cancel(self, tenant: str, batch_id: str) -> Batch | None:
        """Drops the requests that no runner holds. Returns the batch, or None."""
        self._drop_silent()
        batch = self.find(tenant, batch_id)
        if batch is None or batch.status != "in_progress":
            return batch
        batch.status = "cancelling"
        batch.cancelling = int(self._database.clock())
        with self._database.transaction():
            self._save(batch)
            self._drop_unheld(batch)
            self._finish_if_answered(batch)
        return batch

    def claim(self, runner: str, holding: Collection[LineKey], most: int) -> list[BatchLine]:
        """Returns up to `most` requests that no runner holds; `runner` holds them then.

        Tenants take turns: the one with the fewest held requests is next. Also ends the batches and
        deletes the entries that have expired.
        """
        self._seen[runner] = self._monotonic()
        # The runner has given the others up, or the reply to its claim was lost.
        kept = {key: holder for key, holder in self._holders.items() if holder != runner}
        self._holders = dict.fromkeys(holding, runner) | kept
        self._drop_silent()
        self._end_expired()
        self._database.delete_expired()
        claimed: list[BatchLine] = []
        rows = self._database.execute(
            "SELECT id, tenant FROM batches WHERE status = 'in_progress' AND deadline > ? "
            "ORDER BY number",
            self._database.clock(),
        )
        tenants: dict[str, str] = dict(rows)  # by batch with free requests, the oldest first
        held = Counter(tenants[batch_id] for batch_id, _ in self._holders if batch_id in tenants)
        while len(claimed) < most and tenants:
            batch_id = min(tenants, key=lambda each: held[tenants[each]])
            line = self._next_line(batch_id)
            if line is None:
                del tenants[batch_id]
                continue
            self._holders[batch_id, line.number] = runner
            held[tenants[batch_id]] += 1
            claimed.append(line)
        return claimed

    def answer(self, answer: LineAnswer) -> None:
        """Stores an answer, unless the request has one; the last answer ends the batch."""
        batch_id, number = answer.key
        self._holders.pop(answer.key, None)
        row = self._database.one("SELECT facts FROM batches WHERE id = ?", batch_id)
        batch = None if row is None else _batch(row[0])
        if batch is None or batch.status in FINISHED:
            return
        with self._database.transaction():
            self._store(batch, number, answer)
            self._save(batch)
            self._finish_if_answered(batch)

    def has_lease(self, runner: str) -> bool:
        """Returns False if the runner was released, or has not claimed for the time of a lease."""
        return runner in self._seen

    def release(self, runner: str) -> None:
        """Lets others claim the requests that `runner` holds."""
        self._seen.pop(runner, None)
        self._drop_silent()

    def _oldest_ended(self, tenant: str) -> int | None:
        """Returns the number of the oldest batch of a tenant that has ended, or None."""
        (number,) = self._database.one(
            "SELECT MIN(number) FROM batches "
            "WHERE tenant = ? AND status NOT IN ('in_progress', 'cancelling')",
            tenant,
        )
        return None if number is None else int(number)

    def _next_line(self, batch_id: str) -> BatchLine | None:
        """Returns the first request of a batch without an answer that nobody holds."""
        rows = self._database.execute(
            "SELECT line, request FROM lines WHERE batch = ? AND answer IS NULL ORDER BY line",
            batch_id,
        )
        for number, request in rows:
            if (batch_id, number) not in self._holders:
                (facts,) = self._database.one("SELECT facts FROM batches WHERE id = ?", batch_id)
                batch = _batch(facts)
                return BatchLine(
                    batch_id=batch_id,
                    number=number,
                    request=request,
                    owner=batch.owner,
                    expires=batch.expires,
                )
        return None

    def _store(self, batch: Batch, number: int, answer: LineAnswer) -> None:
        """Writes the answer in place of the request, or an error if the tenant has no room."""
        line = answer.line
        has_failed = answer.has_failed
        row = self._database.one(
            "SELECT request FROM lines WHERE batch = ? AND line = ? AND answer IS NULL",
            batch.batch_id,
            number,
        )
        if row is None:
            return
        room = len(line) - len(row[0])
        is_too_much = batch.answer_bytes + len(line) > MAX_ANSWER_BYTES
        if is_too_much or (room > 0 and not self._database.has_room(batch.owner.tenant, room)):
            line = error_line(
                json.loads(row[0])["custom_id"], "storage_full", "the answer found no room"
            )
            has_failed = True
        self._write_answers(batch, {number: line}, has_failed=has_failed)

    def _write_answers(self, batch: Batch, lines: Mapping[int, bytes], *, has_failed: bool) -> None:
        """Writes answers by their numbers in place of the requests, and counts them."""
        self._database.connection.executemany(
            "UPDATE lines SET answer = ?, request = NULL, size = ?, has_failed = ? "
            "WHERE batch = ? AND line = ?",
            [
                (line, len(line) + ENTRY_BYTES, has_failed, batch.batch_id, number)
                for number, line in lines.items()
            ],
        )
        batch.answer_bytes += sum(map(len, lines.values()))
        if has_failed:
            batch.failed += len(lines)
        else:
            batch.completed += len(lines)

    def _end_expired(self) -> None:
        """Answers the requests of the oldest batch that has taken too long with an error.

        One batch at a time: this takes a second for 50,000 requests, and other calls wait for it.
        """
        row = self._database.one(
            "SELECT facts FROM batches WHERE status = 'in_progress' AND deadline <= ? "
            "ORDER BY number LIMIT 1",
            self._database.clock(),
        )
        if row is None:
            return
        batch = _batch(row[0])
        with self._database.transaction():
            rows = self._database.execute(
                "SELECT line, request FROM lines WHERE batch = ? AND answer IS NULL",
                batch.batch_id,
            )
            errors = {number: _expired_line(request) for number, request in rows}
            # Errors are kept without asking for room: none may be lost.
            self._write_answers(batch, errors, has_failed=True)
            self._finish(batch, "expired")

    def _drop_unheld(self, batch: Batch) -> None:
        """Deletes the requests without an answer that nobody holds."""
        rows = self._database.execute(
            "SELECT line FROM lines WHERE batch = ? AND answer IS NULL", batch.batch_id
        ).fetchall()
        for (number,) in rows:
            if (batch.batch_id, number) not in self._holders:
                self._database.execute(
                    "DELETE FROM lines WHERE batch = ? AND line = ?", batch.batch_id, number
                )

    def _drop_silent(self) -> None:
        """Forgets the runners that have not claimed for the time of a lease."""
        least = self._monotonic() - LEASE_SECONDS
        self._seen = {runner: seen for runner, seen in self._seen.items() if seen >= least}
        lost = [key for key, runner in self._holders.items() if runner not in self._seen]
        for key in lost:
            del self._holders[key]
        cancelling = self._database.execute(
            "SELECT facts FROM batches WHERE status = 'cancelling'"
        ).fetchall()
        for (facts,) in cancelling:
            batch = _batch(facts)
            with self._database.transaction():
                self._drop_unheld(batch)
                self._finish_if_answered(batch)

    def _finish_if_answered(self, batch: Batch) -> None:
        row = self._database.one(
            "SELECT 1 FROM lines WHERE batch = ? AND answer IS NULL", batch.batch_id
        )
        if row is None:
            self._finish(batch, "cancelled" if batch.status == "cancelling" else "completed")

    def _finish(self, batch: Batch, status: BatchStatus) -> None:
        """Turns the answers into the output file and the error file."""
        batch.status = status
        batch.ended = int(self._database.clock())
        batch.output_file_id = self._write_file(batch, "output", has_failed=False)
        batch.error_file_id = self._write_file(batch, "error", has_failed=True)
        self._database.execute("DELETE FROM lines WHERE batch = ?", batch.batch_id)
        self._save(batch)

    def _write_file(self, batch: Batch, kind: str, *, has_failed: bool) -> str | None:
        """Joins answers, in the order of the requests; returns the id, or None without answers.

        The lines, whose room the file takes, are deleted later in the same transaction.
        """
        database = self._database
        which = (batch.batch_id, has_failed)
        (size,) = database.one(
            "SELECT SUM(LENGTH(answer)) FROM lines WHERE batch = ? AND has_failed = ? "
            "AND answer IS NOT NULL",
            *which,
        )
        if size is None:
            return None
        file_id = f"file-{uuid.uuid4().hex}"
        now = int(database.clock())
        keep = min(batch.output_seconds or database.keep_seconds, database.keep_seconds)
        cursor = database.execute(
            "INSERT INTO files (tenant, id, expires, size, created, name, purpose, content) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ZEROBLOB(?))",
            batch.owner.tenant,
            file_id,
            now + int(keep),
            size + ENTRY_BYTES,
            now,
            f"{batch.batch_id}_{kind}.jsonl",
            _OUTPUT_PURPOSE,
            size,
        )
        row = cursor.lastrowid
        assert row is not None
        with database.connection.blobopen("files", "content", row) as content:
            answers = database.execute(
                "SELECT answer FROM lines WHERE batch = ? AND has_failed = ? "
                "AND answer IS NOT NULL ORDER BY line",
                *which,
            )
            for (answer,) in answers:
                content.write(answer)
        return file_id

    def _save(self, batch: Batch) -> None:
        self._database.execute(
            "UPDATE batches SET facts = ?, status = ? WHERE id = ?",
            json.dumps(asdict(batch)),
            batch.status,
            batch.batch_id,
        )


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """Returns the line of an error file for a request that has no response."""
    line = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return json.dumps(line).encode() + b"\n"


def _expired_line(request: bytes) -> bytes:
    """Returns the line of an error file for a request of a batch that has taken too long."""
    return error_line(
        json.loads(request)["custom_id"],
        "batch_expired",
        "the batch has expired before this request was answered",
    )


def _batch(facts: str) -> Batch:
    found: dict[str, Any] = json.loads(facts)
    return Batch(**found | {"owner": Owner(**found["owner"])})
