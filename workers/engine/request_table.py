"""Keeps the sequences of one worker and the blocks of each.

Every change of a sequence's state or blocks goes through here, so that the counts agree. Makes no
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
    """Owns every sequence from `add` to FINISHED and all its blocks; not thread-safe."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.pool = BlockPool(config.num_blocks, config.num_host_blocks)
        self.sequences: dict[int, Sequence] = {}
        # By the ids of the submitted specs; their beams may have other ids.
        self.searches: dict[int, Search] = {}
        self.waiting: list[Sequence] = []  # the next to admit first
        # In order of admission; forked sequences follow their parent.
        self.running: list[Sequence] = []
        self.dropped: list[int] = []  # ids finished since the last plan
        # Imports that were committed since the last plan.
        self.committed: list[tuple[Sequence, FirstTokens]] = []
        # Adapters to unload with the first plan after the end of their last sequence.
        self.unloading: set[int] = set()
        # Sequences in IMPORTING or RUNNING; one that will fork counts for all its branches.
        self.num_holding = 0
        self.num_leased = 0
        # Leases of blocks that are being copied elsewhere, see `lease_cached`.
        self.copied = Counter[int]()
        self.num_draft_tokens = 0  # since the start
        self.num_accepted_tokens = 0  # since the start
        self.num_loaded_tokens = 0  # since the start

    @property
    def waiting_tokens(self) -> int:
        """Returns the number of prompt tokens to compute.

        Counts waiting and running prompts, and the part of importing prompts that is not imported.
        Safe from any thread because the copies are atomic.
        """
        queued = sum(s.num_tokens for s in tuple(self.waiting) if s.spec.task is not Task.DECODE)
        importing = [
            s for s in self.sequences.copy().values() if s.state is State.IMPORTING and s.importing
        ]
        rest = sum(s.num_uncomputed - len(s.importing) * self.config.block_size for s in importing)
        running = sum(s.num_uncomputed for s in tuple(self.running) if s.num_uncomputed > 1)
        return queued + rest + running

    def add(self, spec: SequenceSpec, submitted: float | None = None) -> None:
        """Queues a sequence behind the waiting sequences of equal order.

        The caller has checked `Scheduler.fits` and the bound of the queue. The queue time counts
        from `submitted`, or from now without it.
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
        """Returns the number of blocks for a sequence at admission.

        They are for its prompt and for the first growth of all its branches.
        """
        growth = -(-self.config.budgets.growth_tokens // self.config.block_size)
        alone = min(sequence.max_blocks, sequence.num_prompt_blocks + growth)
        if sequence.num_branches == 1:
            return alone
        # Branches share the full blocks of the prompt.
        further = alone - len(sequence.spec.tokens) // self.config.block_size
        return min(alone + (sequence.num_branches - 1) * further, self.config.num_blocks)

    def admit(self, sequence: Sequence, shared: list[int], in_host: list[bytes]) -> None:
        """Admits a queued sequence and gives it its blocks.

        `shared` are cached blocks of its prefix; `in_host` are the hashes of the next blocks, which
        host memory has. Raises RuntimeError if the pool has too few blocks.
        """
        self.pool.share(shared)
        self.pool.host.pin(in_host)
        sequence.blocks = shared
        sequence.reserved = self.pool.reserve(self.num_admission_blocks(sequence) - len(shared))
        num_shared = len(shared)
        self.claim(sequence, len(in_host))
        self.pool.load(sequence.blocks[num_shared:], in_host)
        sequence.num_loaded = len(in_host) * self.config.block_size
        self.num_loaded_tokens += sequence.num_loaded
        sequence.num_cached = len(sequence.blocks) * self.config.block_size
        sequence.num_scheduled = sequence.num_computed = sequence.num_cached
        sequence.started = self.clock()
        self.waiting.remove(sequence)
        self.num_holding += sequence.num_branches
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
        """Starts a sequence whose import has brought the KV cache of `num_tokens` more tokens."""
        self.start(sequence)
        sequence.started = self.clock()
        sequence.num_cached += num_tokens
        sequence.num_scheduled = sequence.num_computed = sequence.num_cached
        self.num_loaded_tokens += num_tokens
        self.publish(sequence)

    def lease_cached(self, digests: Iterable[bytes]) -> list[tuple[int, bytes]]:
        """Leases the cached blocks among `digests`; see `Engine.lease_cached`."""
        found = [(block, digest) for digest in digests for block in self.pool.match([digest])]
        self._lease_copied([block for block, _ in found])
        return found

    def lease_prefix(self, chain: Iterable[bytes]) -> list[int]:
        """Leases the blocks of the longest cached prefix; see `Engine.lease_prefix`."""
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
        """Ends leases that `lease_cached` or `lease_prefix` began."""
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
        """Suspends a running sequence; see `Engine.suspend`."""
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
        """Leases the blocks of a finished prefill or a suspended sequence.

        Returns the blocks reserved for growth to the pool. The ranks forget the sequence.
        """
        self._leave_batch(sequence)
        self.num_leased += 1
        self.pool.unreserve(sequence.reserved)
        sequence.reserved = []
        # No step will copy the partial block, so the reader gets the source block instead.
        if sequence.copy_source is not None:
            self.pool.release([sequence.blocks.pop()])
            sequence.blocks.append(sequence.copy_source)
            sequence.copy_source = None
        end = -(-sequence.num_computed // self.config.block_size)
        self.pool.release(sequence.blocks[end:])  # given for drafts
        del sequence.blocks[end:]
        self.pool.lease(sequence.blocks)
        sequence.move(State.LEASED)

    def fork(self, family: list[Sequence], spec: SequenceSpec, num_growth: int) -> None:
        """Replaces a running sequence by its branches.

        The first of `family` is that sequence. It continues as `spec` and keeps num_growth of its
        reserved blocks. The new sequences follow it in the batch.
        """
        parent, *others = family
        at = self.running.index(parent) + 1
        self.running[at:at] = others
        self.num_holding += len(family) - parent.num_branches
        self.pool.unreserve(parent.reserved[num_growth:])
        del parent.reserved[num_growth:], self.sequences[parent.spec.id]
        parent.become(spec)
        self.sequences |= {member.spec.id: member for member in family}

    def finish(self, sequence_id: int) -> None:
        """Ends a sequence in any state and frees its blocks; idempotent.

        The id of a beam, or of the search's spec, ends the whole beam search.
        """
        sequence = self.sequences.get(sequence_id)
        search = sequence.search if sequence else self.searches.get(sequence_id)
        if search:
            self.end_search(search)
        elif sequence:
            self.end(sequence)

    def abort(self, sequence: Sequence) -> list[int]:
        """Ends a sequence, or the search that a beam belongs to; returns the ids of its choices."""
        search = sequence.search
        ids = (
            [search.spec.id]
            if search
            else [sequence.spec.id + choice for choice in sequence.choices]
        )
        self.finish(sequence.spec.id)
        return ids

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence in any state except FINISHED and frees its blocks."""
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
                self.num_holding -= sequence.num_branches
            self.pool.release(sequence.held_blocks)
            self.pool.unreserve(sequence.reserved)
        sequence.blocks = []
        sequence.reserved = []
        sequence.copy_source = None
        sequence.move(State.FINISHED)

    def end_search(self, search: Search) -> None:
        """Ends all beams of a search and frees their blocks."""
        del self.searches[search.spec.id]
        for member in search.members:
            self.end(member)

    def cancel_choice(self, sequence_id: int, choice: int) -> None:
        """Ends one choice or hypothesis; see `Engine.cancel_choice`."""
        sequence = self.sequences.get(sequence_id)
        search = self.searches.get(sequence_id)
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
        """Raises RuntimeError unless the block tables and the pool's counts agree."""
        self.pool.check_integrity()
        num_owners = [0] * self.config.num_blocks
        num_leases = [0] * self.config.num_blocks
        reserved: list[int] = []
        for sequence in self.sequences.values():
            reserved += sequence.reserved
            counts = num_leases if sequence.state is State.LEASED else num_owners
            for block in sequence.held_blocks:
                counts[block] += 1
        for block, num_copied in self.copied.items():
            num_leases[block] += num_copied
        for block, (owners, leases) in enumerate(zip(num_owners, num_leases, strict=True)):
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
            for _ in range(sequence.num_branches)
        ]
        holding = sum(state in (State.IMPORTING, State.RUNNING) for state in states)
        if holding != self.num_holding or states.count(State.LEASED) != self.num_leased:
            raise RuntimeError(
                f"{holding} sequences hold blocks, {self.num_holding} are counted; of {states}"
            )

    def _leave_batch(self, sequence: Sequence) -> None:
        self.num_holding -= sequence.num_branches
        self.running.remove(sequence)
        self.dropped.append(sequence.spec.id)
