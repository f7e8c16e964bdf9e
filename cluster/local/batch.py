"""Answers the requests of a file in the format of OpenAI's batches; a run can be continued.

A line of the output is written at once, when its request has been answered. A killed run leaves
complete lines, in any order, and at most one truncated line, at the end. The next run removes that
line and answers the requests that have no line.
"""

import asyncio
import errno
import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict

from ...proto.errors import InvalidArgument, Unavailable
from ...router.api.batches.lines import BatchRequest, CustomId, parse_batch
from ...router.json_lines import number_lines
from ..eval.gather import map_concurrently
from ..text_files import read_text

PATIENCE_SECONDS: Final = 600.0
"""The time for which a request is sent again to a busy service or engine."""

_ID: Final = "batch_req_"
_HEAD: Final = json.dumps({"id": _ID}).removesuffix('"}').encode()  # of each line of the output
_AGAIN: Final = "; the answers so far are kept, and the same command continues from there"
_RETRY_SECONDS: Final = 1.0  # if the service names no time
_CANNOT_SYNC: Final = (errno.EINVAL, errno.EROFS)  # of a pipe or a terminal
_BUSY: Final = (429, 502, 503)  # statuses of a service that may accept the request later


class BatchAnswerLine(BaseModel):
    """Describes the fields of an output line that a later run reads."""

    model_config = ConfigDict(strict=True)

    custom_id: CustomId
    response: dict[str, Any] | None
    error: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """Holds the answer of an endpoint; `body` is its JSON, also of an error."""

    status: int
    body: object
    request_id: str = ""
    retry_after: float | None = None


@dataclass(slots=True, kw_only=True)
class BatchCounts:
    """Counts the requests of a batch."""

    total: int
    skipped: int  # answered by an earlier run
    answered: int = 0
    failed: int = 0  # of those answered now, by an error


SendRequest = Callable[[BatchRequest], Awaitable[BatchAnswer]]
"""Sends a request and returns the answer. Raises Unavailable if it cannot be sent now."""


def read_requests(path: Path) -> list[BatchRequest]:
    """Returns the requests of a file. Raises InvalidArgument, which names the line."""
    return [request for _, request in parse_batch(read_text(path, "input"), path)]


def answer_line(request: BatchRequest, answer: BatchAnswer) -> bytes:
    """Returns the line of an output file."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": answer.body,
    }
    line = {"id": _ID + uuid.uuid4().hex, "custom_id": request.custom_id, "response": response}
    return json.dumps(line | {"error": None}).encode() + b"\n"


class BatchOutput:
    """Appends to a file of answers, with an exclusive lock. A context manager."""

    def __init__(self, path: Path, requests: Collection[str]) -> None:
        """Opens the file, removes a truncated last line, and reads the custom ids with an answer.

        Raises InvalidArgument if the file cannot be written, another process writes it, or it has
        other lines than answers to `requests`, which are custom ids. The file is then unchanged.
        Reads nothing from what is no regular file, such as a pipe.
        """
        self._path = path
        # Not for reading too: a pipe's end is never reported to a process that can read it itself.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._refused(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.answered = self._read(frozenset(requests))
        except BlockingIOError:
            os.close(self._file)
            raise InvalidArgument(f"{path} is written by another process", "output") from None
        except BaseException:
            os.close(self._file)
            raise

    def append(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Writes one line. Raises InvalidArgument if the file cannot be written."""
        data = answer_line(request, answer)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._refused(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            if kind is None and error.errno not in _CANNOT_SYNC:
                raise self._refused(error) from None
        finally:
            os.close(self._file)

    def _read(self, requests: frozenset[str]) -> set[str]:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            return set()  # a pipe or a terminal has no end, and keeps no answers
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise InvalidArgument(
                f"{self._path} cannot be read: {error.strerror}", "output"
            ) from None
        whole = data.rfind(b"\n") + 1
        tail = data[whole:]
        answered: set[str] = set()
        try:
            text = data[:whole].decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"{self._path}: not UTF-8", "output") from None
        for number, line in number_lines(text, self._path, BatchAnswerLine) if text.strip() else ():
            found, where = f"custom_id: {line.custom_id!r}", f"{self._path}:{number}"
            if line.custom_id in answered:
                raise InvalidArgument(f"{found} has two answers", where)
            if line.custom_id not in requests:
                raise InvalidArgument(f"{found} is not in the input", where)
            answered.add(line.custom_id)
        if not (tail.startswith(_HEAD) or _HEAD.startswith(tail)):
            raise InvalidArgument(f"{self._path}: the last line is not an answer", "output")
        if tail:
            os.ftruncate(self._file, whole)
        return answered

    def _refused(self, error: OSError) -> InvalidArgument:
        return InvalidArgument(f"{self._path} cannot be written: {error.strerror}", "output")


async def answer_requests(
    requests: Sequence[BatchRequest],
    output: BatchOutput,
    send: SendRequest,
    *,
    concurrency: int,
    patience_seconds: float,
    on_answer: Callable[[], object] = lambda: None,
) -> BatchCounts:
    """Sends all requests without an answer, `concurrency` at a time, and writes the answers.

    The answer to a refused request is the refusal. If the service is busy or cannot be reached, a
    request is sent again for `patience_seconds` after its first failure; then the function raises
    Unavailable.
    """
    rest = [request for request in requests if request.custom_id not in output.answered]
    counts = BatchCounts(total=len(requests), skipped=len(requests) - len(rest))

    async def answer(request: BatchRequest) -> None:
        found = await send_patiently(send, request, patience_seconds)
        output.append(request, found)
        counts.answered += 1
        counts.failed += found.status != 200
        on_answer()

    await map_concurrently(answer, rest, concurrency)
    return counts


async def send_patiently(send: SendRequest, request: BatchRequest, seconds: float) -> BatchAnswer:
    """Sends a request again while the service is busy.

    Raises Unavailable if it is still busy `seconds` after the first failure.
    """
    # Set at the first failure: before that, a request may take longer than the patience.
    deadline: float | None = None
    while True:
        try:
            answer = await send(request)
            if answer.status not in _BUSY:
                return answer
            reason = f"the service answers {answer.status}"
            retry_after = answer.retry_after
        except Unavailable as error:
            reason = error.message
            retry_after = error.retry_after
        delay = _RETRY_SECONDS if retry_after is None else retry_after
        now = time.monotonic()
        deadline = now + seconds if deadline is None else deadline
        if now + delay > deadline:
            raise Unavailable(reason + _AGAIN)
        await asyncio.sleep(delay)
