"""Answers the requests of a file in the format of OpenAI's batches, whatever interrupts that: begun
again, it goes on.

A line of the output is written when its request has been answered, and whole. What a killed run
leaves is whole lines, in any order, and at most one that is cut, at the end. The next run removes
that one and answers what has no line.
"""

import asyncio
import fcntl
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from ...proto.errors import InvalidArgument, Unavailable
from ..eval.gather import map_concurrently
from ..text_files import number_lines, read_text

_ID: Final = "batch_req_"
_HEAD: Final = json.dumps({"id": _ID}).removesuffix('"}').encode()  # of each line of the output
_AGAIN: Final = "; what is answered is kept, and the same command goes on from there"
_RETRY_SECONDS: Final = 1.0  # where the service names no time
_BUSY: Final = (429, 502, 503)  # statuses of a service that may take the request later

CustomId = Annotated[str, Field(min_length=1, max_length=512)]


class BatchRequest(BaseModel):
    """Holds a line of the input."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    custom_id: CustomId
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class BatchAnswerLine(BaseModel):
    """Holds what is read again of a line of the output."""

    model_config = ConfigDict(strict=True)

    custom_id: CustomId
    response: dict[str, Any] | None
    error: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """Holds what an endpoint has answered; `body` is its JSON, an error's too."""

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
"""Has a request answered. Raises Unavailable if it cannot be sent now."""


def read_requests(path: Path) -> list[BatchRequest]:
    """Returns the requests of a file. Raises InvalidArgument, which names the line."""
    lines: dict[str, int] = {}
    numbered = number_lines(read_text(path, "input"), path, BatchRequest)
    for number, request in numbered:
        if request.body.get("stream"):
            raise InvalidArgument("body.stream: a batch has no streams", f"{path}:{number}")
        first = lines.setdefault(request.custom_id, number)
        if first != number:
            raise InvalidArgument(
                f"custom_id: {request.custom_id!r} is that of line {first}, too", f"{path}:{number}"
            )
    return [request for _, request in numbered]


class BatchOutput:
    """Appends to a file of answers, which nobody else may do meanwhile. A context manager."""

    def __init__(self, path: Path, requests: Collection[str]) -> None:
        """Opens the file, removes a last line that is cut, and reads which of `requests`, custom
        ids, have an answer.

        Raises InvalidArgument if it cannot be written, another process writes it, or has lines of
        something else; it stays as it is then.
        """
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
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
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        }
        line = {"id": _ID + uuid.uuid4().hex, "custom_id": request.custom_id, "response": response}
        data = json.dumps(line | {"error": None}).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._refused(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):  # of a file that is none, such as a pipe
            os.fsync(self._file)
        os.close(self._file)

    def _read(self, requests: frozenset[str]) -> set[str]:
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        tail = data[whole:]
        answered: set[str] = set()
        try:
            text = data[:whole].decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"{self._path}: not UTF-8", "output") from None
        for number, line in number_lines(text, self._path, BatchAnswerLine) if text.strip() else ():
            if line.custom_id in answered or line.custom_id not in requests:
                what = (
                    "has two answers"
                    if line.custom_id in answered
                    else "is no request of the input"
                )
                raise InvalidArgument(
                    f"custom_id: {line.custom_id!r} {what}", f"{self._path}:{number}"
                )
            answered.add(line.custom_id)
        if not (tail.startswith(_HEAD) or _HEAD.startswith(tail)):
            raise InvalidArgument(
                f"{self._path}: its last line, which has no end, is no answer", "output"
            )
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
    """Has all requests without an answer answered, `concurrency` at a time; a request that is
    refused gets the refusal as its answer. A service that is busy or away is asked again,
    `patience_seconds` long from the first failure on.

    Raises Unavailable if it is still away then.
    """
    rest = [request for request in requests if request.custom_id not in output.answered]
    counts = BatchCounts(total=len(requests), skipped=len(requests) - len(rest))

    async def answer(request: BatchRequest) -> None:
        found = await _send_patiently(send, request, patience_seconds)
        output.append(request, found)
        counts.answered += 1
        counts.failed += found.status != 200
        on_answer()

    await map_concurrently(answer, rest, concurrency)
    return counts


async def _send_patiently(send: SendRequest, request: BatchRequest, seconds: float) -> BatchAnswer:
    deadline: float | None = (
        None  # a request may take longer than the patience before its service goes away
    )
    while True:
        try:
            answer = await send(request)
            if answer.status not in _BUSY:
                return answer
            reason, delay = f"the service answers {answer.status}", answer.retry_after
        except Unavailable as error:
            reason, delay = error.message, error.retry_after
        delay = _RETRY_SECONDS if delay is None else delay
        now = time.monotonic()
        deadline = now + seconds if deadline is None else deadline
        if now + delay > deadline:
            raise Unavailable(reason + _AGAIN)
        await asyncio.sleep(delay)
