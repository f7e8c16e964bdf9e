"""Decides which evicted blocks of the KV cache stay in host memory.

Knows hashes. Knows nothing of the bytes.
"""

from collections.abc import Iterable, Sequence

from .eviction import EvictionOrder, RetainedHashes

Copies = tuple[tuple[int, int], ...]
"""Pairs (block, host block) to save, or pairs (host block, block) to load."""


class HostTier:
    """Keeps evicted blocks in host blocks by their hashes; evicts in the order of `order`.

    A loaded block also stays here, so that it need not be saved again. The next step plan carries
    out the decisions of this class: first it saves, then it loads. So a host block that the plan
    loads takes no other block until that plan is made. Not thread-safe.
    """

    def __init__(self, num_blocks: int, retained: RetainedHashes) -> None:
        """Makes a tier of `num_blocks` host blocks; with 0 it keeps nothing."""
        self.num_blocks = num_blocks
        self.order = EvictionOrder(retained)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._host_block_of: dict[bytes, int] = {}
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
            self.order.use(digest)
            self._pinned.add(self._host_block_of[digest])

    def save(self, block: int, digest: bytes) -> bytes | None:
        """Schedules the save of a block that the pool evicts now; returns the hash that is evicted.

        Returns None if no hash is evicted, and `digest` itself if no host block is available.
        """
        if digest in self._host_block_of:
            self.order.use(digest)
            return None
        victim = None
        if self._free:
            host_block = self._free.pop()
        else:
            unpinned = (
                each for each in self.order if self._host_block_of[each] not in self._pinned
            )
            victim = next(unpinned, None)
            if victim is None:
                return digest
            host_block = self._host_block_of.pop(victim)
            self.order.remove(victim)
        self._host_block_of[digest] = host_block
        self.order.use(digest)
        self._saved[host_block] = block
        return victim

    def load(self, digest: bytes, block: int) -> None:
        """Schedules the load of a pinned hash into a block."""
        self._loaded.append((self._host_block_of[digest], block))

    def clear(self) -> list[bytes]:
        """Removes all hashes and returns them; call it right after `take_copies` or between plans.

        Raises RuntimeError if the next plan loads a host block.
        """
        if self._pinned:
            raise RuntimeError(f"host blocks {self._pinned} are pinned for the next plan")
        gone = list(self._host_block_of)
        for digest in gone:
            self.order.remove(digest)
        self._free += self._host_block_of.values()
        self._host_block_of.clear()
        self._saved.clear()
        return gone

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
        if set(self.order) != self._host_block_of.keys():
            raise RuntimeError("the eviction order differs from the hashes in host memory")
        self.order.check_integrity()
