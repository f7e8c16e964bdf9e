"""Sums the free capacity of the workers, minus reservations, and predicts their prefill backlog."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from ...proto import worker_pb2
from ...proto.costs import NEUTRAL_COST, LinearCost
from ..request import TokenRequest
from .capacity import NO_CAPACITY, UNBOUNDED, Capacity, required_capacity
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
    ) -> None:
        """`workers`: the live map of the registry. `local_prefill_tokens`: as in WorkerRegistry."""
        self._workers = workers
        self.speeds = speeds
        self.cost = NEUTRAL_COST  # of KV cache on the workers, which all have the same model
        self._local_prefill_tokens = local_prefill_tokens
        self._free = {_PREFILL: NO_CAPACITY, _DECODE: NO_CAPACITY}
        self._stale: set[WorkerState] = set()  # workers to recount
        self._subscribers: list[Callable[[], object]] = []
        self._reserved: dict[str, Capacity] = {}  # by request id
        self._total_reserved = NO_CAPACITY

    def free(self, num_tokens: int = UNBOUNDED) -> Capacity | None:
        """Returns the workers' free capacity for a prompt of `num_tokens`, minus reservations.

        Returns None if no worker takes requests. If one pool has no workers, the other pool does
        its work.
        """
        prefill = self._of(_PREFILL)
        decode = self._of(_DECODE)
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
        """Returns the most sequences and KV tokens of an empty decode worker; None without one."""
        sizes = [worker.size for worker in self._workers.values() if worker.info.role == _DECODE]
        if not sizes:
            return None
        return Capacity(
            sequences=max(size.sequences for size in sizes),
            kv_tokens=max(size.kv_tokens for size in sizes),
        )

    def reserve(self, request: TokenRequest) -> None:
        """Reserves the capacity that a request needs until it is dispatched, or until `release`."""
        self.release(request.request_id)
        needed = required_capacity(request, self.cost)
        self._reserved[request.request_id] = needed
        self._total_reserved += needed

    def release(self, request_id: str) -> None:
        """Ends a reservation. Idempotent."""
        if reserved := self._reserved.pop(request_id, None):
            self._total_reserved -= reserved

    def prefill_queue(self) -> LinearCost:
        """Predicts the prefill backlog: seconds already queued, plus seconds per further token.

        Assumes the recent cache hit rate. Also assumes that other routers send prompt tokens in
        proportion to their share of the sequences at the workers.
        """
        pool = self._computing
        if not pool:
            return LinearCost(fixed=0.0, each=0.0)
        token_seconds = 1 / sum(1 / self.speeds.token_seconds(worker) for worker in pool)
        uncached_rate = self.uncached_rate
        own = sum(worker.own.sequences for worker in self._workers.values())
        others = sum(worker.others.sequences for worker in self._workers.values())
        pending = sum(worker.pending_tokens for worker in pool)
        num_tokens = pending + uncached_rate * self._total_reserved.prompt_tokens
        return LinearCost(
            fixed=num_tokens * token_seconds,
            each=uncached_rate * token_seconds * (1 + others / max(own, 1)),
        )

    @property
    def uncached_rate(self) -> float:
        """Returns the recent uncached share of a prompt: the mean of the workers that prefill."""
        rates = [worker.uncached_rate for worker in self._computing]
        return sum(rates) / len(rates) if rates else 1.0

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
            self._stale.add(worker)

    def remove(self, worker: WorkerState) -> None:
        """Removes the free capacity of a worker that has left."""
        self._stale.discard(worker)
        self._free[worker.info.role] -= worker.free

    @property
    def _computing(self) -> list[WorkerState]:
        """Returns the workers that compute prompts."""
        role = _PREFILL if self._of(_PREFILL).workers else _DECODE
        return [
            worker
            for worker in self._workers.values()
            if worker.info.role == role and worker.takes_requests
        ]

    def _of(self, role: "worker_pb2.Role") -> Capacity:
        """Returns the free capacity of the workers of this role."""
        self._count_stale()
        return self._free[role]

    def _count_stale(self) -> None:
        while self._stale:
            self._count(self._stale.pop())

    def _count(self, worker: WorkerState) -> None:
        before = worker.free
        worker.free = worker.measure_free(self.speeds.token_seconds(worker))
        self._free[worker.info.role] += worker.free - before
        if worker.free.exceeds(before):
            self.notify()
