"""Amounts of worker resources: what a request needs, what it uses on a worker, and how fast a queue
for them drains.
"""

import math
import operator
from collections.abc import Callable
from typing import Final, NamedTuple

from ..request import TokenRequest

UNBOUNDED: Final = 1 << 40

GROWTH_TOKENS: Final = 256
"""Generated tokens of each sequence that are counted in advance; most completions are not longer.
"""


class Capacity(NamedTuple):
    """An amount of every resource of one worker or of many: needed, used or free."""

    workers: int = 0  # that take requests
    sequences: int = 0
    prompts: int = 0  # not computed yet
    prompt_tokens: int = (
        0  # of these prompts; free: what may be sent before the worker has enough to compute
    )
    uncached_tokens: int = (
        0  # of these prompts, the tokens that the worker's prefix cache does not hold
    )
    kv_tokens: int = 0  # tokens of KV cache

    def __add__(self, other: "Capacity") -> "Capacity":  # type: ignore[override]
        return Capacity._make(map(operator.add, self, other))

    def __sub__(self, other: "Capacity") -> "Capacity":
        return Capacity._make(map(operator.sub, self, other))

    def clipped(self) -> "Capacity":
        """Returns the amounts with 0 in place of what is negative."""
        return Capacity._make([amount if amount > 0 else 0 for amount in self])

    def exceeds(self, other: "Capacity") -> bool:
        """Returns whether there is more of any resource than in `other`."""
        return any(map(operator.gt, self, other))


NO_CAPACITY: Final = Capacity()


def required_capacity(request: TokenRequest) -> Capacity:
    """Returns what a request needs of the pools if nothing of its prompt is cached. `kv_tokens`,
    the prompt and the tokens that it is expected to generate, also measure its work.
    """
    submit = request.submit
    num_tokens = len(submit.token_ids)
    num_tokens += sum(len(ids) for ids in request.emitted if ids)  # computed as parts of prompts
    sequences = max(submit.num_choices, submit.beam_search.width)
    return Capacity(
        sequences=sequences,
        prompt_tokens=num_tokens,
        kv_tokens=num_tokens + sequences * min(submit.max_tokens, GROWTH_TOKENS),
    )


def used_capacity(
    request: TokenRequest,
    num_tokens: int,
    cached_tokens: int,
    fetched_tokens: int,
    *,
    decodes: bool,
) -> Capacity:
    """Returns what a request will use on a worker that computes `num_tokens` of its prompt (0:
    none), holds `cached_tokens` of it in its prefix cache, fetches what it lacks of the first
    `fetched_tokens` and, if `decodes`, generates. Choices share the blocks of the prompt, and all
    requests those of its cached part.
    """
    required = required_capacity(request)
    generated = required.kv_tokens - required.prompt_tokens if decodes else 0
    return Capacity(
        sequences=required.sequences if decodes else 1,
        prompts=1 if num_tokens else 0,
        prompt_tokens=num_tokens,
        uncached_tokens=max(num_tokens - max(cached_tokens, fetched_tokens), 1)
        if num_tokens
        else 0,
        kv_tokens=max(required.prompt_tokens - cached_tokens, 0) + generated,
    )


class PrefillWork:
    """Adds up the prompts that were sent to workers to compute."""

    def __init__(self) -> None:
        self.uncached_tokens = 0
        self.seconds = 0.0  # that a worker takes for these tokens

    def add(self, uncached_tokens: int, seconds: float) -> None:
        """Adds a prompt of which the worker computes so many tokens, in about so many seconds."""
        self.uncached_tokens += uncached_tokens
        self.seconds += seconds


class DrainRate:
    """Measures how fast a queue drains since it was last empty: only then do those it waits for
    work at full rate.

    Counts the last ten seconds or so, and the time since the last departure. Before enough requests
    have departed, it estimates by Little's law: the work in progress once the workers are full,
    divided by the mean time for which work is in progress. What still finds room waits for no other
    to end.
    """

    _MEMORY_SECONDS: Final = 10.0
    _TRUSTED: Final = 8  # departures
    _NEWEST_WEIGHT: Final = 0.1  # of the last request in a moving mean

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_progress = NO_CAPACITY
        self._mean_seconds = 0.0  # that work is in progress
        self._last: float | None = (
            None  # time of the last departure, or when the queue began to fill; None if empty
        )
        self.clear()

    def fill(self) -> None:
        """Notes that the queue is not empty. Idempotent."""
        if self._last is None:
            self._last = self._clock()

    def clear(self) -> None:
        """Notes that the queue is empty."""
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
        """Counts work of so many tokens that leaves the queue in order to begin."""
        now = self._clock()
        elapsed = now - (now if self._last is None else self._last)
        memory = math.exp(-elapsed / self._MEMORY_SECONDS)
        self._tokens = self._tokens * memory + num_tokens
        self._elapsed = self._elapsed * memory + elapsed
        self._last = now
        self._count += 1

    def prompt_tokens(self, num_tokens: int) -> float:
        """Returns how many of so many tokens of work are prompts, by the work in progress."""
        return num_tokens * self._in_progress.prompt_tokens / max(self._in_progress.kv_tokens, 1)

    def seconds(self, num_tokens: int, free: Capacity = NO_CAPACITY) -> float:
        """Returns how long so many tokens of work take to depart where the workers have `free`; 0
        while too little is known.
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
