"""Accounts for the KV blocks of one worker: their owners, their leases and the prefix cache.

Knows block numbers and hashes. Knows nothing of tensors, tokens or sequences.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence


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
         └──reserve (evicts the least recently used)──> RESERVED

    A block that both sequences and leases hold is OWNED.
    """

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    LEASED = "leased"
    CACHED = "cached"


Copies = tuple[tuple[int, int], ...]
"""Pairs (block, host block) to save, or pairs (host block, block) to load."""


class HostTier:
    """Keeps evicted blocks in host blocks by their hashes; evicts the least recently used first.

    A loaded block also stays here, so that it need not be saved again. The next step plan carries
    out the decisions of this class: first it saves, then it loads. So a host block that the plan
    loads takes no other block until that plan is made. Not thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        """Makes a tier of `num_blocks` host blocks; with 0 it keeps nothing."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._host_block_of: OrderedDict[bytes, int] = OrderedDict()  # next to evict first
        self._saved: dict[int, int] = {}  # block by host block, for the next plan
        self._loaded: list[tuple[int, int]] = []  # (host block, block), for the next plan
        self._pinned: set[int] = set()  # host blocks that the next plan loads

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._host_block_of

    def __len__(self) -> int:
        return len(self._host_block_of)

    def match(self, chain: Iterable[bytes]) -> list[bytes]:
        """Returns the longest prefix of `chain` that is here; `pin` it before any other call."""
        found = []
        for digest in chain:
            if digest not in self._host_block_of:
                break
            found.append(digest)
        return found

    def pin(self, digests: Sequence[bytes]) -> None:
        """Keeps hashes that `match` found until the next plan.

        Makes them the most recently used hashes, the first of them last to evict.
        """
        for digest in reversed(digests):
            self._host_block_of.move_to_end(digest)
            self._pinned.add(self._host_block_of[digest])

    def save(self, block: int, digest: bytes) -> bytes | None:
        """Schedules the save of a block that the pool evicts now; returns the hash that is evicted.

        Returns None if no hash is evicted, and `digest` itself if no host block is available.
        """
        if digest in self._host_block_of:
            self._host_block_of.move_to_end(digest)
            return None
        victim = None
        if self._free:
            host_block = self._free.pop()
        else:
            unpinned = (
                each for each, held in self._host_block_of.items() if held not in self._pinned
            )
            victim = next(unpinned, None)
            if victim is None:
                return digest
            host_block = self._host_block_of.pop(victim)
        self._host_block_of[digest] = host_block
        self._saved[host_block] = block
        return victim

    def load(self, digest: bytes, block: int) -> None:
        """Schedules the load of a pinned hash into a block."""
        self._loaded.append((self._host_block_of[digest], block))

    def take_copies(self) -> tuple[Copies, Copies]:
        """Returns the copies that a plan must save and those it must load since the last call."""
        saved = tuple((block, host_block) for host_block, block in self._saved.items())
        loaded = tuple(self._loaded)
        self._saved.clear()
        self._loaded.clear()
        self._pinned.clear()
        return saved, loaded

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every host block is free or has exactly one hash."""
        host_blocks = sorted(self._free + list(self._host_block_of.values()))
        if host_blocks != list(range(self.num_blocks)):
            raise RuntimeError(
                f"host blocks {host_blocks} are free or have a hash; expected 0 to "
                f"{self.num_blocks - 1}"
            )
        held = self._host_block_of.values()
        if strangers := (self._pinned | self._saved.keys()).difference(held):
            raise RuntimeError(f"host blocks {strangers} are pinned or saved to without a hash")


class BlockPool:
    """Keeps ref-counted blocks with a hash-chained prefix cache and least-recently-used eviction.

    Verbs come in pairs: reserve/unreserve, claim or share/release, lease/unlease. The caller of the
    first verb must call the second. Not thread-safe: only the engine's thread calls it.

    Evicted blocks move to `host` while it has room. The hashes in `host` belong to the cache.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.host = HostTier(num_host_blocks)
        self._state = [BlockState.FREE] * num_blocks
        self._count = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._owners = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, next to evict first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Hashes stored and evicted since the last `take_changes`: ordered sets.
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def count(self, state: BlockState) -> int:
        """Returns the number of blocks in `state`."""
        return self._count[state]

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
            if digest not in self.host:
                _record(digest, self._evicted, self._stored)

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
        if set(self._lru) != {b for b, s in enumerate(self._state) if s is BlockState.CACHED}:
            raise RuntimeError("the eviction order differs from the cached blocks")
        if {d: b for b, d in self._hash_of.items()} != self._block_of:
            raise RuntimeError("the two directions of the hash index differ")
        self.host.check_integrity()

    def _take(self) -> int:
        block = self._free[-1] if self._free else next(iter(self._lru))
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            gone = self.host.save(block, digest)
            if gone is not None and gone not in self._block_of:
                _record(gone, self._evicted, self._stored)
        self._move(block, BlockState.RESERVED)
        return block

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
            del self._lru[block]
        if state is BlockState.FREE:
            self._free.append(block)
        elif state is BlockState.CACHED:
            self._lru[block] = None
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
