"""Places a request: a pure function of its needs, the state of the workers and a random source.

The cost of a worker is the predicted time until the sequence decodes there. It adds up the prompts
that the worker still has to compute, the uncached part of this prompt, the transfer of the KV cache
that the decode worker lacks, and the slowdown of the running sequences by one more. Prefix affinity
needs no rule, because it follows from the cost; requests with an affinity of their own prefer one
worker even before its cache has their prefix. The prefill and the decode worker are each chosen
by their own part of the cost, in O(P + D). pool.py bounds the number of candidates. Knows nothing
of connections, clocks or text.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple

from ...proto.costs import NEUTRAL_COST, KvCost, LinearCost, mixed_chunk
from ...proto.limits import PREFIX_FETCH_SECONDS
from .capacity import Capacity
from .ranking import NEAR

NEUTRAL_PREFILL: Final = LinearCost(fixed=1e-2, each=2e-4)
NEUTRAL_TRANSFER: Final = LinearCost(fixed=1e-3, each=1e-9)
NEUTRAL_STEP_SECONDS: Final = 0.02
"""Estimates before the first measurement: of prompt tokens, of bytes, of a decode step.

A prompt of a few tokens takes about as long as one of fifty, because both read the weights once. So
`fixed` must not be 0: a short first prompt would predict a far too long time for a long one.
"""

_AFFINE: Final = 2.0
"""A request with an affinity goes to its worker if that costs at most this times the least cost.

So a worker whose queue is long does not get further requests of one affinity.
"""

_HORIZON: Final = 32
"""Decode steps over which a placement is charged for slowing the worker's other sequences."""

_LEAST_FETCHED_TOKENS: Final = 64
"""The minimum length of a cached prefix that is fetched from another worker.

Computing fewer tokens takes almost no time, and a fetch takes two round trips.
"""

_FETCH_SHARE: Final = 0.8
"""Of PREFIX_FETCH_SECONDS: the longest predicted fetch. The rest is for the lease and for errors of
the prediction.
"""

_DEFAULT_SEQUENCES: Final = 64
"""The number of concurrent sequences of a worker that has not reported it."""

_DEFAULT_MIXED_CHUNK: Final = 512
"""The prompt tokens of a step that also decodes, for a worker that has not reported it."""

_TYPICAL: Final = Capacity(sequences=1, prompt_tokens=512)
"""The needs of a request by which the loads of workers are compared."""

_FULL: Final = 1e6
"""Multiplies the load of a worker without capacity, which comes after all others."""


class Candidate(NamedTuple):
    """Describes one worker at the moment of a placement, as the router knows it."""

    worker_id: str
    pending_tokens: int  # prompt tokens that the worker still has to compute
    num_requests: int  # waiting and running sequences
    free_tokens: int  # KV cache tokens that are free or cached
    num_pending: int = 0  # prompts that the worker still has to compute
    max_sequences: int = 0  # 0: unknown
    mixed_chunk_tokens: int = 0  # 0: unknown
    cost: KvCost = NEUTRAL_COST  # of KV cache
    # The fields from here on can differ between two placements without a report of the worker.
    matched_tokens: int = 0  # tokens of this prompt in the worker's prefix cache
    prefill: LinearCost = NEUTRAL_PREFILL  # of prompt tokens
    transfer: LinearCost = NEUTRAL_TRANSFER  # of bytes, from or to this worker
    step_seconds: float = NEUTRAL_STEP_SECONDS

    @property
    def queue_seconds(self) -> float:
        """Returns the predicted seconds until the worker has computed its pending prompts."""
        return self.num_pending * self.prefill.fixed + self.pending_tokens * self.prefill.each

    def uncached(self, num_tokens: int) -> int:
        """Returns the number of prompt tokens to compute; the last token is always computed."""
        return max(num_tokens - self.matched_tokens, 1)


class Placement(NamedTuple):
    """The workers of one attempt; without a prefill worker, the decode worker does the prefill."""

    prefill: str | None
    decode: str


def place(
    needed: Capacity,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    rng: random.Random,
    *,
    local_prefill_tokens: int = 0,
    affinity: str = "",
) -> Placement | None:
    """Returns the workers with the least predicted time until the sequences decode.

    Of the workers within a tenth of it, takes the less loaded of two random ones (Mitzenmacher,
    2001). Workers without enough capacity come after all others. Uses `prompt_tokens` and
    `sequences` of `needed`.

    A decode worker does the prefill as well if there is no prefill worker, or if it lacks at most
    `local_prefill_tokens` of the prompt and is predicted to be faster alone. Prompts of one
    `affinity` are computed by one worker while it is not much slower than others. Returns None
    without a decode worker.
    """
    if not decode:
        return None
    num_tokens = needed.prompt_tokens
    alone = [c for c in decode if not prefill or c.uncached(num_tokens) <= local_prefill_tokens]
    single = _choose(alone, partial(colocated_seconds, needed), needed, rng, affinity)
    if not prefill:
        return Placement(prefill=None, decode=single.worker_id) if single else None
    prompt = needed._replace(sequences=1)  # the choices begin after the first token
    first = _choose(
        prefill,
        partial(source_seconds, num_tokens),
        prompt,
        rng,
        affinity,
    )
    second = _choose(decode, partial(decode_seconds, needed), needed, rng)
    if first is None or second is None:
        return None
    if single is not None and _has_capacity(needed, single) >= _has_capacity(needed, second):
        num_cached = num_tokens - second.uncached(num_tokens)
        moving_seconds = _transfer_seconds(num_tokens, num_cached, first)
        disaggregated_seconds = prefill_seconds(num_tokens, first) + max(
            decode_seconds(needed, second), _crowding_seconds(needed, second) + moving_seconds
        )
        if colocated_seconds(needed, single) < disaggregated_seconds:
            return Placement(prefill=None, decode=single.worker_id)
    return Placement(prefill=first.worker_id, decode=second.worker_id)


def choose_holder(
    num_tokens: int, prefill: Candidate, others: Sequence[Candidate]
) -> Candidate | None:
    """Returns the worker from which the prefill worker should fetch a cached prefix.

    Returns None if no worker of `others` has enough additional tokens cached, if computing these
    tokens is predicted to be as fast as the fetch, or if the worker would give up the fetch.
    """
    holder = max(others, key=lambda c: (c.matched_tokens, -c.num_requests), default=None)
    if holder is None:
        return None
    end = min(holder.matched_tokens, num_tokens - 1)
    fetched = end - prefill.matched_tokens
    if fetched < _LEAST_FETCHED_TOKENS:
        return None
    most_seconds = min(fetched * prefill.prefill.each, _FETCH_SHARE * PREFIX_FETCH_SECONDS)
    if _transfer_seconds(end, prefill.matched_tokens, holder) >= most_seconds:
        return None
    return holder


def prefill_seconds(num_tokens: int, candidate: Candidate) -> float:
    """Predicts the seconds until a prefill worker has the first token of the prompt."""
    return candidate.queue_seconds + candidate.prefill.seconds(candidate.uncached(num_tokens))


def source_seconds(num_tokens: int, candidate: Candidate) -> float:
    """Returns the cost of the prefill worker: its prefill, and the transfer from it."""
    return prefill_seconds(num_tokens, candidate) + _transfer_seconds(num_tokens, 0, candidate)


def colocated_seconds(needed: Capacity, candidate: Candidate) -> float:
    """Predicts the seconds until a worker that does both prefill and decode decodes.

    The worker computes the prompt in chunks, each in a step together with its decodes.
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


def decode_seconds(needed: Capacity, candidate: Candidate) -> float:
    """Returns the cost of the decode worker: the transfer to it, and its slower steps."""
    num_tokens = needed.prompt_tokens
    moving = _transfer_seconds(num_tokens, num_tokens - candidate.uncached(num_tokens), candidate)
    return moving + _crowding_seconds(needed, candidate)


class Load(NamedTuple):
    """The predicted seconds of a typical request on a worker, which rank the workers of a pool."""

    seconds: float  # without a cached prefix
    compute_token_seconds: float  # saved by each cached token where the worker computes the prompt
    move_token_seconds: float  # saved by each cached token where the worker fetches the KV cache


NO_LOAD: Final = Load(0.0, 0.0, 0.0)


def measure_load(candidate: Candidate, *, computes: bool) -> Load:
    """Returns the load of a worker that computes prompts, or else of one that fetches them."""
    num_tokens = _TYPICAL.prompt_tokens
    move_token_seconds = 0.0
    if computes:
        seconds = source_seconds(num_tokens, candidate)
    else:
        seconds = candidate.queue_seconds + decode_seconds(_TYPICAL, candidate)
        moving = _transfer_seconds(num_tokens, 0, candidate)
        move_token_seconds = (moving - candidate.transfer.fixed) / num_tokens
    if not _has_capacity(_TYPICAL, candidate):
        seconds *= _FULL
    return Load(seconds, candidate.prefill.each, move_token_seconds)


def _transfer_seconds(num_tokens: int, num_cached: int, candidate: Candidate) -> float:
    """Predicts the seconds to move a prompt of which the receiver has the first `num_cached`."""
    return candidate.transfer.seconds(candidate.cost.moved_bytes(num_tokens, num_cached))


def _crowding_seconds(needed: Capacity, candidate: Candidate) -> float:
    """Returns the cost of slower steps for all sequences of the worker.

    Assumes that the steps of a full worker take twice as long as the steps of an empty one.
    """
    crowd = candidate.num_requests + needed.sequences - 1
    return (
        _HORIZON * candidate.step_seconds * crowd / (candidate.max_sequences or _DEFAULT_SEQUENCES)
    )


def _has_capacity(needed: Capacity, candidate: Candidate) -> bool:
    fits = candidate.num_requests + needed.sequences <= (candidate.max_sequences or math.inf)
    num_tokens = needed.prompt_tokens
    cached_tokens = min(candidate.matched_tokens, num_tokens)
    return fits and candidate.free_tokens >= candidate.cost.kv_tokens(num_tokens, cached_tokens)


def _choose(
    candidates: Sequence[Candidate],
    cost: Callable[[Candidate], float],
    needed: Capacity,
    rng: random.Random,
    affinity: str = "",
) -> Candidate | None:
    fitting = [
        candidate for candidate in candidates if _has_capacity(needed, candidate)
    ] or candidates
    costs = [cost(candidate) for candidate in fitting]
    limit = (_AFFINE if affinity else NEAR) * min(costs, default=0.0)
    near = [
        candidate for candidate, seconds in zip(fitting, costs, strict=True) if seconds <= limit
    ]
    if affinity:
        return max(near, key=lambda c: affinity_rank(affinity, c.worker_id), default=None)
    if len(near) > 2:
        near = rng.sample(near, 2)
    elif rng.random() < 0.5:
        near.reverse()  # equal ones take turns
    return min(
        near, key=lambda c: (c.pending_tokens, c.num_requests, -c.matched_tokens), default=None
    )


def affinity_rank(affinity: str, worker_id: str) -> bytes:
    """Returns the rank of a worker for an affinity, the same in every router.

    This is rendezvous hashing: if a worker leaves, only its own requests go elsewhere.
    """
    return blake2b(f"{affinity} {worker_id}".encode(), digest_size=8).digest()
