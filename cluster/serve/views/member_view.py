"""Keeps a router's view of the members that the directory lists.

`DirectoryWatcher` merges changes, and does not mistake the empty directory after a restart for the
loss of all workers. `Members` tells which of the members belong to the router's deployment.
"""

import asyncio
from collections.abc import Sequence

from ....proto import worker_pb2
from ..members import EXPIRY_SECONDS, NOTHING, Changes, RouterInfo


class DirectoryWatcher:
    """Merges the changes that a router receives into the list of workers that it may use."""

    def __init__(self, expiry: float = EXPIRY_SECONDS) -> None:
        self._expiry = expiry
        self._current: dict[str, worker_pb2.WorkerInfo] = {}
        self._carried: dict[str, worker_pb2.WorkerInfo] = {}
        self._routers: dict[str, RouterInfo] = {}
        self.version = NOTHING
        # True if the router may know blocked prompts or adapters that the directory does not know.
        self.may_know_more = True

    @property
    def workers(self) -> list[worker_pb2.WorkerInfo]:
        """Returns the workers after the last changes; an unchanged one is the same object."""
        return [*self._carried.values(), *self._current.values()]

    @property
    def routers(self) -> tuple[RouterInfo, ...]:
        """Returns the routers after the last changes, sorted by id."""
        return tuple(self._routers[router_id] for router_id in sorted(self._routers))

    def apply(self, changes: Changes) -> bool:
        """Merges changes; returns True if the list of workers or of routers has changed.

        Keeps workers that only an earlier incarnation knew until this one is old enough to have
        received their heartbeats.
        """
        num_carried = len(self._carried)
        is_other = changes.version.incarnation != self.version.incarnation
        if is_other:
            self._carried |= self._current
            self.may_know_more = True
        if changes.is_whole:
            self._current = {}
            self._routers = {}
        for member_id in changes.removed:
            self._current.pop(member_id, None)
            self._routers.pop(member_id, None)
        parsed = map(worker_pb2.WorkerInfo.FromString, changes.workers)
        self._current |= {info.worker_id: info for info in parsed}
        self._routers |= {info.router_id: info for info in changes.routers}
        if changes.age >= self._expiry:
            self._carried = {}
        for worker_id in self._current.keys() & self._carried.keys():
            del self._carried[worker_id]
        has_changed = changes.is_whole or changes.version.members != self.version.members
        self.version = changes.version
        return has_changed or len(self._carried) != num_carried


class Members:
    """Holds the members that the directory lists; waits until they are complete."""

    def __init__(self, application: str, layout: bytes) -> None:
        """Starts without members.

        `application`: the deployment that this router belongs to. `layout`: of the KV cache of its
        model, as in WorkerInfo.
        """
        self.workers: Sequence[worker_pb2.WorkerInfo] = ()
        self.routers: Sequence[RouterInfo] = ()
        self._application = application
        self._layout = layout
        self._changed = asyncio.Condition()

    async def update(
        self, workers: Sequence[worker_pb2.WorkerInfo], routers: Sequence[RouterInfo]
    ) -> None:
        """Replaces the members by the directory's."""
        async with self._changed:
            self.workers = workers
            self.routers = routers
            self._changed.notify_all()

    @property
    def fitting(self) -> list[worker_pb2.WorkerInfo]:
        """Returns the workers with this service's model.

        After the model's files have changed, workers of the other model must not continue requests.
        """
        return [each for each in self.workers if each.layout == self._layout]

    @property
    def own_routers(self) -> list[RouterInfo]:
        """Returns the routers of this deployment."""
        return [each for each in self.routers if each.application == self._application]

    @property
    def other_routers(self) -> list[RouterInfo]:
        """Returns the routers of the deployment that this one replaces or that replaces it."""
        return [each for each in self.routers if each.application != self._application]

    @property
    def other_workers(self) -> list[worker_pb2.WorkerInfo]:
        """Returns the workers of the deployment that this one replaces or that replaces it."""
        return [each for each in self.workers if each.application != self._application]

    def is_complete(self, num_routers: int, num_prefill: int, num_decode: int) -> bool:
        """Returns True if this deployment has enough members and every router knows all workers.

        Workers may have taken other roles by then; one of them decodes.
        """
        ready = [
            each
            for each in self.fitting
            if not each.draining and each.application == self._application
        ]
        num_decoding = sum(each.role == worker_pb2.ROLE_DECODE for each in ready)
        if len(ready) < num_prefill + num_decode or num_decoding < min(num_decode, 1):
            return False
        all_know = all(each.num_workers >= len(self.workers) for each in self.routers)
        return all_know and len(self.own_routers) >= num_routers

    async def wait_complete(
        self, num_routers: int, num_prefill: int, num_decode: int, timeout: float
    ) -> None:
        """Returns once `is_complete`. Raises TimeoutError."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(
                lambda: self.is_complete(num_routers, num_prefill, num_decode)
            )
