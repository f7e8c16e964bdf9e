"""Lets a stream over HTTP go on after it broke: each event has an id, and the request with the last
one resumes it.

Only for clients that ask for it. The id comes in a header or in the body: browsers and proxies
bound headers, and some clients cannot set any.
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
from .requests import ParsedRequest

_UNFINISHED: Final = inference_pb2.FINISH_REASON_UNSPECIFIED


def header_event_id(headers: Mapping[str, str]) -> str | None:
    """Returns the id of the last event that the client has of a stream, "" if there is none and
    events are to have ids; None if they need none."""
    event_id = headers.get(LAST_EVENT_ID)
    if event_id is None and headers.get(RESUME) == "1":
        return ""
    return event_id


def with_event_id(request: ParsedRequest, context: RequestContext) -> RequestContext:
    """Returns the context with the event id of the header or of the body. Raises InvalidArgument
    if both have one and they differ, or if the request does not go with events that have ids."""
    event_id, given = context.event_id, request.last_event_id
    if event_id and given and event_id != given:
        raise InvalidArgument("differs from that of the header", "last_event_id")
    event_id = event_id or given if given is not None else event_id
    if event_id is not None:
        _check_resumable(request)
    return replace(context, event_id=event_id)


def _check_resumable(request: ParsedRequest) -> None:
    if not request.is_streamed:
        raise InvalidArgument("goes with stream only", RESUME)
    if len(request.prompts) > 1:
        raise InvalidArgument("must be one where events have ids", "prompt")
    if request.common.echo and request.common.HasField("logprobs"):
        raise InvalidArgument("does not go with logprobs where events have ids", "echo")


class EventIds:
    """Makes the ids of the events of one answer, and tells which messages its client has."""

    def __init__(self, request: PreparedRequest) -> None:
        self._signer: EventIdSigner | None = None
        self._cached_tokens = request.cached_tokens
        if request.has_event_ids and request.resume is not None:
            self._signer = EventIdSigner(request.resume, request.begun)

    def take(self, message: inference_pb2.GenerateResponse) -> bool:
        """Takes the next message; returns whether the client has it. Raises InternalError if it
        differs from what the client has.
        """
        if self._signer is None:
            return False
        has_ended = message.finish_reason != _UNFINISHED
        return self._signer.take(message.choice, message.token_ids, has_ended)

    def add(self, event: bytes, timeline: inference_pb2.Timeline) -> bytes:
        """Returns the event of the last message, or the last of its events, with its id."""
        if self._signer is None:
            return event
        known = self._cached_tokens
        event_id = self._signer.sign(timeline.cached_tokens if known is None else known)
        return event[:-1] + b"id: " + event_id + b"\n\n"
