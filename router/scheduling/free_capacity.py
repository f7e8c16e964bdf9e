"""Adds up what the workers of each role have free, and tells those that wait for more."""

from collections.abc import Callable, Iterable
from functools import partial

from ...proto import worker_pb2
from .capacity import NO_CAPACITY, Capacity
from .worker_state import WorkerState


class FreeCapacity:
    """Holds the free capacity of the workers, by role.

    Workers report after each step. While nobody waits for capacity, it is counted when it is
    read, once for all reports before; else with each report.
    """

    def __init__(
        self,
        roles: Iterable["worker_pb2.Role"],
        token_seconds: Callable[[WorkerState], float],
    ) -> None:
        """`token_seconds` returns how long a worker takes for each prompt token."""
        self._free = dict.fromkeys(roles, NO_CAPACITY)
        self._token_seconds = token_seconds
        self._stale: set[WorkerState] = set()  # to be counted anew
        self._subscribers: list[Callable[[], object]] = []

    def of(self, role: "worker_pb2.Role") -> Capacity:
        """Returns what the workers of this role have free."""
        self._count_stale()
        return self._free[role]

    def recount(self, worker: WorkerState) -> None:
        """Takes account of a change of the worker."""
        if self._subscribers:
            self._count(worker)
        else:
            self._stale.add(worker)

    def remove(self, worker: WorkerState) -> None:
        """Counts the worker no more."""
        self._stale.discard(worker)
        self._free[worker.info.role] -= worker.free

    def subscribe(self, on_free: Callable[[], object]) -> Callable[[], None]:
        """Calls `on_free` whenever there may be more free than before; returns what ends that."""
        self._count_stale()
        self._subscribers.append(on_free)
        return partial(self._subscribers.remove, on_free)

    def notify(self) -> None:
        """Calls all subscribers."""
        for on_free in tuple(self._subscribers):
            on_free()

    def _count_stale(self) -> None:
        while self._stale:
            self._count(self._stale.pop())

    def _count(self, worker: WorkerState) -> None:
        before = worker.free
        worker.free = worker.measure_free(self._token_seconds(worker))
        self._free[worker.info.role] += worker.free - before
        if worker.free.exceeds(before):
            self.notify()
