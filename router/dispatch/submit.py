"""Makes the request for the rest of one choice, and translates a worker's refusal."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ...proto import worker_pb2
from ...proto.errors import InvalidArgument
from ..request import TokenRequest

_FIELDS: Final = {
    "num_choices": "n",
    "beam_search": "beam_search.width",  # too few hypotheses exist
    "beam_search.width": "beam_search.width",
    "stop_token_ids": "stopping.stop_token_ids",
    "grammar": "constraint",
    "adapter": "model",
}
"""The API's names of fields of a submit. Any other refusal concerns the length of the prompt."""


def rest_of(request: TokenRequest, choice: int, emitted: Sequence[int]) -> TokenRequest:
    """Returns the request that continues one choice after its tokens `emitted`."""
    submit = worker_pb2.Submit()
    submit.CopyFrom(request.submit)
    submit.token_ids.extend(emitted)
    submit.first_index = len(emitted)
    submit.max_tokens -= len(emitted)
    submit.first_choice = choice
    submit.num_choices = 1
    brought = request.emitted[choice] if request.emitted else None
    if len(emitted) != len(brought or ()):  # the service has interrupted it, not its client
        submit.turn = worker_pb2.TURN_UNSPECIFIED
    return replace(
        request,
        request_id=f"{request.request_id}#{choice}",
        submit=submit,
        emitted=(),
        is_recovery=bool(emitted) and not submit.turn,
    )


def refusal(message: str) -> InvalidArgument:
    """Returns the client's error for a worker's refusal `message`."""
    field, _, reason = message.partition(": ")
    return InvalidArgument(reason if field in _FIELDS else message, _FIELDS.get(field, "prompt"))
