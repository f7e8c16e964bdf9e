"""Defines the stored entries and the interface of the storage, which routers share."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

MAX_RESPONSES: Final = 10_000
"""Number of stored responses of one tenant; beyond it, the oldest is deleted."""

MAX_FILES: Final = 1_000
"""Number of files of one tenant."""

MAX_BATCHES: Final = 1_000
"""Number of batches of one tenant; beyond it, the oldest that has ended is deleted."""

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
"""Size of one uploaded file."""

MAX_ANSWER_BYTES: Final = 512 * 1024 * 1024
"""Size of the answers of one batch; each later one becomes an error. A file of them must fit into
SQLite's largest blob of 1e9 bytes, also with an error of 6 kB for each of MAX_BATCH_LINES.
"""

MAX_BATCH_LINES: Final = 50_000
"""Number of requests in one batch; OpenAI has the same bound."""

MAX_WAIT_SECONDS: Final = 5.0
"""The longest wait of `Storage.claim`."""

BATCH_SECONDS: Final = 86_400
"""A batch that has not ended after this time ends as `expired`; OpenAI calls it `24h`."""

BatchStatus = Literal["in_progress", "cancelling", "completed", "failed", "cancelled", "expired"]
FINISHED: Final = frozenset({"completed", "failed", "cancelled", "expired"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """Holds a response of the Responses API."""

    response_id: str
    body: bytes  # JSON
    items: bytes  # JSON: the list of the input items, which begins with the earlier conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Describes a file. Times are in seconds since the epoch."""

    file_id: str
    name: str
    purpose: str
    size: int  # bytes
    created: int
    expires: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Selects a part of a list, which begins with the newest entry unless `is_ascending`."""

    limit: int
    after: str = ""  # the id of the entry before the first one; "": from the start
    is_ascending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Names the caller that a batch is answered for."""

    tenant: str
    key_name: str  # "" for a caller without a key


@dataclass(slots=True, kw_only=True)
class Batch:
    """Describes a batch. Times are in seconds since the epoch; None: not reached."""

    batch_id: str
    owner: Owner
    endpoint: str
    input_file_id: str
    metadata: Mapping[str, str] | None
    created: int
    expires: int
    output_seconds: int | None  # the time for which its output files are kept, if requested
    total: int
    status: BatchStatus = "in_progress"
    completed: int = 0  # requests with an answer of status 200
    failed: int = 0
    answer_bytes: int = 0
    errors: Sequence[Mapping[str, Any]] = ()  # of an input that cannot be read
    ended: int | None = None
    cancelling: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """Holds one request of a batch, for the router that claims it."""

    batch_id: str
    number: int  # from 0 on
    request: bytes  # JSON, as in the input file
    owner: Owner
    expires: int  # of the batch


LineKey = tuple[str, int]
"""The id of a batch and the number of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAnswer:
    """Holds the line of the output, or of the error file, that answers a request."""

    key: LineKey
    line: bytes  # JSON with a line end
    has_failed: bool = field(default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUsage:
    """Counts the requests of one key that ended on one day."""

    day: str  # in UTC, as 2026-11-27
    key_name: str  # "" for callers without a key
    tenant: str
    requests: int  # those that were not refused
    failed: int  # of these, by an error of the service
    prompt_tokens: int  # of requests with a first token
    cached_tokens: int  # of these, from a prefix cache
    generated_tokens: int


class Storage(Protocol):
    """Stores responses, files and batches, and counts the usage of keys.

    A tenant finds only its own entries; the others do not exist for it. Each method raises
    Unavailable if the store does not answer in time.
    """

    async def keep_response(self, tenant: str, stored: StoredResponse) -> bool:
        """Stores a response; returns False if it has no room."""

    async def find_response(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Returns a response, or None."""

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        """Deletes a response; returns False if it does not exist."""

    async def add_file(
        self, tenant: str, name: str, purpose: str, content: bytes, seconds: int | None = None
    ) -> StoredFile | None:
        """Stores a file for this time, at most the configured one; returns None without room."""

    async def find_file(self, tenant: str, file_id: str) -> StoredFile | None:
        """Returns the description of a file, or None."""

    async def list_files(self, tenant: str, page: Page, purpose: str = "") -> list[StoredFile]:
        """Returns up to `page.limit` files; if a purpose is given, only its files."""

    async def read_file(self, tenant: str, file_id: str, offset: int, size: int) -> bytes | None:
        """Returns a part of a file's content, or None if there is no such file."""

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        """Deletes a file; returns False if it does not exist."""

    async def add_batch(self, batch: Batch, lines: Sequence[bytes]) -> Batch | None:
        """Stores a batch and its requests; returns None without room."""

    async def find_batch(self, tenant: str, batch_id: str) -> Batch | None:
        """Returns a batch, or None."""

    async def list_batches(self, tenant: str, page: Page) -> list[Batch]:
        """Returns up to `page.limit` batches."""

    async def cancel_batch(self, tenant: str, batch_id: str) -> Batch | None:
        """Drops the requests that no router answers yet. Returns the batch, or None.

        A batch that has ended stays as it is.
        """

    async def claim(
        self, runner: str, holding: Collection[LineKey], most: int, wait: float
    ) -> list[BatchLine]:
        """Waits up to `wait` seconds for requests that nobody answers; returns up to `most`.

        `runner` holds them, and those in `holding`, while it claims again within the lease.
        If `runner` is released during the wait, it gets none and holds none.
        """

    async def answer(self, answer: LineAnswer) -> None:
        """Stores the answer to a request; the first answer counts."""

    async def release(self, runner: str) -> None:
        """Lets others claim the requests that `runner` holds."""

    async def add_usage(self, source: str, number: int, usage: Sequence[KeyUsage]) -> None:
        """Adds counts of requests, unless this report or a later one of `source` was added.

        `number` counts the reports of `source`, which repeats a report without an answer.
        """

    async def find_usage(self, since: str, owner: Owner | None = None) -> list[KeyUsage]:
        """Returns the counts from the day `since` on; of one key, or of all."""
