"""Composes the objects of a router: tokenizer, registry, admission, dispatcher, API servers.

Does not import Ray.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import grpc

from ...proto import worker_pb2
from ...proto.addresses import is_loopback
from ...proto.errors import Unavailable
from ...proto.identity import PeerIdentity
from ...proto.metrics import Metrics
from ...router.adapters import AdapterAdmin, AdapterRegistry
from ...router.api.browsers import ANY as ANY_HOST
from ...router.api.browsers import BrowserRules, own_names
from ...router.api.console.feed import ConsoleFeed
from ...router.api.dialect import Dialect
from ...router.api.server.connection import ConnectionBounds
from ...router.api.server.servers import ApiServers
from ...router.api.service import GenerationService
from ...router.auth.authenticator import Authenticator
from ...router.auth.config import AuthConfig
from ...router.auth.keys import load_keys, operator_keys
from ...router.auth.tls import ServerTls
from ...router.auth.watch import FileWatch
from ...router.dispatch.blocked_prompts import BlockedPrompts
from ...router.dispatch.dispatcher import Dispatcher
from ...router.frontend.served_model import ServedModel
from ...router.frontend.tokenizer import Tokenizer
from ...router.request import LoraAdapter
from ...router.resume.policy import ResumePolicy
from ...router.scheduling.admission import Admission
from ...router.scheduling.registry import WorkerRegistry
from ...router.storage.interface import Storage
from ...router.watermark.rules import WatermarkRules
from ...workers.model.config import read_fields, text_model_of
from ...workers.model.generic.context import read_context_tokens
from ..arithmetic import ServedArithmetic
from ..config import RouterConfig, TandemConfig, check_interface
from ..scaling.reports import router_report
from ..store.adapters import named_adapter
from ..store.generation_defaults import generation_defaults
from ..store.pooling import pooling_rules
from .ports import bind_api_servers, bind_ops_server, port_of
from .status import load_on_workers, reset_caches
from .storage.runner import BatchRunner
from .storage.usage import UsageReporter
from .telemetry.monitor import RouterMonitor, open_spans
from .telemetry.trace_file import TraceRecorder
from .views.context_limit import ContextLimit

_COMPRESSION: Final = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
}
_LAST_ANSWER_SECONDS: Final = 0.5  # for the errors of requests that did not end in time
_LAST_REPORT_SECONDS: Final = 0.5  # for the usage of keys; the store may stop at the same time


class RouterRuntime:
    """Runs one router: `start` starts it, `update` sets its workers, `stop` ends it."""

    def __init__(
        self,
        host: str,
        registry: WorkerRegistry,
        admission: Admission,
        dispatcher: Dispatcher,
        servers: ApiServers,
        authenticator: Authenticator,
        watches: Sequence[FileWatch[Any]],
        monitor: RouterMonitor,
        console: ConsoleFeed,
        batches: BatchRunner,
        usage: UsageReporter,
        claims: ExitStack,
        context_limit: ContextLimit,
    ) -> None:
        self.authenticator = authenticator
        self.watches = watches  # their `run` reloads keys and certificates that change
        self.console = console  # its `run` samples the figures that the console shows
        self.batches = batches  # its `run` answers lines of batches
        self.usage = usage  # its `run` reports what the keys use
        self.context_limit = context_limit
        self._claims = claims
        self._registry = registry
        self._admission = admission
        self._dispatcher = dispatcher
        self._servers = servers
        # HOST:PORT; other nodes reach this one by `host`.
        self.grpc_address = f"{host}:{port_of(servers.grpc_address)}"
        self.http_address = f"{host}:{port_of(servers.http_address)}"
        self.ops_address = ""  # until `serve_ops` has returned
        self._monitor = monitor
        monitor.ops.http_port = port_of(servers.http_address)
        self._is_stopping = False
        self._host = host
        self._bind = servers.http_address.rpartition(":")[0]

    @classmethod
    async def start(
        cls,
        config: TandemConfig,
        folder: Path,
        host: str,
        *,
        identity: PeerIdentity,
        resume_key: bytes,
        cache_secret: bytes | None,
        num_routers: int,
        application: str,
        workers: Collection[worker_pb2.WorkerInfo],
        replaced: Collection[tuple[str, str]],
        blocked_prompts: BlockedPrompts,
        adapters: AdapterRegistry,
        describe: Callable[[], Awaitable[dict[str, Any]]],
        name: str,
        storage: Storage,
    ) -> Self:
        """Binds both API servers, which do not serve while no worker can be reached.

        The address is `router.bind`, else `host`.

        `resume_key`: the secret that all routers share to continue each other's requests.
        `cache_secret`: the secret by which all routers know tenants' prefix caches; None:
            `resume_key`.
        `num_routers`: of the service; several may share a host.
        `workers`: known workers; requests come at once if this router replaces another.
        `replaced`: the gRPC and HTTP addresses of each router that `application` replaces; this
            router may bind them as well.
        `blocked_prompts`: see Dispatcher.
        `describe`: see ConsoleFeed.
        `name`: of this router, unlike all others of the service.
        `storage`: see GenerationService.

        Raises OSError or RuntimeError if all its ports are in use, InvalidArgument if keys are
        needed or their file is invalid, also the file of the watermark's key.
        """
        router = config.router
        bind = router.bind or host
        check_interface(config.auth, bind)
        authenticator, watches = _authenticator(config.auth, bind, cache_secret or resume_key)
        registry = WorkerRegistry(local_prefill_tokens=router.local_prefill_tokens)
        browsers = _browser_rules(config, host, bind)
        monitor = _monitor(config, browsers, resume_key)
        admission = _admission(router, registry, monitor.metrics)
        dispatcher = Dispatcher(
            registry,
            admission,
            identity=identity,
            park_seconds=router.park_seconds,
            metrics=monitor.metrics,
            blocked_prompts=blocked_prompts,
        )
        monitor.watch(admission, dispatcher, registry)
        service = GenerationService(
            [_served_model(config, folder)],
            dispatcher,
            admission,
            resume_key,
            monitor.telemetry,
            _adapter_admin(config, adapters, registry, identity),
            names=config.served_names,
            aliases=config.aliases,
            resume_policy=ResumePolicy(router.resume_seconds),
            storage=storage,
            dialect=Dialect(
                reasoning_field=router.reasoning_field,
                ignores_unknown=router.unknown_fields == "ignore",
            ),
            reset_cache=partial(_reset_cache, registry, identity),
        )
        usage = UsageReporter(service.storage, name)
        monitor.telemetry.observers.append(usage.record)
        with suppress(Unavailable):  # then each chat fails with it, and other requests succeed
            await service.model("").tokenizer.wait_for_chats()
        arithmetic = ServedArithmetic(
            folder, config.dtype, config.quantization, config.kv_cache_dtype, config.device
        )
        console = ConsoleFeed(service.telemetry, describe, registry.workers, arithmetic.explain)
        start_servers = partial(
            ApiServers.start,
            service,
            reflection=router.reflection,
            compression=_COMPRESSION[router.compression],
            bounds=_connection_bounds(router),
            browsers=browsers,
            authenticator=authenticator,
            tls=_server_tls(router, watches),
            console=console,
            shares_ports=True,
            keepalive_seconds=router.keepalive_seconds,
        )
        registry.update(workers)
        context_limit = ContextLimit(service, config)
        context_limit.update(registry.workers())
        servers, claims = await bind_api_servers(
            start_servers,
            router,
            host=host,
            bind=bind,
            num_routers=num_routers,
            application=application,
            replaced=replaced,
        )
        return cls(
            host,
            registry,
            admission,
            dispatcher,
            servers,
            authenticator,
            watches,
            monitor,
            console,
            BatchRunner(service, authenticator, name, config.storage.batch_concurrency),
            usage,
            claims,
            context_limit,
        )

    async def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Replaces the registry's list of workers by the directory's."""
        self._registry.update(workers)
        self.context_limit.update(self._registry.workers())
        await self._report_ready()
        await self._dispatcher.update_sessions()

    async def keep_ready(self) -> None:
        """Reports, without end, when no worker can be reached and when one can be again."""
        changed = asyncio.Event()
        self._registry.on_reachability = changed.set
        while True:
            await changed.wait()
            changed.clear()
            await self._report_ready()

    async def _report_ready(self) -> None:
        if not self._is_stopping:
            can_serve = self._registry.can_reach_worker
            self._monitor.ops.reason = "" if can_serve else "no worker"
            await self._servers.set_serving(can_serve)

    async def serve_ops(
        self,
        port: int,
        *,
        num_routers: int = 1,
        application: str = "",
        replaced: Collection[str] = (),
    ) -> None:
        """Serves /metrics, /live and /ready on `port`, one of the next ports, or any free one.

        `replaced`: the ops addresses of the routers that this one replaces. Until these drain,
        either answers on a shared port.
        """
        bound, claim = await bind_ops_server(
            partial(self._monitor.ops.start, shares_port=True),
            port,
            host=self._host,
            bind=self._bind,
            num_routers=num_routers,
            application=application,
            replaced=replaced,
        )
        self._claims.push(claim)
        self.ops_address = f"{self._host}:{port_of(bound)}" if bound else ""

    def report_demand(self) -> dict[str, float]:
        """Returns the demand of this router's requests on the pools, for the autoscaling policy."""
        return router_report(self._admission, self._registry)

    def fail(self) -> None:
        """Reports that this router cannot be used any more."""
        self._monitor.ops.failure = "failed"

    async def stop(self, grace: float) -> None:
        """Refuses new requests, gives running ones `grace` seconds, then ends everything.

        Requests that are cut off fail with the reason.
        """
        self._is_stopping = True
        self._monitor.ops.reason = "draining"
        self._monitor.ops.yield_port()  # else probes and scrapes would get either router's answer
        self._dispatcher.announce_stop()
        await self._servers.set_serving(False)
        asyncio.get_running_loop().call_later(grace, self._dispatcher.stop)
        await self._servers.stop(grace + _LAST_ANSWER_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_REPORT_SECONDS):
                await self.usage.report()
        await self._monitor.close()
        self._claims.close()
        await self._dispatcher.close()


async def _reset_cache(registry: WorkerRegistry, identity: PeerIdentity) -> dict[str, str]:
    known = {worker.worker_id: worker.address for worker in registry.workers()}
    return await reset_caches(known, identity)


def _adapter_admin(
    config: TandemConfig,
    adapters: AdapterRegistry,
    registry: WorkerRegistry,
    identity: PeerIdentity,
) -> AdapterAdmin:
    async def try_on_workers(adapter: LoraAdapter) -> None:
        await load_on_workers(adapter, [worker.address for worker in registry.workers()], identity)

    return AdapterAdmin(
        adapters,
        folder=config.lora.folder,
        read=partial(named_adapter, config.lora.max_lora_rank, "lora_path"),
        try_on_workers=try_on_workers,
    )


def _served_model(config: TandemConfig, folder: Path) -> ServedModel:
    return ServedModel(
        name=config.served_name,
        tokenizer=Tokenizer.load(
            folder,
            config.tool_call_parser,
            config.reasoning_parser,
            config.chat_template,
            config.chat_template_kwargs,
        ),
        context_tokens=config.context_tokens or read_context_tokens(folder),
        text_model_of=text_model_of(read_fields(folder)),
        defaults=generation_defaults(config, folder),
        pooling=pooling_rules(folder),
        watermark=WatermarkRules.load(config.watermark),
        slo=config.slo,
    )


def _monitor(config: TandemConfig, browsers: BrowserRules, secret: bytes) -> RouterMonitor:
    tracing, router = config.tracing, config.router
    trace_file = None
    if router.trace_file is not None:
        trace_file = TraceRecorder(
            Path(router.trace_file),
            salt=secret if router.trace_salt is None else router.trace_salt.encode(),
            block_tokens=router.trace_block_tokens,
            max_mb=router.trace_max_mb,
            has_tenants=router.trace_tenants,
        )
    return RouterMonitor(
        config.served_name,
        counts=config.metrics,
        browsers=browsers,
        spans=open_spans(tracing.endpoint, tracing.sample_ratio, config.name),
        trace_file=trace_file,
        slo_classes=config.slo,
        logs_requests=config.log_format == "json",
    )


def _browser_rules(config: TandemConfig, host: str, bind: str) -> BrowserRules:
    # A page that has rebound its host name (DNS rebinding) has no key. If a key is required, any
    # host name is safe.
    names = (host, *own_names(bind), *config.router.host_names)
    if config.auth.needs_key:
        names = (ANY_HOST,)
    return BrowserRules(host_names=names, cors_origins=config.router.cors_origins)


def _connection_bounds(router: RouterConfig) -> ConnectionBounds:
    return ConnectionBounds(
        stall_seconds=router.stall_seconds,
        max_connections=router.max_connections,
        max_per_address=router.max_connections_per_address,
    )


def _admission(router: RouterConfig, registry: WorkerRegistry, metrics: Metrics) -> Admission:
    return Admission(
        registry,
        max_queued_tokens=router.max_queued_tokens,
        max_queued_requests=router.max_queued_requests,
        max_queue_seconds=router.max_queue_seconds,
        metrics=metrics,
    )


def _authenticator(
    auth: AuthConfig, bind: str, secret: bytes
) -> tuple[Authenticator, list[FileWatch[Any]]]:
    if not auth.needs_key:
        is_local, share = is_loopback(bind), auth.share_anonymous_prefixes
        open_to_all = Authenticator(
            secret=secret,
            share_anonymous_prefixes=is_local if share is None else share,
            anonymous_sees_all=is_local,
            anonymous_max_priority=auth.anonymous_max_priority,
        )
        return open_to_all, []
    authenticator = Authenticator(operator_keys(auth.key_hashes), secret=secret)
    if auth.keys_file is None:
        return authenticator, []
    return authenticator, [
        FileWatch([Path(auth.keys_file)], partial(load_keys, auth.keys_file), authenticator.replace)
    ]


def _server_tls(router: RouterConfig, watches: list[FileWatch[Any]]) -> ServerTls | None:
    if router.tls is None:
        return None
    tls = ServerTls(router.tls.load())
    watches.append(FileWatch(router.tls.paths, router.tls.load, tls.replace))
    return tls
