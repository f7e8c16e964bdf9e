"""Sums the free capacity of the workers, minus reservations, and predicts their prefill backlog."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from ...proto import worker_pb2
from ...proto.costs import NEUTRAL_COST, LinearCost
from ..request import TokenRequest
from .capacity import NO_CAPACITY, UNBOUNDED, Capacity, required_capacity
from .pool import PER_UNIT, Pool
from .speeds import WorkerSpeeds
from .worker_state import WorkerState

_PREFILL: Final = worker_pb2.ROLE_PREFILL
_DECODE: Final = worker_pb2.ROLE_DECODE


class PoolCapacity:
    """Holds the free capacity of the workers of a registry, and the reservations of requests.

    A worker reports after each step. Without subscribers, its free capacity is computed when it is
    read, once for all reports before. With subscribers, it is computed with each report.
    """

    def __init__(
        self,
        workers: Mapping[str, WorkerState],
        speeds: WorkerSpeeds,
        *,
        local_prefill_tokens: int,
        rng: random.Random,
    ) -> None:
        """`workers`: the live map of the registry. `local_prefill_tokens`: as in WorkerRegistry."""
        self.speeds = speeds
        self.cost = NEUTRAL_COST  # of KV cache on the workers, which all have the same model
        self._local_prefill_tokens = local_prefill_tokens
        self._pools = {role: Pool(role, workers, speeds, rng) for role in (_PREFILL, _DECODE)}
        # Workers to recount, in order: equal workers are ranked at random as they are counted, so
        # the order of a set would give another simulation in each process.
        self._stale: dict[WorkerState, None] = {}
        self._subscribers: list[Callable[[], object]] = []
        self._reserved: dict[str, Capacity] = {}  # by request id
        self._total_reserved = NO_CAPACITY

    def free(self, num_tokens: int = UNBOUNDED) -> Capacity | None:
        """Returns the workers' free capacity for a prompt of `num_tokens`, minus reservations.

        Returns None if no worker takes requests. If one pool has no workers, the other pool does
        its work.
        """
        prefill = self.pool(_PREFILL).free
        decode = self.pool(_DECODE).free
        if not decode.workers:
            decode = prefill
        if not decode.workers:
            return None
        prompt_tokens = (prefill if prefill.workers else decode).prompt_tokens
        if self.may_skip_prefill(num_tokens):
            prompt_tokens = max(prompt_tokens, decode.prompt_tokens)
        return decode._replace(prompt_tokens=prompt_tokens) - self._total_reserved

    def may_skip_prefill(self, num_tokens: int) -> bool:
        """Returns True if a decode worker may compute a prompt of `num_tokens`, even uncached."""
        return num_tokens <= self._local_prefill_tokens

    def largest(self) -> Capacity | None:
        """Returns the most sequences and KV tokens of an empty decode worker; None without workers.

        Without a decode worker, counts prefill workers, which then do both.
        """
        return self.pool(_DECODE).largest() or self.pool(_PREFILL).largest()

    def reserve(self, request: TokenRequest) -> None:
        """Reserves the capacity that a request needs until it is dispatched, or until `release`."""
        self.release(request.request_id)
        needed = required_capacity(request, self.cost)
        self._reserved[request.request_id] = needed
        self._total_reserved += needed

    def release(self, request_id: str) -> bool:
        """Ends a reservation. Returns False for a request without one."""
        reserved = self._reserved.pop(request_id, NO_CAPACITY)
        self._total_reserved -= reserved
        return reserved is not NO_CAPACITY

    def prefill_queue(self, *, is_local: bool = False) -> LinearCost:
        """Predicts the prefill backlog: seconds already queued, plus seconds per further token.

        `is_local`: of the decode workers, which compute short prompts. Assumes the recent cache hit
        rate. Also assumes that other routers send prompt tokens in proportion to their share of the
        sequences at the workers.
        """
        role = self._computing
        if is_local and self.pool(_DECODE).free.workers:
            role = _DECODE
        totals = self.pool(role).totals
        unmeasured = totals.num_unmeasured / self.speeds.unmeasured_token_seconds(role)
        speed = totals.speed / PER_UNIT + unmeasured
        if not speed:
            return LinearCost(fixed=0.0, each=0.0)
        uncached_rate = self.uncached_rate
        own = sum(pool.totals.own_sequences for pool in self._pools.values())
        others = sum(pool.totals.other_sequences for pool in self._pools.values())
        num_tokens = totals.pending_tokens + uncached_rate * self._total_reserved.prompt_tokens
        return LinearCost(
            fixed=num_tokens / speed,
            each=uncached_rate / speed * (1 + others / max(own, 1)),
        )

    @property
    def uncached_rate(self) -> float:
        """Returns the recent uncached share of a prompt: the mean of the workers that prefill."""
        pool = self.pool(self._computing)
        return pool.totals.uncached / PER_UNIT / pool.free.workers if pool.free.workers else 1.0

    def subscribe(self, on_free: Callable[[], object]) -> Callable[[], None]:
        """Calls `on_free` when capacity may have become free; returns a function that ends this."""
        self._count_stale()
        self._subscribers.append(on_free)
        return partial(self._subscribers.remove, on_free)

    def notify(self) -> None:
        """Calls all subscribers."""
        for on_free in tuple(self._subscribers):
            on_free()

    def recount(self, worker: WorkerState) -> None:
        """Recounts the free capacity of a worker that has changed."""
        if self._subscribers:
            self._count(worker)
        else:
            self._stale[worker] = None

    def remove(self, worker: WorkerState) -> None:
        """Removes the free capacity of a worker that has left."""
        self._stale.pop(worker, None)
        self._pools[worker.info.role].remove(worker.info.worker_id)

    def pool(self, role: "worker_pb2.Role") -> Pool:
        """Returns the workers of a role, counted."""
        self._count_stale()
        return self._pools[role]

    @property
    def _computing(self) -> "worker_pb2.Role":
        """Returns the role of the workers that compute prompts."""
        return _PREFILL if self.pool(_PREFILL).free.workers else _DECODE

    def _count_stale(self) -> None:
        while self._stale:
            worker = next(iter(self._stale))
            del self._stale[worker]
            self._count(worker)

    def _count(self, worker: WorkerState) -> None:
        if self._pools[worker.info.role].count(worker):
            self.notify()
