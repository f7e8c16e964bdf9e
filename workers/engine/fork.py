"""Forks sequences that share blocks: several choices of one prompt, and beams.

Full blocks are shared. The next step copies a partial block. Until that step is planned, the
sequence that gets the copy also owns the source block, so that nobody else can reuse it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

from ..kv_cache.tables import TableBlocks
from .beam import Move
from .block_pool import BlockPool
from .block_table import NUM_STATES, SequenceTable
from .sequence import Sequence, SequenceSpec


def growth_each(sequence: Sequence) -> int:
    """Returns the number of reserved blocks that each branch of `sequence` gets for growth."""
    num_tokens = len(sequence.spec.tokens)
    num_copies = sum(num_tokens % table.spec.block_size > 0 for table in sequence.tables)
    return (
        len(sequence.reserved) - (sequence.num_branches - 1) * num_copies
    ) // sequence.num_branches


def branch(
    pool: BlockPool, states: BlockPool, parent: Sequence, spec: SequenceSpec, num_growth: int
) -> Sequence:
    """Returns a branch that continues after all computed tokens of `parent`.

    The branch gets `num_growth` of the reserved blocks of `parent`, and one more for the copy of a
    partial block of each table.
    """
    child = parent.branch(spec)
    for own, source in zip(child.tables, parent.tables, strict=True):
        pool.share(own.blocks)
        if own.end < source.end:
            block = parent.reserved.pop()
            pool.claim([block])
            own.blocks.append(block)
            _copy_last(pool, own, source)
    child.cover()
    if parent.slots.current is not None:
        states.share([parent.slots.current])
        child.slots.current = parent.slots.current
        # Fewer if a cached state was shared at admission; its slot is available by now.
        split = max(len(parent.slots.free) - NUM_STATES, 0)
        child.slots.free = parent.slots.free[split:]
        del parent.slots.free[split:]
    split = len(parent.reserved) - num_growth
    parent.reserved, child.reserved = parent.reserved[:split], parent.reserved[split:]
    return child


def rearrange(
    pool: BlockPool,
    states: BlockPool,
    beams: Items[Sequence],
    moves: Items[Move],
    new_beam: Callable[[Sequence], Sequence],
) -> tuple[list[Sequence], list[Sequence]]:
    """Returns the sequences of the next beams, in the order of `moves`, and the unused sequences.

    Appends to each next beam the token of its move. The first move from a beam keeps that beam's
    sequence. Each further move reuses a sequence that no move continues, together with its partial
    block, or takes `new_beam(parent)`.
    """
    origins = {index for index, _ in moves}
    idle = [beam for index, beam in enumerate(beams) if index not in origins]
    arranged: list[Sequence] = []
    for index, _ in moves:
        if index in origins:
            origins.remove(index)
            arranged.append(beams[index])
        elif idle:
            arranged.append(idle.pop())
            _replace(pool, states, arranged[-1], beams[index])
        else:
            arranged.append(new_beam(beams[index]))
    for sequence, (_, token) in zip(arranged, moves, strict=True):
        sequence.tokens.append(token)
    return arranged, idle


def take_new_blocks(sequence: Sequence, copies: list[tuple[int, int]]) -> tuple[TableBlocks, ...]:
    """Returns the blocks that the ranks do not know; adds to `copies` those of partial blocks."""
    for table in sequence.tables:
        if table.copy_source is not None:
            target = table.blocks[sequence.num_scheduled // table.spec.block_size - table.first]
            copies.append((table.copy_source, target))
            table.copy_source = None
    return sequence.take_new_blocks()


def _replace(pool: BlockPool, states: BlockPool, sequence: Sequence, source: Sequence) -> None:
    """Turns a sequence into a copy of `source`, which has the same number of computed tokens."""
    for own, other in zip(sequence.tables, source.tables, strict=True):
        num_full = source.num_computed // other.spec.block_size - other.first
        pairs = zip(own.blocks[:num_full], other.blocks[:num_full], strict=True)
        common = next((index for index, (old, new) in enumerate(pairs) if old != new), num_full)
        pool.share(other.blocks[common:num_full])
        pool.release(own.blocks[common:num_full])
        own.blocks[common:num_full] = other.blocks[common:num_full]
        own.num_published = other.num_published
        if num_full < len(other.blocks):
            _copy_last(pool, own, other)
    if source.slots.current is not None and sequence.slots.current is not None:
        num_available = states.num_available
        states.share([source.slots.current])
        states.release([sequence.slots.current])
        sequence.slots.current = source.slots.current
        if states.num_available > num_available:  # the slot was its own, and it still needs two
            sequence.slots.free += states.reserve(1)
    sequence.continue_from(source)


def _copy_last(pool: BlockPool, table: SequenceTable, source: SequenceTable) -> None:
    """Schedules a copy of the source's partial block; the table owns the source until then."""
    table.copy_source = source.blocks[-1]
    pool.share([table.copy_source])
