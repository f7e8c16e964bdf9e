"""Makes the requests of tests of a router and its workers; without torch, which the quick tier does
not import.
"""

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.hashing import hash_tenant
from tandem.router.request import LoraAdapter, TokenRequest

_OWN_FIELDS: Final = {field.name for field in fields(TokenRequest)}


def token_request(
    prompt: Sequence[int], max_tokens: int = 16, *, name: str = "", **changes: Any
) -> TokenRequest:
    """A greedy request, but for the fields given."""
    request_id = name or f"request-{time.monotonic_ns()}"
    submit = worker_pb2.Submit(
        request_id=request_id,
        token_ids=prompt,
        max_tokens=max_tokens,
        num_choices=1,
        sampling=inference_pb2.SamplingParams(
            temperature=0, top_k=0, top_p=1, min_p=0, seed=0, typical_p=1, repetition_penalty=1
        ),
    )
    request = TokenRequest(request_id=request_id, submit=submit, arrived=time.monotonic())
    return changed(request, **changes)


def changed(request: TokenRequest, **changes: Any) -> TokenRequest:
    """Copies a request with other fields, its own or those of its submit."""
    own = {name: value for name, value in changes.items() if name in _OWN_FIELDS}
    submit = worker_pb2.Submit()
    submit.CopyFrom(request.submit)
    for name, value in changes.items():
        if name == "tenant":
            submit.tenant = hash_tenant(value)
        elif name == "request_id" or name not in _OWN_FIELDS:
            field: dict[str, Any] = {
                name: value.message() if isinstance(value, LoraAdapter) else value
            }
            submit.ClearField(name)
            submit.MergeFrom(worker_pb2.Submit(**field))
    return replace(request, **{"submit": submit} | own)
