"""Where a request goes: a pure function of the request and of what the router knows of the workers.

Knows nothing of connections, clocks or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the router knows of one worker at this moment."""

    worker_id: str
    pending_tokens: int  # prompt tokens it still has to compute
    num_requests: int  # waiting and running
    free_blocks: int  # free and cached
    block_size: int
    matched_tokens: int = 0  # of this prompt, probably in its prefix cache

    @property
    def free_tokens(self) -> int:
        return self.free_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The workers of one attempt; without a prefill worker the decode worker does the whole."""

    prefill: str | None
    decode: str


def place(prompt_tokens: int, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement | None:
    """The least loaded worker of each pool, where a cached prefix counts as work already done.

    Prefill: the fewest tokens to compute before this prompt's first token. Decode: a worker whose free blocks hold the
    prompt before one that must make room, then the fewest requests, then the longest cached prefix. Ties go to the
    candidate that comes first; the caller rotates them. None if there is no decode worker.
    """
    if not decode:
        return None
    best_decode = min(
        decode, key=lambda c: (c.free_tokens + c.matched_tokens < prompt_tokens, c.num_requests, -c.matched_tokens)
    )
    if not prefill:
        return Placement(prefill=None, decode=best_decode.worker_id)
    best_prefill = min(
        prefill, key=lambda c: (c.pending_tokens + prompt_tokens - c.matched_tokens, -c.matched_tokens, c.num_requests)
    )
    return Placement(prefill=best_prefill.worker_id, decode=best_decode.worker_id)
