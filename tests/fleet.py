"""Workers and a dispatcher in one process, joined by real gRPC on free ports, without Ray."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.channel import PeerChannel
from tandem.proto.metrics import NULL_METRICS, Metrics
from tandem.proto.worker_pb2_grpc import WorkerStub
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.execution import PARK_SECONDS
from tandem.router.request import TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.peers import IDENTITY, peer_channel
from tandem.tests.waits import WAIT
from tandem.tests.worker_config import worker_config
from tandem.tests.workers.engine.fake import FakeExecutor
from tandem.workers.engine.plan import DelegatingExecutor, Executor
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank import Rank
from tandem.workers.tp.rank_server import RankServer
from tandem.workers.transfer.sender import FrameHook

VOCAB = 1000


def innermost(executor: Executor) -> Executor:
    """Returns the executor that others wrap: the model's runner in a worker with a model."""
    while isinstance(executor, DelegatingExecutor):
        executor = executor._executor
    return executor


def fake_rank(
    num_blocks: int = 256,
    block_size: int = 16,
    context_tokens: int = 2048,
    vocab_size: int = VOCAB,
    **fake: object,
) -> Rank:
    """A rank whose tokens are a function of all tokens before, and whose KV memory notices every
    misplaced byte.
    """
    executor = FakeExecutor(num_blocks, block_size, vocab_size=vocab_size, **fake)  # type: ignore[arg-type]
    return Rank(
        executor=executor,
        kv=executor.kv,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        eos_ids=frozenset(),
    )


@dataclass(slots=True)
class Fleet:
    """A running set of workers. One that a test has broken leaves `workers`: it is stopped, but not
    audited.
    """

    workers: list[Worker]
    registry: WorkerRegistry
    dispatcher: Dispatcher
    ranks: list[RankServer] = field(default_factory=list)  # other than 0, worker by worker

    async def generate(self, request: TokenRequest) -> tuple[list[int], inference_pb2.Timeline]:
        """All tokens of a request for one choice, see `choices`."""
        (tokens,), timeline = await self.choices(request)
        return tokens, timeline

    async def choices(
        self, request: TokenRequest
    ) -> tuple[list[list[int]], inference_pb2.Timeline]:
        """All tokens of each choice of a request, checked to have contiguous indices and exactly
        one end.
        """
        timeline = inference_pb2.Timeline()
        tokens: list[list[int]] = [[] for _ in range(request.submit.num_choices)]
        ended: set[int] = set()
        async with aclosing(self.dispatcher.generate(request, timeline)) as deltas:
            async for delta in deltas:
                assert delta.choice not in ended
                assert delta.first_index == len(tokens[delta.choice])
                tokens[delta.choice] += delta.ids
                if delta.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
                    ended.add(delta.choice)
        assert ended == set(range(request.submit.num_choices))
        return tokens, timeline

    async def statuses(self) -> list[worker_pb2.GetStatusResponse]:
        """Returns every worker's status, over gRPC."""
        found = []
        for worker in self.workers:
            async with peer_channel(worker.address) as channel:
                found.append(
                    await worker_stub(channel).GetStatus(
                        worker_pb2.GetStatusRequest(), timeout=WAIT
                    )
                )
        return found

    def hurry(self) -> None:
        """Has the fake executors of all workers make the rest of their steps in no time."""
        for worker in self.workers:
            executor = innermost(worker._rank.executor)
            assert isinstance(executor, FakeExecutor)
            executor.step_seconds = 0.0

    async def check_idle(self) -> None:
        """Waits until no worker holds anything for a request; fails if one does, or loses
        blocks.
        """
        deadline = time.monotonic() + WAIT
        while True:
            statuses = await self.statuses()
            assert all(status.integrity_ok for status in statuses)
            if all(is_idle(status) for status in statuses):
                return
            assert time.monotonic() < deadline, f"not idle: {statuses}"
            await asyncio.sleep(0.01)


def worker_stub(channel: PeerChannel) -> WorkerStub:
    """A client of one worker."""
    return WorkerStub(channel)  # type: ignore[no-untyped-call]


def is_idle(status: worker_pb2.GetStatusResponse) -> bool:
    """Whether there is no request, lease or transfer, and every block is free or cached."""
    load = status.info.load
    held = (
        load.owned_blocks
        + load.leased_blocks
        + load.reserved_blocks
        + load.num_waiting
        + load.num_running
    )
    adds_up = load.free_blocks + load.cached_blocks == load.total_blocks
    return adds_up and not (
        held or status.num_requests or status.num_leases or status.num_transfers
    )


@asynccontextmanager
async def fleet(
    prefill: int = 1,
    decode: int = 1,
    *,
    rank: Callable[[str], Rank] = lambda role: fake_rank(),
    frame_hook: FrameHook | None = None,
    park_seconds: float = PARK_SECONDS,
    metrics: Metrics = NULL_METRICS,
    **config: Any,
) -> AsyncIterator[Fleet]:
    """Starts workers of `rank(role)` and a dispatcher that sees them all; on leaving checks that
    they are idle. Every second worker schedules a step while the one before runs, as on a GPU.
    """
    settings = worker_config(**config)
    roles = ["prefill"] * prefill + ["decode"] * decode
    workers = [
        await Worker.serve(
            replace(rank(role), launches_ahead=n % 2 == 1),
            settings,
            worker_id=f"{role}-{n}",
            role=role,
            frame_hook=frame_hook,
            metrics=metrics,
        )
        for n, role in enumerate(roles)
    ]
    async with _running(workers, park_seconds=park_seconds) as running:
        yield running


@asynccontextmanager
async def split_fleet(
    folder: Path,
    tp: Mapping[str, Sequence[int]],
    *,
    park_seconds: float = PARK_SECONDS,
    **config: Any,
) -> AsyncIterator[Fleet]:
    """Like `fleet`, with workers whose ranks share a real model, in float32: `tp` has for each role
    the number of ranks of each of its workers. All ranks are in this process.
    """
    settings = worker_config(
        str(folder), **({"dtype": "float32", "kv_cache_bytes": 2**22} | config)
    )
    workers, ranks = [], []
    for role, sizes in tp.items():
        for n, size in enumerate(sizes):
            others = [await RankServer.start(settings.rank) for _ in range(1, size)]
            ranks += others
            addresses = [rank.address for rank in others]
            workers.append(
                await Worker.start(settings, worker_id=f"{role}-{n}", role=role, ranks=addresses)
            )
    try:
        async with _running(workers, ranks, park_seconds) as running:
            yield running
    finally:
        async with asyncio.timeout(WAIT):
            await asyncio.gather(*(rank.stop() for rank in ranks))


class Unlimited(Admission):
    """Admits every request at once, so that workers get more than they can hold."""

    @asynccontextmanager
    async def permit(self, request: TokenRequest) -> AsyncIterator[Callable[[], None]]:
        yield lambda: None


@asynccontextmanager
async def _running(
    workers: list[Worker], ranks: Sequence[RankServer] = (), park_seconds: float = PARK_SECONDS
) -> AsyncIterator[Fleet]:
    registry = WorkerRegistry()
    registry.update(worker.info() for worker in workers)
    dispatcher = Dispatcher(
        registry, Unlimited(registry), identity=IDENTITY, park_seconds=park_seconds
    )
    running = Fleet(list(workers), registry, dispatcher, list(ranks))
    try:
        yield running
        await running.check_idle()
    finally:
        async with asyncio.timeout(WAIT):
            await running.dispatcher.close()
            await asyncio.gather(*(worker.stop() for worker in workers))
