"""Plans the block tables of a model: one for all tokens, and one for each sliding window.

All blocks have the same number of bytes, so that one pool serves every table. Pure arithmetic.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

from .layout import CacheGroup, KvLayout

MAX_RATIO: Final = 8
"""The maximum of base blocks whose tokens a block of another table holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """Describes one block table of each sequence: its layers' window, and its blocks' tokens."""

    block_size: int  # tokens
    window: int | None = None  # as of LayerGeometry; None: all tokens


@dataclass(frozen=True, slots=True)
class TableBlocks:
    """Holds a part of a sequence's block table: the blocks from index `first` on.

    The tokens of the blocks before have left the window, or the reader does not need them.
    """

    blocks: tuple[int, ...]
    first: int = 0  # the index of blocks[0] in the table

    def tokens(self, block_size: int) -> range:
        """Returns the positions in the sequence of the tokens that the blocks hold."""
        return range(self.first * block_size, (self.first + len(self.blocks)) * block_size)

    def trim(self, first_token: int, end_token: int, block_size: int) -> "TableBlocks":
        """Returns the blocks with the tokens from `first_token` to before `end_token`.

        They must be within `tokens`.
        """
        first = first_token // block_size
        end = -(-end_token // block_size)
        return TableBlocks(self.blocks[first - self.first : end - self.first], first)


STATE_TABLE: Final = TableSpec(block_size=1)
"""Describes the table of a group of states: one block, which is a slot, with one token."""


@dataclass(frozen=True, slots=True)
class SequenceKv:
    """Holds the places of a sequence's KV cache in the memory of every rank."""

    tables: tuple[TableBlocks, ...]  # one for each TableSpec
    state: int | None = None  # the slot; None: the model keeps no state

    def table(self, tables: Sequence[TableSpec], group: CacheGroup) -> TableBlocks:
        """Returns the blocks of a group of layers; empty if the sequence has none for it."""
        if group.part.state:
            return TableBlocks(() if self.state is None else (self.state,))
        index = table_of(tables, group)
        return self.tables[index] if index < len(self.tables) else TableBlocks(())


def plan_tables(layout: KvLayout, block_size: int) -> tuple[TableSpec, ...]:
    """Returns the table of each distinct window of a model, the one without a window first.

    The table with the most bytes per token has blocks of `block_size` tokens. The blocks of the
    others hold the nearest whole multiple of it, at most MAX_RATIO, that makes their bytes equal. A
    model without attention has one table, whose blocks have no bytes.
    """
    tokens: dict[int | None, int] = {} if layout.token_groups else {None: 0}
    for group in layout.token_groups:
        window = group.part.window
        tokens[window] = tokens.get(window, 0) + group.token_bytes
    most = max(tokens.values(), default=0)
    return tuple(
        TableSpec(block_size=block_size * _ratio(most, tokens[window]), window=window)
        for window in sorted(tokens, key=lambda window: (window is not None, window or 0))
    )


def token_bytes(layout: KvLayout, tables: Sequence[TableSpec], slots: Sequence[int]) -> list[int]:
    """Returns the bytes of one token in each table, in all its layers of a rank.

    `slots` has the number of KV slots of each group, as `slots_of` returns it.
    """
    found = [0] * len(tables)
    for group, num_slots in zip(layout.token_groups, slots, strict=False):
        found[table_of(tables, group)] += group.rank_bytes(num_slots)
    return found


def _ratio(most: int, token_bytes: int) -> int:
    """Returns the multiple of the base block for a table with `token_bytes` for each token."""
    if not token_bytes:
        return 1
    return min(MAX_RATIO, max(1, (2 * most + token_bytes) // (2 * token_bytes)))


def spec_of(tables: Sequence[TableSpec], group: CacheGroup) -> TableSpec:
    """Returns the table that holds a group of tokens, or STATE_TABLE for a group of states."""
    return STATE_TABLE if group.part.state else tables[table_of(tables, group)]


def table_of(tables: Sequence[TableSpec], group: CacheGroup) -> int:
    """Returns the index of the table that holds a group of tokens; a single one holds all."""
    if len(tables) == 1:
        return 0
    return next(i for i, table in enumerate(tables) if table.window == group.part.window)


def held_blocks(tables: Sequence[TableSpec], num_tokens: int) -> tuple[int, ...]:
    """Returns the blocks that a decoding sequence holds in each table with its last token.

    A window keeps what the tokens after the last resume point see, a multiple of `alignment`.
    """
    last = num_tokens - 1
    point = last - last % alignment(tables)
    return tuple(
        -(-num_tokens // table.block_size)
        - max(point + 1 - (table.window or point + 1), 0) // table.block_size
        for table in tables
    )


def moved_bytes(layout: KvLayout, slots: Sequence[int], num_tokens: int) -> int:
    """Returns the bytes of a rank's part of a sequence that a transfer moves to another worker.

    `slots` as of `token_bytes`. The next token is computed there, so a window is moved without its
    first token.
    """
    total = 0
    for group, num_slots in zip(layout.groups, slots, strict=True):
        part = group.part
        tokens = num_tokens if part.window is None else min(num_tokens, part.window - 1)
        rows = 1 if part.state else tokens
        total += group.rank_bytes(num_slots) * rows
    return total


def alignment(tables: Iterable[TableSpec]) -> int:
    """Returns the number of tokens that fills whole blocks of every table."""
    return lcm(*(table.block_size for table in tables))


DISK_NEEDS_DENSE: Final = "kv_disk: needs a model without windows and states; leave it out"
"""The error if KV cache on disk is requested for a model that is not dense."""


def is_dense(layout: KvLayout, tables: Sequence[TableSpec]) -> bool:
    """Returns True if a prompt continues from every block of a cached prefix.

    A dense model keeps all tokens of each layer, and no state.
    """
    return not layout.state_groups and all(table.window is None for table in tables)


def has_sparse_points(layout: KvLayout, tables: Sequence[TableSpec]) -> bool:
    """Returns True if the blocks of the first table do not show where a prompt can continue.

    They show it closely if this table keeps all tokens and the model has no state, because windows
    keep the blocks before most of these positions.
    """
    return bool(layout.state_groups) or any(table.window is not None for table in tables[:1])


def block_bytes(layout: KvLayout, tables: Sequence[TableSpec], slots: Sequence[int]) -> int:
    """Returns the bytes of a block in a rank's memory, which are equal in all tables.

    `slots` as of `token_bytes`.
    """
    sizes = token_bytes(layout, tables, slots)
    return max(
        (table.block_size * size for table, size in zip(tables, sizes, strict=True)), default=0
    )
