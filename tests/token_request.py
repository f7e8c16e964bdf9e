"""Makes the requests of tests of a router and its workers; without torch, which the quick tier does
not import.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from tandem.proto import inference_pb2
from tandem.router.request import TokenRequest


def token_request(
    prompt: Sequence[int], max_tokens: int = 16, *, name: str = "", **fields: object
) -> TokenRequest:
    """A greedy request, but for the fields given."""
    request = TokenRequest(
        request_id=name or f"request-{time.monotonic_ns()}",
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=inference_pb2.SamplingParams(
            temperature=0, top_k=0, top_p=1, min_p=0, seed=0, typical_p=1, repetition_penalty=1
        ),
        arrived=time.monotonic(),
    )
    return replace(request, **fields)  # type: ignore[arg-type]
