"""Coordinates a tensor-parallel group from rank 0: loads the ranks and detects a lost one.

It also keeps the other ranks alive by heartbeats. A worker with one rank has a coordinator without
clients.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Self

from ...proto import worker_pb2
from ..engine.engine import Engine
from ..host.threads import LOAD_NICE, in_thread
from .process_group import EMPTY_PLAN, TpExecutor, TpGroup
from .rank import Rank, RankConfig, load_rank
from .rank_client import RankClient, RankLost

_HEARTBEAT_SHARE: Final = 0.25
"""Interval of an idle rank 0's empty plans, as a share of the collectives' timeout."""


@dataclass(slots=True, eq=False)
class TpCoordinator:
    """Holds the clients of ranks 1, 2, ...; `lost` has a result once one of them is lost."""

    epoch: int = field(default_factory=time.time_ns)  # grows with every start of a worker
    clients: list[RankClient] = field(default_factory=list)
    # HOST:PORT of the KV endpoints of ranks 1, 2, ...
    endpoints: list[str] = field(default_factory=list)
    lost: "asyncio.Future[RankLost]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _group: TpGroup | None = None
    _executor: TpExecutor | None = None
    _heartbeats: asyncio.Task[None] | None = None

    @classmethod
    async def load(cls, config: RankConfig, addresses: Sequence[str]) -> tuple[Self, Rank]:
        """Loads this rank and, at the same time, the ranks of the `RankServer`s at these addresses.

        Raises the exceptions of `load_rank`, RankLost if another rank cannot load its part, and
        OSError if config.host cannot be bound.
        """
        coordinator = cls()
        silence = config.silence_seconds
        coordinator.clients = [
            RankClient(
                address,
                config.identity,
                coordinator._lose,
                silence_seconds=silence,
                num_plans=coordinator._count_plans,
            )
            for address in addresses
        ]
        try:
            return coordinator, await coordinator._load(config)
        except BaseException:
            await coordinator.close()
            raise

    async def _load(self, config: RankConfig) -> Rank:
        if not self.clients:
            nice = LOAD_NICE if config.device == "cpu" else 0
            return await in_thread(partial(load_rank, config), "tandem-load", nice=nice)
        group = self._group = TpGroup.listen(
            host=config.host,
            size=len(self.clients) + 1,
            device=config.device,
            timeout=config.collective_seconds,
            start_timeout=config.start_seconds,
        )
        for rank, client in enumerate(self.clients, start=1):
            join = worker_pb2.JoinGroup(
                rank=rank,
                size=group.size,
                store=group.address,
                epoch=self.epoch,
                timeout_seconds=config.collective_seconds,
            )
            client.send(worker_pb2.RankControlRequest(join_group=join))
        # No niceness: it starts the threads of the collectives, which would inherit it for good.
        loading = in_thread(partial(load_rank, config, group), "tandem-load")
        # If another rank fails, gather raises at once. Otherwise this rank would wait for it in
        # vain.
        loaded, self.endpoints = await asyncio.gather(
            loading, asyncio.gather(*(client.ready for client in self.clients))
        )
        self._executor = TpExecutor(group, loaded.executor)
        return replace(loaded, executor=self._executor)

    def start_heartbeats(self, post: Callable[[Callable[[Engine], object]], None]) -> None:
        """Starts to send empty plans to the other ranks, whose waits for a plan have a deadline.

        `post` runs a command in the engine's thread.
        """
        if self._group is not None and self._executor is not None:
            self._heartbeats = asyncio.create_task(
                _send_heartbeats(self._executor, self._group.timeout * _HEARTBEAT_SHARE, post)
            )

    async def stop_ranks(self) -> None:
        """Ends the plan loops of the other ranks. Call it after the engine's thread has ended."""
        if self._heartbeats:
            self._heartbeats.cancel()
        if self._executor and not self.lost.done():
            with suppress(RuntimeError):  # the other ranks have ended already
                await in_thread(self._executor.close, "tandem-stop-ranks")

    async def close(self) -> None:
        """Ends the streams, which also ends the other ranks."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def _count_plans(self) -> int:
        return self._executor.num_plans if self._executor else 0

    def _lose(self, error: RankLost) -> None:
        if not self.lost.done():
            self.lost.set_result(error)
            if self._group is not None:
                self._group.abort()


async def _send_heartbeats(
    executor: TpExecutor, interval: float, post: Callable[[Callable[[Engine], object]], None]
) -> None:
    while True:
        await asyncio.sleep(interval)
        post(lambda engine: executor.launch(EMPTY_PLAN))
