"""Places a request: a pure function of what it needs, of what the router knows of the workers, and
of a random source.

The cost of a worker is the predicted time until the sequence decodes there: what the worker still
has to compute, the part of the prompt that its prefix cache does not hold, the transfer of the KV
cache that the decode worker lacks, and how much a further sequence slows those that already run.
Prefix affinity needs no rule: it follows from the cost. The prefill worker is chosen by its part of
the cost, then the decode worker by its own, which is O(P + D). Knows nothing of connections, clocks
or text.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...proto.limits import mixed_chunk
from .capacity import Capacity
from .rates import LinearCost

NEUTRAL_PREFILL: Final = LinearCost(fixed=1e-2, each=2e-4)
NEUTRAL_TRANSFER: Final = LinearCost(fixed=1e-3, each=1e-9)
NEUTRAL_STEP_SECONDS: Final = 0.02
"""Estimates before anything was measured: of prompt tokens, of bytes, of a decode step. A prompt of
a few tokens takes about as long as one of fifty, since the weights are read once for either: if a
short one comes first, it must not be taken to say how long each token of a long one takes.
"""

_NEAR: Final = 1.1
"""Costs within a tenth of the least count as equal: several routers that see the same must not all
choose the same.
"""

_HORIZON: Final = 32
"""Decode steps over which the effect of a sequence on its neighbours is charged to its placement.
"""

_LEAST_FETCHED_TOKENS: Final = 64
"""Of a cached prefix: fewer take about as long to compute as none, and fetching them takes two
round trips.
"""

_DEFAULT_SEQUENCES: Final = 64
"""The sequences that a worker runs at once, if it has not reported how many."""

_DEFAULT_MIXED_CHUNK: Final = 512
"""The prompt tokens of a step that also decodes, if the worker has not reported how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Holds what the router knows of one worker at the moment of a placement."""

    worker_id: str
    pending_tokens: int  # prompt tokens it still has to compute
    num_requests: int  # waiting and running; choices count one by one
    free_tokens: int  # of KV cache, free and cached
    num_pending: int = 0  # prompts it still has to compute
    matched_tokens: int = 0  # of this prompt, in its prefix cache
    max_sequences: int = 0  # 0 is unknown
    mixed_chunk_tokens: int = 0  # 0 is unknown
    token_bytes: int = 0  # of one token's KV cache
    prefill: LinearCost = NEUTRAL_PREFILL  # of tokens
    transfer: LinearCost = NEUTRAL_TRANSFER  # of bytes, from or to this worker
    step_seconds: float = NEUTRAL_STEP_SECONDS

    @property
    def queue_seconds(self) -> float:
        """Seconds until it has computed the prompts that it already has."""
        return self.num_pending * self.prefill.fixed + self.pending_tokens * self.prefill.each

    def uncached(self, num_tokens: int) -> int:
        """Returns how many of a prompt's tokens it has to compute: at least 1, since the last is
        always computed.
        """
        return max(num_tokens - self.matched_tokens, 1)


class Placement(NamedTuple):
    """The workers of one attempt. Without a prefill worker the decode worker computes the prompt,
    too.
    """

    prefill: str | None
    decode: str


def place(
    needed: Capacity,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    rng: random.Random,
    *,
    local_prefill_tokens: int = 0,
) -> Placement | None:
    """Returns the pair with the least predicted time until the sequences decode; of those within a
    tenth of it, the less loaded of two random ones (Mitzenmacher, 2001). Workers without enough
    capacity come after all others.

    `needed` counts `prompt_tokens` and `sequences`. A decode worker computes the prompt, too, if
    there is no prefill worker, or if it lacks at most `local_prefill_tokens` of the prompt and is
    predicted to be faster alone. None if there is no decode worker.
    """
    if not decode:
        return None
    num_tokens = needed.prompt_tokens
    alone = [c for c in decode if not prefill or c.uncached(num_tokens) <= local_prefill_tokens]
    whole = _choose(alone, lambda c: whole_seconds(needed, c), needed, rng)
    if not prefill:
        return Placement(prefill=None, decode=whole.worker_id) if whole else None
    prompt = needed._replace(sequences=1)  # choices part with the first token
    first = _choose(
        prefill,
        lambda c: prefill_seconds(num_tokens, c) + _transfer_seconds(num_tokens, c),
        prompt,
        rng,
    )
    second = _choose(decode, lambda c: _decode_seconds(needed, c), needed, rng)
    if first is None or second is None:
        return None
    if whole is not None and _has_capacity(needed, whole) >= _has_capacity(needed, second):
        source_seconds = _transfer_seconds(second.uncached(num_tokens), first)
        apart = prefill_seconds(num_tokens, first) + max(
            _decode_seconds(needed, second), _crowding_seconds(needed, second) + source_seconds
        )
        if whole_seconds(needed, whole) < apart:
            return Placement(prefill=None, decode=whole.worker_id)
    return Placement(prefill=first.worker_id, decode=second.worker_id)


def choose_holder(
    num_tokens: int, prefill: Candidate, others: Sequence[Candidate]
) -> Candidate | None:
    """Returns the one of `others` from which the prefill worker is to fetch the KV cache of first
    tokens of the prompt. None if none has more of it cached, or only a few tokens, or what is
    predicted to be computed as fast.
    """
    holder = max(others, key=lambda c: (c.matched_tokens, -c.num_requests), default=None)
    if holder is None:
        return None
    fetched = min(holder.matched_tokens, num_tokens - 1) - prefill.matched_tokens
    if (
        fetched < _LEAST_FETCHED_TOKENS
        or _transfer_seconds(fetched, holder) >= fetched * prefill.prefill.each
    ):
        return None
    return holder


def prefill_seconds(num_tokens: int, candidate: Candidate) -> float:
    """Returns the seconds until a prefill worker has the first token of a prompt of `num_tokens`."""
    return candidate.queue_seconds + candidate.prefill.seconds(candidate.uncached(num_tokens))


def whole_seconds(needed: Capacity, candidate: Candidate) -> float:
    """Returns the seconds until a worker that also prefills decodes: it computes the prompt in
    chunks, each of them in a step of its decodes.
    """
    uncached = candidate.uncached(needed.prompt_tokens)
    chunk_tokens = mixed_chunk(
        candidate.mixed_chunk_tokens or _DEFAULT_MIXED_CHUNK, candidate.num_requests + 1
    )
    steps = math.ceil(uncached / chunk_tokens) if candidate.num_requests else 0
    computing = uncached * candidate.prefill.each + max(
        candidate.prefill.fixed, steps * candidate.step_seconds
    )
    return candidate.queue_seconds + computing + _crowding_seconds(needed, candidate)


def _transfer_seconds(num_tokens: int, candidate: Candidate) -> float:
    return candidate.transfer.seconds(num_tokens * candidate.token_bytes)


def _decode_seconds(needed: Capacity, candidate: Candidate) -> float:
    """Returns what a decode worker adds to the first token: the transfer of what it lacks, and the
    slower steps.
    """
    uncached = candidate.uncached(needed.prompt_tokens)
    return _transfer_seconds(uncached, candidate) + _crowding_seconds(needed, candidate)


def _crowding_seconds(needed: Capacity, candidate: Candidate) -> float:
    """Returns the cost of slowing each other: a full worker's steps are taken to last twice an
    empty one's.
    """
    crowd = candidate.num_requests + needed.sequences - 1
    return (
        _HORIZON * candidate.step_seconds * crowd / (candidate.max_sequences or _DEFAULT_SEQUENCES)
    )


def _has_capacity(needed: Capacity, candidate: Candidate) -> bool:
    fits = candidate.num_requests + needed.sequences <= (candidate.max_sequences or math.inf)
    return fits and candidate.free_tokens + candidate.matched_tokens >= needed.prompt_tokens


def _choose(
    candidates: Sequence[Candidate],
    cost: Callable[[Candidate], float],
    needed: Capacity,
    rng: random.Random,
) -> Candidate | None:
    fitting = [
        candidate for candidate in candidates if _has_capacity(needed, candidate)
    ] or candidates
    costs = [cost(candidate) for candidate in fitting]
    limit = _NEAR * min(costs, default=0.0)
    near = [
        candidate for candidate, seconds in zip(fitting, costs, strict=True) if seconds <= limit
    ]
    if len(near) > 2:
        near = rng.sample(near, 2)
    elif rng.random() < 0.5:
        near.reverse()  # equal ones take turns
    return min(
        near, key=lambda c: (c.pending_tokens, c.num_requests, -c.matched_tokens), default=None
    )
