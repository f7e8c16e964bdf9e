"""How sequences come to share blocks: several that go on from one, and beams that take over one another's place.

Full blocks are shared, a partial one is copied by the next step. Until that step is planned, whoever gets the copy also
holds the block it comes from, so that nobody else can.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

from .beam import Move
from .block_pool import BlockPool
from .sequence import Sequence, SequenceSpec, Task


def least_blocks(spec: SequenceSpec, block_size: int) -> int:
    """Blocks without which the sequence could not come to its end on an empty worker: one choice to its last token,
    all of them to the fork, after which they may be preempted one by one, or a whole beam search."""
    longest = -(-spec.max_length // block_size)
    if spec.num_choices == 1 or spec.task is Task.PREFILL:
        return longest
    shared = len(spec.tokens) // block_size
    tail = longest if spec.beam else -(-len(spec.tokens) // block_size)
    return max(longest, shared + spec.num_choices * (tail - shared))


def growth_each(sequence: Sequence) -> int:
    """Of the blocks reserved, how many each of the sequences gets to grow that `sequence` is to become."""
    num_copies = sequence.num_prompt_blocks - len(sequence.spec.tokens) // sequence.block_size
    return (len(sequence.reserved) - (sequence.num_slots - 1) * num_copies) // sequence.num_slots


def branch(pool: BlockPool, parent: Sequence, spec: SequenceSpec, num_growth: int) -> Sequence:
    """A sequence that goes on from all the computed tokens of `parent`, which gives it reserved blocks."""
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
    pool: BlockPool, beams: Items[Sequence], moves: Items[Move], new_beam: Callable[[Sequence], Sequence]
) -> tuple[list[Sequence], list[Sequence]]:
    """The sequences that carry on the beams, by the moves' order and each with its token, and those left over.

    The first move from a beam keeps its sequence. Each further one takes over a sequence that no move is from, with its
    own partial block, or `new_beam(parent)`."""
    origins = {place for place, _ in moves}
    idle = [beam for place, beam in enumerate(beams) if place not in origins]
    arranged: list[Sequence] = []
    for place, _ in moves:
        if place in origins:
            origins.remove(place)
            arranged.append(beams[place])
        elif idle:
            arranged.append(idle.pop())
            _take_over(pool, arranged[-1], beams[place])
        else:
            arranged.append(new_beam(beams[place]))
    for sequence, (_, token) in zip(arranged, moves, strict=True):
        sequence.append(token)
    return arranged, idle


def _take_over(pool: BlockPool, sequence: Sequence, source: Sequence) -> None:
    """Both have computed equally many tokens."""
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
    sequence.copy_source = source.blocks[-1]
    pool.share([sequence.copy_source])
