"""Starts, stops and kills simulated workers, and keeps them registered in the directory."""

import asyncio
from collections.abc import Callable
from typing import Final

from ..config import PoolRole
from ..serve.members import HEARTBEAT_SECONDS, Directory
from .cost import ServiceCosts
from .fabric import Fabric
from .result import Lifetime, WorkerUsage
from .service import Fault, SimulatedService
from .transfers import TransferCosts
from .worker import SimulatedWorker, WorkerSpec

_DRAIN_SECONDS: Final = 600.0
_COARSE_HEARTBEAT_SECONDS: Final = 4.0
"""Routers learn the load of a worker that they use from their session, so fewer heartbeats do."""


class SimulatedPools:
    """Holds the workers of a service, by id. Lives in the event loop of the simulation."""

    def __init__(
        self,
        service: SimulatedService,
        costs: ServiceCosts,
        fabric: Fabric,
        directory: Directory,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Starts no worker. `failed` is called if a worker has a defect."""
        self.usages: list[WorkerUsage] = []
        self.starts: list[Lifetime] = []
        self.sizes: dict[PoolRole, list[tuple[float, int]]] = {role: [] for role in service.pools}
        self._service = service
        self._costs = costs
        self._fabric = fabric
        self._directory = directory
        self._failed = failed
        self._clock = asyncio.get_running_loop().time
        self._workers: dict[str, SimulatedWorker] = {}
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        self._num_started = 0
        self._num_returning: dict[PoolRole, int] = dict.fromkeys(service.pools, 0)
        self._transfer = TransferCosts(
            kv=service.kv,
            fixed_seconds=costs.transfer_seconds,
            bytes_per_second=costs.transfer_bytes_per_second,
            lease_seconds=service.lease_seconds,
        )

    def running(self, role: PoolRole) -> list[SimulatedWorker]:
        """Returns the workers of a role that take requests, the oldest first."""
        return [each for each in self._workers.values() if each.spec.role == role]

    def num_returning(self, role: PoolRole) -> int:
        """Returns the number of workers of a role that a fault has killed and that start again."""
        return self._num_returning[role]

    async def wait_for_start(self, role: PoolRole, seconds: float) -> None:
        """Waits as long as a worker takes to start."""
        start = Lifetime(role=role, started=self._clock())
        self.starts.append(start)
        try:
            await asyncio.sleep(seconds)
        finally:
            start.ended = self._clock()

    async def start(self, role: PoolRole, worker_id: str = "") -> SimulatedWorker:
        """Starts a worker, which is ready at once; `worker_id`: of one that returns."""
        self._num_started += 1
        pool = self._service.pools[role]
        spec = WorkerSpec(
            worker_id=worker_id or f"{role}-{self._num_started}",
            role=role,
            epoch=self._num_started,
            service=self._service,
            pool=pool,
            costs=self._costs.prefill if role == "prefill" else self._costs.decode,
            transfer=self._transfer,
            fabric=self._fabric,
            clock=self._clock,
            contention=self._contention,
            failed=self._failed,
        )
        worker = self._workers[spec.worker_id] = SimulatedWorker(spec)
        self.usages.append(worker.usage)
        self._count(role)
        await self._directory.register(worker.heartbeat())
        self._heartbeats[spec.worker_id] = asyncio.create_task(self._heartbeat(worker))
        return worker

    async def stop(self, worker: SimulatedWorker) -> None:
        """Stops a worker as Serve does: drains it, removes it from the directory, ends it."""
        self._leave(worker)
        await self._directory.remove(worker.spec.worker_id)
        await worker.drain(_DRAIN_SECONDS)
        await worker.stop()

    async def fail(self, fault: Fault) -> None:
        """Kills a worker at the fault's time, and starts it again."""
        await asyncio.sleep(fault.time - self._clock())
        running = self.running(fault.role)
        if fault.number >= len(running):
            return
        worker = running[fault.number]
        self._leave(worker)
        if fault.restart_seconds is None:
            await worker.kill()
        else:
            self._num_returning[fault.role] += 1
            await worker.kill()
            await self.wait_for_start(fault.role, fault.restart_seconds)
            self._num_returning[fault.role] -= 1
            await self.start(fault.role, worker.spec.worker_id)

    async def close(self) -> None:
        """Ends all workers. `sizes` keeps the sizes that the pools had before."""
        for worker_id, worker in list(self._workers.items()):
            self._heartbeats[worker_id].cancel()
            await worker.kill()

    def _leave(self, worker: SimulatedWorker) -> None:
        del self._workers[worker.spec.worker_id]
        self._heartbeats.pop(worker.spec.worker_id).cancel()
        self._count(worker.spec.role)

    def _count(self, role: PoolRole) -> None:
        self.sizes[role].append((self._clock(), len(self.running(role))))

    def _contention(self, spec: WorkerSpec) -> float:
        """Returns the factor of a worker's step that begins now."""
        costs = self._costs
        factor = costs.prefill_contention if spec.role == "prefill" else costs.contention
        if factor == 1.0:
            return 1.0
        others = (each for each in self._workers.values() if each.spec is not spec)
        return factor if any(each.is_busy for each in others) else 1.0

    async def _heartbeat(self, worker: SimulatedWorker) -> None:
        seconds = HEARTBEAT_SECONDS if self._service.exact else _COARSE_HEARTBEAT_SECONDS
        while True:
            await asyncio.sleep(seconds)
            await self._directory.register(worker.heartbeat())
