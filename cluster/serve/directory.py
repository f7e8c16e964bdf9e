"""Runs the directory of a service as a Ray actor, and calls it.

Beside the members, the actor holds the store of responses, files and batches (storage/).
Workers register with every heartbeat, routers with every long poll. Routers also share the prompts
that have crashed workers, so that each router refuses them, and the adapters that were loaded and
unloaded while they run.

`open_directory` runs a `Directory` as a named Ray actor, one for each service; `DirectoryClient`
calls it. `DirectoryWatcher` merges changes, and does not mistake the empty directory after a
restart for the loss of all workers.
"""

import asyncio
import logging
import time
from typing import Any, Final

import ray

from ...proto import worker_pb2
from ...proto.errors import Unavailable
from ...router.adapters import AdapterRegistry
from ...router.dispatch.blocked_prompts import BlockedPrompts
from ...router.storage.config import StorageConfig
from .members import EXPIRY_SECONDS, NOTHING, Changes, Directory, RouterInfo

log = logging.getLogger(__name__)

NAMESPACE: Final = "tandem"
HEARTBEAT_SECONDS: Final = 1.0
CALL_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05
"""The time between two polls of a router.

One answer contains all changes of this time, for instance if all members join at once.
"""


class DirectoryWatcher:
    """Merges the changes that a router receives into the list of workers that it may use."""

    def __init__(self, expiry: float = EXPIRY_SECONDS) -> None:
        self._expiry = expiry
        self._current: dict[str, worker_pb2.WorkerInfo] = {}
        self._carried: dict[str, worker_pb2.WorkerInfo] = {}
        self._routers: dict[str, RouterInfo] = {}
        self.version = NOTHING
        # Loads that alone have changed: each with id, epoch and load.
        self.loads: list[worker_pb2.WorkerInfo] = []
        # True if the router may know blocked prompts or adapters that the directory does not know.
        self.may_know_more = True

    @property
    def workers(self) -> list[worker_pb2.WorkerInfo]:
        """Returns the workers after the last changes; a load that alone changed is in `loads`."""
        return [*self._carried.values(), *self._current.values()]

    @property
    def routers(self) -> tuple[RouterInfo, ...]:
        """Returns the routers after the last changes, sorted by id."""
        return tuple(self._routers[router_id] for router_id in sorted(self._routers))

    def apply(self, changes: Changes) -> bool:
        """Merges changes; returns True if the list of workers or of routers has changed.

        Keeps workers that only an earlier incarnation knew until this one is old enough to have
        received their heartbeats.
        """
        num_carried = len(self._carried)
        is_other = changes.version.incarnation != self.version.incarnation
        if is_other:
            self._carried |= self._current
            self.may_know_more = True
        if changes.is_whole:
            self._current = {}
            self._routers = {}
        for member_id in changes.removed:
            self._current.pop(member_id, None)
            self._routers.pop(member_id, None)
        parsed = map(worker_pb2.WorkerInfo.FromString, changes.workers)
        self._current |= {info.worker_id: info for info in parsed}
        self._routers |= {info.router_id: info for info in changes.routers}
        self.loads = list(map(worker_pb2.WorkerInfo.FromString, changes.loads))
        if changes.age >= self._expiry:
            self._carried = {}
        for worker_id in self._current.keys() & self._carried.keys():
            del self._carried[worker_id]
        has_changed = changes.is_whole or changes.version.members != self.version.members
        self.version = changes.version
        return has_changed or len(self._carried) != num_carried


class DirectoryClient:
    """Calls the directory's actor with deadlines, and opens it again if it is lost.

    Every method raises Unavailable if the directory does not answer in time; Ray restarts it, or a
    later call starts a new one.
    """

    def __init__(self, service: str, storage: StorageConfig = StorageConfig()) -> None:
        """`storage` configures the store beside a directory that this client starts."""
        self._service = service
        self._storage = storage
        self._handle: Any = None
        self._next_poll = 0.0  # by time.monotonic()

    async def register(self, info: worker_pb2.WorkerInfo) -> None:
        await self._call("register", info.SerializeToString(deterministic=True))

    async def remove(self, member_id: str) -> None:
        await self._call("remove", member_id)

    async def watch(
        self,
        watcher: DirectoryWatcher,
        router: RouterInfo,
        blocked_prompts: BlockedPrompts,
        adapters: AdapterRegistry,
    ) -> bool:
        """Registers the router, waits for changes, and applies them to `watcher`.

        Waits at most half the expiry.

        Exchanges blocked prompts and adapters with the directory. Returns True if the list of
        workers or of routers has changed.
        """
        timeout = EXPIRY_SECONDS / 2
        await asyncio.sleep(self._next_poll - time.monotonic())
        shared = (
            (blocked_prompts.remaining(), adapters.shared()) if watcher.may_know_more else ({}, {})
        )
        changes = await self._call("watch", watcher.version, timeout, router, *shared, wait=timeout)
        self._next_poll = time.monotonic() + _PAUSE_SECONDS
        watcher.may_know_more = False
        blocked_prompts.learn(changes.blocked)
        adapters.learn(changes.adapters)
        return watcher.apply(changes)

    async def keep_sharing(
        self,
        watcher: DirectoryWatcher,
        blocked_prompts: BlockedPrompts,
        adapters: AdapterRegistry,
    ) -> None:
        """Reports each new blocked prompt and each change of an adapter at once, without end.

        If a report fails, the router's next `watch` with this watcher repeats it.
        """
        news = asyncio.Event()
        blocked_prompts.on_news = news.set
        adapters.on_news = news.set
        while True:
            await news.wait()
            news.clear()
            try:
                await self._call("share", blocked_prompts.remaining(), adapters.shared())
            except Unavailable as error:
                watcher.may_know_more = True
                log.warning("a blocked prompt or an adapter is not shared yet: %s", error)

    async def changes(self) -> Changes:
        """Returns all current members."""
        changes: Changes = await self._call("changes")
        return changes

    async def call_store(self, method: str, *args: Any, wait: float = 0.0) -> Any:
        """Returns the result of a method of Storage, which may wait for `wait` seconds."""
        return await self._call("call_store", method, *args, wait=wait)

    async def _call(self, method: str, *args: object, wait: float = 0.0) -> Any:
        try:
            async with asyncio.timeout(CALL_SECONDS + wait):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(
                        open_directory, self._service, self._storage
                    )
                return await getattr(self._handle, method).remote(*args)
        except (ray.exceptions.RayActorError, TimeoutError) as error:
            self._handle = None
            raise Unavailable(f"the directory does not answer ({type(error).__name__})") from error


def open_directory(service: str, storage: StorageConfig = StorageConfig()) -> Any:
    """Returns the actor handle of the service's directory; starts the directory if it does not run.

    `storage` configures the store that it holds beside the members.

    The actor outlives its creator; `close_directory` ends it.
    """
    actor = ray.remote(Directory)
    return actor.options(
        name=f"{service}-directory",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=1000,
        num_cpus=0,
    ).remote(storage=storage)


def close_directory(service: str) -> None:
    """Ends the service's directory, if it runs."""
    try:
        handle = ray.get_actor(f"{service}-directory", namespace=NAMESPACE)
    except ValueError:
        return
    ray.kill(handle)
