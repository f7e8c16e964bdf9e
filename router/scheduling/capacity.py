"""Measures worker resources: the need and the use of a request, and how fast a queue drains."""

import math
import operator
from collections.abc import Callable
from typing import Final, NamedTuple

from ...proto import worker_pb2
from ...proto.costs import GROWTH_TOKENS, NEUTRAL_COST, KvCost
from ..request import TokenRequest

UNBOUNDED: Final = 1 << 40


class Capacity(NamedTuple):
    """An amount of every resource of one or more workers: needed, used or free."""

    workers: int = 0  # workers that take requests
    sequences: int = 0
    prompts: int = 0  # prompts that are not computed yet
    # Tokens of these prompts; free: tokens that may be sent until the worker has enough to compute.
    prompt_tokens: int = 0
    # Tokens of these prompts that the worker's prefix cache lacks.
    uncached_tokens: int = 0
    kv_tokens: int = 0  # tokens of KV cache

    def __add__(self, other: "Capacity") -> "Capacity":  # type: ignore[override]
        return Capacity._make(map(operator.add, self, other))

    def __sub__(self, other: "Capacity") -> "Capacity":
        return Capacity._make(map(operator.sub, self, other))

    def clipped(self) -> "Capacity":
        """Returns the amounts with 0 in place of negative ones."""
        return Capacity._make([amount if amount > 0 else 0 for amount in self])

    def exceeds(self, other: "Capacity") -> bool:
        """Returns True if any amount is greater than in `other`."""
        return any(map(operator.gt, self, other))


NO_CAPACITY: Final = Capacity()


def required_capacity(request: TokenRequest, cost: KvCost = NEUTRAL_COST) -> Capacity:
    """Returns the resources that a request needs if no part of its prompt is cached.

    `kv_tokens` counts the prompt and the expected completion; it also measures the request's work.
    `cost` describes the KV cache of the workers.
    """
    submit = request.submit
    # Emitted tokens are computed again as a part of the prompt.
    num_tokens = len(submit.token_ids) + sum(len(ids) for ids in request.emitted if ids)
    sequences = max(submit.num_choices, submit.beam_search.width)
    return Capacity(
        sequences=sequences,
        prompt_tokens=num_tokens,
        kv_tokens=_kv_tokens(submit, sequences, num_tokens, 0, cost),
    )


def used_capacity(
    request: TokenRequest,
    num_tokens: int,
    cached_tokens: int,
    fetched_tokens: int,
    *,
    decodes: bool,
    cost: KvCost = NEUTRAL_COST,
) -> Capacity:
    """Returns the resources that a request will use on one worker.

    The worker computes `num_tokens` of the prompt (0: none), has `cached_tokens` of it in its
    prefix cache, fetches the missing ones of the first `fetched_tokens`, and generates if `decodes`
    is True. Choices share the blocks of the prompt; all requests share the blocks of its cached
    part. `cost` describes the KV cache of the worker.
    """
    required = required_capacity(request, cost)
    cached_tokens = min(cached_tokens, required.prompt_tokens)
    if decodes:
        kv_tokens = _kv_tokens(
            request.submit, required.sequences, required.prompt_tokens, cached_tokens, cost
        )
    else:
        kv_tokens = cost.kv_tokens(required.prompt_tokens, cached_tokens)
    uncached = 0
    if num_tokens:
        uncached = max(num_tokens - max(cached_tokens, fetched_tokens), 1)
    return Capacity(
        sequences=required.sequences if decodes else 1,
        prompts=1 if num_tokens else 0,
        prompt_tokens=num_tokens,
        uncached_tokens=uncached,
        kv_tokens=kv_tokens,
    )


def _kv_tokens(
    submit: worker_pb2.Submit, sequences: int, num_tokens: int, cached_tokens: int, cost: KvCost
) -> int:
    """Returns the KV tokens of a prompt of `num_tokens` and its expected completions."""
    generated = min(submit.max_tokens, GROWTH_TOKENS)
    first = cost.kv_tokens(num_tokens + generated, cached_tokens)
    return first + (sequences - 1) * cost.kv_tokens(generated)


class DrainRate:
    """Measures how fast a queue drains since it was last empty.

    Only while the queue is not empty do the workers run at full rate. Older departures lose weight
    over about ten seconds. Before enough requests have departed, the rate is estimated by Little's
    law: the work in progress when the workers are full, divided by the mean time that work is in
    progress. Work that fits into free capacity does not wait.
    """

    _MEMORY_SECONDS: Final = 10.0
    _TRUSTED: Final = 8  # departures
    _NEWEST_WEIGHT: Final = 0.1  # weight of the last request in a moving mean

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_progress = NO_CAPACITY
        self._mean_seconds = 0.0  # mean time that work is in progress
        # Time of the last departure, or of the first arrival; None while the queue is empty.
        self._last: float | None = None
        self.clear()

    def fill(self) -> None:
        """Starts the measurement when the queue gets its first request. Idempotent."""
        if self._last is None:
            self._last = self._clock()

    def clear(self) -> None:
        """Ends the measurement because the queue is empty."""
        self._last = None
        self._tokens = 0.0
        self._elapsed = 0.0
        self._count = 0

    def begin(self, work: Capacity) -> None:
        """Counts work that begins."""
        self._in_progress += work

    def finish(self, work: Capacity, seconds: float) -> None:
        """Counts work that ends after `seconds`."""
        self._in_progress -= work
        self._mean_seconds += (self._NEWEST_WEIGHT if self._mean_seconds else 1.0) * (
            seconds - self._mean_seconds
        )

    def depart(self, num_tokens: int) -> None:
        """Counts work of `num_tokens` that leaves the queue to begin."""
        now = self._clock()
        elapsed = now - (now if self._last is None else self._last)
        memory = math.exp(-elapsed / self._MEMORY_SECONDS)
        self._tokens = self._tokens * memory + num_tokens
        self._elapsed = self._elapsed * memory + elapsed
        self._last = now
        self._count += 1

    def prompt_tokens(self, num_tokens: int) -> float:
        """Estimates the prompt share of `num_tokens` queued tokens by the work in progress."""
        return num_tokens * self._in_progress.prompt_tokens / max(self._in_progress.kv_tokens, 1)

    def seconds(self, num_tokens: int, free: Capacity = NO_CAPACITY) -> float:
        """Estimates the seconds until `num_tokens` of work have left the queue.

        `free`: the free capacity of the workers. Returns 0 while too little is known.
        """
        if self._count < self._TRUSTED:
            begun = self._in_progress
            tokens_each = begun.kv_tokens / max(begun.sequences, 1)
            room = max(min(free.kv_tokens, free.sequences * tokens_each), 0.0)
            return (
                max(num_tokens - room, 0.0) * self._mean_seconds / max(begun.kv_tokens + room, 1.0)
            )
        waiting = self._clock() - self._last if self._last is not None else 0.0
        return num_tokens * (self._elapsed + waiting) / self._tokens
