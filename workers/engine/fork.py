"""Forks sequences that share blocks: several choices of one prompt, and beams.

Full blocks are shared. The next step copies a partial block. Until that step is planned, the
sequence that gets the copy also owns the source block, so that nobody else can reuse it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

from .beam import Move
from .block_pool import BlockPool
from .sequence import Sequence, SequenceSpec, Task


def least_blocks(spec: SequenceSpec, block_size: int) -> int:
    """Returns the number of blocks that a sequence needs to finish on an empty worker.

    One choice must reach its last token. Several choices must reach the fork; afterwards they may
    be preempted one by one. All beams of a beam search must reach their last tokens.
    """
    longest = -(-spec.max_length // block_size)
    if spec.num_choices == 1 or spec.task is Task.PREFILL:
        return longest
    shared = len(spec.tokens) // block_size
    tail = longest if spec.beam else -(-len(spec.tokens) // block_size)
    return max(longest, shared + spec.num_choices * (tail - shared))


def growth_each(sequence: Sequence) -> int:
    """Returns the number of reserved blocks that each branch of `sequence` gets for growth."""
    num_copies = sequence.num_prompt_blocks - len(sequence.spec.tokens) // sequence.block_size
    return (
        len(sequence.reserved) - (sequence.num_branches - 1) * num_copies
    ) // sequence.num_branches


def branch(pool: BlockPool, parent: Sequence, spec: SequenceSpec, num_growth: int) -> Sequence:
    """Returns a branch that continues after all computed tokens of `parent`.

    The branch gets `num_growth` of the reserved blocks of `parent`, and one more for the copy of a
    partial block.
    """
    child = parent.branch(spec)
    num_full = parent.num_computed // parent.block_size
    child.blocks = parent.blocks[:num_full]
    pool.share(child.blocks)
    if num_full < len(parent.blocks):
        own = parent.reserved.pop()
        pool.claim([own])
        child.blocks.append(own)
        _copy_last(pool, child, parent)
    split = len(parent.reserved) - num_growth
    parent.reserved, child.reserved = parent.reserved[:split], parent.reserved[split:]
    return child


def rearrange(
    pool: BlockPool,
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
            _replace(pool, arranged[-1], beams[index])
        else:
            arranged.append(new_beam(beams[index]))
    for sequence, (_, token) in zip(arranged, moves, strict=True):
        sequence.tokens.append(token)
    return arranged, idle


def _replace(pool: BlockPool, sequence: Sequence, source: Sequence) -> None:
    """Turns a sequence into a copy of `source`, which has the same number of computed tokens."""
    num_full = source.num_computed // source.block_size
    pairs = zip(sequence.blocks[:num_full], source.blocks[:num_full], strict=True)
    common = next((index for index, (old, new) in enumerate(pairs) if old != new), num_full)
    pool.share(source.blocks[common:num_full])
    pool.release(sequence.blocks[common:num_full])
    sequence.blocks[common:num_full] = source.blocks[common:num_full]
    sequence.continue_from(source)
    if num_full < len(source.blocks):
        _copy_last(pool, sequence, source)


def _copy_last(pool: BlockPool, sequence: Sequence, source: Sequence) -> None:
    """Schedules a copy of the source's partial block; the sequence owns the source until then."""
    sequence.copy_source = source.blocks[-1]
    pool.share([sequence.copy_source])
