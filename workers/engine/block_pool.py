"""Accounts for the KV blocks of one worker: their owners, their leases and the prefix cache.

Knows block numbers and hashes. Knows nothing of tensors, tokens or sequences.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from ..kv_cache.eviction import EvictionOrder, RetainedHashes
from ..kv_cache.host_tier import HostTier


class BlockState(enum.Enum):
    """Names the state of a block.

    Each block is in exactly one state; the five counts add up to the pool's size.

        FREE ──reserve──> RESERVED ──claim──> OWNED ──lease──> LEASED
         ^ ^                 │                 │ ^ ^              │
         │ └───unreserve─────┘                 │ │ └───share──────┤
         ├───────release (no hash)─────────────┘ │                │
         └───────────────────────────────────────┼─unlease────────┤
        CACHED <──release, unlease (hash)────────┼────────────────┘
         │ └──────────────share──────────────────┘
         └──reserve (evicts the next one, see kv_cache/eviction.py)──> RESERVED

    A block that both sequences and leases hold is OWNED. `clear` makes CACHED blocks FREE.
    """

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    LEASED = "leased"
    CACHED = "cached"


class BlockPool:
    """Keeps ref-counted blocks with a hash-chained prefix cache.

    Verbs come in pairs: reserve/unreserve, claim or share/release, lease/unlease,
    lease_copy/end_copy. The caller of the first verb must call the second. Not thread-safe except
    for `counts`: only the engine's thread calls it.

    The cache evicts in the order of `EvictionOrder`. Evicted blocks move to `host` while it has
    room; the hashes in `host` belong to the cache.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.retained = RetainedHashes(num_blocks)
        self.host = HostTier(num_host_blocks, self.retained)
        self._state = [BlockState.FREE] * num_blocks
        self._count = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._owners = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # Leases of blocks that are being copied elsewhere, see `lease_copy`.
        self.copied = Counter[int]()
        self._order = EvictionOrder(self.retained)  # of the hashes of cached blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Hashes stored and evicted since the last `take_changes`: ordered sets.
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def count(self, state: BlockState) -> int:
        """Returns the number of blocks in `state`."""
        return self._count[state]

    def counts(self) -> dict[BlockState, int]:
        """Returns the number of blocks in each state, read at one time. Any thread may call it.

        Within a move of a block, the counts may add up to one block less than the pool has.
        """
        return self._count.copy()  # one step of C under the GIL

    def holders(self, block: int) -> tuple[int, int]:
        """Returns the numbers of sequences and leases that hold `block`."""
        return self._owners[block], self._leases[block]

    @property
    def num_available(self) -> int:
        """Returns the number of blocks that `reserve` could take now: free and cached blocks."""
        return self._count[BlockState.FREE] + self._count[BlockState.CACHED]

    def block_of(self, digest: bytes) -> int | None:
        """Returns the block of a hash, or None; `share` it before any other call."""
        return self._block_of.get(digest)

    def has(self, digest: bytes) -> bool:
        """Returns True if a hash is in the cache: in a block or in host memory."""
        return digest in self._block_of or digest in self.host

    def match(self, chain: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix of `chain`.

        The caller must `share` them before any other call.
        """
        blocks = []
        for digest in chain:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """Returns the number of `blocks` that are available now but not after `share`."""
        return sum(self._state[block] is BlockState.CACHED for block in blocks)

    def reserve(self, count: int) -> list[int]:
        """Takes `count` blocks and evicts cached blocks if needed.

        Raises RuntimeError and takes no block if fewer are available.
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks requested, {self.num_available} available")
        return [self._take() for _ in range(count)]

    def unreserve(self, blocks: Iterable[int]) -> None:
        """Returns reserved blocks to the pool; no sequence ever saw their content."""
        for block in blocks:
            self._expect(block, BlockState.RESERVED)
            self._move(block, BlockState.FREE)

    def claim(self, blocks: Iterable[int]) -> None:
        """Gives reserved blocks to one sequence as their owner."""
        for block in blocks:
            self._expect(block, BlockState.RESERVED)
            self._owners[block] = 1
            self._move(block, BlockState.OWNED)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one owner to blocks that `match` found."""
        for block in blocks:
            self._expect(block, BlockState.OWNED, BlockState.LEASED, BlockState.CACHED)
            self._owners[block] += 1
            self._move(block, BlockState.OWNED)

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one owner from each block.

        The last block will be evicted first, so that a prefix outlives its continuation.
        """
        for block in reversed(blocks):
            self._expect(block, BlockState.OWNED)
            self._owners[block] -= 1
            self._settle(block)

    def lease(self, blocks: Sequence[int]) -> None:
        """Turns one ownership of each block into a lease for a remote reader."""
        for block in blocks:
            self._expect(block, BlockState.OWNED)
            self._leases[block] += 1
            self._owners[block] -= 1
            self._settle(block)

    def unlease(self, blocks: Sequence[int]) -> None:
        """Ends one lease of each block."""
        for block in reversed(blocks):
            self._expect(block, BlockState.OWNED, BlockState.LEASED)
            if not self._leases[block]:
                raise RuntimeError(f"block {block} has no lease")
            self._leases[block] -= 1
            self._settle(block)

    def lease_copy(self, blocks: Sequence[int]) -> None:
        """Leases blocks that `match` found, for a copy elsewhere."""
        self.share(blocks)
        self.lease(blocks)
        self.copied.update(blocks)

    def end_copy(self, blocks: Sequence[int]) -> None:
        """Ends the leases that `lease_copy` began."""
        self.unlease(blocks)
        self.copied -= Counter(blocks)

    def publish(self, block: int, digest: bytes) -> None:
        """Lets `match` find an owned, fully computed block; the first block of a hash wins."""
        self._expect(block, BlockState.OWNED)
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            if digest not in self.host:
                _record(digest, self._stored, self._evicted)

    def forget(self, block: int) -> None:
        """Removes the hash of an owned block, so that its release makes it free."""
        self._expect(block, BlockState.OWNED)
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self._leave(digest)

    def clear(self) -> None:
        """Empties the cache, also in `host`: no hash is found until its next `publish`.

        Owned and leased blocks stay as they are and become free with their release. Call it between
        two plans.
        """
        gone = dict.fromkeys((*self._block_of, *self.host.clear()))
        for block in self._hash_of:
            if self._state[block] is BlockState.CACHED:
                self._move(block, BlockState.FREE)
        self._block_of.clear()
        self._hash_of.clear()
        self.retained.clear()
        for digest in gone:
            _record(digest, self._evicted, self._stored)

    def retain(self, prefix: Iterable[bytes], tenant: bytes, end: float) -> None:
        """Keeps the hashes of a prefix: until the time `end` they are evicted after all others.

        Ends at the first hash that is not in the cache. Other hashes of the tenant, and then those
        of other tenants, lose their retention beyond the bounds of `RetainedHashes`.
        """
        known = list(takewhile(self.has, prefix))
        for digest in self.retained.add(known, tenant, end):
            self._unretain(digest)
        for digest in filter(self.retained.__contains__, known):
            self._order.retain(digest)
            self.host.order.retain(digest)

    def end_retentions(self, now: float) -> None:
        """Ends the retentions whose time is over; these hashes are evicted next."""
        for digest in self.retained.drop_ended(now):
            self._unretain(digest)

    def load(self, blocks: Iterable[int], digests: Iterable[bytes]) -> None:
        """Schedules copies of pinned hashes from `host` to owned blocks and publishes the blocks.

        The caller has found the hashes with `host.match` and has pinned them with `host.pin`.
        """
        for block, digest in zip(blocks, digests, strict=True):
            self.host.load(digest, block)
            self.publish(block, digest)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the hashes that entered and those that left the cache since the last call.

        A hash that did both is in neither result.
        """
        stored = tuple(self._stored)
        evicted = tuple(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return stored, evicted

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the five counts add up to the total and every index agrees."""
        holders = zip(self._state, self._owners, self._leases, strict=True)
        for block, (state, owners, leases) in enumerate(holders):
            if owners > 0:
                fits = state is BlockState.OWNED
            elif leases > 0:
                fits = state is BlockState.LEASED
            elif block in self._hash_of:
                fits = state is BlockState.CACHED
            else:
                fits = state is BlockState.FREE or state is BlockState.RESERVED
            if not fits or owners < 0 or leases < 0:
                raise RuntimeError(
                    f"block {block} is {state.value} with {owners} owners and {leases} leases"
                )
        counts = {state: self._state.count(state) for state in BlockState}
        if counts != self._count or sum(counts.values()) != self.num_blocks:
            raise RuntimeError(f"counted {counts}, expected {self._count}, total {self.num_blocks}")
        if sorted(self._free) != [b for b, s in enumerate(self._state) if s is BlockState.FREE]:
            raise RuntimeError("the free list differs from the free blocks")
        cached = {b for b, s in enumerate(self._state) if s is BlockState.CACHED}
        if set(self._order) != {self._hash_of[block] for block in cached}:
            raise RuntimeError("the eviction order differs from the cached blocks")
        if not all(map(self.has, self.retained)):
            raise RuntimeError("a retained hash is not in the cache")
        self.retained.check_integrity()
        self._order.check_integrity()
        if {d: b for b, d in self._hash_of.items()} != self._block_of:
            raise RuntimeError("the two directions of the hash index differ")
        self.host.check_integrity()

    def _take(self) -> int:
        if self._free:
            block = self._free[-1]
            self._move(block, BlockState.RESERVED)
            return block
        digest = next(iter(self._order))
        block = self._block_of[digest]
        self._move(block, BlockState.RESERVED)
        del self._block_of[digest], self._hash_of[block]
        gone = self.host.save(block, digest)
        if gone is not None and gone not in self._block_of:
            self._leave(gone)
        return block

    def _leave(self, digest: bytes) -> None:
        """Records that a hash has left the cache, unless it is in host memory."""
        if digest not in self.host:
            _record(digest, self._evicted, self._stored)
            self.retained.drop(digest)

    def _unretain(self, digest: bytes) -> None:
        self._order.unretain(digest)
        self.host.order.unretain(digest)

    def _settle(self, block: int) -> None:
        """Moves a block to the state that follows from its owners, leases and hash."""
        if self._owners[block]:
            state = BlockState.OWNED
        elif self._leases[block]:
            state = BlockState.LEASED
        else:
            state = BlockState.CACHED if block in self._hash_of else BlockState.FREE
        self._move(block, state)

    def _move(self, block: int, state: BlockState) -> None:
        old = self._state[block]
        if old is state:
            return
        if old is BlockState.FREE:
            self._free.pop()  # only `_take` takes free blocks, and it takes the last one
        elif old is BlockState.CACHED:
            self._order.remove(self._hash_of[block])
        if state is BlockState.FREE:
            self._free.append(block)
        elif state is BlockState.CACHED:
            self._order.use(self._hash_of[block])
        self._count[old] -= 1
        self._count[state] += 1
        self._state[block] = state

    def _expect(self, block: int, *states: BlockState) -> None:
        if self._state[block] not in states:
            raise RuntimeError(f"block {block} is {self._state[block].value}")


def _record(digest: bytes, changes: dict[bytes, None], opposites: dict[bytes, None]) -> None:
    """Adds a hash to `changes`, or removes it from `opposites` if it is there."""
    if digest in opposites:
        del opposites[digest]
    else:
        changes[digest] = None
