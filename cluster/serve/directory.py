"""Runs the directory of a service as a Ray actor, and calls it.

Beside the members, the actor holds the store of responses, files and batches (storage/).
Workers register with every heartbeat, routers with every long poll. Routers also share the prompts
that have crashed workers, so that each router refuses them, and the adapters that were loaded and
unloaded while they run.

`open_directory` runs a `Directory` as a named Ray actor, one for each service; `DirectoryClient`
calls it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import ray

from ...proto import worker_pb2
from ...proto.errors import Unavailable
from ...router.adapters import AdapterRegistry
from ...router.dispatch.blocked_prompts import BlockedPrompts
from ...router.storage.config import StorageConfig
from ...workers.host.threads import in_thread
from ..scaling.config import RoleScaling
from ..scaling.roles import REPORTS_PER_WINDOW
from .members import EXPIRY_SECONDS, Changes, Directory, RouterInfo
from .views.member_view import DirectoryWatcher

log = logging.getLogger(__name__)

NAMESPACE: Final = "tandem"
CALL_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05
"""The time between two polls of a router.

One answer contains all changes of this time, for instance if all members join at once.
"""


class DirectoryClient:
    """Calls the directory's actor with deadlines, and opens it again if it is lost.

    Every method raises Unavailable if the directory does not answer in time or Ray fails; Ray
    restarts the directory, or a later call starts a new one.
    """

    def __init__(self, service: str, storage: StorageConfig = StorageConfig()) -> None:
        """`storage` configures the store beside a directory that this client starts."""
        self._service = service
        self._storage = storage
        self._handle: Any = None
        self._opening: asyncio.Future[Any] | None = None  # until it ends
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
        watcher.may_know_more = False  # before the call: a report may fail while it waits
        try:
            changes = await self._call(
                "watch", watcher.version, timeout, router, *shared, wait=timeout
            )
        except Unavailable:
            watcher.may_know_more = True
            raise
        self._next_poll = time.monotonic() + _PAUSE_SECONDS
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

    async def follow_role(
        self,
        scaling: RoleScaling,
        member_id: str,
        application: str,
        describe: Callable[[], tuple[str, Mapping[str, float]] | None],
        take_role: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        """Reports a member's load, and has a worker take the roles that the directory chooses.

        Runs without end. `describe` returns the present role, empty for a router, and the figures;
        or None if there is nothing to report. While the directory is away, roles stay.
        """
        while True:
            if (described := describe()) is not None:
                role, figures = described
                try:
                    chosen = await self._call(
                        "report", member_id, application, role, figures, scaling
                    )
                    if take_role is not None and chosen != role:
                        await take_role(chosen)
                except Unavailable as error:
                    log.warning("the role stays as it is: %s", error)
            await asyncio.sleep(scaling.config.window_seconds / REPORTS_PER_WINDOW)

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
                handle = self._handle if self._handle is not None else await self._open()
                return await getattr(handle, method).remote(*args)
        except (ray.exceptions.RayError, ValueError, TimeoutError) as error:
            # Ray raises ValueError for an actor that ends while it is opened.
            self._handle = None
            raise Unavailable(f"the directory does not answer ({type(error).__name__})") from error

    async def _open(self) -> Any:
        """Returns the handle of the directory.

        All calls wait for one thread: while no GCS server answers, Ray does not end the opening.
        """
        if self._opening is None:
            opening = partial(open_directory, self._service, self._storage)
            self._opening = in_thread(opening, "tandem-directory")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: "asyncio.Future[Any]") -> None:
        """Keeps the handle, even if no call waits for it any more."""
        self._opening = None
        if opening.exception() is None:
            self._handle = opening.result()


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
