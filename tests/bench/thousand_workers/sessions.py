"""Measures what the sessions with many workers cost a router, over real gRPC.

The sessions of all workers end in one other process. Its workers are busy with requests of other
routers, so that each second their load and the blocks in their prefix cache change. The code of a
worker decides when it reports this.
"""

import asyncio
import gc
import itertools
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import grpc.aio
import uvloop

from tandem.proto import worker_pb2, worker_pb2_grpc
from tandem.proto.channel import PeerServer
from tandem.proto.identity import PeerIdentity
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.workers.serve.load_reports import LoadReports
from tandem.workers.serve.session import RouterSession

NUM_BLOCKS: Final = 2_000
_MODULE: Final = "tandem.tests.bench.thousand_workers.sessions"
_FILES_PER_WORKER: Final = 4
_CHANGE_SECONDS: Final = 1.0  # from one change of a worker's load to the next


def make_info(number: int, address: str = "") -> worker_pb2.WorkerInfo:
    """Returns the entry of a worker in the directory."""
    return worker_pb2.WorkerInfo(
        worker_id=f"worker-{number:05}",
        epoch=1,
        role=ROLE_DECODE if number % 2 else ROLE_PREFILL,
        address=address,
        block_size=16,
        max_sequences=64,
        kv_bytes_per_token=23_040,
        layout=b"0123456789abcdef",
        load=worker_pb2.WorkerLoad(free_blocks=NUM_BLOCKS, total_blocks=NUM_BLOCKS),
    )


class Reports:
    """Makes the reports of one busy worker, with a full prefix cache."""

    def __init__(self, number: int, changed_blocks: int) -> None:
        self._rng = random.Random(number)
        self._changed_blocks = changed_blocks
        self._cached = [self._rng.randbytes(16) for _ in range(NUM_BLOCKS // 4)]
        self._versions = itertools.count(1)

    def first(self) -> worker_pb2.SessionResponse:
        """Returns a report of the whole prefix cache."""
        return worker_pb2.SessionResponse(load=self._load(), stored_blocks=self._cached)

    def next(self) -> worker_pb2.SessionResponse:
        """Returns a report of another load, and of blocks that replaced the oldest ones."""
        evicted = self._cached[: self._changed_blocks]
        stored = [self._rng.randbytes(16) for _ in evicted]
        self._cached = self._cached[len(evicted) :] + stored
        return worker_pb2.SessionResponse(
            load=self._load(), stored_blocks=stored, evicted_blocks=evicted
        )

    def _load(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(
            version=next(self._versions),
            num_running=self._rng.randrange(20, 40),
            num_waiting=self._rng.randrange(3),
            waiting_tokens=self._rng.randrange(2_000),
            free_blocks=self._rng.randrange(500, 1_000),
            cached_blocks=500,
            total_blocks=NUM_BLOCKS,
            step_seconds=0.02,
            prompt_token_seconds=2e-4,
        )


class _Worker:
    """A worker with one session, busy with requests of other routers."""

    def __init__(self, number: int, changed_blocks: int) -> None:
        self._changes = Reports(number, changed_blocks)
        self._session = RouterSession()
        self._load = worker_pb2.WorkerLoad()
        self._load_reports = LoadReports(lambda: self._load, {self._session})

    async def serve(self, send: Callable[[worker_pb2.SessionResponse], Awaitable[None]]) -> None:
        changing = asyncio.create_task(self._change())
        try:
            while (message := await self._session.take()) is not None:
                self._load_reports.add_to(message, self._session)
                await send(message)
        finally:
            changing.cancel()

    async def _change(self) -> None:
        first = self._changes.first()
        self._load = first.load
        self._session.change_cache(first.stored_blocks, ())
        self._session.wake()
        await asyncio.sleep(random.uniform(0, _CHANGE_SECONDS))
        while True:
            changes = self._changes.next()
            self._load = changes.load
            self._session.change_cache(changes.stored_blocks, changes.evicted_blocks)
            self._load_reports.changed()
            await asyncio.sleep(_CHANGE_SECONDS)


class _Workers(worker_pb2_grpc.WorkerServicer):
    """Serves the sessions of all workers."""

    def __init__(self, changed_blocks: int) -> None:
        self._changed_blocks = changed_blocks
        self._numbers = itertools.count()

    async def Session(
        self,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> None:
        await _Worker(next(self._numbers), self._changed_blocks).serve(context.write)


class _Registry(WorkerRegistry):
    """Counts the reports."""

    num_reports = 0

    def report(self, worker_id: str, epoch: int, message: worker_pb2.SessionResponse) -> None:
        self.num_reports += 1
        super().report(worker_id, epoch, message)


async def _serve(num_workers: int, changed_blocks: int) -> None:
    identity = PeerIdentity.from_text(os.environ["BENCH_IDENTITY"])
    server = PeerServer(identity, max_connections=num_workers + 100)
    worker_pb2_grpc.add_WorkerServicer_to_server(_Workers(changed_blocks), server)  # type: ignore[no-untyped-call]
    print(server.bind("127.0.0.1", 0), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it
    await server.stop(0)


async def _measure(
    identity: PeerIdentity, address: str, num_workers: int, seconds: float
) -> dict[str, float]:
    registry = _Registry()
    registry.capacity.subscribe(lambda: None)  # as admission does
    before = resident_bytes()
    router = Dispatcher(registry, Admission(registry), identity=identity)
    registry.update(make_info(number, address) for number in range(num_workers))
    began, used = time.monotonic(), time.process_time()
    await router.update_sessions()
    async with asyncio.timeout(120):
        while registry._prefixes.num_blocks < num_workers * NUM_BLOCKS // 4:
            await asyncio.sleep(0.05)
    found = {
        "connect_seconds": time.monotonic() - began,
        "connect_cpu_seconds": time.process_time() - used,
    }
    await asyncio.sleep(2 * _CHANGE_SECONDS)  # every worker has begun to change
    gc.collect()
    gc.freeze()
    registry.num_reports = 0
    began, used, thread = time.monotonic(), time.process_time(), time.thread_time()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    found["core_share"] = (time.process_time() - used) / took
    found["event_loop_share"] = (time.thread_time() - thread) / took
    found["reports_per_second"] = registry.num_reports / took
    found["resident_mb"] = (resident_bytes() - before) / 1e6
    assert not registry.has_lost
    await router.close()
    return found


def measure_router(num_workers: int, changed_blocks: int, seconds: float) -> dict[str, float]:
    """Returns the shares of a core of a router with sessions to this many workers.

    `changed_blocks`: blocks that a worker stores, and evicts, each second.
    """
    _allow_files(num_workers)
    identity = PeerIdentity.generate()
    arguments = [sys.executable, "-m", _MODULE, str(num_workers), str(changed_blocks)]
    with subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"BENCH_IDENTITY": identity.to_text()},
    ) as workers:
        assert workers.stdout is not None
        assert workers.stdin is not None
        address = workers.stdout.readline().strip()
        try:
            return uvloop.run(_measure(identity, address, num_workers, seconds))
        finally:
            workers.stdin.close()


def _allow_files(num_workers: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = _FILES_PER_WORKER * num_workers
    if most < needed:
        raise RuntimeError(f"the limit of open files is {most}; {needed} are needed")


def resident_bytes() -> int:
    """Returns the memory of this process that is not swapped out."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    _allow_files(int(sys.argv[1]))
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
