"""Keeps the sequences of one worker and the blocks of each.

Every change of a sequence's state or blocks goes through here, so that the counts agree. Takes no
scheduling decision.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable

from .block_pool import BlockPool, BlockState
from .config import EngineConfig
from .plan import FirstTokens
from .sequence import Search, Sequence, SequenceSpec, State, Task


class RequestTable:
    """Owns every sequence from `add` to FINISHED and all blocks they hold. Not thread-safe."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.pool = BlockPool(config.num_blocks, config.num_host_blocks)
        self.sequences: dict[int, Sequence] = {}
        # by the ids of their specs, which their beams need not have
        self.searches: dict[int, Search] = {}
        self.waiting: list[Sequence] = []  # the next to admit first
        # in order of admission; forked sequences follow their parent
        self.running: list[Sequence] = []
        self.dropped: list[int] = []  # ids finished since the last plan
        # imports committed since the last plan
        self.committed: list[tuple[Sequence, FirstTokens]] = []
        # adapters that leave with the first plan after their last sequence
        self.unloading: set[int] = set()
        # sequences in IMPORTING or RUNNING, with those that they will fork into
        self.num_holding = 0
        self.num_leased = 0
        # leases of blocks that are being copied elsewhere, see `lease_cached`
        self.copied = Counter[int]()
        self.num_draft_tokens = self.num_accepted_tokens = 0  # since the start
        self.num_restored_tokens = 0  # since the start

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to compute: in the queue, under way, and what is left of prompts that are
        being imported. Safe
        from any thread: the copies are atomic.
        """
        queued = sum(s.num_tokens for s in tuple(self.waiting) if s.spec.task is not Task.DECODE)
        importing = [
            s for s in self.sequences.copy().values() if s.state is State.IMPORTING and s.importing
        ]
        rest = sum(s.num_uncomputed - len(s.importing) * self.config.block_size for s in importing)
        return (
            queued
            + rest
            + sum(s.num_uncomputed for s in tuple(self.running) if s.num_uncomputed > 1)
        )

    def add(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence behind those of its order. The caller has checked `Scheduler.fits` and
        the queue's bound. The queue time counts from `submitted`, else from now.
        """
        search = Search(spec) if spec.beam else None
        submitted = self.clock() if submitted is None else submitted
        sequence = Sequence(
            search.member_spec() if search else spec,
            self.config.block_size,
            submitted,
            search=search,
        )
        if search:
            search.members.append(sequence)
            self.searches[spec.id] = search
        self.sequences[spec.id] = sequence
        insort(self.waiting, sequence, key=lambda other: other.spec.order)

    def num_admission_blocks(self, sequence: Sequence) -> int:
        """Returns the blocks that a sequence gets at admission: for its prompt and for the first
        growth of all sequences that it will fork into.
        """
        growth = -(-self.config.budgets.growth_tokens // self.config.block_size)
        alone = min(sequence.max_blocks, sequence.num_prompt_blocks + growth)
        if sequence.num_slots == 1:
            return alone
        # full blocks of the prompt are shared
        further = alone - len(sequence.spec.tokens) // self.config.block_size
        return min(alone + (sequence.num_slots - 1) * further, self.config.num_blocks)

    def admit(self, sequence: Sequence, shared: list[int], restored: list[bytes]) -> None:
        """Gives a queued sequence its blocks, of which the prefix cache has `shared` and, after
        them, in host memory those of the hashes `restored`. Raises RuntimeError if the pool has too
        few.
        """
        self.pool.share(shared)
        self.pool.host.pin(restored)
        sequence.blocks = shared
        sequence.reserved = self.pool.reserve(self.num_admission_blocks(sequence) - len(shared))
        num_shared = len(shared)
        self.claim(sequence, len(restored))
        self.pool.restore(sequence.blocks[num_shared:], restored)
        sequence.num_restored = len(restored) * self.config.block_size
        self.num_restored_tokens += sequence.num_restored
        sequence.num_cached = len(sequence.blocks) * self.config.block_size
        sequence.num_scheduled = sequence.num_computed = sequence.num_cached
        sequence.started = self.clock()
        self.waiting.remove(sequence)
        self.num_holding += sequence.num_slots
        if sequence.spec.task is Task.DECODE or sequence.importing:
            sequence.move(State.IMPORTING)
        else:
            self.start(sequence)

    def start(self, sequence: Sequence) -> None:
        """Puts a sequence into the batch, with blocks for its whole prompt."""
        self.claim(sequence, sequence.num_prompt_blocks - len(sequence.blocks))
        sequence.move(State.RUNNING)
        self.running.append(sequence)

    def claim(self, sequence: Sequence, count: int) -> None:
        """Appends `count` of a sequence's reserved blocks to its block table."""
        self.pool.claim(sequence.reserved[:count])
        sequence.blocks += sequence.reserved[:count]
        del sequence.reserved[:count]

    def commit_prefix(self, sequence: Sequence, num_tokens: int) -> None:
        """Starts an importing sequence that has the KV cache of num_tokens more than at its
        admission.
        """
        self.start(sequence)
        sequence.started = self.clock()
        sequence.num_scheduled = sequence.num_computed = sequence.num_cached = (
            sequence.num_cached + num_tokens
        )
        self.num_restored_tokens += num_tokens
        self.publish(sequence)

    def lease_cached(self, digests: Iterable[bytes]) -> list[tuple[int, bytes]]:
        """See `Engine.lease_cached`."""
        found = [(block, digest) for digest in digests for block in self.pool.match([digest])]
        self._lease_copied([block for block, _ in found])
        return found

    def lease_prefix(self, chain: Iterable[bytes]) -> list[int]:
        """See `Engine.lease_prefix`."""
        blocks = self.pool.match(chain)
        num_leased = self.pool.count(BlockState.LEASED)
        if (
            2 * (num_leased + self.pool.num_evictable(blocks))
            > num_leased + self.pool.num_available
        ):
            return []
        self._lease_copied(blocks)
        return blocks

    def _lease_copied(self, blocks: list[int]) -> None:
        self.pool.share(blocks)
        self.pool.lease(blocks)
        self.copied.update(blocks)

    def unlease_cached(self, blocks: list[int]) -> None:
        """Ends leases of `lease_cached` or `lease_prefix`."""
        self.pool.unlease(blocks)
        self.copied -= Counter(blocks)

    def take_unloaded(self) -> tuple[int, ...]:
        """Returns the adapters to unload that no sequence uses any more."""
        if not self.unloading:
            return ()
        unused = self.unloading - {sequence.spec.adapter for sequence in self.sequences.values()}
        self.unloading -= unused
        return tuple(sorted(unused))

    def publish(self, sequence: Sequence) -> None:
        """Adds the sequence's newly full and computed blocks to the prefix cache."""
        if self.config.budgets.prefix_caching:
            for block, digest in sequence.publishable():
                self.pool.publish(block, digest)

    def suspend(self, sequence_id: int) -> bool:
        """See `Engine.suspend`."""
        search = self.searches.get(sequence_id)
        sequence = search.members[0] if search else self.sequences.get(sequence_id)
        if sequence is None or sequence.state in (State.WAITING, State.IMPORTING):
            return False
        if (
            sequence.state is State.RUNNING
            and not sequence.search
            and sequence.spec.task is not Task.PREFILL
        ):
            sequence.suspend()
        return True

    def lease(self, sequence: Sequence) -> None:
        """Turns the blocks of a finished prefill or a suspended sequence into a lease and returns
        those reserved for growth; the ranks forget the sequence.
        """
        self._leave_batch(sequence)
        self.num_leased += 1
        self.pool.unreserve(sequence.reserved)
        sequence.reserved = []
        if sequence.copy_source is not None:  # a reader finds there what no step will copy
            self.pool.release([sequence.blocks.pop()])
            sequence.blocks.append(sequence.copy_source)
            sequence.copy_source = None
        end = -(-sequence.num_computed // self.config.block_size)
        self.pool.release(sequence.blocks[end:])  # given for drafts
        del sequence.blocks[end:]
        self.pool.lease(sequence.blocks)
        sequence.move(State.LEASED)

    def fork(self, family: list[Sequence], spec: SequenceSpec, num_growth: int) -> None:
        """Replaces a running sequence by several: the first of `family` is that sequence and
        continues as `spec`, with num_growth of its reserved blocks; the new ones follow it in the
        batch.
        """
        parent, *others = family
        at = self.running.index(parent) + 1
        self.running[at:at] = others
        self.num_holding += len(family) - parent.num_slots
        self.pool.unreserve(parent.reserved[num_growth:])
        del parent.reserved[num_growth:], self.sequences[parent.spec.id]
        parent.become(spec)
        self.sequences |= {member.spec.id: member for member in family}

    def finish(self, sequence_id: int) -> None:
        """Frees whatever the sequence holds, in any state; ends the whole search of a beam, also by
        the id of the search's spec. Idempotent.
        """
        sequence = self.sequences.get(sequence_id)
        search = sequence.search if sequence else self.searches.get(sequence_id)
        if search:
            self.end_search(search)
        elif sequence:
            self.end(sequence)

    def abort(self, sequence: Sequence) -> list[int]:
        """Ends a sequence, or the search of a beam; returns the ids of its choices."""
        search = sequence.search
        ids = (
            [search.spec.id]
            if search
            else [sequence.spec.id + choice for choice in sequence.choices]
        )
        self.finish(sequence.spec.id)
        return ids

    def end(self, sequence: Sequence) -> None:
        """Frees whatever the sequence holds, in any state but FINISHED."""
        del self.sequences[sequence.spec.id]
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.LEASED:
            self.num_leased -= 1
            self.pool.unlease(sequence.blocks)
        else:
            if sequence.state is State.RUNNING:
                self._leave_batch(sequence)
            else:
                self.num_holding -= sequence.num_slots
            self.pool.release(sequence.held_blocks)
            self.pool.unreserve(sequence.reserved)
        sequence.blocks, sequence.reserved, sequence.copy_source = [], [], None
        sequence.move(State.FINISHED)

    def end_search(self, search: Search) -> None:
        """Frees whatever the beams of a search hold."""
        del self.searches[search.spec.id]
        for member in search.members:
            self.end(member)

    def cancel_choice(self, sequence_id: int, choice: int) -> None:
        """See `Engine.cancel_choice`."""
        sequence, search = self.sequences.get(sequence_id), self.searches.get(sequence_id)
        if search:
            wanted = search.choices
        elif sequence and sequence.spec.num_choices > 1:
            wanted = sequence.choices
        else:
            self.finish(sequence_id + choice)
            return
        if choice in wanted:
            wanted.remove(choice)
            if not wanted:
                self.finish(sequence_id)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block is held by exactly the sequences whose tables name
        it.
        """
        self.pool.check_integrity()
        holders = [[0, 0] for _ in range(self.config.num_blocks)]
        reserved: list[int] = []
        for sequence in self.sequences.values():
            reserved += sequence.reserved
            for block in sequence.held_blocks:
                holders[block][sequence.state is State.LEASED] += 1
        for block, num_leases in self.copied.items():
            holders[block][1] += num_leases
        for block, (owners, leases) in enumerate(holders):
            if (owners, leases) != self.pool.holders(block):
                raise RuntimeError(
                    f"block {block}: {owners} owners, {leases} leases; the pool has "
                    f"{self.pool.holders(block)}"
                )
        if not len(reserved) == len(set(reserved)) == self.pool.count(BlockState.RESERVED):
            raise RuntimeError(
                f"{reserved} reserved; the pool has {self.pool.count(BlockState.RESERVED)}"
            )
        states = [
            sequence.state
            for sequence in self.sequences.values()
            for _ in range(sequence.num_slots)
        ]
        holding = sum(state in (State.IMPORTING, State.RUNNING) for state in states)
        if holding != self.num_holding or states.count(State.LEASED) != self.num_leased:
            raise RuntimeError(
                f"{holding} sequences hold blocks, {self.num_holding} are counted; of {states}"
            )

    def _leave_batch(self, sequence: Sequence) -> None:
        self.num_holding -= sequence.num_slots
        self.running.remove(sequence)
        self.dropped.append(sequence.spec.id)
