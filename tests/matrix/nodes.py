"""Runs workers with a real model as processes of their own, each behind proxies and under the
control of the test.
"""

import asyncio
import base64
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from tandem.proto import worker_pb2
from tandem.tests.fleet import worker_stub
from tandem.tests.matrix.control import Control
from tandem.tests.matrix.proxy import Proxy
from tandem.tests.peers import peer_channel
from tandem.tests.waits import WAIT

START_SECONDS: Final = 120.0
BLOCK_SIZE: Final = 16
CONFIG: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "kv_cache_bytes": 2**22,
    "block_size": BLOCK_SIZE,
    "chunk_tokens": 16,
    "growth_tokens": 1,
}


class Launcher:
    """Forks workers and ranks. Make one with `launched`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())

    async def start(self, **spec: Any) -> dict[str, Any]:
        """Forks a child and returns its answer: `pid`, `address`, and a worker's `info`."""
        ticket = len(self._answers)
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(spec | {"ticket": ticket}) + "\n").encode())
        async with asyncio.timeout(START_SECONDS):
            found: dict[str, Any] = await answer
        return found

    async def ready(self) -> None:
        """Waits until everything is imported."""
        async with asyncio.timeout(START_SECONDS):
            await self._ready

    async def close(self) -> None:
        """Ends the launcher, and with it all that it has started."""
        self._process.kill()
        try:
            # This waits for all that have its output, also for a child that has been forked just
            # now and has not asked yet to end with the launcher.
            async with asyncio.timeout(WAIT):
                await self._process.wait()
        finally:
            self._reader.cancel()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set_result(None)
            else:
                self._answers[answer["ticket"]].set_result(answer)


@asynccontextmanager
async def launched() -> AsyncIterator[Launcher]:
    """Starts a launcher, and ends all its children with it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tandem.tests.matrix.launcher"),
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    launcher = Launcher(process)
    try:
        await launcher.ready()
        yield launcher
    finally:
        await launcher.close()


@dataclass(eq=False)
class Node:
    """A worker of one or more ranks that a test kills, stops, drains and starts again."""

    launcher: Launcher
    model: Path
    control: Control
    control_path: Path
    worker_id: str
    role: str
    tp: int = 1
    hooks: Sequence[dict[str, Any]] = ()
    config: dict[str, Any] = field(default_factory=dict)
    router_link: Proxy = field(default_factory=Proxy)  # between router and worker
    kv_link: Proxy = field(default_factory=Proxy)  # between decode workers and this one's KV cache
    info: worker_pb2.WorkerInfo = field(default_factory=worker_pb2.WorkerInfo)
    address: str = ""  # without a proxy
    pids: list[int] = field(default_factory=list)  # of rank 0, 1, ...
    is_spent: bool = False  # it is dead, or drains: to be started again

    async def start(self) -> None:
        """Starts the worker's processes."""
        for link in (self.router_link, self.kv_link):
            if not link.address:
                await link.start()
        self.control.clear()
        config = CONFIG | self.config | {"model": str(self.model)}
        others = await asyncio.gather(
            *(self.launcher.start(kind="rank", config=config) for _ in range(1, self.tp)),
        )
        worker = await self.launcher.start(
            kind="worker",
            config=config,
            worker_id=self.worker_id,
            role=self.role,
            ranks=[rank["address"] for rank in others],
            control=str(self.control_path),
            kv_address=self.kv_link.address,
            router_address=self.router_link.address,
            hooks=list(self.hooks),
        )
        self.pids = [worker["pid"], *(rank["pid"] for rank in others)]
        self.address = self.router_link.target = self.kv_link.target = worker["address"]
        self.info = worker_pb2.WorkerInfo.FromString(base64.b64decode(worker["info"]))
        self.info.address = self.router_link.address
        self.is_spent = False

    async def kill(self, rank: int = 0) -> None:
        """Kills the process of one rank; the others then end by themselves or with `restart`."""
        self.is_spent = True
        self.signal(signal.SIGKILL, rank)

    def signal(self, number: signal.Signals, rank: int = 0) -> None:
        """Sends a signal to the process of a rank."""
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    async def drain(self) -> None:
        """Drains the worker, until it has no request."""
        self.is_spent = True
        async with peer_channel(self.address) as channel:
            drained = await worker_stub(channel).Drain(
                worker_pb2.DrainRequest(timeout_seconds=WAIT), timeout=2 * WAIT
            )
        assert drained.num_requests == 0, f"{self.worker_id} is not drained"

    async def restart(self) -> None:
        """Ends what is left of the processes and starts new ones, of a new epoch."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """Kills all processes and waits until they are gone."""
        for rank in range(len(self.pids)):
            self.signal(signal.SIGKILL, rank)
        async with asyncio.timeout(WAIT):
            while any(map(psutil.pid_exists, self.pids)):
                await asyncio.sleep(0.005)
        self.pids = []

    async def close(self) -> None:
        """Ends the processes and the proxies."""
        await self.stop()
        await asyncio.gather(self.router_link.close(), self.kv_link.close())
        self.control.close()

    async def status(self) -> worker_pb2.GetStatusResponse:
        """Returns the worker's status, which it cannot report while a step is held."""
        async with peer_channel(self.address) as channel:
            status: worker_pb2.GetStatusResponse = await worker_stub(channel).GetStatus(
                worker_pb2.GetStatusRequest(), timeout=WAIT
            )
        return status

    def release(self) -> None:
        """Lets steps start again and mends the network."""
        self.control.release()
        self.control.refusals = 0
        self.control.starves = False
        self.router_link.heal()
        self.kv_link.heal()


async def make_node(
    launcher: Launcher, model: Path, folder: Path, worker_id: str, **fields: Any
) -> Node:
    """Makes a node and starts it."""
    path = folder / f"control-{worker_id}"
    role = "prefill" if worker_id.startswith("p") else "decode"
    node = Node(launcher, model, Control(path), path, worker_id, role, **fields)
    await node.start()
    return node
