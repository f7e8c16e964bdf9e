"""Simulates a worker with the real request manager, engine, scheduler and block pool.

Only the executor, the KV transfers and the sessions are simulated; see `engine` and `fabric`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ...proto import worker_pb2
from ...workers.engine.block_pool import BlockState
from ...workers.engine.engine import Engine
from ...workers.engine.plan import StepPlan
from ...workers.serve.cache_reports import CacheReports
from ...workers.serve.cache_reset import CacheAge
from ...workers.serve.grammars import GrammarCompiler
from ...workers.serve.load import LoadReader
from ...workers.serve.prefix_transfer import PrefixImporter, PrefixLender
from ...workers.serve.request_manager import RequestManager
from ...workers.serve.submit import WorkerLimits
from ...workers.serve.watchdog import Canary
from ...workers.tp.adapters import AdapterCache
from ...workers.tp.kv_group import KvGroup
from ..config import PoolRole
from .coarse import CoarseEngine, CoarseRunner
from .cost import StepCosts, StepWork
from .engine import TimedExecutor, TimedRunner
from .fabric import Fabric
from .result import WorkerUsage
from .service import SimulatedPool, SimulatedService
from .transfers import KvFetches, KvOffers, SimulatedEndpoint, TransferCosts

_GOODBYE_SECONDS: Final = 0.5  # for routers to read the last outputs, as real workers wait
VOCAB_SIZE: Final = 1 << 16
LAYOUT: Final = b"simulated"


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Holds what a simulated worker is made of."""

    worker_id: str
    role: PoolRole
    epoch: int
    service: SimulatedService
    pool: SimulatedPool
    costs: StepCosts
    transfer: TransferCosts
    fabric: Fabric
    clock: Callable[[], float]
    # Returns how much longer a step of this worker takes now than on an idle machine.
    contention: Callable[["WorkerSpec"], float]
    failed: Callable[[BaseException], None]

    @property
    def address(self) -> str:
        """Returns the address, which no earlier process of the worker had."""
        return f"{self.worker_id}:{self.epoch}"

    def info(self, load: worker_pb2.WorkerLoad) -> worker_pb2.WorkerInfo:
        """Returns the worker's entry in the directory."""
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=f"ROLE_{self.role.upper()}",
            address=self.address,
            kv_bytes_per_token=self.service.token_bytes,
            block_size=self.service.block_size,
            context_tokens=self.service.context_tokens,
            load=load,
            draining=load.draining,
            tp=1,
            max_sequences=self.pool.budgets.max_sequences,
            mixed_chunk_tokens=self.pool.budgets.mixed_chunk_tokens,
            layout=LAYOUT,
            tables=self._tables,
            has_sparse_points=self.service.kv.has_sparse_points,
        )

    @cached_property
    def _tables(self) -> list[worker_pb2.KvTable]:
        """Returns the block tables of each entry, made once: a service has many heartbeats."""
        return [worker_pb2.KvTable(**each._asdict()) for each in self.service.kv.tables]

    @property
    def limits(self) -> WorkerLimits:
        """Returns the limits of submits."""
        capacity = self.service.engine_config(self.pool).capacity_tokens
        return WorkerLimits(
            vocab_size=VOCAB_SIZE,
            context_tokens=min(self.service.context_tokens, capacity),
            max_sequences=self.pool.budgets.max_sequences,
            eos_ids=frozenset(),
            is_fallback=self.role == "prefill",
        )


class SimulatedWorker:
    """Runs one worker in the event loop of the simulation."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.usage = WorkerUsage(
            worker_id=spec.worker_id,
            role=spec.role,
            started=spec.clock(),
            num_blocks=spec.pool.num_blocks,
        )
        self._engine, self._runner = self._make_engine()
        self.offers = KvOffers(spec.transfer, lambda sequence: self._requests.release(sequence))
        fetches = KvFetches(spec.transfer, spec.fabric.offers)
        self._kv = KvGroup(SimulatedEndpoint(self.offers, fetches, spec.fabric.channel))
        self._loads = LoadReader(self._engine, spec.pool.num_blocks)
        self._num_transfers = 0
        self._entry = b""
        self._registered = (-1, False)  # the state that `_entry` describes
        self._requests = self._request_manager()
        self._lender = PrefixLender(
            self._runner,
            self._kv,
            self._kv_handle,
            spec.service.block_size,
            self._requests.load_reports.changed,
        )
        self.methods: Mapping[str, Any] = {
            "Session": self._requests.serve,
            "LeasePrefix": self._lender.serve,
        }
        self._runner.start(self._requests.deliver)
        spec.fabric.add(spec.address, self)

    def _make_engine(self) -> tuple[Engine, TimedRunner]:
        spec = self.spec
        config = spec.service.engine_config(spec.pool)
        executor = TimedExecutor(self._run_step, reports_layers=not config.overlap)
        if spec.service.exact:
            engine = Engine(executor, config, spec.clock)
            runner = TimedRunner(engine, executor, on_step=self._count_kv, failed=spec.failed)
            return engine, runner
        coarse = CoarseEngine(executor, config, spec.clock)
        return coarse, CoarseRunner(
            coarse,
            executor,
            self._predict,
            on_step=self._count_kv,
            on_decodes=self._count_seconds,
            failed=spec.failed,
        )

    def _request_manager(self) -> RequestManager:
        spec = self.spec
        block_size = spec.service.block_size
        has_windows = any(table.window is not None for table in spec.service.tables)
        return RequestManager(
            thread=self._runner,
            kv=self._kv,
            limits=spec.limits,
            grammars=GrammarCompiler(lambda *_: None),
            adapters=AdapterCache(_no_adapter, max_loras=1, unload=lambda number: None),
            kv_handle=self._kv_handle,
            load=self.load,
            failed=spec.failed,
            canary=Canary(self._runner.post, self._runner.call_in_loop, spec.failed),
            reports=CacheReports(),
            importer=PrefixImporter(self._kv, block_size, None, CacheAge(), is_whole=has_windows),
            age=CacheAge(),
            clock=spec.clock,
        )

    def load(self) -> worker_pb2.WorkerLoad:
        """Returns a snapshot of the load."""
        return self._loads.read(draining=self._requests.is_leaving)

    def info(self) -> worker_pb2.WorkerInfo:
        """Returns the worker's entry in the directory."""
        return self.spec.info(self.load())

    def heartbeat(self) -> bytes:
        """Returns the entry as the worker registers it; an idle worker repeats the last one."""
        state = self._runner.num_turns, self._requests.is_leaving
        if state != self._registered:
            self._registered = state
            self._entry = self.info().SerializeToString(deterministic=True)
        return self._entry

    async def drain(self, seconds: float) -> None:
        """Refuses new requests; waits until all have ended or moved, for at most `seconds`."""
        self._requests.leave()
        await self._requests.wait_idle(seconds)

    async def stop(self) -> None:
        """Ends the worker after `drain`: the rest of its requests continue elsewhere."""
        self._requests.fail_all()
        await asyncio.sleep(_GOODBYE_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Ends the worker as the death of its process does."""
        self.usage.ended = self.spec.clock()
        self._runner.stop()
        self.spec.fabric.kill(self.spec.address)
        await self._kv.close()

    @property
    def is_busy(self) -> bool:
        """Returns True while a step runs."""
        return self._runner.is_busy

    def _predict(self, work: StepWork) -> float:
        """Returns the seconds of a step that begins now."""
        return self.spec.costs.seconds(work) * self.spec.contention(self.spec)

    def _run_step(self, plan: StepPlan) -> float:
        """Returns the seconds of a planned step, and counts it."""
        seconds = self._predict(StepWork.of(plan))
        self._count_seconds(seconds)
        return seconds

    def _count_seconds(self, seconds: float) -> None:
        self.usage.busy_seconds += seconds

    def _count_kv(self) -> None:
        pool = self._engine.requests.pool
        num_unheld = pool.count(BlockState.FREE) + pool.count(BlockState.CACHED)
        self.usage.count_blocks(self.spec.pool.num_blocks - num_unheld)

    def _kv_handle(self, num_tokens: int) -> worker_pb2.KvHandle:
        """Returns the handle of a new transfer."""
        self._num_transfers += 1
        return worker_pb2.KvHandle(
            transfer_id=self._num_transfers.to_bytes(16, "big"),
            num_tokens=num_tokens,
            epoch=self.spec.epoch,
            layout=LAYOUT,
            endpoints=[self.spec.address],
        )


def _no_adapter(number: int, adapter: worker_pb2.Adapter) -> str:
    return "adapter: is not simulated"
