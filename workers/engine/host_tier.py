"""Accounts for the blocks of KV cache that a worker keeps in host memory after they have left its
block pool.

Knows the numbers of blocks and slots and hashes; nothing of tensors, tokens or sequences.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Copies = tuple[tuple[int, int], ...]
"""(block, slot) of what is saved, or (slot, block) of what is restored."""


class HostTier:
    """Keeps the hashes of evicted blocks, each in a slot of host memory; the least recently used
    goes first. A block that is restored also stays here, so that it need not be saved again.

    What is decided here is done by the next plan of a step: first it saves, then it restores. So a
    slot that it restores is taken for no other block until that plan is made. Not thread-safe.
    """

    def __init__(self, num_slots: int) -> None:
        """Without slots nothing is kept."""
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # next to evict first
        self._saved: dict[int, int] = {}  # by slot the block, for the next plan
        self._restored: list[tuple[int, int]] = []  # slot and block, for the next plan
        self._pinned: set[int] = set()  # slots that the next plan restores

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def match(self, chain: Iterable[bytes]) -> list[bytes]:
        """Returns the longest prefix of `chain` that is here. `pin` it before any other call."""
        found = []
        for digest in chain:
            if digest not in self._slot_of:
                break
            found.append(digest)
        return found

    def pin(self, digests: Sequence[bytes]) -> None:
        """Keeps hashes that `match` found until the next plan, and makes them the last to go, their
        first one last.
        """
        for digest in reversed(digests):
            self._slot_of.move_to_end(digest)
            self._pinned.add(self._slot_of[digest])

    def save(self, block: int, digest: bytes) -> bytes | None:
        """Takes in a block that the pool evicts now. Returns the hash that leaves for it, if one
        does, which is its own if no slot can be had.
        """
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return None
        victim = None
        if self._free:
            slot = self._free.pop()
        else:
            victim = next(
                (each for each, slot in self._slot_of.items() if slot not in self._pinned), None
            )
            if victim is None:
                return digest
            slot = self._slot_of.pop(victim)
        self._slot_of[digest] = slot
        self._saved[slot] = block
        return victim

    def restore(self, digest: bytes, block: int) -> None:
        """Has a pinned hash restored to a block."""
        self._restored.append((self._slot_of[digest], block))

    def take_copies(self) -> tuple[Copies, Copies]:
        """Returns what a plan is to save, and then to restore, since the last call."""
        saved, restored = (
            tuple((block, slot) for slot, block in self._saved.items()),
            tuple(self._restored),
        )
        self._saved.clear()
        self._restored.clear()
        self._pinned.clear()
        return saved, restored

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every slot is free or has one hash."""
        slots = self._free + list(self._slot_of.values())
        if sorted(slots) != list(range(self.num_slots)):
            raise RuntimeError(
                f"slots {sorted(slots)} are free or have a hash, of {self.num_slots}"
            )
        if strangers := (self._pinned | self._saved.keys()).difference(self._slot_of.values()):
            raise RuntimeError(f"slots {strangers} are pinned or saved to without a hash")
