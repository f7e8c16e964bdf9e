"""Finds the longest prefix of a prompt from which a sequence can continue: a resume point.

To continue from a position, a sequence needs the blocks of the full table before it, the blocks of
each window before it, and the state there. Every part has a name that identifies all tokens before
its end, so parts with the right names belong together. A hit is a whole point or nothing. For a
model with one full table every full block is a point. Pure: knows names, not blocks.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ..kv_cache.tables import TableBlocks, alignment
from .block_table import block_name, window_first
from .config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Describes the longest resume point of a prompt."""

    num_tokens: int = 0
    # The number of tokens whose blocks of table 0 are cached; more than `num_tokens` where another
    # part of later points is missing.
    num_matched: int = 0
    # For each table, the index of the first block of the point, and the names of its blocks.
    parts: tuple[tuple[int, tuple[bytes, ...]], ...]
    state: bytes | None = None  # the name of the state


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedPrefix:
    """Names the parts of a resume point that are leased for a copy."""

    num_tokens: int = 0
    tables: tuple[TableBlocks, ...] = ()
    state: int | None = None

    @property
    def blocks(self) -> list[int]:
        """Returns the leased blocks of all tables."""
        return [block for table in self.tables for block in table.blocks]


class ResumePoints:
    """Knows the tables of an engine's config, and looks for resume points by their names."""

    def __init__(self, config: EngineConfig) -> None:
        self._tables = config.tables
        self._size = config.block_size
        self._has_state = config.num_states > 0
        self.alignment = alignment(config.tables)
        # Every block of a model with one full table is a point, and none has to be kept for one.
        self.is_sparse = self._has_state or any(table.window for table in config.tables)
        window_blocks = sum(
            -(-(table.window - 1) // table.block_size) for table in config.tables if table.window
        )
        # As many tokens of the blocks that stay in the cache as have the bytes of a point.
        spacing = window_blocks * config.tables[0].block_size + config.state_tokens
        self._spacing = max(-(-spacing // self.alignment), 1) * self.alignment

    def points(self, num_tokens: int, hit: Hit, retained: Iterable[int] = ()) -> tuple[int, ...]:
        """Returns the ascending positions at which a prompt leaves resume points.

        These are its last possible one, the hit itself, the position where the prompt diverges from
        the cached tokens of table 0, the ends of `retained` prefixes, and regular ones. Without
        `retained`, at most half of the cache's bytes then belong to points.
        """
        if not self.is_sparse:
            return ()
        last = self.last_point(num_tokens, num_tokens)
        wanted = (self.last_point(num_tokens, end) for end in (hit.num_matched, *retained))
        regular = range(self._spacing, last + 1, self._spacing)
        return tuple(sorted({*regular, last, *wanted, hit.num_tokens} - {0}))

    def last_point(self, num_tokens: int, end: int) -> int:
        """Returns the last possible point at or before `end` of a prompt of `num_tokens`."""
        return min(end, num_tokens - 1) // self.alignment * self.alignment

    def last_within(self, num_tokens: int, end: int, num_blocks: int) -> int:
        """Returns the last possible point as of `last_point` that needs at most `num_blocks`."""
        possible = range(0, self.last_point(num_tokens, end) + 1, self.alignment)
        return possible[bisect_right(possible, num_blocks, key=self._num_blocks) - 1]

    def _num_blocks(self, position: int) -> int:
        """Returns the number of blocks of a point; a later point never has fewer."""
        return sum(
            position // table.block_size - window_first(table, position) for table in self._tables
        )

    def longest(
        self,
        chain: Items[bytes],
        has_block: Callable[[bytes], bool],
        has_state: Callable[[bytes], bool],
        *,
        fetched: int | None = None,
    ) -> Hit:
        """Returns the longest point within a chain of base blocks.

        A prompt of `fetched` tokens whose KV cache comes from another worker needs no state, and of
        the windows only blocks before its own end. `has_block` and `has_state` tell whether the
        cache has a name.
        """
        tables = self._tables
        if tables[0].window is None:
            ratio = tables[0].block_size // self._size
            matched = 0
            for digest in chain[ratio - 1 :: ratio]:
                if not has_block(digest):
                    break
                matched += tables[0].block_size
        else:
            matched = len(chain) * self._size
        position = matched - matched % self.alignment
        needs_state = self._has_state and fetched is None
        while position and self.is_sparse:
            gap = position - 1
            if not needs_state or has_state(self._digest(chain, position)):
                found = self._gap(chain, position, has_block, fetched)
                if found is None:
                    break
                gap = found
            position = gap - gap % self.alignment
        parts = tuple(self._part(chain, number, position, fetched) for number in range(len(tables)))
        if fetched is not None and not any(names for _, names in parts):
            position = 0  # windows need nothing of the tokens that are far before a fetched end
        return Hit(
            num_tokens=position,
            num_matched=matched,
            parts=parts,
            state=self._digest(chain, position) if position and needs_state else None,
        )

    def _gap(
        self,
        chain: Items[bytes],
        position: int,
        has_block: Callable[[bytes], bool],
        fetched: int | None,
    ) -> int | None:
        """Returns None if the cache has the windows' blocks of a point.

        Else returns a lower position, above which there is no point either.
        """
        for number, table in enumerate(self._tables):
            if table.window is None:
                continue
            first, names = self._part(chain, number, position, fetched)
            for index in range(len(names) - 1, -1, -1):
                if not has_block(names[index]):
                    start = (first + index) * table.block_size
                    return start if fetched is None else max(start, fetched - table.window + 1)
        return None

    def _part(
        self, chain: Items[bytes], number: int, position: int, fetched: int | None
    ) -> tuple[int, tuple[bytes, ...]]:
        """Returns the first index and the names of a table's blocks that a point needs."""
        table = self._tables[number]
        size = table.block_size
        first = window_first(table, position if fetched is None else fetched)
        return first, tuple(
            block_name(self._digest(chain, end), number)
            for end in range((first + 1) * size, position + 1, size)
        )

    def _digest(self, chain: Items[bytes], position: int) -> bytes:
        return chain[position // self._size - 1]
