"""Starts a service on a local Ray or on a running cluster, waits until it can answer, and stops it
again.
"""

import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final

import psutil
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview

from ...proto.addresses import free_port, host_of, in_brackets, why_not_bound, without_brackets
from ...proto.errors import TandemError, Unavailable
from ...router.client.client import Client
from ..config import STOP_MARGIN_SECONDS, NodeOffer, TandemConfig, check_interface
from .directory import close_directory
from .environment import cluster_address, own_ray_token, ray_scratch
from .identity_file import kept_identity
from .members import Continuity
from .ranks import ray_dashboard_url
from .redeploy import (
    SuccessorWatch,
    applications_of,
    is_replaced,
    retire,
    running_application,
    take_over,
)
from .serve_app import build_app, count_routers
from .status import following

log = logging.getLogger(__name__)

DEFAULT_STATUS_PORT: Final = 8000  # where KubeRay's probes ask Serve
_SHARED_MEMORY: Final = "/dev/shm"  # nosec B108: of Ray; nothing is written there by us
OBJECT_STORE_BYTES: Final = 128 * 1024 * 1024  # nothing large passes through it
FAILURE_CHECK_SECONDS: Final = 1.0
HEALTH_SECONDS: Final = 10.0
REACH_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 2.0
ORPHAN_SECONDS: Final = (
    40.0  # Ray ends all processes, this one too, 60 s after its GCS server has ended
)
END_SECONDS: Final = 2.0
DELETE_CHECK_SECONDS: Final = 0.1
_ANY_HOST: Final = (None, str(IPv4Address(0)), str(IPv6Address(0)))
_RETIRE_SECONDS: Final = 60.0

RouterAddresses = tuple[list[str], list[str], list[str]]
"""HOST:PORT of every router: gRPC, HTTP, ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Describes a running service: its API servers, HOST:PORT of each router, and the status page
    for operators.
    """

    config: TandemConfig
    grpc_addresses: Sequence[str]
    http_addresses: Sequence[str]
    ops_addresses: Sequence[str]
    status_url: str
    application: str  # its name in Ray Serve
    dashboard_url: str = ""  # of Ray, if the configuration starts its dashboard
    ray_processes: Sequence[psutil.Process] = ()  # of a Ray of its own, those without which it ends

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
        """Waits until a signal's handler raises, or another command has replaced the service.
        Raises Unavailable if a Ray of the service's own ends.
        """
        with ExitStack() as stack:
            replaced = os.eventfd(0)
            stack.callback(os.close, replaced)
            if not self.ray_processes:  # a Ray of its own ends with this command
                notify = partial(os.eventfd_write, replaced, 1)
                stack.callback(SuccessorWatch(self.config.name, self.application, notify).stop)
            files = [replaced]
            for process in self.ray_processes:
                files.append(os.pidfd_open(process.pid))
                stack.callback(os.close, files[-1])
            if replaced in select.select(files, [], [])[0]:
                return
        ended = ", ".join(process.name() for process in self.ray_processes if _has_ended(process))
        raise Unavailable(f"Ray has ended: its {ended} process is gone")


@contextmanager
def start_service(
    config: TandemConfig, folder: str, *, address: str | None = None
) -> Iterator[Service]:
    """Serves the model in `folder` while the context is open; on entry every router can answer.

    Without `address` or RAY_ADDRESS a Ray of its own is started on this machine, and ends with it.
    On a cluster the folder must be there on every node, and a service of its name is replaced: see
    `redeploy`. Raises Unavailable.
    """
    config.check_sizes_are_fixed()
    address = cluster_address(address)
    local = address is None
    if local:
        host = config.host or "127.0.0.1"
        check_interface(config.auth, config.router.bind or host)
        config = config.model_copy(update={"host": host})
        _check_free(config, host)
    with _local_ray(config) if address is None else _joined_ray(address) as ray_processes:
        with _in_one_line("Ray Serve did not start"):
            if local:
                _check_gpus(config)
            root_url = _start_serve(config, local=local)
            running = running_application(config.name)
            continuity = take_over(config, folder, running, local=local)
        application = following(config.name, running)
        status_url = f"{root_url}/{application}"
        try:
            # While one deployment replaces another, the page of either may be the one that answers.
            with kept_identity(continuity.identity, status_url):
                with _in_one_line("the service did not start"):
                    grpc, http, ops = _deploy(config, folder, application, running, continuity)
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
            in_order = _stop_service(config, application)
            if not in_order and not any(map(_has_ended, ray_processes)):
                log.warning("the service did not stop in order")


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Makes Unavailable, whose text begins with `what`, of what Ray raises at a start that fails or
    takes too long, which may be any exception.
    """
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Unavailable(f"{what}: {reason}") from error


@contextmanager
def _local_ray(config: TandemConfig) -> Iterator[list[psutil.Process]]:
    """Runs a Ray of this process's own; yields its processes without which it ends."""
    options: dict[str, Any] = {
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": config.dashboard,
    }
    options |= _local_resources(config)
    with ray_scratch() as scratch, own_ray_token(scratch), ExitStack() as stack:
        if not os.access(_SHARED_MEMORY, os.W_OK):  # Ray's object store would abort
            options["_plasma_directory"] = scratch
        with _in_one_line("Ray did not start"):
            stack.enter_context(_ray(address="local", _temp_dir=scratch, **options))
            if (
                node := ray._private.worker._global_node
            ):  # whose monitor reads all logs for drivers that show them
                node.kill_log_monitor(check_alive=False)
        yield [
            process
            for process in _processes_of(scratch)
            if process.name() in ("gcs_server", "raylet")
        ]


def _local_resources(config: TandemConfig) -> dict[str, Any]:
    """Returns at least what all replicas reserve: on one machine every placement fits."""
    totals: defaultdict[str, float] = defaultdict(float)
    for section, replicas in (
        (config.router, config.router.replicas or 1),
        (config.prefill, config.prefill.num_ranks),
        (config.decode, config.decode.num_ranks),
    ):
        totals["CPU"] += replicas * section.num_cpus
        for name, amount in section.resources.items():
            totals[name] += replicas * amount
    whole = {
        name: math.ceil(amount) for name, amount in totals.items()
    }  # Ray takes no fraction of a node's resource
    return {"num_cpus": max(os.cpu_count() or 1, whole.pop("CPU")), "resources": whole}


@contextmanager
def _joined_ray(address: str) -> Iterator[list[psutil.Process]]:
    if ray.is_initialized():  # a program that has joined the cluster already stays joined
        yield []
        return
    _check_reachable(address)
    with ExitStack() as stack:
        with _in_one_line(f"address: cannot join the Ray cluster at {address}"):
            stack.enter_context(_ray(address=address))
        yield []


@contextmanager
def _ray(**options: Any) -> Iterator[None]:
    """Runs Ray from init to shutdown, both in a thread of their own.

    No signal interrupts init in that thread: an incomplete start would leave processes behind. The
    thread lives as long as Ray, since the kernel kills Ray's processes with the thread that started
    them.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tandem-ray") as thread:
        try:
            start = thread.submit(
                ray.init, log_to_driver=False, logging_level=logging.ERROR, **options
            )
            try:
                start.result()
            finally:
                wait([start])
                _restore_sigterm_handler()
            yield
        finally:
            processes = _processes_of(options["_temp_dir"]) if "_temp_dir" in options else []
            thread.submit(ray.shutdown).result()
            _end(processes)


def _restore_sigterm_handler() -> None:
    """Installs Python's handler again: Ray's core has replaced it by one that aborts the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _processes_of(scratch: str) -> list[psutil.Process]:
    """Returns the processes of the Ray whose folder is `scratch`. They name it or, as workers, have
    their logs there; whose children they are says nothing once the raylet has died.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended meanwhile, or is another user's
            names = (*process.cmdline(), *(file.path for file in process.open_files()))
            if process.pid != os.getpid() and any(scratch in name for name in names):
                found.append(process)
    return found


def _has_ended(process: psutil.Process) -> bool:
    """Returns whether a child has ended, also if nobody has waited for it."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _end(processes: list[psutil.Process]) -> None:
    """Waits for processes that were told to end, then kills the rest: a killed raylet leaves its
    agents behind.
    """
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=END_SECONDS)


def _start_serve(config: TandemConfig, *, local: bool) -> str:
    """Starts Serve unless it runs; returns the URL of its HTTP proxy."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    host = config.host or "127.0.0.1"
    port = config.status_port or DEFAULT_STATUS_PORT
    if local and config.status_port is None and why_not_bound(host, port):
        port = free_port(host)
    serve.start(
        proxy_location="HeadOnly", http_options={"host": without_brackets(host), "port": port}
    )
    client: Any = (
        _get_global_client()
    )  # of a Serve that ran already, perhaps; no public function tells its port
    found = client.http_config
    if config.status_port not in (None, found.port):
        log.warning("status_port: Ray Serve runs already, on port %d", found.port)
    return f"http://{host if found.host in _ANY_HOST else in_brackets(found.host)}:{found.port}"


def _deploy(
    config: TandemConfig, folder: str, application: str, running: str | None, continuity: Continuity
) -> RouterAddresses:
    """Deploys and waits until every router answers, and what ran before has ended; returns their
    addresses.
    """
    deadline = time.monotonic() + config.start_seconds
    alive = [_offer(node) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = [node for node in alive if node.resources.get("CPU")]
    _check_interfaces(config)
    num_routers = count_routers(config, nodes)
    app = build_app(config, folder, nodes, num_routers, continuity)
    target = serve.RunTarget(target=app, name=application, route_prefix=f"/{application}")
    (router,) = serve.run_many([target], wait_for_applications_running=False)
    addresses = _wait(config, application, router, num_routers, deadline)
    for address in (
        addresses[0] if config.router.tls is None else ()
    ):  # whose CA and names are the clients' matter
        with Client(address, use_proxy=False) as client:
            if not client.health(timeout=HEALTH_SECONDS):
                raise Unavailable(f"the service has started, but does not answer at {address}")
    if running is not None:
        retire(running, router, max(deadline - time.monotonic(), _RETIRE_SECONDS))
    return addresses


def _check_interfaces(config: TandemConfig) -> None:
    """Raises InvalidArgument if a router could be placed where it may not listen."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and _offer(node).takes(config.router):
            check_interface(
                config.auth, config.router.bind or config.host or node["NodeManagerAddress"]
            )


def _offer(node: Mapping[str, Any]) -> NodeOffer:
    """Returns what one of `ray.nodes()` offers."""
    return NodeOffer(resources=node["Resources"], labels=node["Labels"])


def _wait(
    config: TandemConfig,
    application: str,
    router: DeploymentHandle[Any],
    num_routers: int,
    deadline: float,
) -> RouterAddresses:
    """Waits until every router knows all workers; checks meanwhile whether Serve has given up."""
    ready = router.wait_for_members.remote(
        num_routers, config.prefill.replicas, config.decode.replicas, config.start_seconds
    )
    while time.monotonic() < deadline:
        try:
            addresses: RouterAddresses = ready.result(timeout_s=FAILURE_CHECK_SECONDS)
            return addresses
        except TimeoutError:
            status = serve.status().applications[application]
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise Unavailable(_reason(status)) from None
        except ray.exceptions.RayActorError:
            raise Unavailable("the router died while it started") from None
    raise Unavailable(f"not ready after {config.start_seconds:g} seconds (start_seconds)")


def _reason(status: ApplicationStatusOverview) -> str:
    """Returns the last line of what the failed replica raised."""
    for name, deployment in status.deployments.items():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        if deployment.status not in ("HEALTHY", "UPDATING") and lines:
            return f"{name} did not start: {lines[-1]}"
    return "the service did not start"


def _stop_service(config: TandemConfig, application: str) -> bool:
    """Ends the application, and with the service's last one the directory, within the time that a
    graceful stop may take; returns whether they have ended. One that has been replaced is left to
    the command that has replaced it.
    """
    answered, given_up = threading.Event(), threading.Event()

    def delete() -> None:
        if is_replaced(config.name, application):
            answered.set()
            return
        serve.delete(
            application, _blocking=False
        )  # blocking, it would look once a second, for a minute
        while not given_up.is_set() and application in serve.status().applications:
            answered.set()
            given_up.wait(DELETE_CHECK_SECONDS)
        answered.set()
        if not given_up.is_set() and not applications_of(config.name):
            close_directory(config.name)  # now that no heartbeat would open it again

    # In a thread, because calls to a Ray that has died never end. It must make none after the end
    # of Ray. Without an answer, too, the streams that run have their time.
    thread = threading.Thread(target=delete, name="tandem-stop", daemon=True)
    thread.start()
    if answered.wait(min(max(ANSWER_SECONDS, config.grace_seconds), ORPHAN_SECONDS)):
        thread.join(config.grace_seconds + STOP_MARGIN_SECONDS + 1)
    given_up.set()
    return not thread.is_alive()


def _check_gpus(config: TandemConfig) -> None:
    """Raises Unavailable if this machine has fewer GPUs than ranks that need one: Ray would wait
    for more.
    """
    if config.device != "cuda":
        return
    needed = config.prefill.num_ranks + config.decode.num_ranks
    found = round(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if needed > found:
        raise Unavailable(
            f"device: cuda needs {needed} GPUs, one for each rank, and this machine offers {found} "
            "(CUDA_VISIBLE_DEVICES); take fewer workers (--prefill, --decode), or --device cpu"
        )


def _check_reachable(address: str) -> None:
    """Raises Unavailable if no server listens at a HOST:PORT. Ray itself would try for two minutes."""
    if address == "auto":  # which Ray finds
        return
    try:
        place = host_of(address), int(address.rpartition(":")[2])
        socket.create_connection(place, timeout=REACH_SECONDS).close()
    except OSError as error:
        raise Unavailable(f"address: no Ray cluster answers at {address} ({error})") from None


def _check_free(config: TandemConfig, host: str) -> None:
    """Raises Unavailable if a port that the service must have is taken on this machine."""
    ports = {"status_port": config.status_port or 0}
    if (config.router.replicas or 1) == 1:  # several routers take free ports where these are taken
        ports |= {
            "router.grpc_port": config.router.grpc_port,
            "router.http_port": config.router.http_port,
        }
    for key, port in ports.items():
        interface = (config.router.bind or host) if key.startswith("router.") else host
        if reason := why_not_bound(interface, port):
            raise Unavailable(f"{key}: {interface}:{port} cannot be bound{reason}")
