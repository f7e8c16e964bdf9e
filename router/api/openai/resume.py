"""Lets a stream over HTTP go on after it broke: the id of each event holds all that another router needs.

Only for clients that ask for it by a header: an id has all token ids of the answer so far, so that those of a stream of
n tokens have some 1.5 n² bytes together.
"""

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument
from ...frontend.prepare import PreparedRequest, RequestContext
from .openapi import LAST_EVENT_ID, RESUME
from .requests import HttpRequest


def parse_resume(headers: Mapping[str, str]) -> list[inference_pb2.ResumedChoice] | None:
    """Returns what the client has of an answer that it goes on with; None if its events need no ids. Raises
    InvalidArgument."""
    event_id = headers.get(LAST_EVENT_ID)
    if event_id is None:
        return [] if headers.get(RESUME) == "1" else None
    given = inference_pb2.GenerateRequest()
    try:
        given.ParseFromString(b64decode(event_id, "-_", validate=True))
    except (ValueError, DecodeError):  # binascii.Error is a ValueError
        given.Clear()
    if not given.resume:
        raise InvalidArgument("is no id of an event of this service", LAST_EVENT_ID)
    return list(given.resume)


def check_resumable(request: HttpRequest, context: RequestContext) -> None:
    """Raises InvalidArgument if the request asks for events with ids and for what does not go with them."""
    if not context.is_resumable:
        return
    if not request.is_streamed:
        raise InvalidArgument("goes with stream only", RESUME)
    if len(request.prompts) > 1:
        raise InvalidArgument("must be one where events have ids", "prompt")
    if request.common.echo and request.common.HasField("logprobs"):
        raise InvalidArgument("does not go with logprobs where events have ids", "echo")


class EventIds:
    """Makes the ids of the events of one answer."""

    def __init__(self, request: PreparedRequest) -> None:
        self._is_wanted = request.resume is not None
        self._state = inference_pb2.GenerateRequest()
        self._choices: dict[int, inference_pb2.ResumedChoice] = {}
        for choice, progress in request.progress.items():
            self._choices[choice] = self._state.resume.add(resume_token=progress.token, token_ids=progress.ids)

    def add(self, event: bytes, message: inference_pb2.GenerateResponse) -> bytes:
        """Returns the event of a message, or the last of its events, with its id."""
        if not self._is_wanted:
            return event
        if message.choice not in self._choices:
            self._choices[message.choice] = self._state.resume.add()
        given = self._choices[message.choice]
        given.resume_token = message.resume_token
        given.token_ids.extend(message.token_ids)
        return event[:-1] + b"id: " + urlsafe_b64encode(self._state.SerializeToString()) + b"\n\n"
