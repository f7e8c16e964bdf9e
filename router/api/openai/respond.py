"""Answers one HTTP request: reads its body within bounds, and turns errors into responses."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ....proto.errors import Cancelled, DeadlineExceeded, InvalidArgument, TandemError, TooLarge
from ....proto.limits import MAX_MESSAGE_BYTES
from ...frontend.fair_threads import TEXTS
from ...frontend.prepare import RequestContext
from ...frontend.validation import check_request_id
from ...telemetry.trace import TRACEPARENT, parse_traceparent
from ..browsers import check_json
from ..service import tandem_errors_only
from .openapi import MAX_TIMEOUT_SECONDS, REQUEST_ID, REQUEST_TIMEOUT
from .parsing import http_field
from .refused_body import RefusedBody
from .resume import parse_resume
from .streaming import OPENAI_FORM, AnswerForm

_T = TypeVar("_T")

_MAX_BODY_SECONDS: Final = 60
_THREAD_FROM_BYTES: Final = 65_536


async def respond(
    request: Request,
    answer: Callable[[bytes, str, RequestContext], Awaitable[Response]],
    form: AnswerForm = OPENAI_FORM,
) -> Response:
    """Answers the request's body. Turns errors into responses of `form`; each response has the request's id."""
    arrived = time.monotonic()
    request_id = uuid.uuid4().hex
    response: Response
    try:
        with tandem_errors_only():
            check_request_id(request.headers.get(REQUEST_ID, ""))
            request_id = request.headers.get(REQUEST_ID) or request_id
            timeout = _timeout(request.headers.get(REQUEST_TIMEOUT))
            resume = parse_resume(request.headers)
            context = RequestContext(
                arrived=arrived,
                deadline=None if timeout is None else arrived + timeout,
                caller=request.state.caller,
                is_resumable=resume is not None,
                resume=resume or (),
                trace=parse_traceparent(request.headers.get(TRACEPARENT)),
            )
            body = await _read(request)
            check_json(request.headers)
            response = await answer(body, request_id, context)
    except TooLarge as error:
        response = RefusedBody(form.error_response(error, http_field))
    except TandemError as error:
        response = form.error_response(error, http_field)
    response.headers[REQUEST_ID] = request_id
    return response


def _timeout(header: str | None) -> float | None:
    """Parses the header; returns seconds. Raises InvalidArgument."""
    if header is None:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(header)) <= MAX_TIMEOUT_SECONDS:
            return seconds
    raise InvalidArgument(f"must be a number of seconds from above 0 to {MAX_TIMEOUT_SECONDS}", REQUEST_TIMEOUT)


async def _read(request: Request) -> bytes:
    """Reads the body. Raises TooLarge, before anything is read if its length is announced, DeadlineExceeded, or
    Cancelled if the client has disconnected."""
    body, announced = bytearray(), request.headers.get("content-length", "")
    has_room = not announced.isdecimal() or int(announced[:20]) <= MAX_MESSAGE_BYTES
    try:
        async with asyncio.timeout(_MAX_BODY_SECONDS):
            while has_room:
                async for part in request.stream():
                    body += part
                    has_room = len(body) <= MAX_MESSAGE_BYTES
                    if not has_room:
                        break
                else:
                    return bytes(body)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {_MAX_BODY_SECONDS} seconds") from None
    except ClientDisconnect:
        raise Cancelled("the client has disconnected") from None
    raise TooLarge(f"the body has more than {MAX_MESSAGE_BYTES} bytes")


async def off_loop(turn: str, body: bytes, parse_body: Callable[..., _T], *args: Any) -> _T:
    """Parses a body; off the event loop, in the caller's turn, where that takes more than some milliseconds."""
    if len(body) < _THREAD_FROM_BYTES:
        return parse_body(body, *args)
    return await TEXTS.run(turn, len(body), parse_body, body, *args)
