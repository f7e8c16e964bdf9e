"""Lists the members of a service: the directory of its workers and routers.

`Directory` is plain asyncio and knows nothing of Ray. Workers are sent as serialized `WorkerInfo`.
A member that is silent for `expiry` seconds is dropped. Heartbeats fill a directory that has
restarted.

Routers poll for the changes since their last poll. A change of the membership, or of any fact that
routers use, ends their polls at once. The workers' loads change with every heartbeat and end no
poll; routers receive the loads from their sessions with the workers.

Another release of Tandem may replace a running service. Ray then passes the dataclasses of this
module between processes of both releases and finds them by the module's name, so they stay here.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ...proto import worker_pb2
from ...proto.identity import PeerIdentity
from ...router.adapters import AdapterRegistry, Shared
from ...router.dispatch.blocked_prompts import BlockedPrompts
from ...router.storage.config import StorageConfig
from ..scaling.config import RoleScaling
from ..scaling.roles import RoleScaler
from .storage.host import StorageHost

EXPIRY_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 1.0

_MAX_REMOVED: Final = 4_096
"""The maximum number of removed members to remember. Routers that missed more get all members."""

_Order = tuple[int, int, bool]
"""The epoch, the version of the load, and the draining flag of a report. No part ever decreases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterInfo:
    """Describes one router, as it registers itself."""

    router_id: str
    grpc_address: str  # HOST:PORT
    http_address: str  # HOST:PORT
    num_workers: int = 0  # known workers
    application: str = ""  # the router's deployment of the service
    ops_address: str = ""  # HOST:PORT of /metrics

    @property
    def addresses(self) -> tuple[str, str]:
        """Returns both addresses of the API servers, gRPC first."""
        return self.grpc_address, self.http_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Identifies a state of a directory. Versions of different incarnations are not comparable."""

    incarnation: str
    members: int  # counts also changes of blocked prompts and adapters


NOTHING: Final = Version(incarnation="", members=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Holds the changes of a directory since a version; all its content if `is_whole`."""

    version: Version  # of the directory after these changes
    is_whole: bool
    age: float  # seconds since this incarnation started
    workers: tuple[bytes, ...]  # serialized WorkerInfo
    routers: tuple[RouterInfo, ...] = ()
    removed: tuple[str, ...] = ()  # ids of workers and routers
    # See BlockedPrompts.remaining and AdapterRegistry.shared; both complete, or both empty.
    blocked: Mapping[bytes, float] = field(default_factory=dict)
    adapters: Shared = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """Holds the last registration of one member."""

    info: bytes | RouterInfo  # of a worker, without its load
    load: bytes  # serialized WorkerInfo of a worker, with its last load alone
    order: _Order
    seen: float  # by the directory's clock
    changed: int  # the version of the members that brought `info`


class Directory:
    """Registers workers and routers and lists them. Not thread-safe: use it on one event loop."""

    def __init__(
        self,
        expiry: float = EXPIRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        storage: StorageConfig = StorageConfig(),
    ) -> None:
        self._store = StorageHost(storage)
        self._expiry = expiry
        self._clock = clock
        self._started = clock()
        self._awake = self._started
        self._version = Version(incarnation=uuid.uuid4().hex, members=0)
        # By worker id or router id; the member that has been silent for longest is first.
        self._entries: dict[str, _Entry] = {}
        # By id of a removed member, the members version of its removal; the oldest is first.
        self._removed: dict[str, int] = {}
        # The members version of the last removal that is not in `_removed` any more.
        self._forgotten = -1
        self._blocked_prompts = BlockedPrompts(clock)  # of all routers
        self._adapters = AdapterRegistry()  # of all routers
        # The members version of the last change of blocked prompts or adapters.
        self._shared_changed = 0
        self._changed = asyncio.Event()
        self._role_scalers: dict[str, RoleScaler] = {}  # by application

    def __repr__(self) -> str:
        return f"tandem directory of {len(self._entries)} workers and routers"

    async def call_store(self, method: str, *args: object) -> object:
        """Returns the result of a method of Storage, which has nothing to do with the members."""
        return await self._store.call(method, *args)

    async def register(self, info: bytes) -> None:
        """Adds or refreshes a worker; a heartbeat is the same call.

        Ignores reports that are older than the last one: of an earlier epoch, of an older load, or
        from before the worker was draining.
        """
        parsed = worker_pb2.WorkerInfo.FromString(info)
        order = (parsed.epoch, parsed.load.version, parsed.draining)
        load = worker_pb2.WorkerInfo(load=parsed.load).SerializeToString(deterministic=True)
        parsed.ClearField("load")
        self._refresh(parsed.worker_id, parsed.SerializeToString(deterministic=True), load, order)

    async def remove(self, member_id: str) -> None:
        """Drops a worker or a router; unknown ids are ignored."""
        for scaler in self._role_scalers.values():
            scaler.forget(member_id)
        if self._entries.pop(member_id, None) is not None:
            self._note_removed(member_id)

    async def changes(self, known: Version = NOTHING) -> Changes:
        """Returns the changes since `known`; all members if `known` is of another incarnation."""
        self._expire()
        is_whole = self._lacks(known)
        if is_whole:
            news = [entry for _, entry in sorted(self._entries.items())]
        else:
            news = [each for each in self._entries.values() if each.changed > known.members]
        shares = is_whole or known.members < self._shared_changed
        return Changes(
            version=self._version,
            is_whole=is_whole,
            age=self._clock() - self._started,
            # Two concatenated messages parse as one with the fields of both.
            workers=tuple(each.info + each.load for each in news if isinstance(each.info, bytes)),
            routers=tuple(each.info for each in news if isinstance(each.info, RouterInfo)),
            removed=() if is_whole else self._removed_after(known.members),
            blocked=self._blocked_prompts.remaining() if shares else {},
            adapters=self._adapters.shared() if shares else {},
        )

    async def share(self, blocked: Mapping[bytes, float], adapters: Shared) -> None:
        """Merges blocked prompts and adapters that a router knows.

        `blocked` comes from BlockedPrompts.remaining, `adapters` from AdapterRegistry.shared.
        """
        news = self._blocked_prompts.learn(blocked), self._adapters.learn(adapters)
        if any(news):
            self._shared_changed = self._bump()

    async def watch(
        self,
        known: Version,
        timeout: float,
        router: RouterInfo | None = None,
        blocked: Mapping[bytes, float] | None = None,
        adapters: Shared | None = None,
    ) -> Changes:
        """Returns `changes` as soon as there are some, or after `timeout` seconds.

        The call registers or refreshes its caller, `router`, and merges `blocked` and `adapters` as
        `share` does.
        """
        if router is not None:
            self._refresh(router.router_id, router, b"", (0, 0, False))
        await self.share(blocked or {}, adapters or {})
        until = self._clock() + timeout
        while True:
            self._expire()
            has_changed = known.members != self._version.members
            if self._lacks(known) or has_changed or self._clock() >= until:
                return await self.changes(known)
            try:
                async with asyncio.timeout(min(until - self._clock(), self._expiry / 4)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def report(
        self,
        member_id: str,
        application: str,
        role: str,
        figures: Mapping[str, float],
        scaling: RoleScaling,
    ) -> str:
        """Records the load of a member; returns the role that the worker should have.

        See `RoleScaler.report`. The latest `scaling` of an application counts.
        """
        now = self._clock()
        scaler = self._role_scalers.get(application)
        if scaler is None or scaler.scaling != scaling:
            self._role_scalers = {
                name: each for name, each in self._role_scalers.items() if not each.is_silent(now)
            }
            scaler = self._role_scalers[application] = RoleScaler(scaling)
        return scaler.report(now, member_id, role, figures)

    def _lacks(self, known: Version) -> bool:
        """Returns True if the changes since `known` are not known any more."""
        return known.incarnation != self._version.incarnation or known.members < self._forgotten

    def _removed_after(self, version: int) -> tuple[str, ...]:
        return tuple(member_id for member_id, removed in self._removed.items() if removed > version)

    def _refresh(
        self, member_id: str, info: bytes | RouterInfo, load: bytes, order: _Order
    ) -> None:
        self._expire()
        known = self._entries.get(member_id)
        if known is not None and known.order > order:
            return
        self._entries.pop(member_id, None)
        entry = self._entries[member_id] = _Entry(
            info=info,
            load=load,
            order=order,
            seen=self._clock(),
            changed=0 if known is None else known.changed,
        )
        if known is None or known.info != info:
            self._removed.pop(member_id, None)
            entry.changed = self._bump()

    def _bump(self) -> int:
        """Counts a change of the members; returns their new version."""
        self._version = replace(self._version, members=self._version.members + 1)
        self._changed.set()
        self._changed = asyncio.Event()
        return self._version.members

    def _note_removed(self, member_id: str) -> None:
        self._removed[member_id] = self._bump()
        if len(self._removed) > _MAX_REMOVED:
            self._forgotten = self._removed.pop(next(iter(self._removed)))

    def _expire(self) -> None:
        now = self._clock()
        if now - self._awake > self._expiry / 2:
            # Without a call for this time, the process was frozen; the members were not silent.
            for entry in self._entries.values():
                entry.seen = now
        self._awake = now
        while self._entries:
            member_id, entry = next(iter(self._entries.items()))
            if now - entry.seen < self._expiry:
                break
            del self._entries[member_id]
            self._note_removed(member_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuity:
    """Holds the secrets and facts of a deployment that the next one takes over or must share."""

    identity: PeerIdentity  # of the service's processes
    resume_key: bytes  # of the tokens with which clients continue at another router
    layout: bytes  # of the KV cache, as in WorkerInfo; also a digest of the model
    ends_with_launcher: bool  # True on a local Ray
    # The secret of the salts of the tenants' prefixes; None: the resume key.
    cache_secret: bytes | None = None

    def __repr__(self) -> str:
        return "Continuity(...)"  # no secret in logs
