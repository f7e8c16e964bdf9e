"""Defines the deployments of the Ray Serve application: `Router`, and `WorkerPool` for both pools.

One replica of a pool is one worker; one replica of the router runs a gRPC and an HTTP server.
Requests do not pass through Serve, which places, watches and restarts replicas. One file because
both kinds of replicas share their start, their registration and their end.
"""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from ...proto.errors import PermissionDenied, Unauthenticated, Unavailable
from ...proto.identity import PeerIdentity
from ...proto.metrics import NULL_METRICS
from ...router.api.browsers import BrowserRules, own_names
from ...router.api.console.feed import without_loads
from ...router.dispatch.blocked_prompts import BlockedPrompts
from ...router.frontend.template import start_for
from ...router.garbage import collections_paused
from ...workers.host.threads import LOAD_NICE, go_first, in_thread
from ..config import PoolRole, TandemConfig
from ..scaling.reports import worker_report
from ..store.adapters import configured_adapters
from ..store.store import ensure_tokenizer
from .directory import DirectoryClient
from .environment import raise_open_files
from .members import HEARTBEAT_SECONDS, Continuity, RouterInfo
from .ranks import node_host, ray_dashboard_url, start_ranks
from .status import SWITCH_SECONDS, WorkerStatuses, describe_routers, drain_workers
from .storage.remote import RemoteStorage
from .telemetry.logs import write_json_logs
from .telemetry.ray_metrics import RayMetrics, keep_reporting
from .views.member_view import DirectoryWatcher, Members

if TYPE_CHECKING:
    from ...workers.serve.worker import Worker
    from .runtime import RouterRuntime

log = logging.getLogger(__name__)

_SWITCH_SECONDS: Final = 0.0005
"""How long a router's thread may keep the interpreter lock while another waits (Python: 5 ms).

The event loop releases the lock at each system call, and waits this long each time to get it back.
"""

_LAST_SECONDS: Final = 0.5  # for the last calls of a failed worker


class Replica:
    """Registers a replica in the directory and runs the background tasks that it needs.

    `_stop_server` is set once the start has succeeded; it stops the replica's server within a
    number of seconds.
    """

    _stop_server: Callable[[float], Awaitable[None]] | None = None
    _tasks: Sequence[asyncio.Task[None]] = ()

    def __init__(self, config: TandemConfig, kind: str) -> None:
        go_first()
        raise_open_files()
        if config.log_format == "json":
            write_json_logs()
        self._config = config
        self._directory = DirectoryClient(config.name, config.storage)
        self._label = f"tandem {kind} {config.served_name}"
        context = serve.get_replica_context()
        self._application = context.app_name
        self._member_id = f"{kind}-{context.replica_id.unique_id}"

    def __repr__(self) -> str:
        return self._label

    def check_health(self) -> None:
        """Raises if a background task has ended; Serve then replaces the replica."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("a background task has ended")

    async def __del__(self) -> None:
        """Stops the replica. Serve awaits this at a graceful stop and after a failed start."""
        for task in self._tasks:
            task.cancel()
        if self._stop_server is None:
            return
        try:
            await self._directory.remove(self._member_id)
        except Unavailable as error:  # the directory drops silent members anyway
            log.warning("this process is not removed from the directory yet: %s", error)
        await self._stop_server(self._config.grace_seconds)

    def _run(
        self, stop: Callable[[float], Awaitable[None]], *tasks: Coroutine[Any, Any, None]
    ) -> None:
        """Completes a successful start: starts the background tasks.

        Exempts all objects that exist now from garbage collection: a full collection stalls every
        stream for 0.1 s.
        """
        gc.collect()
        gc.freeze()
        self._stop_server = stop
        self._tasks = [asyncio.create_task(task) for task in tasks]

    def _follow_role(
        self,
        describe: Callable[[], tuple[str, Mapping[str, float]] | None],
        take_role: Callable[[str], Awaitable[object]] | None = None,
    ) -> Iterable[Coroutine[Any, Any, None]]:
        """Yields the task that `DirectoryClient.follow_role` describes, if roles are scaled."""
        scaling = self._config.scaled_roles
        if scaling is not None:
            yield self._directory.follow_role(
                scaling, self._member_id, self._application, describe, take_role
            )


def _import_torch() -> None:
    """Imports what a worker needs, which takes seconds."""
    from ...workers.serve import worker  # noqa: F401


class WorkerPool(Replica):
    """Runs one worker of a pool: starts it, keeps it registered in the directory, stops it."""

    _worker: "Worker | None" = None  # until the start has succeeded

    async def __init__(  # type: ignore[misc]
        self,
        config: TandemConfig,
        folder: str,
        role: PoolRole,
        ranks_per_node: int,
        identity: PeerIdentity,
        environment: dict[str, str],
    ) -> None:
        """Starts the worker; `environment` is what its other ranks need and do not inherit."""
        with collections_paused():
            nice = LOAD_NICE if config.device == "cpu" else 0
            await in_thread(_import_torch, "tandem-import", nice=nice)
            # These import torch; routers do without.
            from ...workers.serve.worker import Worker
            from ..local.worker import rank_threads, worker_config

            super().__init__(config, role)
            await asyncio.to_thread(ensure_tokenizer, Path(folder))  # each node has its own cache
            pool = config.pools[role]
            threads = partial(rank_threads, pool.num_threads, ranks_per_node, pool.num_cpus)
            own = worker_config(
                config,
                role,
                folder,
                threads(),
                identity,
                host=node_host(config.host),
                ranks_per_node=ranks_per_node,
            )
            self._ranks = start_ranks(
                own.rank,
                pool.tp,
                host=config.host,
                label=repr(self),
                worker_id=self._member_id,
                threads=threads,
                environment=environment,
                gpu=config.device == "cuda",
            )
            addresses = await asyncio.gather(*(rank.start.remote() for rank in self._ranks))
            self._worker = worker = await Worker.start(
                own,
                worker_id=self._member_id,
                role=role,
                ranks=addresses,
                metrics=RayMetrics(config.served_name, role) if config.metrics else NULL_METRICS,
            )
            self._run(
                worker.stop,
                self._exit_on_failure(worker),
                self._heartbeat(worker),
                keep_reporting(worker.report_metrics),
                *self._follow_role(
                    lambda: _described(worker), partial(worker.switch_role, seconds=SWITCH_SECONDS)
                ),
            )

    def check_health(self) -> None:
        """Raises if the worker cannot serve any more; Serve then replaces the replica."""
        super().check_health()
        if self._worker is not None:
            self._worker.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the figures that Serve passes to the autoscaling policy."""
        return {} if self._worker is None else worker_report(self._worker.info())

    async def _exit_on_failure(self, worker: "Worker") -> None:
        """Ends the process if the engine fails, hangs or loses a rank; Serve replaces the replica.

        It checks the engine, because Serve does so only while its controller runs.
        """
        while not worker.failed.is_set():
            with suppress(RuntimeError):  # `failed` is set now
                worker.check_health()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await worker.failed.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await asyncio.gather(
                    worker.stop(), self._directory.remove(worker.worker_id), return_exceptions=True
                )
        os._exit(1)

    async def _heartbeat(self, worker: "Worker") -> None:
        """Keeps the worker registered until it fails; after that nothing may undo its removal."""
        while not worker.failed.is_set():
            worker.has_news.clear()
            info = worker.info()
            info.application = self._application
            try:
                await self._directory.register(info)
            except Unavailable as error:
                log.warning("the directory did not get a heartbeat of this worker: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await worker.has_news.wait()


def _described(worker: "Worker") -> tuple[str, dict[str, float]] | None:
    """Returns a worker's role and load; None for one that drains, which keeps its role."""
    info = worker.info()
    return None if info.draining else (worker.role, worker_report(info))


class Router(Replica):
    """Runs one router, and answers the status page behind Serve's HTTP proxy."""

    _runtime: "RouterRuntime | None" = None  # until the start has succeeded

    async def __init__(  # type: ignore[misc]
        self,
        config: TandemConfig,
        folder: str,
        replicas: int,
        continuity: Continuity,
        *pools: object,
    ) -> None:
        with collections_paused():
            start_for(Path(folder))
            # Imports transformers, which takes a second; binding this class does without.
            from .runtime import RouterRuntime

            super().__init__(config, "router")
            sys.setswitchinterval(_SWITCH_SECONDS)
            await asyncio.to_thread(ensure_tokenizer, Path(folder))
            self._continuity = continuity
            self._ray_dashboard = ray_dashboard_url()
            self._members = members = Members(self._application, continuity.layout)
            self._statuses = WorkerStatuses(lambda: members.workers, continuity.identity)
            host = node_host(config.host)
            self._blocked_prompts = BlockedPrompts()
            self._adapters = await asyncio.to_thread(configured_adapters, config)
            with suppress(Unavailable):  # `_watch` gets the list of members later
                changes = await self._directory.changes()
                self._blocked_prompts.learn(changes.blocked)
                self._adapters.learn(changes.adapters)
                watcher = DirectoryWatcher()
                watcher.apply(changes)
                await self._members.update(watcher.workers, watcher.routers)
            runtime = await RouterRuntime.start(
                config,
                Path(folder),
                host,
                identity=continuity.identity,
                resume_key=continuity.resume_key,
                cache_secret=continuity.cache_secret,
                num_routers=replicas,
                application=self._application,
                workers=self._members.fitting,
                replaced=[each.addresses for each in self._members.other_routers],
                blocked_prompts=self._blocked_prompts,
                adapters=self._adapters,
                describe=self.status,
                name=self._member_id,
                storage=RemoteStorage(self._directory.call_store),
            )
            await runtime.serve_ops(
                config.router.ops_port,
                num_routers=replicas,
                application=self._application,
                replaced=[each.ops_address for each in self._members.other_routers],
            )
            self._authenticator = runtime.authenticator
            self._runtime = runtime
            watcher = DirectoryWatcher()
            self._run(
                partial(self._stop, runtime),
                self._watch(runtime, watcher),
                runtime.keep_ready(),
                runtime.console.run(),
                runtime.batches.run(),
                runtime.usage.run(),
                self._directory.keep_sharing(watcher, self._blocked_prompts, self._adapters),
                *(watch.run() for watch in runtime.watches),
                *self._follow_role(lambda: ("", runtime.report_demand())),
            )

    def check_health(self) -> None:
        """Raises if the router cannot serve any more; Serve then replaces the replica."""
        try:
            super().check_health()
        except BaseException:
            if self._runtime is not None:
                self._runtime.fail()
            raise

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the figures that Serve passes to the autoscaling policy."""
        return {} if self._runtime is None else self._runtime.report_demand()

    async def __call__(self, request: Request) -> JSONResponse:
        """Answers the status page, which is read-only.

        Refuses pages in browsers, and callers without a key if the service has keys. Only
        operators' keys see the loads of workers; without keys all callers see them.
        """
        if request.method not in ("GET", "HEAD"):
            return JSONResponse({"error": "the status page supports only GET and HEAD"}, 405)
        try:
            BrowserRules(
                host_names=(
                    *own_names(node_host(self._config.host)),
                    *self._config.router.host_names,
                )
            ).check(request.headers)
            caller = self._authenticator.caller(request.headers.get("authorization"), "")
        except PermissionDenied as error:
            return JSONResponse({"error": error.message}, error.http_status)
        except Unauthenticated as error:
            return JSONResponse(
                {"error": error.message}, error.http_status, {"WWW-Authenticate": "Bearer"}
            )
        service = await self.status()
        return JSONResponse(
            without_loads(service) if caller.tenant and not caller.sees_all else service
        )

    async def status(self) -> dict[str, Any]:
        """Returns the service as plain data: routers with addresses, workers with loads."""
        return {
            "service": self._config.name,
            "model": self._config.served_name,
            "ray_dashboard": self._ray_dashboard,
            "routers": describe_routers(
                self._members.routers, has_tls=self._config.router.tls is not None
            ),
            "workers": await self._statuses.get(),
        }

    async def continuity(self) -> Continuity:
        """Returns the secrets and facts that the application that replaces this one takes over."""
        return self._continuity

    async def context_warning(self) -> str:
        """Returns the warning that workers hold less than the context; "" if they hold it."""
        return "" if self._runtime is None else self._runtime.context_limit.warning

    async def wait_for_members(
        self, num_routers: int, num_prefill: int, num_decode: int, timeout: float
    ) -> tuple[list[str], list[str], list[str]]:
        """Waits until this application is complete; returns the gRPC, HTTP and ops addresses.

        Complete: it has these numbers of routers and workers, and each router of the service knows
        all workers. Raises TimeoutError.
        """
        await self._members.wait_complete(num_routers, num_prefill, num_decode, timeout)
        own = self._members.own_routers
        addresses = zip(
            *((each.grpc_address, each.http_address, each.ops_address) for each in own), strict=True
        )
        grpc, http, ops = map(list, addresses)
        return grpc, http, ops

    async def drain_others(self, seconds: float) -> int:
        """Drains the workers of the application that this one replaces.

        Returns the number of requests left, at the latest after `seconds`.
        """
        others = [each.address for each in self._members.other_workers]
        return sum(
            count or 0 for count in await drain_workers(others, seconds, self._continuity.identity)
        )

    async def _stop(self, runtime: "RouterRuntime", grace: float) -> None:
        await runtime.stop(grace)
        await self._statuses.close()

    async def _watch(self, runtime: "RouterRuntime", watcher: DirectoryWatcher) -> None:
        """Keeps the router's list of workers equal to the directory's.

        While the directory is unavailable, the last list stays.
        """
        while True:
            me = RouterInfo(
                router_id=self._member_id,
                grpc_address=runtime.grpc_address,
                http_address=runtime.http_address,
                ops_address=runtime.ops_address,
                num_workers=len(self._members.workers),
                application=self._application,
            )
            try:
                has_moved = await self._directory.watch(
                    watcher, me, self._blocked_prompts, self._adapters
                )
            except Unavailable as error:
                log.warning("the list of workers is not up to date: %s", error)
                await asyncio.sleep(HEARTBEAT_SECONDS)
                continue
            if has_moved:
                await self._members.update(watcher.workers, watcher.routers)
                self._statuses.forget_gone()
                await runtime.update(self._members.fitting)
