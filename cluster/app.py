"""The Ray Serve application: `Router`, `PrefillPool` and `DecodePool`, thin shells around plain objects.

One replica of a pool is one worker; the router's replica hosts the front doors. Requests never pass through Serve:
it places, watches and restarts.
"""

import asyncio
import gc
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, cast

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from ..proto import worker_pb2
from ..workers.engine.config import Budgets
from ..workers.tp.rank import RankConfig
from ..workers.worker import Worker, WorkerConfig
from .config import PoolConfig, TandemConfig
from .directory import HEARTBEAT_SECONDS, DirectoryAway, DirectoryClient, Follower
from .ranks import node_host, rank_addresses, start_ranks
from .status import describe_workers

log = logging.getLogger(__name__)

PREFILL: Final = worker_pb2.Role.ROLE_PREFILL
DECODE: Final = worker_pb2.Role.ROLE_DECODE
STOP_MARGIN_SECONDS: Final = 2.0
_LAST_SECONDS: Final = 0.5  # what a worker that has failed may take to say so

_LEAST_CPUS: Final = 0.001  # Ray knows no empty bundle

# Nice value on CPUs. A step of prompts may wait for whatever else shares its cores; a step of streams may not, nor may
# the threads that talk.
_PREFILL_NICE: Final = 10


class WorkerPool:
    """One worker of a pool: starts it, keeps it known to the directory, stops it."""

    role: ClassVar[Literal["prefill", "decode"]]

    async def __init__(self, config: TandemConfig, folder: str, num_threads: int) -> None:  # type: ignore[misc]
        pool: PoolConfig = getattr(config, self.role)
        self._config = config
        self._directory = DirectoryClient(config.name)
        rank = RankConfig(
            model=folder,
            dtype=config.dtype,
            device=config.device,
            block_size=pool.block_size,
            kv_cache_bytes=pool.kv_cache_bytes,
            context_tokens=config.context_tokens,
            num_threads=num_threads,
            transports=config.transports,
            nice=_PREFILL_NICE if self.role == "prefill" else 0,
            host=node_host(config.host),
            start_seconds=config.start_seconds,
        )
        budgets = Budgets(
            chunk_tokens=config.chunk_tokens(pool),
            mixed_chunk_tokens=config.mixed_chunk_tokens(pool),
            max_sequences=pool.max_sequences,
            prefix_caching=config.prefix_caching,
        )
        self._ranks = start_ranks(
            rank,
            pool.tp,
            host=config.host,
            label=repr(self),
            environment=_environment(num_threads),
            gpu=config.device == "cuda",
        )
        self._worker = await Worker.start(
            WorkerConfig(rank=rank, budgets=budgets, lease_seconds=config.lease_seconds),
            worker_id=f"{self.role}-{serve.get_replica_context().replica_id.unique_id}",
            role=self.role,
            ranks=await rank_addresses(self._ranks),
        )
        self._failing = asyncio.create_task(self._end_with_the_worker())
        _freeze()
        self._heartbeats = asyncio.create_task(self._heartbeat())

    def __repr__(self) -> str:
        return f"tandem {self.role} {self._config.served_name}"

    def check_health(self) -> None:
        """Raises if the worker can serve no more; Serve then replaces the replica."""
        _raise_if_ended(self._heartbeats)
        self._worker.check_health()

    async def __del__(self) -> None:
        """Serve's hook for a graceful stop, which it awaits."""
        self._heartbeats.cancel()
        self._failing.cancel()
        try:
            await self._directory.remove(self._worker.info().worker_id)
        except DirectoryAway as error:
            log.warning("not removed from the directory: %s", error)
        await self._worker.stop(grace=self._config.grace_seconds)

    async def _end_with_the_worker(self) -> None:
        """An engine that has failed or lost a rank cannot be mended. The process ends, Serve starts another."""
        await self._worker.failed.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await asyncio.gather(
                    self._worker.stop(), self._directory.remove(self._worker.worker_id), return_exceptions=True
                )
        os._exit(1)

    async def _heartbeat(self) -> None:
        while True:
            try:
                await self._directory.register(self._worker.info())
            except DirectoryAway as error:
                log.warning("heartbeat lost: %s", error)
            await asyncio.sleep(HEARTBEAT_SECONDS)


class PrefillPool(WorkerPool):
    role = "prefill"


class DecodePool(WorkerPool):
    role = "decode"


class Router:
    """The front doors over one dispatcher, and the status page behind Serve's HTTP proxy."""

    async def __init__(self, config: TandemConfig, folder: str, *pools: object) -> None:  # type: ignore[misc]
        from .runtime import (
            RouterRuntime,
        )  # imports transformers for a second, which whoever only binds this class need not pay

        self._config = config
        self._directory = DirectoryClient(config.name)
        self._workers: list[worker_pb2.WorkerInfo] = []
        self._changed = asyncio.Condition()
        self._doors = await RouterRuntime.open(config, Path(folder), node_host(config.host))
        _freeze()
        self._following = asyncio.create_task(self._follow())

    def __repr__(self) -> str:
        return f"tandem router {self._config.served_name}"

    def check_health(self) -> None:
        """Raises if the router no longer learns of workers; Serve then replaces the replica."""
        _raise_if_ended(self._following)

    async def __call__(self, request: Request) -> JSONResponse:
        return JSONResponse(await self.status())

    async def status(self) -> dict[str, Any]:
        """The service as plain data: addresses, and every worker with its blocks and load."""
        return {
            "service": self._config.name,
            "model": self._config.served_name,
            "grpc": self._doors.grpc_address,
            "http": self._doors.http_address,
            "workers": await describe_workers(self._workers),
        }

    async def wait_for_workers(self, num_prefill: int, num_decode: int, timeout: float) -> tuple[str, str]:
        """The gRPC and HTTP addresses, once that many workers are in view. Raises TimeoutError."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(
                lambda: self._count(PREFILL) >= num_prefill and self._count(DECODE) >= num_decode
            )
        return self._doors.grpc_address, self._doors.http_address

    async def __del__(self) -> None:
        """Serve's hook for a graceful stop, which it awaits."""
        self._following.cancel()
        await self._doors.close(self._config.grace_seconds)

    async def _follow(self) -> None:
        """Keeps the view as the directory has it; while that is away, the last view stays."""
        follower = Follower()
        while True:
            try:
                workers = await self._directory.follow(follower)
            except DirectoryAway as error:
                log.warning("view not refreshed: %s", error)
                await asyncio.sleep(HEARTBEAT_SECONDS)
                continue
            async with self._changed:
                self._workers = workers
                await self._doors.update(workers)
                self._changed.notify_all()

    def _count(self, role: worker_pb2.Role) -> int:
        return sum(worker.role == role and not worker.draining for worker in self._workers)


def _freeze() -> None:
    """Spares the collector what was imported and loaded: a full collection of that stops every stream for 0.1 s."""
    gc.collect()
    gc.freeze()


def build_app(config: TandemConfig, folder: str, num_cores: int) -> serve.Application:
    """The application that serves the model in `folder`, which every node must have at that path.

    `num_cores` are those of a node; workers without a thread count of their own share them."""
    pools = [_bind_pool(DecodePool, config, config.decode, folder, num_cores)]
    if config.prefill.replicas:
        pools.append(_bind_pool(PrefillPool, config, config.prefill, folder, num_cores))
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    options = _options(config, 1, config.router.num_cpus, config.router.resources, environment)
    router: Any = serve.deployment(Router, **options)
    return cast(serve.Application, router.bind(config, folder, *pools))


def _bind_pool(
    pool_class: type[WorkerPool], config: TandemConfig, pool: PoolConfig, folder: str, num_cores: int
) -> serve.Application:
    num_threads = config.num_threads(pool, num_cores)
    options = _options(config, pool.replicas, pool.num_cpus, pool.resources, _environment(num_threads))
    gpus = {"GPU": 1.0} if config.device == "cuda" else {}
    if gpus:
        options["ray_actor_options"]["num_gpus"] = 1
    if pool.tp > 1:
        bundle = {"CPU": max(pool.num_cpus, _LEAST_CPUS), **pool.resources, **gpus}
        options["placement_group_bundles"] = [bundle] * pool.tp
        options["placement_group_strategy"] = pool.placement
    deployment: Any = serve.deployment(pool_class, **options)
    return cast(serve.Application, deployment.bind(config, folder, num_threads))


def _environment(num_threads: int) -> dict[str, str]:
    """Of a process that computes, on CPUs.

    Between the kernels of a step OpenMP's threads spin for some microseconds, not longer: threads that spin on while
    another process wants the core cost it up to a factor of 10, those that sleep at once wake too late."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    # A replica serves a folder that is there; it has nothing to ask a hub.
    return threads | {"GOMP_SPINCOUNT": "3000", "HF_HUB_OFFLINE": "1"}


def _options(
    config: TandemConfig, replicas: int, num_cpus: float, resources: dict[str, float], environment: dict[str, str]
) -> dict[str, Any]:
    return {
        "num_replicas": replicas,
        "ray_actor_options": {
            "num_cpus": num_cpus,
            "resources": resources,
            "runtime_env": {"env_vars": environment},
        },
        "max_ongoing_requests": 1000,
        "max_constructor_retry_count": 3,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": config.grace_seconds + STOP_MARGIN_SECONDS,
    }


def _raise_if_ended(task: asyncio.Task[None]) -> None:
    if task.done():
        task.result()
        raise RuntimeError("a background task has ended")
