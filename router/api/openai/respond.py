"""Answers one HTTP request: reads its body within bounds, and turns errors into responses."""

import asyncio
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from ....proto.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    TandemError,
    TooLarge,
    UnknownEncoding,
)
from ....proto.limits import MAX_MESSAGE_BYTES
from ...frontend.fair_threads import PARSER, PARSING
from ...frontend.prepare import RequestContext
from ...frontend.validation import check_request_id
from ...telemetry.trace import TRACEPARENT, parse_traceparent
from ..browsers import check_json
from ..service import tandem_errors_only
from .answers import OPENAI_FORM
from .openapi import MAX_TIMEOUT_SECONDS, REQUEST_ID, REQUEST_TIMEOUT
from .parsing import MAX_NAME, http_field
from .refused_body import RefusedBody
from .resume import header_event_id
from .writers import AnswerForm

_T = TypeVar("_T")

_MAX_BODY_SECONDS: Final = 60
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS  # makes zlib expect the header of a gzip file
_DISCONNECTED: Final = "the client has disconnected"


async def respond(
    request: Request,
    answer: Callable[[bytes, str, RequestContext], Awaitable[Response]],
    form: AnswerForm = OPENAI_FORM,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
    is_form: bool = False,
    outlives_client: bool = False,
    keepalive_seconds: float | None = None,
) -> Response:
    """Reads the body and answers it; turns errors into responses of `form`.

    `max_bytes`: of the body. `is_form`: the body is not JSON. `outlives_client`: the work goes
    on if the client disconnects, because it stores something. `keepalive_seconds`: of a stream, as
    in RequestContext. The header `x-request-id` of the response has the request's id.
    """
    arrived = time.monotonic()
    request_id = uuid.uuid4().hex
    response: Response
    is_read = False
    try:
        with tandem_errors_only():
            request_id = _request_id(request) or request_id
            timeout = _timeout(request.headers.get(REQUEST_TIMEOUT))
            context = RequestContext(
                arrived=arrived,
                deadline=None if timeout is None else arrived + timeout,
                caller=request.state.caller,
                event_id=header_event_id(request.headers),
                keepalive_seconds=keepalive_seconds,
                trace=parse_traceparent(request.headers.get(TRACEPARENT)),
            )
            is_gzip = _is_gzip(request.headers.getlist("content-encoding"))
            body = await _read(request, max_bytes)
            is_read = True
            if not is_form:
                check_json(request.headers)
            if is_gzip:
                body = await PARSER.run(context.caller.fairness_id, len(body), _gunzip, body)
            answered = answer(body, request_id, context)
            if not outlives_client:
                answered = _while_connected(request.receive, answered)
            response = await answered
    except TooLarge as error:
        response = form.error_response(error, http_field)
        if not is_read:
            response = RefusedBody(response)
    except TandemError as error:
        response = form.error_response(error, http_field)
    response.headers[REQUEST_ID] = request_id
    return response


async def respond_without_body(
    request: Request, answer: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Answers a request whose body is not read; turns errors into responses of OpenAI's API.

    The response has the same header `x-request-id` as of `respond`.
    """
    request_id = uuid.uuid4().hex
    try:
        with tandem_errors_only():
            request_id = _request_id(request) or request_id
            response = await answer(request)
    except TandemError as error:
        response = OPENAI_FORM.error_response(error, http_field)
    # A body that was read has its header already, also if it was refused.
    response.headers.setdefault(REQUEST_ID, request_id)
    return response


def _request_id(request: Request) -> str:
    """Returns the id in the header; "" without one. Raises InvalidArgument."""
    request_id = request.headers.get(REQUEST_ID, "")
    check_request_id(request_id)
    return request_id


def _timeout(header: str | None) -> float | None:
    """Returns the seconds of the header. Raises InvalidArgument."""
    if header is None:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(header)) <= MAX_TIMEOUT_SECONDS:
            return seconds
    raise InvalidArgument(
        f"must be a number of seconds above 0 and at most {MAX_TIMEOUT_SECONDS}", REQUEST_TIMEOUT
    )


async def _read(request: Request, most: int) -> bytes:
    """Returns the body of at most `most` bytes.

    Raises TooLarge (before reading if Content-Length is too large), DeadlineExceeded, or Cancelled
    if the client has disconnected.
    """
    body = bytearray()
    announced = request.headers.get("content-length", "")
    has_room = not announced.isdecimal() or int(announced[:20]) <= most
    try:
        async with asyncio.timeout(_MAX_BODY_SECONDS):
            while has_room:
                async for part in request.stream():
                    body += part
                    has_room = len(body) <= most
                    if not has_room:
                        break
                else:
                    return bytes(body)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the body did not arrive within {_MAX_BODY_SECONDS} seconds"
        ) from None
    except ClientDisconnect:
        raise Cancelled(_DISCONNECTED) from None
    raise _too_large(most)


async def _while_connected(receive: Receive, result: Awaitable[_T]) -> _T:
    """Awaits `result`. Cancels it and raises Cancelled when the client disconnects."""
    scope = asyncio.timeout(None)

    async def watch() -> None:
        await disconnected(receive)
        scope.reschedule(0)  # a time that has passed

    watching = asyncio.create_task(watch())
    try:
        async with scope:
            return await result
    except TimeoutError:
        if scope.expired():
            raise Cancelled(_DISCONNECTED) from None
        raise
    finally:
        watching.cancel()


async def disconnected(receive: Receive) -> None:
    """Waits until the client disconnects; ignores the rest of the body."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the body has more than {most} bytes")


def _is_gzip(encodings: Sequence[str]) -> bool:
    """Returns True if the values of Content-Encoding name gzip.

    Raises UnknownEncoding for any other encoding, and for repeated compression.
    """
    names = [name.strip().lower() for value in encodings for name in value.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if names and names not in (["gzip"], ["x-gzip"]):
        shown = ", ".join(names)[:MAX_NAME]
        raise UnknownEncoding(
            f"{shown!r} is not supported; send gzip, or no encoding", "Content-Encoding"
        )
    return bool(names)


def _gunzip(body: bytes) -> bytes:
    """Returns the decompressed body; decompresses at most MAX_MESSAGE_BYTES.

    Raises InvalidArgument if the body is not one gzip file, and TooLarge if the result is larger.
    """
    unpacking = zlib.decompressobj(_GZIP_BITS)
    try:
        found = unpacking.decompress(body, MAX_MESSAGE_BYTES + 1)
    except zlib.error:
        raise InvalidArgument("the body is not gzip data", "Content-Encoding") from None
    if len(found) > MAX_MESSAGE_BYTES:
        raise _too_large(MAX_MESSAGE_BYTES)
    if not unpacking.eof:
        raise InvalidArgument("the gzip data is not complete", "Content-Encoding")
    if unpacking.unused_data:
        raise InvalidArgument("there is data after the end of the gzip data", "Content-Encoding")
    return found


async def off_loop(fairness_id: str, body: bytes, parse_body: Callable[..., _T], *args: Any) -> _T:
    """Parses a body; a large one in a thread that callers use in turn."""
    return await PARSING.run(fairness_id, len(body), parse_body, body, *args)
