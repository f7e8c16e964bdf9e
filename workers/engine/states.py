"""Keeps the slots of the states of a worker's sequences.

A model that keeps states writes each of them to another slot than it read, so a running sequence
has two: the current one, and one for its next step. A worker whose model keeps none has no slots,
and the methods do nothing.
"""

from .block_pool import BlockPool, BlockState
from .block_table import NUM_STATES
from .config import EngineConfig
from .plan import StatePlan
from .resume import Hit
from .sequence import Sequence, State, Task


class SequenceStates:
    """Owns all slots; the sequences hold their numbers in `Sequence.slots`. Not thread-safe."""

    def __init__(self, config: EngineConfig, alignment: int) -> None:
        """Resume points are at multiples of `alignment`."""
        self.pool = BlockPool(config.num_states, config.num_host_states)
        self._config = config
        self._alignment = alignment
        # Slots that the steps of the next plan read, and the sequences that read them.
        self._read: list[tuple[Sequence, int]] = []

    def num_admission(self, sequence: Sequence, hit: Hit) -> int:
        """Returns the number of slots that a sequence reserves at admission, without a shared one.

        A PREFILL has a third, to which only its last step writes.
        """
        if not self._config.num_states:
            return 0
        block = None if hit.state is None else self.pool.block_of(hit.state)
        is_loaded = hit.state is not None and block is None
        wanted = NUM_STATES * sequence.num_branches + (sequence.spec.task is Task.PREFILL)
        return min(wanted + is_loaded, self._config.num_states - (block is not None))

    def admit(self, sequence: Sequence, hit: Hit) -> None:
        """Gives a sequence its slots; it continues from the state of `hit`, if there is one."""
        slots = sequence.slots
        count = self.num_admission(sequence, hit)
        if hit.state is not None and (slot := self.pool.block_of(hit.state)) is not None:
            self.pool.share([slot])
            slots.current = slot
        elif hit.state is not None:
            self.pool.host.pin([hit.state])
        slots.free = self.pool.reserve(count)
        if hit.state is not None and slots.current is None:
            self.pool.load([self.claim(sequence)], [hit.state])
        if sequence.spec.task is Task.DECODE and count:
            self.claim(sequence)
        elif sequence.spec.task is Task.PREFILL and count:
            slots.final = slots.free.pop()

    def claim(self, sequence: Sequence) -> int:
        """Makes the first free slot the current one, for an import to write to; returns it."""
        slot = sequence.slots.free.pop(0)
        self.pool.claim([slot])
        sequence.slots.current = slot
        return slot

    def prepare(self, sequence: Sequence, count: int = 1, num_kept: int = 0) -> int:
        """Reserves up to `count` slots for a sequence's next step; returns the number it has.

        Leaves `num_kept` slots available to other sequences.
        """
        free = sequence.slots.free
        num_available = max(self.pool.num_available - num_kept, 0)
        free += self.pool.reserve(min(max(count - len(free), 0), num_available))
        return len(free)

    def plan(self, sequence: Sequence, count: int, num_draft: int) -> StatePlan:
        """Plans the slots of a step of `count` tokens and a draft after them."""
        slots = sequence.slots
        start = sequence.num_scheduled
        end = start + count
        source = slots.current
        if num_draft:
            taken = [slots.free.pop(0) for _ in range(num_draft + 1)]
            self.pool.claim(taken)
            slots.draft = [(end + index, slot) for index, slot in enumerate(taken)]
            return StatePlan(source, tuple((p - start, slot) for p, slot in slots.draft))
        targets: list[tuple[int, int]] = []
        for position in self._checkpoints(sequence, start, end):
            (slot,) = self.pool.reserve(1)
            self.pool.claim([slot])
            slots.points.append((position, slot))
            targets.append((position - start, slot))
        if slots.final is not None and end >= len(sequence.spec.tokens):
            last, slots.final = slots.final, None
        else:
            last = slots.free.pop(0)
        self.pool.claim([last])
        if self._begin_point(sequence, end):
            self.pool.share([last])
            slots.points.append((end, last))
        slots.current = last
        if source is not None:
            self._read.append((sequence, source))
        return StatePlan(source, (*targets, (count, last)))

    def _checkpoints(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Returns the resume points within a chunk for which slots are available."""
        if not sequence.enters_cache:
            return []
        found = [position for position in sequence.points if start < position < end]
        return found[max(len(found) - self.pool.num_available, 0) :]

    def _begin_point(self, sequence: Sequence, position: int) -> bool:
        """Returns True if the state at a position is to be published, and makes room for it.

        Decoding leaves its newest point in place of the one before, which is forgotten here, and
        only in a free slot.
        """
        if not sequence.enters_cache:
            return False
        if position <= len(sequence.spec.tokens):
            return position in sequence.points
        if position % self._alignment:
            return False
        self._forget_newest(sequence)
        return self.pool.count(BlockState.FREE) > 0

    def _forget_newest(self, sequence: Sequence) -> None:
        name = sequence.slots.newest
        slot = None if name is None else self.pool.block_of(name)
        if slot is not None and self.pool.holders(slot) == (0, 0):
            self.pool.share([slot])
            self.pool.forget(slot)
            self.pool.release([slot])
        sequence.slots.newest = None

    def release_read(self) -> None:
        """Releases the slots that the steps of a plan read, after all admissions of the plan.

        An import writes at once, before the plan's steps. Each sequence gets a slot in exchange.
        """
        for sequence, slot in self._read:
            self.pool.release([slot])
            if sequence.state is State.RUNNING:
                self._refill(sequence)
        self._read.clear()

    def _refill(self, sequence: Sequence) -> None:
        """Gives a sequence the slots that its branches need beside the current one.

        Returns further slots to the pool: of a draft that was not made, and of choices that ended
        before the fork.
        """
        count = NUM_STATES * sequence.num_branches - 1
        self.prepare(sequence, count)
        self.pool.unreserve(sequence.slots.free[count:])
        del sequence.slots.free[count:]

    def publish(self, sequence: Sequence) -> None:
        """Publishes the states of resume points that are computed now."""
        slots = sequence.slots
        done = [point for point in slots.points if point[0] <= sequence.num_computed]
        slots.points = slots.points[len(done) :]
        sequence.extend_chain()
        for position, slot in done:
            name = sequence.chain[position // self._config.block_size - 1]
            if sequence.enters_cache:
                self.pool.publish(slot, name)
            self.pool.release([slot])
            if position > len(sequence.spec.tokens):
                slots.newest = name

    def settle(self, sequence: Sequence) -> None:
        """Makes the state after the last right token of a draft current, and frees the others."""
        slots = sequence.slots
        if not slots.draft:
            return
        for position, slot in slots.draft:
            if position == sequence.num_computed:
                self.pool.release(slots.held[:1])
                slots.current = slot
            elif position < sequence.num_computed and self._begin_point(sequence, position):
                slots.points.append((position, slot))
            else:
                self.pool.release([slot])
        slots.draft = []
        self.publish(sequence)
        self._refill(sequence)

    def import_again(self, sequence: Sequence) -> None:
        """Makes the slot to which an import has written the current one."""
        if sequence.slots.free:
            self.pool.release(sequence.slots.held)
            self.claim(sequence)
            self.prepare(sequence)

    def unreserve(self, sequence: Sequence) -> None:
        """Returns the slots that a sequence has not used to the pool."""
        self.pool.unreserve(sequence.slots.reserved)
        sequence.slots.free = []
        sequence.slots.final = None
