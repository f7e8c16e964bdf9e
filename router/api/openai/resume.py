"""Resumes a broken stream over HTTP: each event has an id, and a request with the last id resumes.

Only clients that ask for it get ids. They send the id in a header or in the body, because browsers
and proxies bound headers, and some clients cannot set headers.
"""

from collections.abc import Mapping
from dataclasses import replace

from ....proto.errors import InvalidArgument
from ...frontend.prepare import RequestContext
from ...frontend.prepared import PreparedRequest
from ...resume.event_ids import EventIdSigner
from .openapi import LAST_EVENT_ID, RESUME
from .requests import AnyRequest


def header_event_id(headers: Mapping[str, str]) -> str | None:
    """Returns the id of the client's last event of a stream.

    "": a new stream whose events have ids. None: a stream without ids.
    """
    event_id = headers.get(LAST_EVENT_ID)
    if event_id is None and headers.get(RESUME) == "1":
        return ""
    return event_id


def with_event_id(request: AnyRequest, context: RequestContext) -> RequestContext:
    """Returns the context with the event id of the header or of the body.

    Raises InvalidArgument if the two differ, or if the request does not support event ids.
    """
    event_id = context.event_id
    given = request.last_event_id
    if event_id and given and event_id != given:
        raise InvalidArgument("differs from the id in the header", "last_event_id")
    event_id = event_id or given if given is not None else event_id
    if event_id is not None:
        _check_resumable(request)
    return replace(context, event_id=event_id)


def _check_resumable(request: AnyRequest) -> None:
    if not request.is_streamed:
        raise InvalidArgument("requires stream", RESUME)
    if len(request.prompts) > 1:
        raise InvalidArgument("must be a single prompt if events have ids", "prompt")
    if request.common.echo and request.common.HasField("logprobs"):
        raise InvalidArgument("is not supported with logprobs if events have ids", "echo")


def event_signer(request: PreparedRequest) -> EventIdSigner | None:
    """Returns the signer of the ids of a stream's events; None if they have no ids."""
    if request.resume is None or not request.has_event_ids:
        return None
    return EventIdSigner(request.resume, request.begun)


def with_id(event: bytes, event_id: bytes) -> bytes:
    """Returns the events of a message with an id at their end."""
    return event[:-1] + b"id: " + event_id + b"\n\n"
