"""Makes what a worker is sent for an attempt, and reads its refusal."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InvalidArgument
from ...proto.hashing import hash_tenant
from ..request import TokenRequest

_FIELDS: Final = {
    **{"num_choices": "n", "stop_token_ids": "stopping.stop_token_ids", "grammar": "constraint"},
    "adapter": "model",
}
"""Fields of a submit by the names of the API. Every other refusal of a worker concerns the length
of the prompt.
"""


def make_submit(
    request: TokenRequest, part: TokenRequest, attempt: int, first_choice: int, first_index: int
) -> worker_pb2.Submit:
    """Returns the submit of an attempt, but for its task. `part` is the request or what is left of
    one choice, which is `first_choice`, after `first_index` generated tokens.
    """
    return worker_pb2.Submit(
        request_id=request.request_id,
        attempt=attempt,
        token_ids=part.prompt,
        first_index=first_index,
        max_tokens=part.max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
        adapter=_adapter(request),
        num_choices=part.num_choices,
        first_choice=first_choice,
        beam_search=request.beam_search,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        bad_words=[inference_pb2.TokenIds(ids=word) for word in request.bad_words],
        min_tokens=request.min_tokens,
        grammar=request.grammar,
        priority=request.priority,
        pooling=request.pooling,
        tenant=hash_tenant(request.tenant),
        turn=_turn(request, first_choice, first_index),
    )


def _turn(request: TokenRequest, choice: int, first_index: int) -> "worker_pb2.Turn":
    """Returns the turn at workers. Once a choice has more tokens than its client brought, the
    service has interrupted it."""
    brought = request.emitted[choice] if request.emitted else None
    return request.turn if first_index == len(brought or ()) else worker_pb2.TURN_UNSPECIFIED


def _adapter(request: TokenRequest) -> worker_pb2.Adapter | None:
    if request.adapter is None:
        return None
    return worker_pb2.Adapter(
        folder=request.adapter.folder, fingerprint=request.adapter.fingerprint
    )


def rest_of(request: TokenRequest, choice: int, emitted: Sequence[int]) -> TokenRequest:
    """Returns what is left of one choice after `emitted`, as a request of its own."""
    return replace(
        request,
        request_id=f"{request.request_id}#{choice}",
        prompt=(*request.prompt, *emitted),
        max_tokens=request.max_tokens - len(emitted),
        num_choices=1,
        emitted=(),
        is_resumed=bool(emitted) and not _turn(request, choice, len(emitted)),
    )


def refusal(message: str) -> InvalidArgument:
    """Returns what a worker's refusal of a request means to the client."""
    field, _, reason = message.partition(": ")
    return InvalidArgument(reason if field in _FIELDS else message, _FIELDS.get(field, "prompt"))
