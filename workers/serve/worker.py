"""Runs one worker: an engine, its KV cache, and the gRPC service for routers and other workers.

Runs in any process with an event loop; needs no Ray. Knows nothing of text, of pools or of other
workers' load. One file because the class makes, checks and releases all parts of a worker, and its
gRPC methods only delegate to them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Full
from typing import Self

import grpc
import grpc.aio

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import PeerServer
from ...proto.errors import Unavailable
from ...proto.metrics import NULL_METRICS, UNBALANCED, Metrics
from ...proto.shared_result import SharedResult
from ..engine.config import Budgets
from ..engine.engine import Engine
from ..engine.plan import CpuShare
from ..host.malloc import keep_freed_memory
from ..kv_cache.memory import table_costs
from ..kv_cache.tables import DISK_NEEDS_DENSE, has_sparse_points, is_dense
from ..model.device import enter_device
from ..tp.adapters import AdapterCache
from ..tp.coordinator import TpCoordinator
from ..tp.kv_group import KvGroup
from ..tp.rank import Rank, RankConfig, enter_engine_thread
from ..transfer.endpoint import KvEndpoint
from ..transfer.sender import FrameHook, KvSender
from .cache_reset import CacheAge, CacheReset
from .disk_tier import DiskTier, reports_of
from .engine_thread import EngineThread
from .grammars import GrammarCompiler
from .load import LoadReader
from .prefix_transfer import PrefixImporter, PrefixLender
from .request_manager import RequestManager
from .stats import WorkerStats
from .submit import WorkerLimits
from .watchdog import Canary, Watchdog, WatchedExecutor

logger = logging.getLogger(__name__)

_GOODBYE_SECONDS = 0.5  # time for routers to read the last outputs of their requests
_COMMAND_SECONDS = 30.0  # timeout of a command to the engine, which runs it between two steps
_MAX_DRAIN_SECONDS = 86_400.0
# Maximum share of the time for integrity checks, even with frequent status requests.
_CHECK_SHARE = 0.02

ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """Holds what a worker changes with its role."""

    budgets: Budgets
    share: CpuShare


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Holds the configuration of one worker: its ranks, its budgets and its leases."""

    rank: RankConfig
    budgets: Budgets = field(default_factory=Budgets)  # for which it is loaded
    # By role, what the worker takes with it, within `budgets`; with a role that is absent it keeps
    # what it has.
    roles: Mapping[str, RoleConfig] = field(default_factory=dict)
    kv_disk: str | None = None  # the folder of the KV cache on disk
    kv_disk_bytes: int = 0
    lease_seconds: float = 30.0  # lifetime of a finished prefill's KV cache without a reader
    hang_seconds: float = 10.0  # an engine that makes no progress for this time counts as hung
    # After this idle time, a health check runs the canary on the engine.
    canary_seconds: float = 30.0


class Worker(worker_pb2_grpc.WorkerServicer):
    """Serves `tandem.v1.Worker` and the KV endpoint on one port.

    Make a worker with `start` and end it with `stop`.
    """

    def __init__(
        self,
        rank: Rank,
        config: WorkerConfig,
        coordinator: TpCoordinator,
        disk: DiskTier | None,
        *,
        worker_id: str,
        role: str,
        frame_hook: FrameHook | None,
        metrics: Metrics,
    ) -> None:
        """Makes a worker that does not serve yet; use `start` or `serve` instead."""
        self.worker_id = worker_id
        self.role = role
        # Fences off messages of earlier processes, and of this one in an earlier role.
        self.epoch = coordinator.epoch
        self.address = ""
        self.failed = asyncio.Event()  # once it is set, only `stop` may be called
        # Set by a failure and by a new epoch, which the directory should know at once.
        self.has_news = asyncio.Event()
        self._coordinator = coordinator
        self._rank = rank
        self._config = config
        self._metrics = metrics
        self._progress = Watchdog()
        self._disk = disk
        watched = WatchedExecutor(rank.executor, self._progress)
        self._engine = Engine(watched, rank.engine_config(config.budgets), source=self._disk)
        self._loads = LoadReader(self._engine, rank.num_blocks, rank.num_states)
        self._context_tokens = min(rank.context_tokens, self._engine.config.capacity_tokens)
        self._thread = EngineThread(self._engine, self._fail, self._progress)
        self._budgets = self._engine.config.budgets
        self._take_role(role)
        self._canary = Canary(self._thread.post, self._thread.call_in_loop, self._fail)
        sender = KvSender(
            config.rank.transfer_context(rank.kv, metrics),
            epoch=coordinator.epoch,
            lease_seconds=config.lease_seconds,
            stall_seconds=config.rank.stall_seconds,
            on_release=lambda sequence_id: self._requests.release(sequence_id),
            frame_hook=frame_hook,
        )
        self._endpoint = KvEndpoint(sender, config.rank.identity)
        self._kv = KvGroup(self._endpoint, coordinator.clients)
        # The cache in memory is empty; files on disk may be older.
        self._age = CacheAge(done=time.time_ns() if disk is None else 0)
        self._requests = self._request_manager(rank, config)
        self._reset = CacheReset(self._thread, disk, self._age, self._requests.deliver)
        self._lender = PrefixLender(
            self._thread,
            self._kv,
            self._kv_handle,
            rank.block_size,
            self._requests.load_reports.changed,
        )
        self._stats = WorkerStats(
            load=self.load,
            states=self.states,
            kv=self._kv,
            steps=self._progress.steps,
            num_graph_replays=rank.num_graph_replays,
            on_gpu=config.rank.device == "cuda",
        )
        self._integrity = SharedResult(self._check_integrity, share=_CHECK_SHARE)
        self._failure: BaseException | None = None
        self._server = PeerServer(config.rank.identity)

    def _limits(self) -> WorkerLimits:
        """Returns the limits of submits in the present role."""
        return WorkerLimits(
            vocab_size=self._rank.vocab_size,
            context_tokens=self._context_tokens,
            max_sequences=self._engine.config.budgets.max_sequences,
            eos_ids=self._rank.eos_ids,
            is_fallback=self.role == "prefill",
        )

    def _request_manager(self, rank: Rank, config: WorkerConfig) -> RequestManager:
        return RequestManager(
            thread=self._thread,
            kv=self._kv,
            limits=self._limits(),
            grammars=GrammarCompiler(rank.load_grammar),
            adapters=AdapterCache(
                rank.load_adapter,
                self._coordinator.clients,
                max_loras=config.rank.max_loras,
                unload=lambda number: self._thread.post(
                    lambda engine: engine.unload_adapter(number)
                ),
            ),
            kv_handle=self._kv_handle,
            load=self.load,
            failed=self._fail,
            canary=self._canary,
            reports=reports_of(self._disk, self._thread),
            importer=PrefixImporter(
                self._kv,
                rank.block_size,
                self._disk,
                self._age,
                is_whole=not is_dense(rank.kv.layout, rank.kv.tables),
            ),
            age=self._age,
            metrics=self._metrics,
        )

    @classmethod
    async def start(
        cls,
        config: WorkerConfig,
        *,
        worker_id: str,
        role: str = "decode",
        ranks: Sequence[str] = (),
        metrics: Metrics = NULL_METRICS,
        listens: bool = True,
        loaded: tuple[TpCoordinator, Rank] | None = None,
    ) -> Self:
        """Loads the model, binds the port and serves, as the only worker of this process.

        `ranks` are the addresses of the `RankServer`s of ranks 1, 2, ... of the group, which have
        the same RankConfig. Without `listens` there is no port, and all requests come through
        `serve_session`. `loaded` is the result of `TpCoordinator.load`, if the model is loaded.

        Raises the errors of `TpCoordinator.load`, such as CheckpointError for a bad model folder,
        and OSError if the port is in use.
        """
        keep_freed_memory()
        enter_device(config.rank.device)  # this thread reads and writes KV cache
        coordinator, rank = loaded or await TpCoordinator.load(config.rank, ranks)
        try:
            worker = await cls.serve(
                rank,
                config,
                worker_id=worker_id,
                role=role,
                coordinator=coordinator,
                metrics=metrics,
                listens=listens,
            )
        except BaseException:
            await coordinator.close()
            raise
        worker._thread.post(lambda engine: enter_engine_thread(config.rank))
        return worker

    @classmethod
    async def serve(
        cls,
        rank: Rank,
        config: WorkerConfig,
        *,
        worker_id: str,
        role: str,
        frame_hook: FrameHook | None = None,
        coordinator: TpCoordinator | None = None,
        metrics: Metrics = NULL_METRICS,
        listens: bool = True,
    ) -> Self:
        """Serves a loaded rank and returns the worker.

        `frame_hook` wraps the frames that the KV sender yields, for tests of faults.
        """
        coordinator = coordinator or TpCoordinator()
        disk = None
        if config.kv_disk:
            if not is_dense(rank.kv.layout, rank.kv.tables):
                raise ValueError(DISK_NEEDS_DENSE)
            disk = await DiskTier.open(
                config.kv_disk, role, rank.kv, config.kv_disk_bytes, coordinator.clients
            )
        worker = cls(
            rank,
            config,
            coordinator,
            disk,
            worker_id=worker_id,
            role=role,
            frame_hook=frame_hook,
            metrics=metrics,
        )
        if listens:
            worker_pb2_grpc.add_WorkerServicer_to_server(worker, worker._server)  # type: ignore[no-untyped-call]
            worker._endpoint.serve_on(worker._server)
            worker.address = worker._server.bind(config.rank.host, config.rank.port)
            await worker._server.start()
        worker._thread.start(worker._requests.deliver)
        coordinator.lost.add_done_callback(lambda lost: worker._fail(lost.result()))
        coordinator.start_heartbeats(worker._thread.post)
        return worker

    async def drain(self, seconds: float) -> int:
        """Refuses new requests from now on and waits for running requests to end.

        Reports the refusal to routers at once. Returns the number of remaining requests, at the
        latest after `seconds`.
        """
        self._requests.leave()
        if seconds > 0:
            await self._requests.wait_idle(seconds)
        return len(self._requests)

    async def switch_role(self, role: str, seconds: float) -> int:
        """Takes a role at once, in a new epoch; keeps weights, prefix cache and running requests.

        Routers see a worker that has just come and, over their present sessions, one that drains;
        so they move its sequences as they do in a drain. Returns the number of remaining requests
        of these sessions, at the latest after `seconds`. Raises Unavailable if the worker drains.
        """
        if self._requests.is_leaving:
            raise Unavailable("the worker drains or stops; switch another one")
        if role != self.role:
            self.role = role
            self.epoch += 1
            self._take_role(role)
            self._requests.limits = self._limits()
            self._requests.retire_sessions()
            self.has_news.set()
        await self._requests.wait_retired(seconds)
        return self._requests.num_retired

    def _take_role(self, role: str) -> None:
        if settings := self._config.roles.get(role):
            budgets = self._budgets = settings.budgets.within(self._engine.config.budgets)
            self._thread.post(lambda engine: engine.take_role(budgets, settings.share))

    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new requests, gives running ones up to `grace` seconds, then ends everything.

        Raises TimeoutError if the engine's step does not end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        await self.drain(grace)  # the server keeps running, so decode workers can fetch KV cache
        self._requests.fail_all()  # a session that only breaks would count as a crash
        self._endpoint.disconnect()
        await self._server.stop(max(deadline - loop.time(), _GOODBYE_SECONDS))
        try:
            if self._disk is not None:
                await self._disk.close()
            await self._thread.stop(_COMMAND_SECONDS)
            await self._coordinator.stop_ranks()
        finally:
            await self._coordinator.close()
            await self._kv.close()

    def end_engine(self, timeout: float) -> bool:
        """Ends the engine's thread; returns False if its current step does not end in time.

        Blocks the calling thread, which is not the event loop's.
        """
        return self._thread.end(timeout)

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed, hangs or has computed NaN for its canary.

        Call it periodically in the event loop. It runs the canary on an engine that has been idle
        for `canary_seconds`. The canary fails or hangs if the engine cannot compute steps any more.
        """
        hang_seconds = self._config.hang_seconds
        if self._failure is None and self._progress.stalled_seconds() > hang_seconds:
            message = f"the engine has made no progress for {hang_seconds:g} seconds (hang_seconds)"
            self._fail(TimeoutError(message))
        if self._failure is not None:
            raise RuntimeError(f"the engine of {self.worker_id} has failed") from self._failure
        if self._canary.is_due or self._progress.idle_seconds() >= self._config.canary_seconds:
            self._canary.run()

    async def report_metrics(self, with_integrity: bool) -> None:
        """Reports the worker's current metrics; call it every few seconds.

        `with_integrity` also checks the engine's integrity, which takes a moment between two of its
        steps.
        """
        self._stats.report(self._metrics)
        if with_integrity:
            with suppress(TimeoutError):  # the watchdog handles an engine that does not answer
                self._metrics.set(UNBALANCED, not await self._integrity.get())

    def load(self) -> worker_pb2.WorkerLoad:
        """Returns a snapshot of the load for placement."""
        return self._loads.read(draining=self._requests.is_leaving)

    def states(self) -> dict[str, int]:
        """Returns the number of states by their status, as `load` returns those of blocks."""
        return self._loads.states()

    def info(self) -> worker_pb2.WorkerInfo:
        """Returns this worker's entry in the directory."""
        layout = self._rank.kv.layout
        tables = self._rank.kv.tables
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=ROLES[self.role],
            address=self.address,
            kv_bytes_per_token=layout.bytes_per_token,
            block_size=self._rank.block_size,
            context_tokens=self._context_tokens,
            load=self.load(),
            draining=self._requests.is_leaving,
            tp=self._rank.kv.tp,
            max_sequences=self._budgets.max_sequences,
            mixed_chunk_tokens=self._budgets.mixed_chunk_tokens,
            layout=layout.digest,
            tables=[worker_pb2.KvTable(**each._asdict()) for each in table_costs(layout, tables)],
            state_bytes=layout.bytes_per_state,
            num_states=self._engine.config.num_states,
            has_sparse_points=has_sparse_points(layout, tables),
        )

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> None:
        """Serves one router; see the proto."""
        await self.serve_session(request_iterator, context.write)

    async def serve_session(
        self,
        commands: AsyncIterator[worker_pb2.SessionRequest],
        send: Callable[[worker_pb2.SessionResponse], Awaitable[None]],
    ) -> None:
        """Serves one router until its commands end."""
        await self._requests.serve(commands, send)

    async def GetStatus(
        self,
        request: worker_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.GetStatusRequest, worker_pb2.GetStatusResponse
        ],
    ) -> worker_pb2.GetStatusResponse:
        """Returns `status`; see the proto."""
        return await self.status()

    async def status(self) -> worker_pb2.GetStatusResponse:
        """Returns counts of everything that could leak, and the last integrity check's result."""
        integrity_ok = await self._integrity.get()
        return worker_pb2.GetStatusResponse(
            info=self.info(),
            num_sessions=len(self._requests.reports.sessions),
            num_leases=self._kv.num_leases,
            num_transfers=self._kv.num_transfers,
            num_requests=len(self._requests),
            integrity_ok=integrity_ok,
            transports=self._endpoint.receiver.connections.transports,
            num_recomputed_tokens=self._requests.num_recomputed_tokens,
            num_tasks=len(asyncio.all_tasks()),
            num_draft_tokens=self._engine.requests.num_draft_tokens,
            num_accepted_tokens=self._engine.requests.num_accepted_tokens,
            num_restored_tokens=self._engine.requests.num_loaded_tokens,
            cpu_power_watts=self._stats.cpu_watts,
            gpu_power_watts=self._stats.gpu_watts,
        )

    async def _check_integrity(self) -> bool:
        try:
            await self._thread.call(Engine.check_integrity, _COMMAND_SECONDS)
        except RuntimeError:
            logger.exception("the integrity of %s is violated or cannot be checked", self.worker_id)
            return False
        return True

    async def LoadAdapter(
        self,
        request: worker_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.LoadAdapterRequest, worker_pb2.LoadAdapterResponse
        ],
    ) -> worker_pb2.LoadAdapterResponse:
        """Loads an adapter before the requests that use it; see the proto."""
        return worker_pb2.LoadAdapterResponse(error=await self.load_adapter(request.adapter))

    async def load_adapter(self, adapter: worker_pb2.Adapter) -> str:
        """Loads an adapter, unless other adapters in use fill the cache; returns an error or ""."""
        try:
            with suppress(Full):
                await self._requests.load_adapter(adapter)
        except Unavailable as error:
            return error.message
        return ""

    async def LeasePrefix(
        self,
        request_iterator: AsyncIterator[worker_pb2.LeasePrefixRequest],
        context: grpc.aio.ServicerContext[
            worker_pb2.LeasePrefixRequest, worker_pb2.LeasePrefixResponse
        ],
    ) -> None:
        """Leases a cached prefix to another worker; see the proto."""
        await self._lender.serve(request_iterator, context.write)

    async def Drain(
        self,
        request: worker_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainResponse],
    ) -> worker_pb2.DrainResponse:
        """Drains this worker; see the proto.

        Afterwards the worker keeps refusing requests, and keeps answering, until it is stopped.
        """
        seconds = _bounded(request.timeout_seconds)
        return worker_pb2.DrainResponse(num_requests=await self.drain(seconds))

    async def SwitchRole(
        self,
        request: worker_pb2.SwitchRoleRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.SwitchRoleRequest, worker_pb2.SwitchRoleResponse
        ],
    ) -> worker_pb2.SwitchRoleResponse:
        """Gives this worker another role; see the proto."""
        role = next((name for name, each in ROLES.items() if each == request.role), None)
        if role is None:
            return worker_pb2.SwitchRoleResponse(error="role: must be prefill or decode")
        try:
            left = await self.switch_role(role, _bounded(request.timeout_seconds))
        except Unavailable as error:
            return worker_pb2.SwitchRoleResponse(error=error.message)
        return worker_pb2.SwitchRoleResponse(num_requests=left)

    async def ResetPrefixCache(
        self,
        request: worker_pb2.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.ResetPrefixCacheRequest, worker_pb2.ResetPrefixCacheResponse
        ],
    ) -> worker_pb2.ResetPrefixCacheResponse:
        """Empties the prefix cache; see the proto."""
        return worker_pb2.ResetPrefixCacheResponse(error=await self._reset.run(request.time))

    def _kv_handle(self, num_tokens: int) -> worker_pb2.KvHandle:
        """Returns the handle of a new transfer of this worker."""
        return worker_pb2.KvHandle(
            transfer_id=secrets.token_bytes(16),
            num_tokens=num_tokens,
            epoch=self._coordinator.epoch,
            layout=self._rank.kv.layout.digest,
            endpoints=[self.address, *self._coordinator.endpoints],
            computed_after=self._age.done,
            last_reset=self._age.asked,
        )

    def _fail(self, error: BaseException) -> None:
        """Ends all work of this worker after a failure of the engine."""
        self._failure = self._failure or error
        self.failed.set()
        self.has_news.set()
        logger.error("the engine of %s has failed", self.worker_id, exc_info=error)
        self._requests.fail_all(failed=True)


def _bounded(seconds: float) -> float:
    """Returns the seconds of a caller within the bounds of a wait; 0 for NaN."""
    return min(max(0.0, seconds), _MAX_DRAIN_SECONDS)
