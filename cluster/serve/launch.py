"""Starts a service on a local Ray or on a Ray cluster, waits until it can answer, and stops it."""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final

import psutil
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview

from ...proto.addresses import free_port, in_brackets, why_not_bound, without_brackets
from ...proto.errors import Unavailable
from ...router.client.client import Client
from ..config import STOP_MARGIN_SECONDS, RouterConfig, TandemConfig, check_interface
from ..local.environment import shared_environment
from ..nodes import NodeOffer, check_gpus
from .directory import close_directory, open_directory
from .environment import cluster_address
from .identity_file import kept_identity
from .members import Continuity
from .ports import local_host
from .ranks import ray_dashboard_url
from .ray_internals import begin_delete, serve_http_address
from .ray_session import has_ended, in_one_line, joined_ray, local_ray
from .redeploy import (
    announced,
    applications_of,
    is_ending,
    is_replaced,
    retire,
    running_application,
    take_over,
    watched_successor,
)
from .serve_app import build_app, count_routers
from .status import following

log = logging.getLogger(__name__)

_DEFAULT_STATUS_PORT: Final = 8000  # where KubeRay's probes ask Serve
_FAILURE_CHECK_SECONDS: Final = 1.0
_HEALTH_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 2.0
_RESTART_SECONDS: Final = 20.0  # for Ray to start Serve's controller again, if that has died
# Ray ends all processes, also this one, 60 s after its GCS server has ended.
_ORPHAN_SECONDS: Final = 40.0
_DELETE_CHECK_SECONDS: Final = 0.1
_END_SECONDS: Final = 10.0  # for Serve to see, on a busy machine, that all replicas have ended
_ANY_HOST: Final = (None, str(IPv4Address(0)), str(IPv6Address(0)))
_RETIRE_SECONDS: Final = 60.0

RouterAddresses = tuple[list[str], list[str], list[str]]
"""HOST:PORT of every router: gRPC, HTTP, ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Describes a running service: the addresses of its routers and its status page."""

    config: TandemConfig
    grpc_addresses: Sequence[str]
    http_addresses: Sequence[str]
    ops_addresses: Sequence[str]
    status_url: str
    application: str  # its name in Ray Serve
    dashboard_url: str = ""  # of Ray, if the configuration starts its dashboard
    ray_processes: Sequence[psutil.Process] = ()  # see `local_ray`; empty on a cluster

    @property
    def grpc_address(self) -> str:
        """Returns the address of the first router's gRPC server."""
        return self.grpc_addresses[0]

    @property
    def console_url(self) -> str:
        """Returns the address of the first router's console."""
        scheme = "http" if self.config.router.tls is None else "https"
        return f"{scheme}://{self.http_addresses[0]}/console"

    @property
    def addresses(self) -> str:
        """Returns all addresses as `tandem serve` prints them."""
        kinds = {
            "grpc": self.grpc_addresses,
            "http": self.http_addresses,
            "ops": self.ops_addresses,
        }
        return " ".join(f"{kind}={','.join(addresses)}" for kind, addresses in kinds.items())

    def wait(self) -> None:
        """Waits until a signal handler raises or another command has replaced the service.

        Raises Unavailable if the Ray that this process started ends.
        """
        with ExitStack() as stack:
            replaced = os.eventfd(0)
            stack.callback(os.close, replaced)
            if not self.ray_processes:  # a local Ray ends with this command: nothing replaces it
                notify = partial(os.eventfd_write, replaced, 1)
                stack.enter_context(watched_successor(self.config.name, self.application, notify))
            files = [replaced]
            for process in self.ray_processes:
                files.append(os.pidfd_open(process.pid))
                stack.callback(os.close, files[-1])
            if replaced in select.select(files, [], [])[0]:
                return
        ended = ", ".join(process.name() for process in self.ray_processes if has_ended(process))
        raise Unavailable(f"Ray has ended: its {ended} process is gone")


@contextmanager
def start_service(
    config: TandemConfig,
    folder: str,
    *,
    address: str | None = None,
    check: Callable[[], object] = lambda: None,
) -> Iterator[Service]:
    """Serves the model in `folder` while the context is open; on entry every router can answer.

    `check` runs while a local Ray starts; if it raises, nothing is served. Without `address` and
    RAY_ADDRESS, the context starts a Ray on this machine, which ends with it. On a cluster every
    node must have the folder, and a running service of the same name is replaced: see `redeploy`.
    Raises Unavailable, and the errors of `check`.
    """
    config.check_sizes_are_fixed()
    address = cluster_address(address)
    local = address is None
    if local:
        config = config.model_copy(update={"host": local_host(config)})
    with ExitStack() as stack:
        ray_processes: list[psutil.Process] = []
        if address is None:
            wait_for_ray = stack.enter_context(local_ray(config))
            check()
            ray_processes = wait_for_ray()
        else:
            check()
            stack.enter_context(joined_ray(address))
        with in_one_line("Ray Serve did not start"):
            check_gpus(config, _nodes())
            if local:
                open_directory(config.name, config.storage)  # it starts beside Serve
            root_url = _start_serve(config, local=local)
            running = running_application(config.name, config.start_seconds)
            continuity = take_over(config, folder, running, local=local)
        application = following(config.name, running)
        status_url = f"{root_url}/{application}"
        announcement = stack.enter_context(ExitStack())
        if not local:  # no other command finds a local Ray
            announcement.enter_context(announced(application))
        try:
            # While one deployment replaces another, the status page of either may answer.
            with kept_identity(continuity.identity, status_url):
                with in_one_line("the service did not start"):
                    grpc, http, ops = _deploy(config, folder, application, running, continuity)
                announcement.close()
                yield Service(
                    config=config,
                    grpc_addresses=grpc,
                    http_addresses=http,
                    ops_addresses=ops,
                    status_url=status_url,
                    application=application,
                    dashboard_url=ray_dashboard_url() if config.dashboard else "",
                    ray_processes=ray_processes,
                )
        finally:
            in_order = _stop_service(config, application, ray_processes)
            if not in_order and not any(map(has_ended, ray_processes)):
                log.warning("the service did not stop in order")


def _start_serve(config: TandemConfig, *, local: bool) -> str:
    """Starts Serve unless it runs already; returns the URL of its HTTP proxy."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    host = config.host or "127.0.0.1"
    port = config.status_port or _DEFAULT_STATUS_PORT
    if local and config.status_port is None and not _is_left(port, host, config.router):
        port = free_port(host)
    serve.start(
        proxy_location="HeadOnly", http_options={"host": without_brackets(host), "port": port}
    )
    # Serve may have run already, with another host and port.
    proxy_host, proxy_port = serve_http_address()
    if config.status_port not in (None, proxy_port):
        log.warning("status_port: Ray Serve runs already, on port %d", proxy_port)
    return f"http://{host if proxy_host in _ANY_HOST else in_brackets(proxy_host)}:{proxy_port}"


def _is_left(port: int, host: str, router: RouterConfig) -> bool:
    """Returns True if a port can be bound and the routers, which start later, do not need it."""
    own = (router.grpc_port, router.http_port, router.ops_port)
    return port not in own and not why_not_bound(host, port)


def _deploy(
    config: TandemConfig, folder: str, application: str, running: str | None, continuity: Continuity
) -> RouterAddresses:
    """Deploys an application and waits until all its routers answer; returns their addresses.

    Then ends the application `running`, which this one replaces.
    """
    deadline = time.monotonic() + config.start_seconds
    nodes = [node for node in _nodes() if node.resources.get("CPU")]
    _check_interfaces(config)
    num_routers = count_routers(config, nodes)
    inherited = shared_environment(config) if continuity.ends_with_launcher else {}
    app = build_app(config, folder, nodes, num_routers, continuity, inherited)
    target = serve.RunTarget(target=app, name=application, route_prefix=f"/{application}")
    (router,) = serve.run_many([target], wait_for_applications_running=False)
    addresses = _wait(config, application, router, num_routers, deadline)
    if config.router.tls is None:  # else only the clients know the CA and the names
        _check_answers(addresses[0])
    if running is not None:
        retire(running, router, max(deadline - time.monotonic(), _RETIRE_SECONDS))
    _warn_of_context(router)
    return addresses


def _warn_of_context(router: DeploymentHandle[Any]) -> None:
    """Logs that workers hold less than the context, which the log of a router says as well."""
    with suppress(TimeoutError, ray.exceptions.RayError):  # the service runs without this warning
        warning = router.context_warning.remote().result(timeout_s=_HEALTH_SECONDS)
        if warning:
            log.warning("%s", warning)


def _check_answers(grpc_addresses: Sequence[str]) -> None:
    """Raises Unavailable if a router does not answer."""
    for address in grpc_addresses:
        with Client(address, use_proxy=False) as client:
            if not client.health(timeout=_HEALTH_SECONDS):
                raise Unavailable(f"the service has started, but does not answer at {address}")


def _check_interfaces(config: TandemConfig) -> None:
    """Raises InvalidArgument if a router may be placed on a node where it must not listen."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and _offer(node).takes(config.router):
            check_interface(
                config.auth, config.router.bind or config.host or node["NodeManagerAddress"]
            )


def _nodes() -> list[NodeOffer]:
    """Returns the living nodes of the cluster."""
    return [_offer(node) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _offer(node: Mapping[str, Any]) -> NodeOffer:
    """Returns the resources and labels of one of `ray.nodes()`."""
    return NodeOffer(resources=node["Resources"], labels=node["Labels"])


def _wait(
    config: TandemConfig,
    application: str,
    router: DeploymentHandle[Any],
    num_routers: int,
    deadline: float,
) -> RouterAddresses:
    """Waits until every router knows all workers; raises Unavailable once Serve gives up."""
    ready = router.wait_for_members.remote(
        num_routers, config.prefill.replicas, config.decode.replicas, config.start_seconds
    )
    while time.monotonic() < deadline:
        try:
            addresses: RouterAddresses = ready.result(timeout_s=_FAILURE_CHECK_SECONDS)
            return addresses
        except TimeoutError:
            status = serve.status().applications[application]
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise Unavailable(_reason(status)) from None
        except ray.exceptions.RayActorError:
            raise Unavailable("the router died while it started") from None
    raise Unavailable(
        f"not ready after {config.start_seconds:g} seconds (start_seconds); raise it if a worker "
        "only needs more time to load"
    )


def _reason(status: ApplicationStatusOverview) -> str:
    """Returns the last line of the error of the replica that failed."""
    for name, deployment in status.deployments.items():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        if deployment.status not in ("HEALTHY", "UPDATING") and lines:
            return f"{name} did not start: {lines[-1]}"
    return "the service did not start"


def _stop_service(
    config: TandemConfig, application: str, ray_processes: Sequence[psutil.Process]
) -> bool:
    """Ends an application; with the service's last one, also the directory.

    Takes at most the time of a graceful stop and of a restart of Serve's controller. An application
    that has been replaced is left to the command that replaced it. Returns True if the application
    has ended.
    """
    answered = threading.Event()
    given_up = threading.Event()

    def delete() -> None:
        replaced = is_replaced(config.name, application)
        answered.set()
        if replaced or given_up.is_set():
            return
        begin_delete(application)
        while not given_up.is_set() and is_ending(config.name, application):
            given_up.wait(_DELETE_CHECK_SECONDS)
        if not given_up.is_set() and not applications_of(config.name):
            close_directory(config.name)  # no heartbeat opens it again now

    # A thread, because calls to a Ray that has died never end; `given_up` ends its calls before Ray
    # ends. Running streams get their grace even if Ray does not answer.
    thread = threading.Thread(target=delete, name="tandem-stop", daemon=True)
    thread.start()
    grace = min(max(_ANSWER_SECONDS, config.grace_seconds), _ORPHAN_SECONDS)
    late = min(_RESTART_SECONDS, _ORPHAN_SECONDS - grace)
    if answered.wait(grace) or _wait_while_ray_runs(answered, late, ray_processes):
        thread.join(config.grace_seconds + STOP_MARGIN_SECONDS + _END_SECONDS)
    given_up.set()
    return not thread.is_alive()


def _wait_while_ray_runs(
    answered: threading.Event, seconds: float, ray_processes: Sequence[psutil.Process]
) -> bool:
    """Waits for an answer of Serve, whose controller Ray starts again if it has died."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not any(map(has_ended, ray_processes)):
        if answered.wait(_FAILURE_CHECK_SECONDS):
            return True
    return False
