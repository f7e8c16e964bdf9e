"""Reports to routers the prefixes that a worker has in any tier."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from .session import RouterSession

Tier = Literal["memory", "disk"]


class CacheReports:
    """Tracks the hashes in each tier and reports changes to sessions.

    Reports a hash when it enters its first tier and when it leaves its last tier. Lives in one
    event loop.
    """

    def __init__(
        self,
        on_stored: Callable[[Sequence[bytes]], object] = lambda stored: None,
        on_evicted: Callable[[Sequence[bytes]], object] = lambda evicted: None,
    ) -> None:
        """Calls `on_stored` and `on_evicted` with hashes that enter and leave memory, in order."""
        self.sessions: set[RouterSession] = set()  # `add` adds one
        self._on_stored = on_stored
        self._on_evicted = on_evicted
        self._hashes: dict[Tier, set[bytes]] = {"memory": set(), "disk": set()}

    def add(self, session: RouterSession) -> None:
        """Reports all hashes to a session, and then every change until it leaves `sessions`."""
        self.sessions.add(session)
        hashes = set[bytes]().union(*self._hashes.values())
        if hashes:
            session.change_cache(hashes, ())
            session.wake()

    def change(self, tier: Tier, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Applies the changes of one tier and reports them."""
        known = self._hashes[tier]
        elsewhere = self._hashes["disk" if tier == "memory" else "memory"]
        added = [digest for digest in dict.fromkeys(stored) if digest not in known]
        removed = [digest for digest in dict.fromkeys(evicted) if digest in known]
        known.update(added)
        known.difference_update(removed)
        if self.sessions:
            came = [digest for digest in added if digest not in elsewhere]
            left = [digest for digest in removed if digest not in elsewhere]
            for session in self.sessions:
                session.change_cache(came, left)
        if tier == "memory" and removed:
            self._on_evicted(removed)
        if tier == "memory" and added:
            self._on_stored(added)
