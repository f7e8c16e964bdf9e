"""Lists the workers and routers of a service: workers register with every heartbeat, routers with
every long poll.

With that routers also share which prompts have crashed workers, so that each of them refuses these,
and which adapters were loaded and unloaded while they run.

`Directory` lists them; `open_directory` runs it as a named Ray actor, one for each service, and
`DirectoryClient` calls that. `DirectoryWatcher` merges what has changed, and keeps a router from
mistaking the emptiness of a directory that restarts for the loss of all workers.
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
from .members import EXPIRY_SECONDS, NOTHING, Changes, Directory, RouterInfo

log = logging.getLogger(__name__)

NAMESPACE: Final = "tandem"
HEARTBEAT_SECONDS: Final = 1.0
CALL_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05
"""Between two polls of a router. What many members change in this time, as when they all join, is
one answer.
"""


class DirectoryWatcher:
    """Merges the changes that a router receives into the list of workers that it may use."""

    def __init__(self, expiry: float = EXPIRY_SECONDS) -> None:
        self._expiry = expiry
        self._current: dict[str, worker_pb2.WorkerInfo] = {}
        self._carried: dict[str, worker_pb2.WorkerInfo] = {}
        self._routers: dict[str, RouterInfo] = {}
        self.version = NOTHING
        self.loads: list[
            worker_pb2.WorkerInfo
        ] = []  # of the last changes; with id, epoch and load alone
        self.may_know_more = True  # than the directory, of blocked_prompts and adapters

    @property
    def workers(self) -> list[worker_pb2.WorkerInfo]:
        """The workers after the last changes. The load of each is that of its last other change:
        see `loads`.
        """
        return [*self._carried.values(), *self._current.values()]

    @property
    def routers(self) -> tuple[RouterInfo, ...]:
        """The routers after the last changes, sorted by id."""
        return tuple(self._routers[router_id] for router_id in sorted(self._routers))

    def apply(self, changes: Changes) -> bool:
        """Takes over changes; returns whether the lists of workers or of routers differ from those
        before.

        Workers that only an earlier incarnation knew are kept until this one is old enough to have
        their heartbeats.
        """
        num_carried = len(self._carried)
        is_other = changes.version.incarnation != self.version.incarnation
        if is_other:
            self._carried |= self._current
            self.may_know_more = True
        if changes.is_whole:
            self._current, self._routers = {}, {}
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
        has_moved = changes.is_whole or changes.version.members != self.version.members
        self.version = changes.version
        return has_moved or len(self._carried) != num_carried


class DirectoryClient:
    """Calls the directory's actor with deadlines, and opens it again when it is lost.

    Every method raises Unavailable if the directory does not answer in time; Ray restarts it, or a
    later call starts a new one.
    """

    def __init__(self, service: str) -> None:
        self._service = service
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
        adapters: AdapterRegistry | None = None,
    ) -> bool:
        """Registers the router, waits for a change, at most half the expiry, and has `watcher` take
        it over. Returns whether the lists of workers or of routers have changed. The router and the
        directory learn the blocked_prompts and the adapters that the other has.
        """
        adapters = adapters or AdapterRegistry()
        timeout = EXPIRY_SECONDS / 2
        await asyncio.sleep(self._next_poll - time.monotonic())  # not at all if that is over
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
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """Reports each blocked prompt and each change of an adapter at once, without end; where that
        fails, the router's next `watch` with this watcher does.
        """
        adapters, news = adapters or AdapterRegistry(), asyncio.Event()
        blocked_prompts.on_news = adapters.on_news = news.set
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
