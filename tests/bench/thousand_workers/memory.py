"""Measures the memory of a directory and of a router's registry over an hour of virtual time.

Workers report and register, some are replaced by new ones, and requests come and go.
"""

import asyncio
import gc
import itertools
import random
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

from tandem.cluster.serve.members import Directory, RouterInfo
from tandem.cluster.serve.views.member_view import DirectoryWatcher
from tandem.proto import worker_pb2
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.bench.thousand_workers.sessions import Reports, make_info, resident_bytes
from tandem.tests.router.pools import Clock, request

_REPLACE_SECONDS: Final = 10  # from one replaced worker to the next
_REPORT_SECONDS: Final = 4  # from one report of a worker to the next
_CHANGED_BLOCKS: Final = 32  # in a report
_REQUESTS: Final = 5  # a second
_RUNNING: Final = 50


class Fleet:
    """The workers of a service, of which some are replaced."""

    def __init__(self, num_workers: int) -> None:
        self._numbers = itertools.count()
        self._free: list[worker_pb2.WorkerInfo] = []
        self.infos = deque(make_info(next(self._numbers)) for _ in range(num_workers))

    def replace_oldest(self) -> tuple[worker_pb2.WorkerInfo, worker_pb2.WorkerInfo]:
        """Returns the worker that leaves and the one that replaces it."""
        new = make_info(next(self._numbers))
        self.infos.append(new)
        return self.infos.popleft(), new


def measure_memory(
    num_workers: int, seconds: int, every: int, on_sample: Callable[[int, float, float], None]
) -> None:
    """Calls `on_sample` every so many virtual seconds: the time, and both parts in megabytes."""
    asyncio.run(_run(num_workers, seconds, every, on_sample))


def send_memory(sender: Connection, num_workers: int, seconds: int) -> None:
    """Sends six samples of `measure_memory`, from a new process."""
    with sender:
        measure_memory(num_workers, seconds, seconds // 6, lambda *sample: sender.send(sample))


async def _run(
    num_workers: int, seconds: int, every: int, on_sample: Callable[[int, float, float], None]
) -> None:
    clock = Clock()
    fleet = Fleet(num_workers)
    began = resident_bytes()
    directory = _DirectoryPart(fleet, clock)
    of_directory = 0
    for second in range(1, seconds + 1):
        clock.now = float(second)
        await directory.pass_second(second)
        if second % every == 0:
            gc.collect()
            of_directory = resident_bytes() - began
            on_sample(second, of_directory / 1e6, 0.0)
    began = resident_bytes()
    fleet = Fleet(num_workers)
    router = _RouterPart(fleet, clock)
    for second in range(1, seconds + 1):
        clock.now = float(second)
        router.pass_second(second)
        if second % every == 0:
            gc.collect()
            on_sample(second, of_directory / 1e6, (resident_bytes() - began) / 1e6)


class _DirectoryPart:
    """A directory with the heartbeats of all workers and the polls of a router."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._directory = Directory(clock=clock)
        self._watcher = DirectoryWatcher()
        self._router = RouterInfo(router_id="r", grpc_address="", http_address="")

    async def pass_second(self, second: int) -> None:
        if second % _REPLACE_SECONDS == 0:
            left, _ = self._fleet.replace_oldest()
            await self._directory.remove(left.worker_id)
        for info in self._fleet.infos:
            info.load.version = second
            info.load.num_running = second % 30
            await self._directory.register(info.SerializeToString())
        self._watcher.apply(await self._directory.watch(self._watcher.version, 0.0, self._router))
        assert len(self._watcher.workers) == len(self._fleet.infos)


class _RouterPart:
    """A registry with the reports of all workers, and with requests."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._rng = random.Random(0)
        self._registry = WorkerRegistry(rng=self._rng, clock=clock)
        self._registry.capacity.subscribe(lambda: None)
        self._reports: dict[str, Reports] = {}
        self._running: deque[tuple[str, str]] = deque()
        self._numbers = itertools.count()
        self._registry.update(fleet.infos)
        for info in fleet.infos:
            self._begin(info)

    def pass_second(self, second: int) -> None:
        if second % _REPLACE_SECONDS == 0:
            left, new = self._fleet.replace_oldest()
            self._registry.update(self._fleet.infos)
            del self._reports[left.worker_id]
            self._begin(new)
        for number, info in enumerate(self._fleet.infos):
            if (number + second) % _REPORT_SECONDS == 0:
                report = self._reports[info.worker_id].next()
                self._registry.report(info.worker_id, info.epoch, report)
        for _ in range(_REQUESTS):
            self._send()

    def _begin(self, info: worker_pb2.WorkerInfo) -> None:
        reports = self._reports[info.worker_id] = Reports(
            int(info.worker_id.rpartition("-")[2]), _CHANGED_BLOCKS
        )
        self._registry.report(info.worker_id, info.epoch, reports.first())

    def _send(self) -> None:
        prompt = self._rng.choices(range(50_000), k=200)
        asked = request(prompt, str(next(self._numbers)))
        placement = self._registry.place(asked)
        assert placement is not None
        for worker_id in filter(None, placement):
            self._registry.dispatched(worker_id, asked, len(prompt))
            self._registry.record_prefill(worker_id, len(prompt), 0.05)
            self._running.append((worker_id, asked.request_id))
        while len(self._running) > _RUNNING:
            self._registry.ended(*self._running.popleft())
