"""Where a request goes: a pure function of the request, of what the router knows of the workers, and of a die.

The cost of a place is the predicted time until the stream decodes there: what the worker still has to compute, the part
of the prompt that its prefix cache does not hold, the transfer of what the decode worker's does not hold, and what a
further stream costs those that already run. Prefix affinity is nothing of its own: it follows from the cost. The
prefill worker is chosen by its part of the cost, then the decode worker by its own, so that the work is O(P + D).
Knows nothing of connections, clocks or text.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from .rates import LinearCost

NEUTRAL_PREFILL: Final = LinearCost(fixed=0.0, each=2e-4)
NEUTRAL_TRANSFER: Final = LinearCost(fixed=1e-3, each=1e-9)
NEUTRAL_STEP_SECONDS: Final = 0.02
"""What is believed before anything has been measured: tokens, bytes, decode steps."""

_NEAR: Final = 1.1
"""Costs within a tenth of the least count as equal: several routers that see the same must not all choose the same."""

_HORIZON: Final = 32
"""Steps over which a stream's effect on its neighbours is charged to its place."""

_MANY: Final = 64
"""The sequences that a worker runs at once, if it has not said."""

_MIXED_CHUNK: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the router knows of one worker at this moment."""

    worker_id: str
    pending_tokens: int  # prompt tokens it still has to compute
    num_requests: int  # waiting and running; choices count one by one
    free_tokens: int  # of KV cache, free and cached
    num_pending: int = 0  # prompts it still has to compute
    matched_tokens: int = 0  # of this prompt, in its prefix cache
    max_sequences: int = 0  # 0 is unknown
    mixed_chunk_tokens: int = 0  # 0 is unknown
    prefill: LinearCost = NEUTRAL_PREFILL  # of tokens
    transfer: LinearCost = NEUTRAL_TRANSFER  # of bytes, from or to this worker
    step_seconds: float = NEUTRAL_STEP_SECONDS

    @property
    def queue_seconds(self) -> float:
        """Until it has computed what is already there."""
        return self.num_pending * self.prefill.fixed + self.pending_tokens * self.prefill.each


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be placed."""

    num_tokens: int  # of the prompt
    num_sequences: int = 1
    token_bytes: int = 0  # of KV cache, of one token

    def uncached(self, candidate: Candidate) -> int:
        """At least 1: the last token is always computed."""
        return max(self.num_tokens - candidate.matched_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The workers of one attempt; without a prefill worker the decode worker does the whole."""

    prefill: str | None
    decode: str


def place(
    demand: Demand,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    rng: random.Random,
    *,
    local_prefill_tokens: int = 0,
) -> Placement | None:
    """The pair with the least predicted time until the stream decodes; of those within a tenth of it, the less loaded
    of two drawn at random (Mitzenmacher, 2001). Whoever has no room comes after all who have.

    A decode worker does the whole if there is no prefill worker, or if it lacks at most `local_prefill_tokens` of the
    prompt and is predicted to be faster alone. None if there is no decode worker.
    """
    if not decode:
        return None
    alone = [c for c in decode if not prefill or demand.uncached(c) <= local_prefill_tokens]
    whole = _choose(alone, lambda c: whole_seconds(demand, c), demand, rng)
    if not prefill:
        return Placement(prefill=None, decode=whole.worker_id) if whole else None
    prompt = replace(demand, num_sequences=1)  # choices part with the first token
    first = _choose(prefill, lambda c: prefill_seconds(demand, c) + sending_seconds(demand, c), prompt, rng)
    second = _choose(decode, lambda c: decode_seconds(demand, c), demand, rng)
    if first is None or second is None:
        return None
    if whole is not None and _has_room(demand, whole) >= _has_room(demand, second):
        apart = prefill_seconds(demand, first) + max(
            decode_seconds(demand, second), crowding_seconds(demand, second) + sending_seconds(demand, first, second)
        )
        if whole_seconds(demand, whole) < apart:
            return Placement(prefill=None, decode=whole.worker_id)
    return Placement(prefill=first.worker_id, decode=second.worker_id)


def prefill_seconds(demand: Demand, candidate: Candidate) -> float:
    """Until a prefill worker has the first token."""
    return candidate.queue_seconds + candidate.prefill.seconds(demand.uncached(candidate))


def sending_seconds(demand: Demand, source: Candidate, target: Candidate | None = None) -> float:
    """How long the source takes to send what the target lacks; the whole prompt, if it is not known to whom."""
    num_tokens = demand.num_tokens if target is None else demand.uncached(target)
    return source.transfer.seconds(num_tokens * demand.token_bytes)


def decode_seconds(demand: Demand, candidate: Candidate) -> float:
    """What a decode worker adds to the first token: the transfer of what it lacks, and its crowd."""
    return candidate.transfer.seconds(demand.uncached(candidate) * demand.token_bytes) + crowding_seconds(
        demand, candidate
    )


def whole_seconds(demand: Demand, candidate: Candidate) -> float:
    """The same for a worker that does both: its prompts are computed in chunks, each beside a step of its decodes."""
    uncached = demand.uncached(candidate)
    steps = math.ceil(uncached / (candidate.mixed_chunk_tokens or _MIXED_CHUNK)) if candidate.num_requests else 0
    computing = uncached * candidate.prefill.each + max(candidate.prefill.fixed, steps * candidate.step_seconds)
    return candidate.queue_seconds + computing + crowding_seconds(demand, candidate)


def crowding_seconds(demand: Demand, candidate: Candidate) -> float:
    """Streams slow each other: a full worker's steps are taken to last twice an empty one's."""
    crowd = candidate.num_requests + demand.num_sequences - 1
    return _HORIZON * candidate.step_seconds * crowd / (candidate.max_sequences or _MANY)


def _has_room(demand: Demand, candidate: Candidate) -> bool:
    fits = candidate.num_requests + demand.num_sequences <= (candidate.max_sequences or math.inf)
    return fits and candidate.free_tokens + candidate.matched_tokens >= demand.num_tokens


def _choose(
    candidates: Sequence[Candidate], cost: Callable[[Candidate], float], demand: Demand, rng: random.Random
) -> Candidate | None:
    roomy = [candidate for candidate in candidates if _has_room(demand, candidate)] or candidates
    costs = [cost(candidate) for candidate in roomy]
    limit = _NEAR * min(costs, default=0.0)
    near = [candidate for candidate, seconds in zip(roomy, costs, strict=True) if seconds <= limit]
    if len(near) > 2:
        near = rng.sample(near, 2)
    elif rng.random() < 0.5:
        near.reverse()  # equals take turns
    return min(near, key=lambda c: (c.pending_tokens, c.num_requests, -c.matched_tokens), default=None)
