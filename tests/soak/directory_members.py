"""Plays the members of a directory for `tests.soak.directory`: routers that follow it, and
workers.
"""

import asyncio
import itertools
import time
from collections import Counter
from typing import Final

from tandem.cluster.serve.directory import DirectoryClient
from tandem.cluster.serve.members import HEARTBEAT_SECONDS, RouterInfo
from tandem.cluster.serve.views.member_view import DirectoryWatcher
from tandem.proto import worker_pb2
from tandem.router.adapters import AdapterRegistry
from tandem.router.dispatch.blocked_prompts import BlockedPrompts
from tandem.router.scheduling.registry import WorkerRegistry

SERVICE: Final = "bench"
_ROLES: Final = (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)
_BLOCKS: Final = 20_000


class RouterMember:
    """Follows the directory as a router does."""

    def __init__(self, number: int) -> None:
        self.registry = WorkerRegistry()
        self.counts: Counter[str] = Counter()
        self.changed = asyncio.Condition()
        self._id = f"r{number}"

    async def run(self) -> None:
        client, watcher, blocked_prompts = (
            DirectoryClient(SERVICE),
            DirectoryWatcher(),
            BlockedPrompts(),
        )
        while True:
            me = RouterInfo(
                router_id=self._id,
                grpc_address="",
                http_address="",
                num_workers=len(self.registry.workers()),
            )
            if await client.watch(watcher, me, blocked_prompts, AdapterRegistry()):
                self.registry.update(watcher.workers)
                async with self.changed:
                    self.changed.notify_all()
            self.registry.capacity.free()
            self.counts["polls"] += 1


class Heartbeats:
    """Registers workers, each once a second, with another load each time."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    async def run(self) -> None:
        client = DirectoryClient(SERVICE)
        began = time.monotonic()
        for beat in itertools.count():
            for number in range(self._num_workers):
                due = began + (beat + number / self._num_workers) * HEARTBEAT_SECONDS
                await asyncio.sleep(due - time.monotonic())
                await client.register(_info(number, beat))


def _info(number: int, beat: int) -> worker_pb2.WorkerInfo:
    load = worker_pb2.WorkerLoad(
        version=beat,
        total_blocks=_BLOCKS,
        free_blocks=_BLOCKS // 2 + beat % 7,
        num_running=beat % 5,
        step_seconds=0.02,
    )
    return worker_pb2.WorkerInfo(
        worker_id=f"worker-{number:05}",
        epoch=1,
        role=_ROLES[number % 2],
        address=f"10.0.{number // 250}.{number % 250}:50061",
        block_size=16,
        max_sequences=64,
        kv_bytes_per_token=23_040,
        layout=b"0123456789abcdef",
        load=load,
    )
