"""A bounded queue: by priority, then fair among tenants, then earliest due time first.

The next tenant is the one with the least running work, so neither of two waiting tenants holds more
than half for long, however long its requests run (max-min fairness). Between tenants with equal
running work, the queue is a start-time fair queue (Goyal et al., 1996) on tokens with equal
weights: every tenant of a priority has a tag, the number of its served tokens, and the least tag is
next. A tenant that comes back begins at the present tag of its priority: it gets no credit. Due
times order only the entries of one tenant (due_order.py), so no tenant gets more by earlier ones.
Entries of equal due times are served first come, first served.

When the queue is full, the tenant with the longest backlog gives way to one with a shorter backlog
(longest queue drop, Suter et al., 1998), and a lower priority to a higher one. Every operation is
O(log n) in tenants; DueOrder states the cost in a tenant's entries. Knows nothing of time and I/O.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Final, Generic, TypeVar

from .due_order import DueOrder, QueueEntry

_MAX_IDLE_TENANTS: Final = 4_096
"""Idle tenants of one priority whose tags are kept; beyond it, the smallest tags are forgotten."""

_Backlog = tuple[int, str]  # priority, tenant

T = TypeVar("T", bound=QueueEntry)
K = TypeVar("K", bound=Hashable)


class Ranking(Generic[K]):
    """Orders keys by rank, then by the time of `put`. O(log n), amortised."""

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[tuple[float, ...], int]] = {}
        self._heap: list[tuple[tuple[float, ...], int, K]] = []
        self._count = count()

    def put(self, key: K, *rank: float) -> None:
        """Sets the rank of a key."""
        ranked = self._ranks[key] = (rank, next(self._count))
        heapq.heappush(self._heap, (*ranked, key))
        if len(self._heap) > 2 * len(self._ranks) + 16:
            self._heap = [(*ranked, key) for key, ranked in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Removes the key. Idempotent."""
        self._ranks.pop(key, None)

    def first(self) -> K | None:
        """Returns the key of the least rank; None if there are no keys."""
        while self._heap:
            rank, number, key = self._heap[0]
            if self._ranks.get(key) == (rank, number):
                return key
            heapq.heappop(self._heap)
        return None


class FairQueue(Generic[T]):
    """Holds at most `max_requests` entries and `max_tokens` tokens; a larger entry waits alone."""

    def __init__(self, *, max_tokens: int, max_requests: int) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self.num_tokens = 0  # of all entries
        self._num_requests = 0
        self._backlogs: dict[_Backlog, DueOrder[T]] = {}  # not empty
        self._running: dict[str, float] = {}  # the amount of each tenant that runs, if above 0
        # The highest priority first, then the least running, then the least tag.
        self._turns: Ranking[_Backlog] = Ranking()
        # The lowest priority first, then the largest share.
        self._longest: Ranking[_Backlog] = Ranking()
        # By priority, while it has a backlog:
        self._tokens: Counter[int] = Counter()
        self._num_backlogs: Counter[int] = Counter()
        self._tags: dict[int, dict[str, float]] = {}  # also of tenants without a backlog
        self._present: dict[int, float] = {}  # the tag of the last served tenant

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[T]:
        """Yields all entries, in no particular order."""
        return (entry for backlog in self._backlogs.values() for entry in backlog)

    def displaced_by(self, entry: QueueEntry) -> list[T] | None:
        """Returns the entries that `push` would remove for `entry`; None if it has no place.

        They are the last ones of the longest backlog of the lowest priority, as many as the bounds
        demand. The entry has no place if they are not enough, or if it has the same priority and
        their tenant would have less than its own tenant.
        """
        excess_tokens = self.num_tokens + entry.num_tokens - self._max_tokens
        excess_requests = self._num_requests + 1 - self._max_requests
        longest = self._longest.first()
        if longest is None or (excess_tokens <= 0 and excess_requests <= 0):
            return []
        if longest[0] > entry.priority:
            return None
        floor = self._share(self._key(entry), entry) if longest[0] == entry.priority else 0.0
        share = self._share(longest)
        found = []
        for victim in reversed(self._backlogs[longest]):
            if share <= floor * (1 + 1e-9):
                return None
            found.append(victim)
            share -= victim.num_tokens / self._max_tokens + 1 / self._max_requests
            excess_tokens -= victim.num_tokens
            excess_requests -= 1
            if excess_tokens <= 0 and excess_requests <= 0:
                return found
        return None

    def push(self, entry: T) -> list[T] | None:
        """Adds an entry and returns the entries removed for it.

        Returns None, without any change, if it has no place.
        """
        displaced = self.displaced_by(entry)
        if displaced is None:
            return None
        for victim in displaced:
            self.remove(victim)
        key = self._key(entry)
        if key not in self._backlogs:
            self._backlogs[key] = DueOrder()
            self._num_backlogs[entry.priority] += 1
            tags = self._tags.setdefault(entry.priority, {})
            tags[entry.tenant] = max(
                self._present.get(entry.priority, 0.0), tags.get(entry.tenant, 0.0)
            )
            self._put_turn(key)
        self._backlogs[key].add(entry)
        self._count(entry, 1)
        return displaced

    def set_running(self, tenant: str, amount: float) -> None:
        """Sets the amount of a tenant that runs, in the unit of all tenants."""
        if amount > 0:
            self._running[tenant] = amount
        else:
            self._running.pop(tenant, None)
        for priority in self._num_backlogs:
            if (priority, tenant) in self._backlogs:
                self._put_turn((priority, tenant))

    def first(self) -> T | None:
        """Returns the next entry; None if the queue is empty."""
        key = self._turns.first()
        return None if key is None else next(iter(self._backlogs[key]))

    def pop(self) -> T:
        """Removes and returns the next entry. Raises IndexError if the queue is empty."""
        entry = self.first()
        if entry is None:
            raise IndexError("the queue is empty")
        tags = self._tags[entry.priority]
        self._present[entry.priority] = tags[entry.tenant]
        tags[entry.tenant] += entry.num_tokens
        self._put_turn(self._key(entry))
        self.remove(entry)
        return entry

    def serve(self, entry: T) -> None:
        """Charges the tenant of an entry and removes the entry if it is in the queue.

        It need not be the next one. Out of turn, it does not move the tag at which tenants begin.
        """
        if entry is self.first():
            self.pop()
        else:
            self.remove(entry)
            self.charge(entry, entry.num_tokens)

    def charge(self, entry: T, num_tokens: int) -> None:
        """Corrects the work of a removed entry by `num_tokens`, more or less."""
        tags = self._tags.get(entry.priority, {})
        if entry.tenant in tags:
            tags[entry.tenant] += num_tokens
        if self._key(entry) in self._backlogs:
            self._put_turn(self._key(entry))

    def remove(self, entry: T) -> None:
        """Removes an entry from anywhere in the queue, without a charge. Idempotent."""
        key = self._key(entry)
        priority = entry.priority
        backlog = self._backlogs.get(key)
        if backlog is None or entry not in backlog:
            return
        backlog.remove(entry)
        self._count(entry, -1)
        if backlog:
            return
        del self._backlogs[key]
        self._turns.discard(key)
        self._longest.discard(key)
        self._num_backlogs[priority] -= 1
        if not self._num_backlogs[priority]:
            for by_priority in (self._num_backlogs, self._tokens, self._tags, self._present):
                by_priority.pop(priority, None)
        elif len(self._tags[priority]) - self._num_backlogs[priority] > _MAX_IDLE_TENANTS:
            tags = self._tags[priority]
            idle = [tenant for tenant in tags if (priority, tenant) not in self._backlogs]
            for tenant in heapq.nsmallest(_MAX_IDLE_TENANTS // 2, idle, key=tags.__getitem__):
                del tags[tenant]

    def tokens_ahead(self, entry: QueueEntry) -> int:
        """Estimates the tokens that are served before a new entry if nothing else comes.

        Each other tenant counts with at most the tokens of the entry's tenant.
        """
        key = self._key(entry)
        priority = entry.priority
        higher = sum(num_tokens for other, num_tokens in self._tokens.items() if other > priority)
        backlog = self._backlogs.get(key)
        own = 0 if backlog is None else backlog.tokens_until(entry.due)
        others = self._tokens[priority] - (0 if backlog is None else backlog.num_tokens)
        num_others = self._num_backlogs[priority] - (backlog is not None)
        return higher + own + min(others, num_others * (own + entry.num_tokens))

    def _put_turn(self, key: _Backlog) -> None:
        priority, tenant = key
        self._turns.put(
            key, -priority, self._running.get(tenant, 0.0), self._tags[priority][tenant]
        )

    def _key(self, entry: QueueEntry) -> _Backlog:
        return entry.priority, entry.tenant

    def _share(self, key: _Backlog, new: QueueEntry | None = None) -> float:
        """Returns a backlog's shares of the two bounds, added up; with the entry `new` if given."""
        backlog = self._backlogs.get(key)
        num_tokens = 0 if backlog is None else backlog.num_tokens
        num_requests = 0 if backlog is None else len(backlog)
        if new is not None:
            num_tokens += new.num_tokens
            num_requests += 1
        return num_tokens / self._max_tokens + num_requests / self._max_requests

    def _count(self, entry: T, sign: int) -> None:
        key = self._key(entry)
        num_tokens = sign * entry.num_tokens
        self._num_requests += sign
        self.num_tokens += num_tokens
        self._tokens[entry.priority] += num_tokens
        self._longest.put(key, entry.priority, -self._share(key))
