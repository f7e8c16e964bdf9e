"""Starts the other ranks of a worker as Ray actors, each in its bundle of the placement group."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...proto.addresses import in_brackets
from ...router.garbage import collections_paused
from ...workers.host.threads import go_first
from ..store.store import ensure_tokenizer

if TYPE_CHECKING:
    from ...workers.tp.rank import RankConfig


def node_host(host: str | None) -> str:
    """Returns the interface that servers of this process bind: `host`, else the node's address.

    An IPv6 address is in brackets.
    """
    return host or in_brackets(str(get_node_ip_address()))  # type: ignore[no-untyped-call]


def ray_dashboard_url() -> str:
    """Returns the URL of the dashboard of this process's Ray; empty if it has none."""
    if not ray.is_initialized():
        return ""
    handler = signal.getsignal(signal.SIGTERM)
    found = str(ray.init(ignore_reinit_error=True, configure_logging=False).dashboard_url or "")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has replaced it by one that exits at once
    return found if "://" in found or not found else f"http://{found}"


class RankActor:
    """Runs one rank other than 0. Its process ends as soon as rank 0 ends.

    `threads` is called in that process.
    """

    def __init__(
        self, config: "RankConfig", host: str | None, label: str, threads: Callable[[], int]
    ) -> None:
        go_first()
        self._config = replace(config, host=node_host(host), port=0, num_threads=threads())
        self._label = label

    def __repr__(self) -> str:
        return self._label

    async def start(self) -> str:
        """Starts the rank's server; returns its address, HOST:PORT."""
        with collections_paused():
            # Imports torch. Routers import this file and must not.
            from ...workers.tp.rank_server import RankServer

            # Each node has its own cache.
            await asyncio.to_thread(ensure_tokenizer, Path(self._config.model))
            self._server = await RankServer.start(self._config)
        self._ending = asyncio.create_task(self._end())
        return self._server.address

    async def _end(self) -> None:
        """Ends the process with rank 0.

        Otherwise the engine might wait half a minute in a collective.
        """
        await self._server.ended.wait()
        os._exit(0)


def start_ranks(
    config: "RankConfig",
    size: int,
    *,
    host: str | None,
    label: str,
    worker_id: str,
    threads: Callable[[], int],
    environment: dict[str, str],
    gpu: bool,
) -> list[Any]:
    """Returns the actor handles of ranks 1 to size - 1; each one's `start` returns an address.

    The actor of rank 0 calls this, and the ranks end with it. `host`: the interface that all ranks
    bind; None: each one's node address. Ray's dashboard shows the ranks by `worker_id`, rank and
    `label`.
    """
    if size == 1:
        return []
    group = get_current_placement_group()
    assert group is not None  # Serve has placed the calling replica in a group
    actor = ray.remote(RankActor)
    return [
        actor.options(
            name=f"{worker_id} rank {rank} of {size}",
            num_cpus=0,
            num_gpus=1 if gpu else 0,
            runtime_env={"env_vars": environment} if environment else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank
            ),
        ).remote(config, host, f"{label} rank {rank} of {size}", threads)
        for rank in range(1, size)
    ]
