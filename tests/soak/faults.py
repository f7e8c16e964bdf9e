"""Finds the processes of a service on a Ray cluster that this process has started, kills them, and
waits until the service is whole again.
"""

import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import psutil
import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError

from tandem.cluster.serve.directory import NAMESPACE
from tandem.cluster.serve.launch import Service
from tandem.tests.service import status

PAUSE_SECONDS: Final = 20.0  # of the GCS
_ANSWER_SECONDS: Final = 5.0

KINDS: Final = {
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
    "router": ":Router",
    "prefill": ":PrefillPool",
    "decode": ":DecodePool",
    "rank": "RankActor",
    "controller": "ServeController",
    "proxy": "ProxyActor",
    "directory": "irectory",
}
"""What the command line of a process of each kind contains."""


def processes() -> dict[str, list[psutil.Process]]:
    """Returns the processes of this cluster by kind; other clusters on this machine have other
    parents.
    """
    found = defaultdict(list)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            kind = next((kind for kind, part in KINDS.items() if part in title), None)
            if kind and process.status() != psutil.STATUS_ZOMBIE:
                found[kind].append(process)
    return found


class Nemesis:
    """Kills one process after the other, each kind in turn."""

    def __init__(
        self, service: Service, kinds: Sequence[str], *, with_gcs: bool, spares: bool = False
    ) -> None:
        """`kinds`: what to kill in turn. `with_gcs`: after the first round the GCS is stopped for a
        while. `spares`: of each kind that has several processes one lives throughout.
        """
        self.kills: Counter[str] = Counter()
        self.slowest: dict[
            str, float
        ] = {}  # by kind: the most seconds until the service was whole again
        self.not_whole: list[str] = []
        self._service = service
        self._with_gcs = with_gcs
        self._spares = spares
        self._order = kinds
        self._position = 0

    def strike(self) -> str:
        """Kills a process of the next kind, the one that has run longest, or that has not if this
        spares; returns what it did. The GCS, once, is stopped for a while: killed without a
        database of its own, it would take the cluster along.
        """
        if self._with_gcs and not self.kills["gcs"] and self._position == len(self._order):
            return self._pause_gcs()
        kind = self._order[self._position % len(self._order)]
        self._position += 1
        found = processes()[kind]
        if not found:
            self.not_whole.append(f"no process of kind {kind}")
            return f"no process of kind {kind}"
        target = (max if self._spares else min)(found, key=psutil.Process.create_time)
        os.kill(target.pid, signal.SIGKILL)
        self.kills[kind] += 1
        return f"killed {kind} {target.pid}"

    def wait_until_whole(self, kind: str, seconds: float) -> bool:
        """Returns whether all members are there again within so many seconds; records how long it
        took.
        """
        started = time.monotonic()
        reason = "not asked"
        while time.monotonic() - started < seconds:
            reason = self._missing()
            if not reason:
                taken = time.monotonic() - started
                self.slowest[kind] = max(self.slowest.get(kind, 0.0), taken)
                return True
            time.sleep(0.25)
        self.not_whole.append(f"not whole {seconds:g} s after {kind}: {reason}")
        return False

    def _pause_gcs(self) -> str:
        (gcs,) = processes()["gcs"]
        gcs.suspend()
        time.sleep(PAUSE_SECONDS)
        gcs.resume()
        self.kills["gcs"] += 1
        return f"stopped gcs {gcs.pid} for {PAUSE_SECONDS:g} s"

    def _missing(self) -> str:
        """Returns what the service lacks; empty if it is whole."""
        return _unanswered(self._describe) or _unanswered(self._application)

    def _describe(self) -> str:
        """Compares the status page with the configuration and with the processes that run."""
        config, page = self._service.config, status(self._service.status_url)
        counts = Counter(each["role"] for each in page["workers"] if each["state"] == "ready")
        wanted = {"prefill": config.prefill.replicas, "decode": config.decode.replicas}
        members = dict(counts) | {"router": len(page["routers"])}
        if (
            members != wanted | {"router": config.router.replicas}
            or len(page["workers"]) != config.num_workers
        ):
            return f"members {members} and {len(page['workers'])} workers"
        silent = [each for each in page["routers"] if not _answers(each["grpc"])]
        return f"routers {silent} do not answer" if silent else ""

    def _application(self) -> str:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        ray.get(controller.get_pid.remote(), timeout=_ANSWER_SECONDS)
        directory = ray.get_actor(f"{self._service.config.name}-directory", namespace=NAMESPACE)
        ray.get(directory.changes.remote(), timeout=_ANSWER_SECONDS)
        application = serve.status().applications[self._service.config.name]
        states = {name: dict(each.replica_states) for name, each in application.deployments.items()}
        is_whole = application.status == "RUNNING" and all(
            set(each) == {"RUNNING"} for each in states.values()
        )
        return (
            ""
            if is_whole
            else f"application {application.status.value}, {json.dumps(states, default=str)}"
        )


def _unanswered(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (OSError, KeyError, ValueError, RayActorError, GetTimeoutError) as error:
        return f"{ask.__name__}: {type(error).__name__} {error}"[:200]


def _answers(address: str) -> bool:
    from tandem.router.client.client import Client

    with Client(address) as client:
        return client.health(timeout=_ANSWER_SECONDS)
