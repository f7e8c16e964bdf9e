"""Reports to routers which prefixes a worker has, wherever it keeps them."""

from collections.abc import Callable, Iterable
from typing import Literal

from .session import RouterSession

Tier = Literal["memory", "disk"]


class CacheReports:
    """Follows which hashes are in each tier, and reports to sessions those that come into the first or leave the last.
    Lives in one event loop."""

    def __init__(self, on_stored: Callable[[Iterable[bytes]], object] = lambda stored: None) -> None:
        """`on_stored` is called with the hashes that have come into memory."""
        self.sessions: set[RouterSession] = set()  # `start` the reports of each
        self._on_stored = on_stored
        self._hashes: dict[Tier, set[bytes]] = {"memory": set(), "disk": set()}

    def start(self, session: RouterSession) -> None:
        """Reports all hashes, and from now on every change."""
        session.start_cache_reports(set[bytes]().union(*self._hashes.values()))

    def change(self, tier: Tier, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Takes in the changes of one tier."""
        known, elsewhere = self._hashes[tier], self._hashes["disk" if tier == "memory" else "memory"]
        added, removed = set(stored) - known, known.intersection(evicted)
        known |= added
        known -= removed
        for session in self.sessions:
            session.change_cache(added - elsewhere, removed - elsewhere)
        if tier == "memory" and added:
            self._on_stored(added)
