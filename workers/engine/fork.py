"""Forks sequences that share blocks: several continuations of one, and beams that replace one
another.

Full blocks are shared, a partial one is copied by the next step. Until that step is planned, the
sequence that gets the copy also owns the source block, so that it cannot be reused.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

from .beam import Move
from .block_pool import BlockPool
from .sequence import Sequence, SequenceSpec, Task


def least_blocks(spec: SequenceSpec, block_size: int) -> int:
    """Returns the blocks that a sequence needs to finish on an empty worker: one choice to its last
    token, all choices up to the fork, after which they may be preempted one by one, or a whole beam
    search.
    """
    longest = -(-spec.max_length // block_size)
    if spec.num_choices == 1 or spec.task is Task.PREFILL:
        return longest
    shared = len(spec.tokens) // block_size
    tail = longest if spec.beam else -(-len(spec.tokens) // block_size)
    return max(longest, shared + spec.num_choices * (tail - shared))


def growth_each(sequence: Sequence) -> int:
    """Returns how many of its reserved blocks each sequence that `sequence` forks into gets for
    growth.
    """
    num_copies = sequence.num_prompt_blocks - len(sequence.spec.tokens) // sequence.block_size
    return (len(sequence.reserved) - (sequence.num_slots - 1) * num_copies) // sequence.num_slots


def branch(pool: BlockPool, parent: Sequence, spec: SequenceSpec, num_growth: int) -> Sequence:
    """Returns a sequence that continues from all computed tokens of `parent` and takes over some of
    its reserved blocks.
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
    """Returns the sequences of the next beams, in the moves' order and each with its token, and the
    unused sequences.

    The first move from a beam keeps its sequence. Each further one reuses a sequence that no move
    is from, with its own partial block, or takes `new_beam(parent)`.
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
    """Replaces a sequence by a copy of `source`, which has computed equally many tokens."""
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
    """Has the next step copy the source's partial block, which the sequence owns until then."""
    sequence.copy_source = source.blocks[-1]
    pool.share([sequence.copy_source])
