"""Starts a Ray of this process on this machine, or joins the Ray of a cluster, and leaves it."""

import ctypes
import logging
import math
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import psutil
import ray

from ...proto.addresses import host_of
from ...proto.errors import TandemError, Unavailable
from ..config import TandemConfig
from ..local.environment import shared_environment
from .environment import own_ray_token, ray_scratch, set_environment
from .ray_internals import with_variables, without_idle_processes

_SHARED_MEMORY: Final = "/dev/shm"  # nosec B108: Ray's; this module writes nothing there
_OBJECT_STORE_BYTES: Final = 128 * 1024 * 1024  # nothing large passes through it
_START_VARIABLE: Final = "RAY_worker_maximum_startup_concurrency"
_FOLDER_VARIABLE: Final = "TANDEM_RAY_FOLDER"
# With it, the new title of a process does not overwrite the environment that others can read.
_TITLE_VARIABLE: Final = "SPT_NOENV"
_OTHER_PROCESSES: Final = 3  # Serve's controller and its proxy, and the directory
_REACH_SECONDS: Final = 5.0
_END_SECONDS: Final = 2.0


@contextmanager
def in_one_line(prefix: str) -> Iterator[None]:
    """Turns every exception that is not a TandemError into Unavailable, as `prefix: first line`.

    Ray may raise any exception if a start fails or takes too long.
    """
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Unavailable(f"{prefix}: {reason}") from error


@contextmanager
def local_ray(config: TandemConfig) -> Iterator[Callable[[], list[psutil.Process]]]:
    """Starts a Ray on this machine; yields a function that waits until it runs.

    The function returns the processes without which Ray ends. It must be called once.
    """
    num_processes, resources = _local_resources(config)
    options: dict[str, Any] = resources | {
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": config.dashboard,
    }
    # Ray starts as many processes at once, before it knows what they will run.
    environment = shared_environment(config) | {_START_VARIABLE: str(num_processes)}
    with ray_scratch() as scratch, own_ray_token(scratch), set_environment(environment):
        if not os.access(_SHARED_MEMORY, os.W_OK):  # Ray's object store would abort
            options["_plasma_directory"] = scratch
        with _ray(address="local", _temp_dir=scratch, **options) as started:

            def wait_for_ray() -> list[psutil.Process]:
                with in_one_line("Ray did not start"):
                    started()
                return [
                    process
                    for process in _processes_of(scratch)
                    if process.name() in ("gcs_server", "raylet")
                ]

            yield wait_for_ray


def _local_resources(config: TandemConfig) -> tuple[int, dict[str, Any]]:
    """Returns the number of the service's processes, and resources for them.

    These are at least what all replicas reserve: one machine fits any placement. Ray has a CPU for
    each process, because it starts a process for each CPU in advance.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    num_processes = _OTHER_PROCESSES
    for section, replicas in (
        (config.router, config.router.replicas or 1),
        (config.prefill, config.prefill.num_ranks),
        (config.decode, config.decode.num_ranks),
    ):
        num_processes += replicas
        totals["CPU"] += replicas * section.num_cpus
        for name, amount in section.resources.items():
            totals[name] += replicas * amount
    # Ray accepts no fraction of a node's resource.
    resources = {name: math.ceil(amount) for name, amount in totals.items()}
    num_cpus = max(num_processes, resources.pop("CPU"))
    return num_processes, {"num_cpus": num_cpus, "resources": resources}


@contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Joins the Ray cluster at `address`; a process that has joined one already stays joined."""
    if ray.is_initialized():
        yield
        return
    _check_reachable(address)
    with ExitStack() as stack:
        with in_one_line(f"address: cannot join the Ray cluster at {address}"):
            started = stack.enter_context(_ray(address=address))
            started()
        yield


def _check_reachable(address: str) -> None:
    """Raises Unavailable if no server listens at HOST:PORT; Ray would try for two minutes."""
    if address == "auto":  # Ray finds the address
        return
    try:
        place = host_of(address), int(address.rpartition(":")[2])
        socket.create_connection(place, timeout=_REACH_SECONDS).close()
    except OSError as error:
        raise Unavailable(f"address: no Ray cluster answers at {address} ({error})") from None


@contextmanager
def _ray(**options: Any) -> Iterator[Callable[[], None]]:
    """Runs Ray from init to shutdown, both in one extra thread; yields a function that waits.

    The function raises what init raises. No signal interrupts init in that thread: an incomplete
    start would leave processes behind. The thread lives as long as Ray, since the kernel kills
    Ray's processes with the thread that started them.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tandem-ray") as thread:
        start = thread.submit(_init, **options)
        try:
            yield start.result
        finally:
            wait([start])
            processes = _processes_of(options["_temp_dir"]) if "_temp_dir" in options else []
            thread.submit(ray.shutdown).result()
            _end(processes)


def _init(**options: Any) -> None:
    """Initializes Ray, and keeps this process's handler of SIGTERM.

    Ray replaces it by one that aborts the process. Ray's processes inherit that SIGHUP is blocked
    in this thread: a terminal that closes ends only this process, which gives streams their grace.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # Not signal.signal, which works in the main thread alone.
    get_handler = ctypes.pythonapi.PyOS_getsig
    get_handler.restype = ctypes.c_void_p
    handler = ctypes.c_void_p(get_handler(signal.SIGTERM))
    variables: dict[str, str] = {}
    if "_temp_dir" in options:
        variables = {_FOLDER_VARIABLE: options["_temp_dir"], _TITLE_VARIABLE: "1"}
    try:
        with (
            without_idle_processes(dashboard=options.get("include_dashboard", False)),
            with_variables(variables),
        ):
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    finally:
        ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, handler)


def _processes_of(scratch: str) -> list[psutil.Process]:
    """Returns the processes of the Ray whose folder is `scratch`, and the children of these.

    All have inherited the name of the folder in their environment. Their parents tell nothing once
    the raylet has died; their files tell nothing, because a `tail` may also read a log.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            if process.environ().get(_FOLDER_VARIABLE) == scratch:
                found.append(process)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Returns True if a child process has ended, waited for or not."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _end(processes: list[psutil.Process]) -> None:
    """Waits for processes that were told to end, then kills the rest.

    A raylet that was killed leaves its agents behind.
    """
    _, alive = psutil.wait_procs(processes, timeout=_END_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_END_SECONDS)
