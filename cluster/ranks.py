"""The other ranks of a worker as Ray actors, each in its own bundle of the worker's placement group."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..workers.tp.rank import RankConfig
from ..workers.tp.rank_server import RankServer


def node_host(host: str | None) -> str:
    """The interface that servers of this process bind: the one that is named, else the node's."""
    return host or str(get_node_ip_address())  # type: ignore[no-untyped-call]


class RankActor:
    """One rank other than 0. Its process ends as soon as rank 0 does."""

    def __init__(self, config: RankConfig, host: str | None, label: str) -> None:
        self._config = replace(config, host=node_host(host), port=0)
        self._label = label

    def __repr__(self) -> str:
        return self._label

    async def start(self) -> str:
        """Serves; returns the address at which rank 0 finds it."""
        self._server = await RankServer.start(self._config)
        self._ending = asyncio.create_task(self._end())
        return self._server.address

    async def _end(self) -> None:
        """Without rank 0 the process is of no use, and its engine may wait in a collective for half a minute."""
        await self._server.ended.wait()
        os._exit(0)


def start_ranks(
    config: RankConfig, size: int, *, host: str | None, label: str, environment: dict[str, str], gpu: bool
) -> list[Any]:
    """Handles of ranks 1 to size - 1, started by rank 0's actor, with which they end. `host` is the interface that all
    of them bind, None is each one's node address."""
    if size == 1:
        return []
    group = get_current_placement_group()
    assert group is not None  # of the replica that calls
    actor = ray.remote(RankActor)
    return [
        actor.options(
            num_cpus=0,
            num_gpus=1 if gpu else 0,
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank
            ),
        ).remote(config, host, f"{label} rank {rank} of {size}")
        for rank in range(1, size)
    ]


async def rank_addresses(ranks: Sequence[Any]) -> list[str]:
    """Where each of the ranks is."""
    return list(await asyncio.gather(*(rank.start.remote() for rank in ranks)))
