"""Orders what waits: a bounded queue, by priority, then fair among tenants, then first come, first served.

Fair means start-time fair queueing (Goyal et al., 1996) on tokens with equal weights: every tenant of a priority has a
tag, the tokens that it was served so far; the least tag is next. A tenant that was away continues at the present tag of
its priority, so that nobody saves up. When the queue is full, the tenant with the longest backlog gives way to one with
a shorter one (longest queue drop, Suter et al., 1998), and a lower priority to a higher. Every operation is O(log n).
Knows nothing of time and I/O.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Generic, TypeVar

_MAX_IDLE_TENANTS: Final = 4_096
"""Tenants without a backlog whose tags are remembered; then the half that was served least is forgotten."""


@dataclass(eq=False, slots=True, kw_only=True)
class QueueEntry:
    """Stands for work that waits. Entries compare by identity."""

    tenant: str
    priority: int
    num_tokens: int  # of work, at least 1


T = TypeVar("T", bound=QueueEntry)
K = TypeVar("K", bound=Hashable)


class Ranking(Generic[K]):
    """Keeps keys by rank, the least first; of equal ranks the one put first. O(log n), amortised."""

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = count()

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, key: K, rank: float) -> None:
        """Gives the key a rank, in place of the one it had."""
        ranked = self._ranks[key] = (rank, next(self._count))
        heapq.heappush(self._heap, (*ranked, key))
        if len(self._heap) > 2 * len(self._ranks) + 16:
            self._heap = [(*ranked, key) for key, ranked in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Removes the key. Idempotent."""
        self._ranks.pop(key, None)

    def first(self) -> K | None:
        """Returns the key of the least rank; None if there is none."""
        while self._heap:
            rank, number, key = self._heap[0]
            if self._ranks.get(key) == (rank, number):
                return key
            heapq.heappop(self._heap)
        return None


@dataclass(slots=True)
class _Backlog(Generic[T]):
    """Holds the entries of one tenant in one priority. None is empty."""

    tag: float
    entries: "OrderedDict[T, None]" = field(default_factory=OrderedDict)
    num_tokens: int = 0
    share: float = 0.0


class _Level(Generic[T]):
    """Holds the entries of one priority. None is empty."""

    def __init__(self, *, max_tokens: int, max_requests: int) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._present = 0.0  # the tag of the tenant that was served last
        self._idle_tags: dict[str, float] = {}  # of tenants without a backlog
        self._turns: Ranking[str] = Ranking()
        self._longest: Ranking[str] = Ranking()  # by share, negative
        self.backlogs: dict[str, _Backlog[T]] = {}
        self.num_tokens = 0

    def add(self, entry: T) -> None:
        backlog = self.backlogs.get(entry.tenant)
        if backlog is None:
            tag = max(self._present, self._idle_tags.pop(entry.tenant, 0.0))
            backlog = self.backlogs[entry.tenant] = _Backlog(tag)
            self._turns.put(entry.tenant, tag)
        backlog.entries[entry] = None
        self._count(entry, backlog, 1)

    def first(self) -> T:
        tenant = self._turns.first()
        assert tenant is not None  # no level is empty
        return next(iter(self.backlogs[tenant].entries))

    def pop(self) -> T:
        entry = self.first()
        backlog = self.backlogs[entry.tenant]
        self._present = backlog.tag
        backlog.tag += entry.num_tokens
        self._turns.put(entry.tenant, backlog.tag)
        self.remove(entry)
        return entry

    def remove(self, entry: T) -> None:
        backlog = self.backlogs[entry.tenant]
        del backlog.entries[entry]
        self._count(entry, backlog, -1)
        if not backlog.entries:
            del self.backlogs[entry.tenant]
            self._turns.discard(entry.tenant)
            self._longest.discard(entry.tenant)
            self._idle_tags[entry.tenant] = backlog.tag
            if len(self._idle_tags) > _MAX_IDLE_TENANTS:
                kept = heapq.nlargest(_MAX_IDLE_TENANTS // 2, self._idle_tags.items(), key=lambda item: item[1])
                self._idle_tags = dict(kept)

    def share(self, num_tokens: int, num_requests: int = 1) -> float:
        """Returns the part of the queue's two bounds that so much takes, added up."""
        return num_tokens / self._max_tokens + num_requests / self._max_requests

    def victims(self, entry: QueueEntry, excess_tokens: int, excess_requests: int, *, outranked: bool) -> list[T]:
        """Returns the last entries of the longest backlog that make up for the excess; none if they do not, or if their
        tenant would then have less than that of `entry`, unless that has the higher priority (`outranked`)."""
        tenant = self._longest.first()
        if tenant is None:
            return []
        own, longest, found = self.backlogs.get(entry.tenant), self.backlogs[tenant], []
        floor = 0.0 if outranked else self.share(entry.num_tokens) + (own.share if own else 0.0)
        share = longest.share
        for victim in reversed(longest.entries):
            if share <= floor * (1 + 1e-9):
                return []
            found.append(victim)
            share -= self.share(victim.num_tokens)
            excess_tokens -= victim.num_tokens
            excess_requests -= 1
            if excess_tokens <= 0 and excess_requests <= 0:
                return found
        return []

    def ahead(self, num_tokens: int, tenant: str) -> int:
        """Estimates the tokens that go before a new entry of `num_tokens`: of each tenant no more than of its own."""
        backlog = self.backlogs.get(tenant)
        own = backlog.num_tokens if backlog else 0
        others = len(self.backlogs) - (backlog is not None)
        return own + min(self.num_tokens - own, others * (own + num_tokens))

    def _count(self, entry: T, backlog: _Backlog[T], sign: int) -> None:
        self.num_tokens += sign * entry.num_tokens
        backlog.num_tokens += sign * entry.num_tokens
        backlog.share = self.share(backlog.num_tokens, len(backlog.entries))
        self._longest.put(entry.tenant, -backlog.share)


class FairQueue(Generic[T]):
    """Holds at most `max_requests` entries of at most `max_tokens` tokens; one that is larger may only wait alone."""

    def __init__(self, *, max_tokens: int, max_requests: int) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._levels: dict[int, _Level[T]] = {}  # by priority; as many as there are priorities, at most
        self._num_requests = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[T]:
        """Yields all entries, in no particular order."""
        return (t for level in self._levels.values() for b in level.backlogs.values() for t in b.entries)

    @property
    def num_tokens(self) -> int:
        """Tokens of all entries."""
        return self._num_tokens

    def displaced_by(self, entry: QueueEntry) -> list[T] | None:
        """Returns the entries that `push` would remove for it; None if it has no place."""
        excess_tokens = self._num_tokens + entry.num_tokens - self._max_tokens
        excess_requests = self._num_requests + 1 - self._max_requests
        if not self._levels or (excess_tokens <= 0 and excess_requests <= 0):
            return []
        priority = min(self._levels)
        if priority > entry.priority:
            return None
        outranked = priority < entry.priority
        return self._levels[priority].victims(entry, excess_tokens, excess_requests, outranked=outranked) or None

    def push(self, entry: T) -> list[T] | None:
        """Adds an entry and returns those that were removed for it; None, having done nothing, if it has no place."""
        displaced = self.displaced_by(entry)
        if displaced is None:
            return None
        for victim in displaced:
            self.remove(victim)
        level = self._levels.get(entry.priority)
        if level is None:
            level = _Level(max_tokens=self._max_tokens, max_requests=self._max_requests)
            self._levels[entry.priority] = level
        level.add(entry)
        self._num_requests += 1
        self._num_tokens += entry.num_tokens
        return displaced

    def first(self) -> T | None:
        """Returns the entry that is next; None if the queue is empty."""
        return self._levels[max(self._levels)].first() if self._levels else None

    def pop(self) -> T:
        """Removes the entry that is next. Raises IndexError if there is none."""
        if not self._levels:
            raise IndexError("the queue is empty")
        entry = self._levels[max(self._levels)].pop()
        self._count_removed(entry)
        return entry

    def remove(self, entry: T) -> None:
        """Removes an entry, wherever it is in the queue; its tenant is not charged for it. Idempotent."""
        level = self._levels.get(entry.priority)
        backlog = level.backlogs.get(entry.tenant) if level else None
        if level is not None and backlog is not None and entry in backlog.entries:
            level.remove(entry)
            self._count_removed(entry)

    def tokens_ahead(self, entry: QueueEntry) -> int:
        """Estimates the tokens of work that go before a new entry, if nothing else comes."""
        higher = sum(level.num_tokens for priority, level in self._levels.items() if priority > entry.priority)
        level = self._levels.get(entry.priority)
        return higher + (level.ahead(entry.num_tokens, entry.tenant) if level else 0)

    def _count_removed(self, entry: T) -> None:
        self._num_requests -= 1
        self._num_tokens -= entry.num_tokens
        if not self._levels[entry.priority].num_tokens:
            del self._levels[entry.priority]
