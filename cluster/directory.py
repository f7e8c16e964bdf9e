"""Lists the workers and routers of a service: workers register with every heartbeat, routers with every long poll.

With that routers also share which prompts have crashed workers, so that each of them refuses these, and which adapters
were loaded and unloaded while they run.

`Directory` is plain asyncio; `open_directory` runs it as a named Ray actor, one for each service, and
`DirectoryClient` calls that. Workers are sent as serialized `WorkerInfo`. A member that is silent for `expiry` seconds
is dropped. A directory that restarts is filled again by the heartbeats; `DirectoryWatcher` keeps a router from
mistaking its emptiness for the loss of all workers.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from ..proto import worker_pb2
from ..proto.errors import Unavailable
from ..router.adapters import AdapterRegistry, Shared
from ..router.dispatch.convictions import Convictions

log = logging.getLogger(__name__)

NAMESPACE: Final = "tandem"
HEARTBEAT_SECONDS: Final = 1.0
EXPIRY_SECONDS: Final = 10.0
CALL_SECONDS: Final = 5.0

_Order = tuple[int, int, bool]
"""Of a report: epoch, version of the load, draining. None of them ever decreases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterInfo:
    """Describes one router, as it registers itself."""

    router_id: str
    grpc_address: str  # HOST:PORT
    http_address: str  # HOST:PORT
    num_workers: int = 0  # that it knows
    application: str = ""  # the deployment of the service that it belongs to
    ops_address: str = ""  # HOST:PORT of /metrics

    @property
    def addresses(self) -> tuple[str, str]:
        """Both, gRPC first."""
        return self.grpc_address, self.http_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Holds the state of the directory at one moment. Versions compare within one incarnation only."""

    incarnation: str
    version: int
    age: float  # seconds since this incarnation started
    workers: tuple[bytes, ...]  # serialized WorkerInfo, sorted by worker id
    routers: tuple[RouterInfo, ...] = ()  # sorted by router id
    convicted: Mapping[bytes, float] = field(default_factory=dict)  # see Convictions.remaining
    adapters: Shared = field(default_factory=dict)  # see AdapterRegistry.shared


class Directory:
    """Registers workers and routers, and serves snapshots of them. Not thread-safe: one event loop makes all calls."""

    def __init__(self, expiry: float = EXPIRY_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry = expiry
        self._clock = clock
        self._started = self._awake = clock()
        self._incarnation = uuid.uuid4().hex
        self._version = 0
        # By worker id or router id: what it has registered, its order, and when, by the directory's clock.
        self._entries: dict[str, tuple[bytes | RouterInfo, _Order, float]] = {}
        self._convictions = Convictions(clock)  # of all routers
        self._adapters = AdapterRegistry()  # loaded and unloaded at any of them
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"tandem directory of {len(self._entries)} workers and routers"

    async def register(self, info: bytes) -> None:
        """Adds a worker or refreshes it; a heartbeat is the same call. One that was sent before the last is ignored:
        of an earlier epoch, of an older load, or from before the worker was draining."""
        parsed = worker_pb2.WorkerInfo.FromString(info)
        self._refresh(parsed.worker_id, info, (parsed.epoch, parsed.load.version, parsed.draining))

    async def remove(self, member_id: str) -> None:
        """Drops a worker or a router; unknown ids are ignored."""
        if self._entries.pop(member_id, None) is not None:
            self._bump()

    async def snapshot(self) -> Snapshot:
        """Returns the current members."""
        self._expire()
        members = [info for _, (info, _, _) in sorted(self._entries.items())]
        return Snapshot(
            incarnation=self._incarnation,
            version=self._version,
            age=self._clock() - self._started,
            workers=tuple(info for info in members if isinstance(info, bytes)),
            routers=tuple(info for info in members if isinstance(info, RouterInfo)),
            convicted=self._convictions.remaining(),
            adapters=self._adapters.shared(),
        )

    async def watch(
        self,
        incarnation: str,
        version: int,
        timeout: float,
        router: RouterInfo | None = None,
        convicted: Mapping[bytes, float] | None = None,
        adapters: Shared | None = None,
    ) -> Snapshot:
        """Returns a snapshot as soon as the directory differs from the caller's version, or after `timeout` seconds.

        `router` is the caller: it is registered, or refreshed, by watching. `convicted`: what it knows of convictions,
        see Convictions.remaining; `adapters`: of adapters, see AdapterRegistry.shared."""
        if router is not None:
            self._refresh(router.router_id, router)
        news = self._convictions.learn(convicted or {}), self._adapters.learn(adapters or {})
        if any(news):
            self._bump()
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

    def _refresh(self, member_id: str, info: bytes | RouterInfo, order: _Order = (0, 0, False)) -> None:
        self._expire()
        known, known_order, _ = self._entries.get(member_id, (None, order, 0.0))
        if known_order > order:
            return
        if known != info:
            self._bump()
        self._entries[member_id] = info, order, self._clock()

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _expire(self) -> None:
        now = self._clock()
        if now - self._awake > self._expiry / 2:
            # No call for so long: this process was frozen, not every member silent. All of them get a fresh term.
            self._entries = {member_id: (*entry[:2], now) for member_id, entry in self._entries.items()}
        self._awake = now
        silent = [member_id for member_id, (*_, seen) in self._entries.items() if now - seen >= self._expiry]
        for member_id in silent:
            del self._entries[member_id]
        if silent:
            self._bump()


class DirectoryWatcher:
    """Merges the snapshots that a router receives into the list of workers that it may use."""

    def __init__(self, expiry: float = EXPIRY_SECONDS) -> None:
        self._expiry = expiry
        self._current: dict[str, worker_pb2.WorkerInfo] = {}
        self._carried: dict[str, worker_pb2.WorkerInfo] = {}
        self.incarnation = ""
        self.version = -1
        self.routers: tuple[RouterInfo, ...] = ()

    def apply(self, snapshot: Snapshot) -> list[worker_pb2.WorkerInfo]:
        """Returns the workers after this snapshot.

        Workers that only an earlier incarnation knew are kept until this one is old enough to have their heartbeats."""
        if snapshot.incarnation != self.incarnation:
            self._carried |= self._current
        parsed = (worker_pb2.WorkerInfo.FromString(info) for info in snapshot.workers)
        self._current = {info.worker_id: info for info in parsed}
        if snapshot.age >= self._expiry:
            self._carried = {}
        for worker_id in self._current:
            self._carried.pop(worker_id, None)
        self.incarnation, self.version, self.routers = snapshot.incarnation, snapshot.version, snapshot.routers
        return [*self._carried.values(), *self._current.values()]


class DirectoryClient:
    """Calls the directory's actor with deadlines, and opens it again when it is lost.

    Every method raises Unavailable if the directory does not answer in time; Ray restarts it, or a later call starts
    a new one."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._handle: Any = None

    async def register(self, info: worker_pb2.WorkerInfo) -> None:
        await self._call("register", info.SerializeToString(deterministic=True))

    async def remove(self, member_id: str) -> None:
        await self._call("remove", member_id)

    async def watch(
        self,
        watcher: DirectoryWatcher,
        router: RouterInfo,
        convictions: Convictions,
        adapters: AdapterRegistry | None = None,
    ) -> list[worker_pb2.WorkerInfo]:
        """Registers the router, waits for a change, at most half the expiry, and returns the workers. The router and
        the directory learn the convictions and the adapters that the other has."""
        adapters = adapters or AdapterRegistry()
        timeout = EXPIRY_SECONDS / 2
        known = watcher.incarnation, watcher.version
        shared = convictions.remaining(), adapters.shared()
        snapshot = await self._call("watch", *known, timeout, router, *shared, wait=timeout)
        convictions.learn(snapshot.convicted)
        adapters.learn(snapshot.adapters)
        return watcher.apply(snapshot)

    async def keep_sharing(self, convictions: Convictions, adapters: AdapterRegistry | None = None) -> None:
        """Reports each conviction and each change of an adapter at once, without end; where that fails, the router's
        next `watch` does."""
        adapters, news = adapters or AdapterRegistry(), asyncio.Event()
        convictions.on_news = adapters.on_news = news.set
        while True:
            await news.wait()
            news.clear()
            try:
                await self._call("watch", "", -1, 0.0, None, convictions.remaining(), adapters.shared())
            except Unavailable as error:
                log.warning("a conviction or an adapter is not shared yet: %s", error)

    async def snapshot(self) -> Snapshot:
        """Returns the current members."""
        snapshot: Snapshot = await self._call("snapshot")
        return snapshot

    async def _call(self, method: str, *args: object, wait: float = 0.0) -> Any:
        try:
            async with asyncio.timeout(CALL_SECONDS + wait):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(open_directory, self._service)
                return await getattr(self._handle, method).remote(*args)
        except (ray.exceptions.RayActorError, TimeoutError) as error:
            self._handle = None
            raise Unavailable(f"the directory does not answer ({type(error).__name__})") from error


def open_directory(service: str) -> Any:
    """Returns the actor handle of the service's directory, which is started if it does not run yet.

    The actor outlives its creator; `close_directory` ends it."""
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
    """Ends the service's directory, if it runs."""
    try:
        handle = ray.get_actor(f"{service}-directory", namespace=NAMESPACE)
    except ValueError:
        return
    ray.kill(handle)
