"""Decides which hashes a prefix cache evicts next; some hashes are retained for a time.

Knows hashes, tenants and times. Knows nothing of blocks.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

TENANT_PART: Final = 4
"""A tenant retains at most the number of blocks divided by this, at least one block."""

TOTAL_PART: Final = 2
"""All tenants together retain at most the number of blocks divided by this, at least one block.

The other blocks serve as the cache of requests that retain nothing.
"""


class RetainedHashes:
    """Knows which hashes are retained for which tenant, and until when.

    If a tenant or all tenants together retain too many hashes, those are dropped first whose
    retention was requested the longest time ago. Not thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        self.most_each = max(num_blocks // TENANT_PART, 1)
        self.most = max(num_blocks // TOTAL_PART, 1)
        # (tenant, end) by hash, and the hashes of each tenant; the next to drop come first.
        self._retained: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._of_tenant: dict[bytes, OrderedDict[bytes, None]] = {}
        # A heap of (end, hash). Entries of hashes that were dropped or retained again are ignored.
        self._ends: list[tuple[float, bytes]] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._retained

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._retained)

    def __len__(self) -> int:
        return len(self._retained)

    def count(self, tenant: bytes) -> int:
        """Returns the number of hashes that are retained for a tenant."""
        return len(self._of_tenant.get(tenant, ()))

    def add(self, prefix: Sequence[bytes], tenant: bytes, end: float) -> list[bytes]:
        """Retains the hashes of a prefix until the time `end`; no retention becomes shorter.

        A prefix that exceeds the tenant's share retains its first hashes. Returns the hashes that
        are dropped for it.
        """
        # The first hash is the last to drop: a prefix is useless without it.
        for digest in reversed(prefix[: self.most_each]):
            _, known = self._retained.get(digest, (tenant, end))
            self.drop(digest)
            self._retained[digest] = tenant, max(known, end)
            self._of_tenant.setdefault(tenant, OrderedDict())[digest] = None
            heapq.heappush(self._ends, (max(known, end), digest))
        dropped: list[bytes] = []
        while self.count(tenant) > self.most_each:
            dropped.append(next(iter(self._of_tenant[tenant])))
            self.drop(dropped[-1])
        while len(self._retained) > self.most:
            dropped.append(next(iter(self._retained)))
            self.drop(dropped[-1])
        if len(self._ends) > 2 * self.most:  # most entries are ignored
            self._ends = [(until, digest) for digest, (_, until) in self._retained.items()]
            heapq.heapify(self._ends)
        return dropped

    def drop(self, digest: bytes) -> None:
        """Ends the retention of a hash, if there is one."""
        if digest not in self._retained:
            return
        tenant, _ = self._retained.pop(digest)
        own = self._of_tenant[tenant]
        del own[digest]
        if not own:
            del self._of_tenant[tenant]

    def clear(self) -> None:
        """Ends all retentions."""
        self._retained.clear()
        self._of_tenant.clear()
        self._ends.clear()

    def drop_ended(self, now: float) -> list[bytes]:
        """Drops and returns the hashes whose retention has ended at the time `now`."""
        ended: list[bytes] = []
        while self._ends and self._ends[0][0] <= now:
            end, digest = heapq.heappop(self._ends)
            if self._retained.get(digest, (b"", end + 1))[1] <= end:
                self.drop(digest)
                ended.append(digest)
        return ended

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the bounds hold and every index agrees."""
        tenants = {tenant: set(own) for tenant, own in self._of_tenant.items()}
        expected: dict[bytes, set[bytes]] = {}
        for digest, (tenant, _) in self._retained.items():
            expected.setdefault(tenant, set()).add(digest)
        if tenants != expected:
            raise RuntimeError("the retained hashes differ from those of the tenants")
        if {(end, digest) for digest, (_, end) in self._retained.items()}.difference(self._ends):
            raise RuntimeError("a retained hash has no end")
        if len(self) > self.most or max(map(len, tenants.values()), default=0) > self.most_each:
            raise RuntimeError(f"{len(self)} hashes are retained; at most {self.most} may be")


class EvictionOrder:
    """Orders hashes for eviction: the least recently used first, retained hashes after all others.

    Not thread-safe.
    """

    def __init__(self, retained: RetainedHashes) -> None:
        self._retained = retained
        self._usual: OrderedDict[bytes, None] = OrderedDict()
        self._late: OrderedDict[bytes, None] = OrderedDict()

    def __iter__(self) -> Iterator[bytes]:
        """Iterates over the hashes, the next to evict first."""
        return chain(self._usual, self._late)

    def use(self, digest: bytes) -> None:
        """Adds a hash, or makes it the most recently used one."""
        order = self._late if digest in self._retained else self._usual
        order[digest] = None
        order.move_to_end(digest)

    def remove(self, digest: bytes) -> None:
        """Removes a hash that is here."""
        del (self._late if digest in self._late else self._usual)[digest]

    def retain(self, digest: bytes) -> None:
        """Moves a hash whose retention has begun behind all others, if it is here."""
        if digest in self._usual:
            del self._usual[digest]
            self._late[digest] = None

    def unretain(self, digest: bytes) -> None:
        """Makes a hash whose retention has ended the next to evict, if it is here."""
        if digest in self._late:
            del self._late[digest]
            self._usual[digest] = None
            self._usual.move_to_end(digest, last=False)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless exactly the retained hashes come last."""
        if not all(map(self._retained.__contains__, self._late)) or any(
            map(self._retained.__contains__, self._usual)
        ):
            raise RuntimeError("the eviction order differs from the retained hashes")
