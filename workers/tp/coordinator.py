"""Rank 0's side of its group: brings the other ranks up, keeps them, and notices when one is lost.

A worker of one rank has a leader of nobody.
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
from ..threads import in_thread
from .process_group import NOTHING, TpExecutor, TpGroup
from .rank import Rank, RankConfig, load_rank
from .rank_client import RankClient, RankLost

_IDLE_SHARE: Final = 0.25
"""Of the collectives' timeout: so often the others hear of an idle rank 0."""


@dataclass(slots=True, eq=False)
class TpCoordinator:
    """The links to ranks 1, 2, ..., and what rank 0 says through the group. `lost` has a result once one is lost."""

    epoch: int = field(default_factory=time.time_ns)  # grows with every start of a worker
    links: list[RankClient] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)  # from which others pull the KV cache of ranks 1, 2, ...
    lost: "asyncio.Future[RankLost]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _executor: TpExecutor | None = None
    _interval: float = 0.0
    _pulse: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: RankConfig, addresses: Sequence[str]) -> tuple[Self, Rank]:
        """Loads this rank, and lets the `RankServer`s at these addresses load theirs at the same time.

        Raises what `load_rank` raises, RankLost if another rank cannot load its part, OSError if config.host cannot be
        bound."""
        leader = cls()
        leader.links = [RankClient(address, leader._lose) for address in addresses]
        try:
            return leader, await leader._load(config)
        except BaseException:
            await leader.close()
            raise

    async def _load(self, config: RankConfig) -> Rank:
        if not self.links:
            return await in_thread(partial(load_rank, config), "tandem-load")
        group = TpGroup.listen(
            host=config.host,
            size=len(self.links) + 1,
            device=config.device,
            timeout=config.collective_seconds,
            start_timeout=config.start_seconds,
        )
        for rank, link in enumerate(self.links, start=1):
            link.join(
                worker_pb2.Join(
                    rank=rank,
                    size=group.size,
                    store=group.address,
                    epoch=self.epoch,
                    timeout_seconds=config.collective_seconds,
                )
            )
        loading = in_thread(partial(load_rank, config, group), "tandem-load")
        # If another rank fails, this one would wait for it in vain.
        loaded, others = await asyncio.gather(loading, asyncio.gather(*(link.ready for link in self.links)))
        self.endpoints = [other.endpoint for other in others]
        self._interval = config.collective_seconds * _IDLE_SHARE
        self._executor = TpExecutor(group, loaded.executor)
        return replace(loaded, executor=self._executor)

    def keep(self, post: Callable[[Callable[[Engine], object]], None]) -> None:
        """From now on the other ranks hear from the engine's thread, which runs what is posted, however idle it is."""
        if self._executor is not None:
            self._pulse = asyncio.create_task(self._say_nothing(self._executor, post))

    async def end(self) -> None:
        """The other ranks may go; the engine's thread has ended."""
        if self._pulse:
            self._pulse.cancel()
        if self._executor and not self.lost.done():
            with suppress(RuntimeError):  # they are gone already
                await in_thread(self._executor.end, "tandem-end")

    async def close(self) -> None:
        """Ends the links, and with them the other ranks."""
        await asyncio.gather(*(link.close() for link in self.links))

    async def _say_nothing(self, executor: TpExecutor, post: Callable[[Callable[[Engine], object]], None]) -> None:
        while True:
            await asyncio.sleep(self._interval)
            post(lambda engine: executor.launch(NOTHING))

    def _lose(self, error: RankLost) -> None:
        if not self.lost.done():
            self.lost.set_result(error)
