"""Keeps one block table of one sequence, and computes how many blocks a table needs.

Blocks that leave a sliding window leave the table. Knows nothing of pools, hashes or steps.
"""

from bisect import bisect_left
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final, Self

from ..kv_cache.tables import TableBlocks, TableSpec

NUM_STATES: Final = 2
"""The slots of a running sequence: a step reads the state from one and writes it to the other."""

PREFILL_STATES: Final = NUM_STATES + 1
"""The slots of a prefill, which keeps its result for the transfer in a slot of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLimits:
    """Holds the limits of an engine that decide the number of blocks of a table, in tokens."""

    alignment: int  # resume points are multiples of it
    ahead_tokens: int  # the maximum that steps compute before blocks behind them leave the window
    growth_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableNeed:
    """Holds the numbers of blocks that a table reserves for a sequence at admission."""

    # The index of the first block of the tail: the prompt's last blocks, which are known at
    # admission so that a transfer can name them. Without a window this is the whole prompt.
    tail_first: int
    tail: int
    ring: int  # for the prompt before its tail; blocks that leave the window are used again
    growth: int  # for generated tokens
    copies: int  # for each further branch, a copy of the partial block


@dataclass(slots=True, eq=False)
class SequenceTable:
    """Holds the blocks of one table of a sequence, from the index `first` on."""

    spec: TableSpec
    number: int  # among the tables of the sequence
    blocks: list[int] = field(default_factory=list)  # shared and own blocks
    first: int = 0  # the index of blocks[0] in the table
    tail: list[int] = field(default_factory=list)  # reserved for the indices from tail_first on
    tail_first: int = 0
    num_ring: int = 0  # reserved blocks of the sequence that are for indices before the tail
    num_sent: int = 0  # the index after the blocks that the ranks know
    num_published: int = 0  # the index after the blocks that were offered to the prefix cache
    # The block that the next step copies into the last block of the table.
    copy_source: int | None = None

    @property
    def end(self) -> int:
        """Returns the index after the last block."""
        return self.first + len(self.blocks)

    @property
    def num_covered(self) -> int:
        """Returns the position up to which the table has blocks."""
        return self.end * self.spec.block_size

    @property
    def held_blocks(self) -> list[int]:
        """Returns the blocks that the sequence owns or leases for this table."""
        return self.blocks if self.copy_source is None else [*self.blocks, self.copy_source]

    @property
    def prompt(self) -> TableBlocks:
        """Returns the blocks of the prompt's tail, some of which may be cached already."""
        skipped = max(self.tail_first - self.first, 0)
        return TableBlocks((*self.blocks[skipped:], *self.tail), self.first + skipped)

    def slide(self, first: int) -> list[int]:
        """Removes and returns the blocks before the index `first`."""
        count = max(first - self.first, 0)
        left = self.blocks[:count]
        del self.blocks[:count]
        self.first += len(left)
        return left

    def take_new(self) -> TableBlocks:
        """Returns the blocks that the ranks do not know yet; from now on they know them."""
        first = max(self.num_sent, self.first)
        self.num_sent = self.end
        return TableBlocks(tuple(self.blocks[first - self.first :]), first)

    def branch(self, num_computed: int) -> Self:
        """Returns the table of a branch with the full blocks of `num_computed` tokens."""
        num_full = num_computed // self.spec.block_size - self.first
        return type(self)(
            spec=self.spec,
            number=self.number,
            blocks=self.blocks[:num_full],
            first=self.first,
            num_published=self.num_published,
        )

    def serves(self, index: int, points: Items[int]) -> bool:
        """Returns True if one of the ascending resume `points` needs the block at `index`."""
        if self.spec.window is None:
            return True
        if self.spec.window == 1:
            return False
        size = self.spec.block_size
        place = bisect_left(points, index * size + 1)
        return place < len(points) and points[place] <= (index + 1) * size + self.spec.window - 2


@dataclass(slots=True, eq=False)
class StateSlots:
    """Holds the slots of a sequence in a model that keeps state."""

    # The state after the scheduled tokens; while a draft is verified, the state before it.
    current: int | None = None
    free: list[int] = field(default_factory=list)  # reserved, for the next steps
    final: int | None = None  # reserved for the last step of a PREFILL, known at admission
    # (position, slot) pairs that steps in flight write: resume points to publish, and the states
    # after each token of a draft.
    points: list[tuple[int, int]] = field(default_factory=list)
    draft: list[tuple[int, int]] = field(default_factory=list)
    newest: bytes | None = None  # the name of the last point that decoding has left

    @property
    def held(self) -> list[int]:
        """Returns the slots that the sequence owns or leases."""
        current = [] if self.current is None else [self.current]
        return [*current, *(slot for _, slot in (*self.points, *self.draft))]

    @property
    def reserved(self) -> list[int]:
        """Returns the slots that are reserved for the sequence."""
        return self.free if self.final is None else [*self.free, self.final]


def block_name(digest: bytes, table: int) -> bytes:
    """Returns the name of a block in the prefix cache by the digest of its last token.

    Table 0 has no number, so that a model with one table keeps its names.
    """
    return digest + bytes([table]) if table else digest


def window_first(spec: TableSpec, position: int, alignment: int = 1) -> int:
    """Returns the index of the first block that a resume at or before `position` needs.

    The resume is at the last multiple of `alignment`.
    """
    if spec.window is None:
        return 0
    return max(position - position % alignment - spec.window + 1, 0) // spec.block_size


def window_blocks(spec: TableSpec, limits: TableLimits) -> int | None:
    """Returns the maximum of blocks that decoding needs at once; None without a window."""
    if spec.window is None:
        return None
    return -(-(limits.alignment + spec.window) // spec.block_size) + 1


def table_need(
    spec: TableSpec,
    limits: TableLimits,
    *,
    num_tokens: int,
    max_length: int,
    num_cached: int,
    is_computed: bool,
) -> TableNeed:
    """Returns the blocks for a prompt of `num_tokens` beyond its `num_cached` cached tokens.

    The sequence has at most `max_length` tokens. `is_computed` is False for a prompt whose KV cache
    comes from another worker.
    """
    size = spec.block_size
    end = -(-num_tokens // size)
    done = num_cached // size
    growth = min(-(-max_length // size) - end, -(-limits.growth_tokens // size))
    most = window_blocks(spec, limits)
    ring = 0
    if spec.window is None or most is None:
        tail_first = 0
    elif is_computed:
        tail_first = window_first(spec, num_tokens - 1, limits.alignment)
        ring = min(max(tail_first - done, 0), most + -(-limits.ahead_tokens // size))
    else:
        tail_first = window_first(spec, num_tokens)
    if most is not None:
        # Later growth uses blocks that leave the window.
        growth = min(growth, max(limits.alignment // size + 1, most - end))
    return TableNeed(
        tail_first=tail_first,
        tail=end - max(tail_first, done),
        ring=ring,
        growth=growth,
        copies=int(num_tokens % size > 0),
    )


def least_blocks(
    spec: TableSpec,
    limits: TableLimits,
    *,
    num_tokens: int,
    max_length: int,
    is_computed: bool,
    num_branches: int,
    is_search: bool,
) -> int:
    """Returns the number of blocks that a sequence needs in a table on an empty worker.

    One branch must reach its last token. Several choices must reach the fork; afterwards they may
    be preempted one by one. All beams of a beam search must reach their last tokens.
    """
    need = table_need(
        spec,
        limits,
        num_tokens=num_tokens,
        max_length=max_length,
        num_cached=0,
        is_computed=is_computed,
    )
    longest = -(-max_length // spec.block_size)
    most = window_blocks(spec, limits)
    alone = longest if most is None else max(need.ring + need.tail, min(longest, most))
    if is_search:
        further = longest - num_tokens // spec.block_size
        return alone + (num_branches - 1) * (further if most is None else min(further, most))
    return max(alone, need.ring + need.tail + (num_branches - 1) * need.copies)
