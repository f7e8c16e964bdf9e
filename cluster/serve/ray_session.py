"""Starts a Ray of this process on this machine, or joins the Ray of a cluster, and leaves it."""

import logging
import math
import os
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import psutil
import ray

from ...proto.addresses import host_of
from ...proto.errors import TandemError, Unavailable
from ..config import TandemConfig
from .environment import own_ray_token, ray_scratch
from .ray_internals import stop_log_monitor

_SHARED_MEMORY: Final = "/dev/shm"  # nosec B108: Ray's; this module writes nothing there
_OBJECT_STORE_BYTES: Final = 128 * 1024 * 1024  # nothing large passes through it
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
def local_ray(config: TandemConfig) -> Iterator[list[psutil.Process]]:
    """Runs a Ray on this machine; yields the processes without which it ends."""
    options: dict[str, Any] = {
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": config.dashboard,
    }
    options |= _local_resources(config)
    with ray_scratch() as scratch, own_ray_token(scratch), ExitStack() as stack:
        if not os.access(_SHARED_MEMORY, os.W_OK):  # Ray's object store would abort
            options["_plasma_directory"] = scratch
        with in_one_line("Ray did not start"):
            stack.enter_context(_ray(address="local", _temp_dir=scratch, **options))
            stop_log_monitor()
        yield [
            process
            for process in _processes_of(scratch)
            if process.name() in ("gcs_server", "raylet")
        ]


def _local_resources(config: TandemConfig) -> dict[str, Any]:
    """Returns at least the resources that all replicas reserve: one machine fits any placement."""
    totals: defaultdict[str, float] = defaultdict(float)
    for section, replicas in (
        (config.router, config.router.replicas or 1),
        (config.prefill, config.prefill.num_ranks),
        (config.decode, config.decode.num_ranks),
    ):
        totals["CPU"] += replicas * section.num_cpus
        for name, amount in section.resources.items():
            totals[name] += replicas * amount
    # Ray accepts no fraction of a node's resource.
    resources = {name: math.ceil(amount) for name, amount in totals.items()}
    num_cpus = max(os.cpu_count() or 1, resources.pop("CPU"))
    return {"num_cpus": num_cpus, "resources": resources}


@contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Joins the Ray cluster at `address`; a process that has joined one already stays joined."""
    if ray.is_initialized():
        yield
        return
    _check_reachable(address)
    with ExitStack() as stack:
        with in_one_line(f"address: cannot join the Ray cluster at {address}"):
            stack.enter_context(_ray(address=address))
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
def _ray(**options: Any) -> Iterator[None]:
    """Runs Ray from init to shutdown, both in one extra thread.

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
    """Installs Python's handler again; Ray has replaced it by one that aborts the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _processes_of(scratch: str) -> list[psutil.Process]:
    """Returns the processes of the Ray whose folder is `scratch`.

    Their command lines name the folder, or (workers) they have log files open there. Their parents
    tell nothing once the raylet has died.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            names = (*process.cmdline(), *(file.path for file in process.open_files()))
            if process.pid != os.getpid() and any(scratch in name for name in names):
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
