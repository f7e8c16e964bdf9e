"""Which workers there are: they register with every heartbeat, routers follow by a long poll.

`Directory` is plain asyncio; `open_directory` runs it as a named Ray actor, one for each service, and
`DirectoryClient` calls that. Workers travel as serialized `WorkerInfo`. A worker that is silent for `expiry` seconds
is dropped. A directory that restarts is filled again by the heartbeats; `Follower` keeps a router from mistaking its
emptiness for the loss of all workers.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import ray

from ..proto import worker_pb2

NAMESPACE: Final = "tandem"
HEARTBEAT_SECONDS: Final = 1.0
EXPIRY_SECONDS: Final = 10.0
CALL_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the directory knows at one moment. Versions compare within one incarnation only."""

    incarnation: str
    version: int
    age: float  # seconds since this incarnation started
    workers: tuple[bytes, ...]  # serialized WorkerInfo, sorted by worker id


@dataclass(slots=True)
class _Entry:
    info: bytes
    epoch: int
    seen: float  # by the directory's clock


class Directory:
    """Not thread-safe: all calls come from one event loop."""

    def __init__(self, expiry: float = EXPIRY_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry = expiry
        self._clock = clock
        self._started = self._awake = clock()
        self._incarnation = uuid.uuid4().hex
        self._version = 0
        self._entries: dict[str, _Entry] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"tandem directory of {len(self._entries)} workers"

    async def register(self, info: bytes) -> None:
        """Adds a worker or refreshes it; a heartbeat is the same call. What an earlier epoch says is ignored."""
        self._expire()
        parsed = worker_pb2.WorkerInfo.FromString(info)
        known = self._entries.get(parsed.worker_id)
        if known is not None and known.epoch > parsed.epoch:
            return
        if known is None or known.info != info:
            self._bump()
        self._entries[parsed.worker_id] = _Entry(info, parsed.epoch, self._clock())

    async def remove(self, worker_id: str) -> None:
        """Drops a worker; unknown ids are fine."""
        if self._entries.pop(worker_id, None) is not None:
            self._bump()

    async def snapshot(self) -> Snapshot:
        self._expire()
        return Snapshot(
            incarnation=self._incarnation,
            version=self._version,
            age=self._clock() - self._started,
            workers=tuple(entry.info for _, entry in sorted(self._entries.items())),
        )

    async def follow(self, incarnation: str, version: int, timeout: float) -> Snapshot:
        """Answers as soon as the directory differs from what the caller has, or after `timeout` seconds."""
        deadline = self._clock() + timeout
        while True:
            self._expire()
            now = self._clock()
            if (incarnation, version) != (self._incarnation, self._version) or now >= deadline:
                return await self.snapshot()
            changed = self._changed
            try:
                async with asyncio.timeout(min(deadline - now, self._expiry / 4)):
                    await changed.wait()
            except TimeoutError:
                continue

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _expire(self) -> None:
        now = self._clock()
        if now - self._awake > self._expiry / 2:
            # Nobody called for so long: this process was frozen, not every worker silent. They get a fresh term.
            for entry in self._entries.values():
                entry.seen = now
        self._awake = now
        silent = [worker_id for worker_id, entry in self._entries.items() if now - entry.seen >= self._expiry]
        for worker_id in silent:
            del self._entries[worker_id]
        if silent:
            self._bump()


class Follower:
    """A router's side of the long poll: snapshots in, the workers to believe in out."""

    def __init__(self, expiry: float = EXPIRY_SECONDS) -> None:
        self._expiry = expiry
        self._current: dict[str, worker_pb2.WorkerInfo] = {}
        self._carried: dict[str, worker_pb2.WorkerInfo] = {}
        self.incarnation = ""
        self.version = -1

    def apply(self, snapshot: Snapshot) -> list[worker_pb2.WorkerInfo]:
        """The workers after this snapshot.

        Those that only an earlier directory knew stay until the new one is old enough to have heard of them."""
        if snapshot.incarnation != self.incarnation:
            self._carried |= self._current
        parsed = (worker_pb2.WorkerInfo.FromString(info) for info in snapshot.workers)
        self._current = {info.worker_id: info for info in parsed}
        if snapshot.age >= self._expiry:
            self._carried = {}
        for worker_id in self._current:
            self._carried.pop(worker_id, None)
        self.incarnation, self.version = snapshot.incarnation, snapshot.version
        return [*self._carried.values(), *self._current.values()]


class DirectoryAway(Exception):
    """The directory cannot be reached now; Ray restarts it or a later call starts a new one."""


class DirectoryClient:
    """What workers and routers hold: the actor behind deadlines, opened anew when it is lost.

    Every method raises DirectoryAway when the directory does not answer in time."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._handle: Any = None

    async def register(self, info: worker_pb2.WorkerInfo) -> None:
        await self._call("register", info.SerializeToString(deterministic=True))

    async def remove(self, worker_id: str) -> None:
        await self._call("remove", worker_id)

    async def follow(self, follower: Follower) -> list[worker_pb2.WorkerInfo]:
        """Waits until there is news for the follower, at most half the expiry; returns the workers then."""
        timeout = EXPIRY_SECONDS / 2
        snapshot = await self._call("follow", follower.incarnation, follower.version, timeout, wait=timeout)
        return follower.apply(snapshot)

    async def _call(self, method: str, *args: object, wait: float = 0.0) -> Any:
        try:
            async with asyncio.timeout(CALL_SECONDS + wait):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(open_directory, self._service)
                return await getattr(self._handle, method).remote(*args)
        except (ray.exceptions.RayActorError, TimeoutError) as error:
            self._handle = None
            raise DirectoryAway(f"the directory does not answer ({type(error).__name__})") from error


def open_directory(service: str) -> Any:
    """The actor handle of the service's directory, which is started if it does not run yet.

    It outlives its creator; `close_directory` ends it."""
    actor = ray.remote(Directory)
    return actor.options(
        name=f"{service}-directory",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=1000,
        num_cpus=0,
    ).remote()


def close_directory(service: str) -> None:
    """Ends the service's directory; none running is fine."""
    try:
        handle = ray.get_actor(f"{service}-directory", namespace=NAMESPACE)
    except ValueError:
        return
    ray.kill(handle)
