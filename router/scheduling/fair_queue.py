"""Who is next: a bounded queue, ordered by priority, then fair among tenants, then first come, first served.

Fair means start-time fair queueing (Goyal et al., 1996) on tokens with equal weights: every tenant of a level has a
tag, the tokens it was served so far; the least tag is next. A tenant that was away begins at the level's present tag,
so that nobody saves up. When the queue is full, whoever has much in it gives way to who has little (longest queue drop,
Suter et al., 1998), and the lower priority to the higher. Every operation is O(log n). Knows nothing of time and I/O.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Generic, TypeVar

_MAX_GONE: Final = 4_096
"""Tenants without a backlog whose tags are remembered; then the half that was served least is forgotten."""


@dataclass(eq=False, slots=True, kw_only=True)
class QueueEntry:
    """A place in the queue; each is its own."""

    tenant: str
    priority: int
    num_tokens: int  # of work, at least 1


T = TypeVar("T", bound=QueueEntry)
K = TypeVar("K", bound=Hashable)


class FairQueueFull(Exception):
    """There is no place for the ticket."""


class Ranking(Generic[K]):
    """Keys by rank, the least first; of equal ranks the one put first. O(log n), amortised."""

    def __init__(self) -> None:
        self._places: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = count()

    def __len__(self) -> int:
        return len(self._places)

    def put(self, key: K, rank: float) -> None:
        """Gives the key a rank, in place of the one it had."""
        place = self._places[key] = (rank, next(self._count))
        heapq.heappush(self._heap, (*place, key))
        if len(self._heap) > 2 * len(self._places) + 16:
            self._heap = [(*place, key) for key, place in self._places.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Removes the key, if it is there."""
        self._places.pop(key, None)

    def first(self) -> K | None:
        """The key of least rank; None if there is none."""
        while self._heap:
            rank, number, key = self._heap[0]
            if self._places.get(key) == (rank, number):
                return key
            heapq.heappop(self._heap)
        return None


@dataclass(slots=True)
class _Backlog(Generic[T]):
    """What one tenant has in one level. There is none that is empty."""

    tag: float
    tickets: "OrderedDict[T, None]" = field(default_factory=OrderedDict)
    num_tokens: int = 0
    share: float = 0.0


class _Level(Generic[T]):
    """The tickets of one priority. There is none that is empty."""

    def __init__(self, *, max_tokens: int, max_requests: int) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._present = 0.0  # the tag of the last that left
        self._gone: dict[str, float] = {}  # tags of tenants without a backlog
        self._turns: Ranking[str] = Ranking()
        self._longest: Ranking[str] = Ranking()  # by share, negative
        self.backlogs: dict[str, _Backlog[T]] = {}
        self.num_tokens = 0

    def add(self, ticket: T) -> None:
        backlog = self.backlogs.get(ticket.tenant)
        if backlog is None:
            tag = max(self._present, self._gone.pop(ticket.tenant, 0.0))
            backlog = self.backlogs[ticket.tenant] = _Backlog(tag)
            self._turns.put(ticket.tenant, tag)
        backlog.tickets[ticket] = None
        self._count(ticket, backlog, 1)

    def holds(self, ticket: T) -> bool:
        backlog = self.backlogs.get(ticket.tenant)
        return backlog is not None and ticket in backlog.tickets

    def first(self) -> T:
        return next(iter(self.backlogs[self._first_tenant()].tickets))

    def pop(self) -> T:
        tenant = self._first_tenant()
        backlog = self.backlogs[tenant]
        ticket = next(iter(backlog.tickets))
        self._present = backlog.tag
        backlog.tag += ticket.num_tokens
        self._turns.put(tenant, backlog.tag)
        self.remove(ticket)
        return ticket

    def remove(self, ticket: T) -> None:
        backlog = self.backlogs[ticket.tenant]
        del backlog.tickets[ticket]
        self._count(ticket, backlog, -1)
        if not backlog.tickets:
            del self.backlogs[ticket.tenant]
            self._turns.discard(ticket.tenant)
            self._longest.discard(ticket.tenant)
            self._gone[ticket.tenant] = backlog.tag
            self._prune()

    def share(self, num_tokens: int, num_requests: int = 1) -> float:
        """The part of the queue's bounds that so much takes, of both added up."""
        return num_tokens / self._max_tokens + num_requests / self._max_requests

    def victims(self, ticket: QueueEntry, excess_tokens: int, excess_requests: int, *, outranked: bool) -> list[T]:
        """The last tickets of the longest backlog that make so much room; none if they do not, or if their tenant then
        had less than the newcomer's, unless the newcomer has the greater priority."""
        tenant = self._longest.first()
        if tenant is None:
            return []
        mine, longest, found = self.backlogs.get(ticket.tenant), self.backlogs[tenant], []
        floor = 0.0 if outranked else self.share(ticket.num_tokens) + (mine.share if mine else 0.0)
        share = longest.share
        for victim in reversed(longest.tickets):
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
        """Tokens that go before a newcomer's of `num_tokens`, about: of each tenant no more than of its own."""
        backlog = self.backlogs.get(tenant)
        own = backlog.num_tokens if backlog else 0
        others = len(self.backlogs) - (backlog is not None)
        return own + min(self.num_tokens - own, others * (own + num_tokens))

    def _first_tenant(self) -> str:
        tenant = self._turns.first()
        assert tenant is not None  # no level is empty
        return tenant

    def _count(self, ticket: T, backlog: _Backlog[T], sign: int) -> None:
        self.num_tokens += sign * ticket.num_tokens
        backlog.num_tokens += sign * ticket.num_tokens
        backlog.share = self.share(backlog.num_tokens, len(backlog.tickets))
        self._longest.put(ticket.tenant, -backlog.share)

    def _prune(self) -> None:
        if len(self._gone) > _MAX_GONE:
            self._gone = dict(heapq.nlargest(_MAX_GONE // 2, self._gone.items(), key=lambda item: item[1]))


class FairQueue(Generic[T]):
    """At most `max_requests` tickets of at most `max_tokens` tokens; one that is larger may only wait alone."""

    def __init__(self, *, max_tokens: int, max_requests: int) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._levels: dict[int, _Level[T]] = {}  # by priority; as many as there are priorities, at most
        self._num_requests = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[T]:
        """All tickets, in no order that means anything."""
        return (t for level in self._levels.values() for b in level.backlogs.values() for t in b.tickets)

    @property
    def num_tokens(self) -> int:
        """Of all tickets."""
        return self._num_tokens

    def push(self, ticket: T) -> list[T]:
        """Adds a ticket and returns those that had to leave for it. Raises QueueFull if there is no place."""
        displaced = self._displaced(ticket)
        for victim in displaced:
            self.remove(victim)
        level = self._levels.get(ticket.priority)
        if level is None:
            level = _Level(max_tokens=self._max_tokens, max_requests=self._max_requests)
            self._levels[ticket.priority] = level
        level.add(ticket)
        self._num_requests += 1
        self._num_tokens += ticket.num_tokens
        return displaced

    def takes(self, ticket: QueueEntry) -> bool:
        """Whether `push` would take it."""
        try:
            self._displaced(ticket)
        except FairQueueFull:
            return False
        return True

    def first(self) -> T | None:
        """The ticket that is next."""
        return self._levels[max(self._levels)].first() if self._levels else None

    def pop(self) -> T:
        """Removes the ticket that is next. Raises IndexError if there is none."""
        if not self._levels:
            raise IndexError("the queue is empty")
        priority = max(self._levels)
        ticket = self._levels[priority].pop()
        self._left(ticket)
        return ticket

    def remove(self, ticket: T) -> None:
        """Removes a ticket, wherever it is in the queue; its tenant is not charged for it. Idempotent."""
        level = self._levels.get(ticket.priority)
        if level is not None and level.holds(ticket):
            level.remove(ticket)
            self._left(ticket)

    def tokens_ahead(self, ticket: QueueEntry) -> int:
        """Tokens of work that go before a new ticket's, about, if nobody else comes."""
        higher = sum(level.num_tokens for priority, level in self._levels.items() if priority > ticket.priority)
        level = self._levels.get(ticket.priority)
        return higher + (level.ahead(ticket.num_tokens, ticket.tenant) if level else 0)

    def _left(self, ticket: T) -> None:
        self._num_requests -= 1
        self._num_tokens -= ticket.num_tokens
        if not self._levels[ticket.priority].num_tokens:
            del self._levels[ticket.priority]

    def _displaced(self, ticket: QueueEntry) -> list[T]:
        excess_tokens = self._num_tokens + ticket.num_tokens - self._max_tokens
        excess_requests = self._num_requests + 1 - self._max_requests
        if not self._levels or (excess_tokens <= 0 and excess_requests <= 0):
            return []
        priority = min(self._levels)
        if priority > ticket.priority:
            raise FairQueueFull
        outranked = priority < ticket.priority
        found = self._levels[priority].victims(ticket, excess_tokens, excess_requests, outranked=outranked)
        if not found:
            raise FairQueueFull
        return found
