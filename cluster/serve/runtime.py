"""Composes the objects of a router: tokenizer, registry, admission, dispatcher, API servers. Does
not import Ray.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import grpc

from ...proto import worker_pb2
from ...proto.addresses import is_loopback, open_socket, without_brackets
from ...proto.errors import Unavailable
from ...proto.identity import PeerIdentity
from ...proto.metrics import Metrics
from ...router.adapters import AdapterAdmin, AdapterRegistry
from ...router.api.browsers import ANY as ANY_HOST
from ...router.api.browsers import BrowserRules
from ...router.api.console.feed import ConsoleFeed
from ...router.api.server.connection import ConnectionBounds
from ...router.api.server.servers import ApiServers
from ...router.api.service import GenerationService
from ...router.auth.authenticator import Authenticator
from ...router.auth.config import AuthConfig
from ...router.auth.keys import load_keys
from ...router.auth.tls import ServerTls
from ...router.auth.watch import FileWatch
from ...router.dispatch.blocked_prompts import BlockedPrompts
from ...router.dispatch.dispatcher import Dispatcher
from ...router.frontend.prepare import ServedModel
from ...router.frontend.tokenizer import Tokenizer
from ...router.request import LoraAdapter
from ...router.resume.policy import ResumePolicy
from ...router.scheduling.admission import Admission
from ...router.scheduling.registry import WorkerRegistry
from ...workers.model.config import read_context_tokens
from ..config import RouterConfig, TandemConfig, check_interface
from ..scaling.reports import router_report
from ..store.adapters import configured_adapters, named_adapter
from ..store.generation_defaults import generation_defaults
from .status import load_on_workers
from .telemetry.monitor import RouterMonitor, open_spans

_MAX_PORT: Final = 65_535

_LAST_ANSWER_SECONDS: Final = 0.5  # for the errors of requests that did not end in time


class RouterRuntime:
    """Runs one router: started by `start`, gets the list of workers by `update`, ended by `stop`."""

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
        claims: ExitStack,
    ) -> None:
        self.authenticator = authenticator
        self.watches = watches  # whose `run` takes keys and certificates as their files change
        self.console = console  # whose `run` samples what the console shows
        self._claims = claims
        self._registry = registry
        self._admission = admission
        self._dispatcher = dispatcher
        self._servers = servers
        # HOST:PORT, with the host by which others reach this node.
        self.grpc_address, self.http_address = (
            f"{host}:{_port(bound)}" for bound in (servers.grpc_address, servers.http_address)
        )
        self.ops_address = ""  # once `serve_ops` has returned
        self._monitor = monitor
        self._is_stopping = False
        self._host, self._bind = host, servers.http_address.rpartition(":")[0]

    @classmethod
    async def start(
        cls,
        config: TandemConfig,
        folder: Path,
        host: str,
        *,
        identity: PeerIdentity,
        resume_key: bytes,
        cache_secret: bytes | None = None,
        num_routers: int = 1,
        application: str = "",
        workers: Collection[worker_pb2.WorkerInfo] = (),
        replaced: Collection[tuple[str, str]] = (),
        blocked_prompts: BlockedPrompts | None = None,
        adapters: AdapterRegistry | None = None,
        describe: Callable[[], Awaitable[dict[str, Any]]] | None = None,
    ) -> Self:
        """Binds both API servers on `router.bind`, else `host`; not SERVING until there is a decode
        worker.

        `resume_key`: the secret of all routers, with which each goes on with the others' requests.
        `cache_secret`: that with which each knows the prefix caches of tenants; None: the same.
        `num_routers`: of the service, which may share a host; see `_addresses`. `replaced`: both
        addresses of each router that those of `application` replace, which both may have; then
        requests come at once, for which there are `workers`. `blocked_prompts`: see Dispatcher;
        `adapters`: None has those of `config`; `describe`: see ConsoleFeed. Raises OSError or
        RuntimeError if all its ports are taken, InvalidArgument if keys are needed or a file of
        them is wrong.
        """
        router, bind = config.router, config.router.bind or host
        check_interface(config.auth, bind)
        authenticator, watches = _authenticator(config.auth, bind, cache_secret or resume_key)
        registry = WorkerRegistry(local_prefill_tokens=router.local_prefill_tokens)
        monitor = _monitor(config, browsers := _browser_rules(config, host))
        admission = _admission(router, registry, monitor.metrics)
        shared = blocked_prompts, adapters or configured_adapters(config)
        service, dispatcher = _service(
            config, folder, registry, admission, monitor, identity, resume_key, *shared
        )
        with suppress(Unavailable):  # each chat then says so, and other requests are answered
            await service.model("").tokenizer.wait_for_chats()
        console = ConsoleFeed(service.telemetry, describe, registry.workers)
        start_servers = partial(
            ApiServers.start,
            service,
            **_server_options(router),
            browsers=browsers,
            authenticator=authenticator,
            tls=_server_tls(router, watches),
            console=console,
            shares_ports=True,
        )
        registry.update(workers)
        known = _rebound(replaced, host, bind)
        claim = partial(
            PortClaim, application=application, shared={each for both in known for each in both}
        )
        servers, claims = await _listen(
            start_servers, claim, _addresses(router, bind, num_routers, known)
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
            claims,
        )

    async def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Replaces the registry's list of workers by the directory's."""
        self._registry.update(workers)
        await self._report_ready()

    def update_loads(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Takes over loads that the directory has, see WorkerRegistry.update_loads."""
        self._registry.update_loads(workers)

    async def keep_ready(self) -> None:
        """Reports at once, without end, that no decode worker can be reached any more, or one
        again.
        """
        changed = asyncio.Event()
        self._registry.on_reach = changed.set
        while True:
            await changed.wait()
            changed.clear()
            await self._report_ready()

    async def _report_ready(self) -> None:
        if not self._is_stopping:
            can_serve = self._registry.reaches_decode
            self._monitor.ops.reason = "" if can_serve else "no decode worker"
            await self._servers.set_serving(can_serve)

    async def serve_ops(
        self,
        port: int,
        *,
        num_routers: int = 1,
        application: str = "",
        replaced: Collection[str] = (),
    ) -> None:
        """Serves /metrics, /live and /ready beside the API servers: on `port`, of several routers
        of one host on those after it, else on any free one. `replaced`: their addresses at the
        routers that this one replaces.

        A router that replaces another listens beside it, so for as long as both are there, either
        answers.
        """
        wanted = [
            port + index for index in range(num_routers) if port and port + index <= _MAX_PORT
        ]
        kept = [_port(each) for each in replaced if each.rpartition(":")[0] == self._host]
        shared = [f"{self._bind}:{each}" for each in kept]
        for each in (*([] if port else kept), *wanted, 0):
            with suppress(OSError), ExitStack() as scope:
                claim = scope.enter_context(
                    closing(PortClaim(f"{self._bind}:{each}", application, shared))
                )
                bound = await self._monitor.ops.start(claim.address, shares_port=True)
                self.ops_address = f"{self._host}:{_port(bound)}"
                self._claims.push(scope.pop_all())
                break

    def report_demand(self) -> dict[str, float]:
        """Returns what the requests of this router ask of the pools."""
        return router_report(self._admission, self._registry)

    def fail(self) -> None:
        """Reports that this router cannot be used any more."""
        self._monitor.ops.failure = "failed"

    async def stop(self, grace: float) -> None:
        """Refuses new requests, gives running ones `grace` seconds, then ends everything. Who is
        cut reads why.
        """
        self._is_stopping, self._monitor.ops.reason = True, "draining"
        self._dispatcher.announce_stop()
        await self._servers.set_serving(False)
        asyncio.get_running_loop().call_later(grace, self._dispatcher.stop)
        await self._servers.stop(grace + _LAST_ANSWER_SECONDS)
        await self._monitor.close()
        self._claims.close()
        await self._dispatcher.close()


def _service(
    config: TandemConfig,
    folder: Path,
    registry: WorkerRegistry,
    admission: Admission,
    monitor: RouterMonitor,
    identity: PeerIdentity,
    resume_key: bytes,
    blocked_prompts: BlockedPrompts | None,
    adapters: AdapterRegistry,
) -> tuple[GenerationService, Dispatcher]:
    dispatcher = Dispatcher(
        registry,
        admission,
        identity=identity,
        park_seconds=config.router.park_seconds,
        metrics=monitor.metrics,
        blocked_prompts=blocked_prompts,
    )
    monitor.watch(admission, dispatcher, registry)
    models = [_served_model(config, folder)]
    admin = _adapter_admin(config, adapters, registry, identity)
    service = GenerationService(
        models,
        dispatcher,
        admission,
        resume_key,
        monitor.telemetry,
        admin,
        aliases=config.aliases,
        resume_policy=ResumePolicy(config.router.resume_seconds),
    )
    return service, dispatcher


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


async def _listen(
    start_servers: Callable[..., Awaitable[ApiServers]],
    claim: Callable[[str], "PortClaim"],
    addresses: Iterable[tuple[str, str]],
) -> tuple[ApiServers, ExitStack]:
    """Returns servers on the first two addresses that are free, and what gives them back. Raises
    OSError or RuntimeError.
    """
    for both in addresses:
        try:
            with ExitStack() as scope:
                claims = [scope.enter_context(closing(claim(each))) for each in both]
                servers = await start_servers(
                    grpc_address=claims[0].address, http_address=claims[1].address
                )
                return servers, scope.pop_all()
        except (OSError, RuntimeError) as error:
            taken = error
    raise taken


def _served_model(config: TandemConfig, folder: Path) -> ServedModel:
    return ServedModel(
        name=config.served_name,
        tokenizer=Tokenizer.load(folder, config.tool_call_parser, config.reasoning_parser),
        context_tokens=config.context_tokens or read_context_tokens(folder),
        defaults=generation_defaults(config, folder),
    )


def _monitor(config: TandemConfig, browsers: BrowserRules) -> RouterMonitor:
    tracing = config.tracing
    return RouterMonitor(
        config.served_name,
        counts=config.metrics,
        browsers=browsers,
        spans=open_spans(tracing.endpoint, tracing.sample_ratio, config.name, config.served_name),
        logs_requests=config.log_format == "json",
    )


def _browser_rules(config: TandemConfig, host: str) -> BrowserRules:
    # A page that has rebound its name has no key: where one is needed, any name will do.
    names = (host, *config.router.host_names) if config.auth.keys_file is None else (ANY_HOST,)
    return BrowserRules(host_names=names, cors_origins=config.router.cors_origins)


def _server_options(router: RouterConfig) -> dict[str, Any]:
    bounds = ConnectionBounds(
        stall_seconds=router.stall_seconds,
        max_connections=router.max_connections,
        max_per_address=router.max_connections_per_address,
    )
    compression = (
        grpc.Compression.Gzip if router.compression == "gzip" else grpc.Compression.NoCompression
    )
    return {"reflection": router.reflection, "compression": compression, "bounds": bounds}


def _admission(router: RouterConfig, registry: WorkerRegistry, metrics: Metrics) -> Admission:
    return Admission(
        registry,
        max_queued_tokens=router.max_queued_tokens,
        max_queued_requests=router.max_queued_requests,
        max_queue_seconds=router.max_queue_seconds,
        metrics=metrics,
    )


def _authenticator(
    auth: AuthConfig, host: str, secret: bytes
) -> tuple[Authenticator, list[FileWatch[Any]]]:
    if auth.keys_file is None:
        share = auth.share_anonymous_prefixes
        open_to_all = Authenticator(
            secret=secret,
            share_anonymous_prefixes=is_loopback(host) if share is None else share,
            anonymous_max_priority=auth.anonymous_max_priority,
        )
        return open_to_all, []
    authenticator = Authenticator((), secret=secret)
    return authenticator, [
        FileWatch([Path(auth.keys_file)], partial(load_keys, auth.keys_file), authenticator.replace)
    ]


def _server_tls(router: RouterConfig, watches: list[FileWatch[Any]]) -> ServerTls | None:
    if router.tls is None:
        return None
    files = router.tls.files
    tls = ServerTls(files.load())
    watches.append(FileWatch(files.paths, files.load, tls.replace))
    return tls


def _addresses(
    router: RouterConfig, host: str, num_routers: int, replaced: Collection[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yields the addresses of both servers to try: the configured ports, and of several routers the
    ones after them; if any port will do, first those (`replaced`) of routers on this host that are
    replaced.

    So a router that is started in place of another, on the same host, has the address by which
    clients know that.
    """
    if not router.grpc_port and not router.http_port:
        yield from replaced
    for index in range(num_routers):
        ports = [port + index if port else 0 for port in (router.grpc_port, router.http_port)]
        if max(ports) <= _MAX_PORT:
            yield f"{host}:{ports[0]}", f"{host}:{ports[1]}"
    if num_routers > 1:
        yield f"{host}:0", f"{host}:0"


def _rebound(addresses: Iterable[tuple[str, str]], host: str, bind: str) -> list[tuple[str, str]]:
    """Returns the addresses of the routers on this host, as they are bound there."""
    return [
        (f"{bind}:{_port(grpc_address)}", f"{bind}:{_port(http_address)}")
        for grpc_address, http_address in addresses
        if grpc_address.rpartition(":")[0] == host
    ]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


class PortClaim:
    """Holds the right to listen on HOST:PORT until it is closed, or this process ends.

    A router binds its ports so that others may bind them, too (SO_REUSEPORT); which of them may is
    settled before. A port belongs to one router, and to one router of the deployment that replaces
    its own.
    """

    def __init__(self, address: str, application: str, shared: Collection[str]) -> None:
        """Port 0 takes a free one. `shared`: addresses of routers that the ones of `application`
        replace.

        Raises OSError if the port is taken.
        """
        host, _, port = address.rpartition(":")
        is_shared = address in shared
        if not is_shared:
            with open_socket(host) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                probe.bind((without_brackets(host), int(port)))
                address = f"{host}:{probe.getsockname()[1]}"
        # The probe lets a second one by until the first listens. A name of the abstract kind is
        # bound once, and is free again however the process ends.
        self._lock = socket.socket(socket.AF_UNIX)
        try:
            self._lock.bind(f"\0tandem {application if is_shared else ''} {address}")
        except OSError:
            self._lock.close()
            raise
        self.address = address

    def close(self) -> None:
        """Gives the right back. Idempotent."""
        self._lock.close()
