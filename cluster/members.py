"""Holds the workers and routers of a service as one of its routers sees them, and what its deployments share."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..proto import worker_pb2
from ..proto.identity import PeerIdentity
from .directory import RouterInfo


class Members:
    """Holds what the directory lists; `update` whenever that has changed."""

    def __init__(self, application: str, layout: bytes) -> None:
        """`application`: the deployment of the service that this router belongs to. `layout`: of the KV cache of its
        model, as in WorkerInfo."""
        self.workers: Sequence[worker_pb2.WorkerInfo] = ()
        self.routers: Sequence[RouterInfo] = ()
        self._application = application
        self._layout = layout
        self._changed = asyncio.Condition()

    async def update(self, workers: Sequence[worker_pb2.WorkerInfo], routers: Sequence[RouterInfo]) -> None:
        """Takes over the directory's lists."""
        async with self._changed:
            self.workers, self.routers = workers, routers
            self._changed.notify_all()

    @property
    def fitting(self) -> list[worker_pb2.WorkerInfo]:
        """The workers that have the model of this service: those of another, as after its files have changed, must not
        continue its requests."""
        return [each for each in self.workers if each.layout == self._layout]

    @property
    def own_routers(self) -> list[RouterInfo]:
        """The routers of this deployment."""
        return [each for each in self.routers if each.application == self._application]

    @property
    def other_routers(self) -> list[RouterInfo]:
        """The routers of the deployment that this one replaces, or is replaced by."""
        return [each for each in self.routers if each.application != self._application]

    @property
    def other_workers(self) -> list[worker_pb2.WorkerInfo]:
        """The workers of that deployment."""
        return [each for each in self.workers if each.application != self._application]

    def is_complete(self, num_routers: int, num_prefill: int, num_decode: int) -> bool:
        """Returns whether this deployment has so many routers and workers, and every router knows all workers."""
        ready = [each for each in self.fitting if not each.draining and each.application == self._application]
        counts = Counter(worker.role for worker in ready)
        if counts[worker_pb2.ROLE_PREFILL] < num_prefill or counts[worker_pb2.ROLE_DECODE] < num_decode:
            return False
        all_know = all(each.num_workers >= len(self.workers) for each in self.routers)
        return all_know and len(self.own_routers) >= num_routers

    async def wait_complete(self, num_routers: int, num_prefill: int, num_decode: int, timeout: float) -> None:
        """Returns once `is_complete`. Raises TimeoutError."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(lambda: self.is_complete(num_routers, num_prefill, num_decode))


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuity:
    """What a deployment of a service takes over from the one before, and what must be the same."""

    identity: PeerIdentity  # of its processes
    resume_key: bytes  # of the tokens with which clients go on at another router
    layout: bytes  # of the KV cache, as in WorkerInfo: a digest of the model, too
    ends_with_launcher: bool  # on a Ray of its own
    cache_secret: bytes | None = None  # of which come the salts of the tenants' prefixes; None: of the resume key

    def __repr__(self) -> str:
        return "Continuity(...)"  # no secret in logs
