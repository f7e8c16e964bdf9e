"""Resumes a broken stream over HTTP: each event has an id, and a request with the last id resumes.

Only clients that ask for it get ids. They send the id in a header or in the body, because browsers
and proxies bound headers, and some clients cannot set headers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument
from ...frontend.prepare import RequestContext
from ...frontend.prepared import PreparedRequest
from ...resume.event_ids import EventIdSigner
from .openapi import LAST_EVENT_ID, RESUME
from .requests import AnyRequest

_UNFINISHED: Final = inference_pb2.FINISH_REASON_UNSPECIFIED


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


class EventIds:
    """Makes the ids of the events of one answer, and finds the messages that its client has."""

    def __init__(self, request: PreparedRequest) -> None:
        self._signer: EventIdSigner | None = None
        self._cached_tokens = request.cached_tokens
        if request.has_event_ids and request.resume is not None:
            self._signer = EventIdSigner(request.resume, request.begun)

    def take(self, message: inference_pb2.GenerateResponse) -> bool:
        """Counts the next message; returns True if the client has it.

        Raises InternalError if it differs from the message that the client has.
        """
        if self._signer is None:
            return False
        has_ended = message.finish_reason != _UNFINISHED
        return self._signer.take(message.choice, message.token_ids, has_ended)

    def add(self, event: bytes, timeline: inference_pb2.Timeline) -> bytes:
        """Returns the events of the last message with an id at their end."""
        if self._signer is None:
            return event
        known = self._cached_tokens
        event_id = self._signer.sign(timeline.cached_tokens if known is None else known)
        return event[:-1] + b"id: " + event_id + b"\n\n"
