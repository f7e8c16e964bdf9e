"""Keeps the sequences of one worker and the blocks of each.

Every change of a sequence's state or blocks goes through here, so that the counts agree. Makes no
scheduling decision. One file because the counts of sequences, blocks and leases change together.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import islice

from ..kv_cache.tables import TableBlocks
from .block_pool import BlockPool, BlockState
from .block_table import (
    SequenceTable,
    StateSlots,
    TableNeed,
    table_need,
    window_first,
)
from .config import EngineConfig
from .plan import FirstTokens
from .resume import Hit, LeasedPrefix, ResumePoints
from .sequence import PrefixRetention, Search, Sequence, SequenceSpec, State, Task
from .states import SequenceStates


class RequestTable:
    """Owns every sequence from `add` to FINISHED and all its blocks; not thread-safe."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.pool = BlockPool(config.num_blocks, config.num_host_blocks)
        self.resume = ResumePoints(config)
        self.states = SequenceStates(config, self.resume.alignment)
        self.limits = config.table_limits
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
        self.num_draft_tokens = 0  # since the start
        self.num_accepted_tokens = 0  # since the start
        self.num_loaded_tokens = 0  # since the start

    @property
    def is_importing(self) -> bool:
        """Returns True if a sequence waits for its KV cache."""
        return any(sequence.state is State.IMPORTING for sequence in self.sequences.values())

    @property
    def waiting_tokens(self) -> int:
        """Returns the number of prompt tokens to compute.

        Counts waiting and running prompts, and the part of importing prompts that is not imported.
        Safe from any thread because the copies are atomic. An import may end and a prompt may run
        meanwhile, so each number is read once and counts as at least 0.
        """
        queued = sum(s.num_tokens for s in tuple(self.waiting) if s.spec.task is not Task.DECODE)
        importing = [
            s
            for s in self.sequences.copy().values()
            if s.state is State.IMPORTING and s.import_hashes
        ]
        block_size = self.config.block_size
        rest = sum(max(s.num_uncomputed - len(s.import_hashes) * block_size, 0) for s in importing)
        running = sum(count for s in tuple(self.running) if (count := s.num_uncomputed) > 1)
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
            self.config.tables,
            search=search,
            enters_cache=spec.enters_cache and self.config.budgets.prefix_caching,
        )
        if search:
            search.members.append(sequence)
            self.searches[spec.id] = search
        self.sequences[spec.id] = sequence
        insort(self.waiting, sequence, key=lambda other: other.spec.order)

    def find_hit(self, sequence: Sequence) -> Hit:
        """Returns the longest resume point of a queued sequence's prompt."""
        spec = sequence.spec
        fetched = len(spec.tokens) if spec.task is Task.DECODE else None
        return self.resume.longest(
            self.cacheable(sequence), self.pool.has, self.states.pool.has, fetched=fetched
        )

    def cacheable(self, sequence: Sequence) -> list[bytes]:
        """Returns the hashes of the prompt's blocks for which a cache hit saves the computation."""
        if not self.config.budgets.prefix_caching or sequence.needs_every_position:
            return []
        # A prompt that is computed here must compute at least its last token, for the logits.
        last = sequence.num_tokens - (sequence.spec.task is not Task.DECODE)
        return sequence.chain[: last // self.config.block_size]

    def needs(self, sequence: Sequence, num_cached: int) -> list[TableNeed]:
        """Returns the blocks that each table needs beyond a sequence's cached tokens."""
        return [
            table_need(
                table.spec,
                self.limits,
                num_tokens=len(sequence.spec.tokens),
                max_length=sequence.spec.max_length,
                num_cached=num_cached,
                is_computed=sequence.spec.task is not Task.DECODE,
            )
            for table in sequence.tables
        ]

    def num_admission_blocks(self, sequence: Sequence, hit: Hit, num_shared: int) -> int:
        """Returns the number of blocks that a sequence reserves at admission.

        They are for the blocks of its prompt that are not among the `num_shared` blocks in the
        pool, and for the first growth of all its branches.
        """
        needs = self.needs(sequence, hit.num_tokens)
        in_host = sum(len(names) for _, names in hit.parts) - num_shared
        # Branches share the full blocks of the prompt.
        alone = sum(need.tail + need.ring + need.growth for need in needs) + in_host
        further = sum(need.copies + need.growth for need in needs)
        # A hit must not keep a sequence from running that would run without it. Blocks of the hit
        # that leave a window refill the ring.
        return min(
            alone + (sequence.num_branches - 1) * further, self.config.num_blocks - num_shared
        )

    def admit(self, sequence: Sequence, hit: Hit) -> None:
        """Admits a queued sequence, which continues from `hit`, and gives it its blocks.

        Raises RuntimeError if the pool has too few blocks.
        """
        names = [name for _, names in hit.parts for name in names]
        blocks = [self.pool.block_of(name) for name in names]
        shared = [block for block in blocks if block is not None]
        self.pool.share(shared)
        self.pool.host.pin(
            [name for name, block in zip(names, blocks, strict=True) if block is None]
        )
        reserved = self.pool.reserve(self.num_admission_blocks(sequence, hit, len(shared)))
        sequence.num_loaded = self._take_hit(sequence, hit, reserved)
        self.num_loaded_tokens += sequence.num_loaded
        sequence.num_cached = hit.num_tokens
        self._set_needs(sequence, reserved)
        if self._count_ring(sequence) > sum(table.num_ring for table in sequence.tables):
            sequence.import_hashes = ()
        self.states.admit(sequence, hit)
        ends = (self._retained_end(sequence, each) for each in sequence.retentions)
        sequence.points = self.resume.points(len(sequence.spec.tokens), hit, ends)
        sequence.num_scheduled = sequence.num_computed = sequence.num_cached
        sequence.started = self.clock()
        self.waiting.remove(sequence)
        self.num_holding += sequence.num_branches
        if sequence.spec.task is Task.DECODE or sequence.import_hashes:
            sequence.move(State.IMPORTING)
        else:
            self.start(sequence)

    def _take_hit(self, sequence: Sequence, hit: Hit, reserved: list[int]) -> int:
        """Puts the shared blocks of a hit into the tables, and loads the others into new blocks.

        Takes the new blocks from `reserved`. Returns the number of loaded tokens.
        """
        num_loaded = 0
        for table, (first, names) in zip(sequence.tables, hit.parts, strict=True):
            table.first = first
            for name in names:
                block = self.pool.block_of(name)
                if block is None:
                    block = reserved.pop(0)
                    self.pool.claim([block])
                    self.pool.load([block], [name])
                    num_loaded += 0 if table.number else table.spec.block_size
                table.blocks.append(block)
            table.num_published = table.end
        return num_loaded

    def _set_needs(self, sequence: Sequence, reserved: list[int]) -> None:
        """Divides the reserved blocks of an admission among tails, rings, copies and growth."""
        needs = self.needs(sequence, sequence.num_cached)
        copies = (sequence.num_branches - 1) * sum(need.copies for need in needs)
        for table, need in zip(sequence.tables, needs, strict=True):
            table.tail_first = need.tail_first
            table.tail = reserved[: need.tail]
            del reserved[: need.tail]
            if sequence.spec.task is Task.DECODE and table.spec.window is not None:
                # The first block of a fetched window may be incomplete.
                start = max(len(sequence.spec.tokens) - table.spec.window + 1, 0)
                table.num_published = max(table.end, -(-start // table.spec.block_size))
        room = len(reserved) - copies
        for table, need in zip(sequence.tables, needs, strict=True):
            table.num_ring = max(min(need.ring, room), 0)
            room -= table.num_ring
        sequence.reserved = reserved
        sequence.cover()

    def start(self, sequence: Sequence) -> None:
        """Puts a sequence into the batch, with blocks for its whole prompt or its tail."""
        for table in sequence.tables:
            if table.end >= table.tail_first:
                self.pool.claim(table.tail)
                table.blocks += table.tail
                table.tail = []
        sequence.cover()
        sequence.move(State.RUNNING)
        self.running.append(sequence)

    def add_block(self, sequence: Sequence, table: SequenceTable) -> bool:
        """Appends a block to a table; returns False if none is reserved or available."""
        is_before_tail = table.end < table.tail_first
        if table.tail and not is_before_tail:
            block = table.tail.pop(0)
        elif sequence.reserved and (table.num_ring or not is_before_tail):
            block = sequence.reserved.pop(0)
            table.num_ring -= is_before_tail
        elif self.pool.num_available:
            (block,) = self.pool.reserve(1)
        else:
            return False
        self.pool.claim([block])
        table.blocks.append(block)
        return True

    def extend(self, sequence: Sequence, end: int) -> int:
        """Gives the tables blocks for the tokens before `end` as far as blocks are available.

        Blocks that have left their windows are released first. Returns the position up to which
        the tables have blocks.
        """
        if end > sequence.num_covered:
            for table in sequence.tables:
                if table.num_covered < end and table.spec.window is not None:
                    self.slide(sequence, table)
                while table.num_covered < end and self.add_block(sequence, table):
                    pass
            sequence.cover()
        return sequence.num_covered

    def slide(self, sequence: Sequence, table: SequenceTable) -> None:
        """Releases the blocks that have left a window before the next step.

        Only computed blocks leave, so each is in the cache by then. It stays there if a resume
        point needs it. A prompt gets a block in exchange as long as its ring needs one.
        """
        first = window_first(table.spec, sequence.num_scheduled, self.limits.alignment)
        index = table.first
        left = table.slide(min(first, sequence.num_computed // table.spec.block_size))
        for block in left:
            if not table.serves(index, sequence.points) and self.pool.holders(block) == (1, 0):
                self.pool.forget(block)
            index += 1
        self.pool.release(left)
        wanted = table.tail_first - table.end - table.num_ring
        count = max(min(wanted, len(left), self.pool.num_available), 0)
        sequence.reserved += self.pool.reserve(count)
        table.num_ring += count

    def commit_prefix(self, sequence: Sequence, num_tokens: int) -> None:
        """Starts a sequence whose import has brought the KV cache of `num_tokens` more tokens."""
        self._move_tables(sequence, sequence.num_cached + num_tokens)
        if num_tokens:
            self.states.import_again(sequence)
        self.start(sequence)
        sequence.started = self.clock()
        sequence.num_cached += num_tokens
        sequence.num_scheduled = sequence.num_computed = sequence.num_cached
        self.num_loaded_tokens += num_tokens
        self.publish(sequence)

    def _count_ring(self, sequence: Sequence) -> int:
        """Returns the number of reserved blocks that an import needs before the tails."""
        if not sequence.import_hashes:
            return 0
        pairs = zip(sequence.tables, self.import_tables(sequence), strict=True)
        return sum(
            max(min(table.tail_first - part.first, len(part.blocks)), 0) for table, part in pairs
        )

    def import_tables(self, sequence: Sequence) -> tuple[TableBlocks, ...]:
        """Returns the blocks that an import must fill, of each table."""
        end = sequence.num_cached + len(sequence.import_hashes) * self.config.block_size
        ring = iter(sequence.reserved)
        tables: list[TableBlocks] = []
        for table in sequence.tables:
            first = max(window_first(table.spec, end), table.end)
            count = end // table.spec.block_size - first
            num_ring = max(min(table.tail_first - first, count), 0)
            blocks = (*islice(ring, num_ring), *table.tail[: max(count - num_ring, 0)])
            tables.append(TableBlocks(blocks, first))
        return tuple(tables)

    def _move_tables(self, sequence: Sequence, position: int) -> None:
        """Gives the tables of an import that ends at `position` its blocks."""
        for table in sequence.tables:
            first = window_first(table.spec, position)
            if position > sequence.num_cached and table.spec.window is not None:
                self.pool.release(table.slide(first))
                table.first = max(table.first, first)
                start = max(position - table.spec.window + 1, 0)
                table.num_published = max(table.end, -(-start // table.spec.block_size))
            while table.num_covered < position and self.add_block(sequence, table):
                pass
            surplus = table.num_ring - max(table.tail_first - table.end, 0)
            if surplus > 0:
                table.num_ring -= surplus
                self.pool.unreserve(sequence.reserved[-surplus:])
                del sequence.reserved[-surplus:]

    def lease_cached(self, digests: Iterable[bytes]) -> list[tuple[int, bytes]]:
        """Leases the cached blocks among `digests`; see `Engine.lease_cached`."""
        found = [(block, digest) for digest in digests for block in self.pool.match([digest])]
        self.pool.lease_copy([block for block, _ in found])
        return found

    def lease_prefix(self, chain: Items[bytes]) -> LeasedPrefix:
        """Leases the parts of the longest resume point; see `Engine.lease_prefix`."""
        hit = self.resume.longest(
            chain,
            lambda name: self.pool.block_of(name) is not None,
            lambda name: self.states.pool.block_of(name) is not None,
        )
        state = None if hit.state is None else self.states.pool.block_of(hit.state)
        tables = tuple(
            TableBlocks(tuple(self.pool.match(names)), first) for first, names in hit.parts
        )
        lease = LeasedPrefix(num_tokens=hit.num_tokens, tables=tables, state=state)
        slots = [] if state is None else [state]
        if not (_leaves_half(self.pool, lease.blocks) and _leaves_half(self.states.pool, slots)):
            return LeasedPrefix()
        self.pool.lease_copy(lease.blocks)
        self.states.pool.lease_copy(slots)
        return lease

    def unlease_prefix(self, lease: LeasedPrefix) -> None:
        """Ends the leases that `lease_prefix` began."""
        self.pool.end_copy(lease.blocks)
        if lease.state is not None:
            self.states.pool.end_copy([lease.state])

    def take_unloaded(self) -> tuple[int, ...]:
        """Returns the adapters to unload that no sequence uses any more."""
        if not self.unloading:
            return ()
        unused = self.unloading - {sequence.spec.adapter for sequence in self.sequences.values()}
        self.unloading -= unused
        return tuple(sorted(unused))

    def publish(self, sequence: Sequence) -> None:
        """Adds the sequence's newly full and computed blocks to the prefix cache."""
        if sequence.enters_cache:
            for block, name in sequence.publishable():
                self.pool.publish(block, name)

    def clear_cache(self) -> None:
        """Empties the prefix cache; see `Engine.clear_cache`."""
        for sequence in self.sequences.values():
            # The KV cache of a DECODE may have been computed already.
            if sequence.state is not State.WAITING or sequence.spec.task is Task.DECODE:
                sequence.enters_cache = False
        self.pool.clear()
        self.states.pool.clear()

    def retain(self, sequence: Sequence) -> None:
        """Begins the retentions of a sequence once its prompt is computed and published."""
        num_tokens = len(sequence.spec.tokens)
        if not sequence.retentions or sequence.num_computed < num_tokens:
            return
        for each in sequence.retentions:
            kept = self._retained_end(sequence, each) // self.config.block_size
            point = self.resume.longest(sequence.chain[:kept], self.pool.has, self.states.pool.has)
            end = self.clock() + each.seconds
            names = [name for _, names in point.parts for name in names]
            self.pool.retain(names, sequence.spec.tenant, end)
            if point.state is not None:
                self.states.pool.retain([point.state], sequence.spec.tenant, end)
        sequence.retentions = ()

    def _retained_end(self, sequence: Sequence, retention: PrefixRetention) -> int:
        """Returns the last resume point of a retained prefix that fits into the tenant's share.

        Blocks beyond the share are not retained, and no sequence can continue from a part of a
        point.
        """
        return self.resume.last_within(
            len(sequence.spec.tokens), retention.num_tokens, self.pool.retained.most_each
        )

    def end_retentions(self) -> None:
        """Ends the retentions whose time is over."""
        for pool in (self.pool, self.states.pool):
            if pool.retained:
                pool.end_retentions(self.clock())

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
        self._unreserve(sequence)
        for table in sequence.tables:
            # No step will copy the partial block, so the reader gets the source block instead.
            if table.copy_source is not None:
                self.pool.release([table.blocks.pop()])
                table.blocks.append(table.copy_source)
                table.copy_source = None
            end = -(-sequence.num_computed // table.spec.block_size) - table.first
            self.pool.release(table.blocks[end:])  # given for drafts
            del table.blocks[end:]
            self.pool.lease(table.blocks)
        self.states.pool.lease(sequence.slots.held)
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
            self.pool.unlease(sequence.held_blocks)
            self.states.pool.unlease(sequence.slots.held)
        else:
            if sequence.state is State.RUNNING:
                self._leave_batch(sequence)
            else:
                self.num_holding -= sequence.num_branches
            self.pool.release(sequence.held_blocks)
            self.states.pool.release(sequence.slots.held)
            self._unreserve(sequence)
        sequence.tables = []
        sequence.slots = StateSlots()
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
        everyone = list(self.sequences.values())
        leased = [sequence.state is State.LEASED for sequence in everyone]
        blocks = [(each.held_blocks, each.reserved_blocks) for each in everyone]
        _check_pool(self.pool, list(zip(leased, blocks, strict=True)))
        slots = [(each.slots.held, each.slots.reserved) for each in everyone]
        _check_pool(self.states.pool, list(zip(leased, slots, strict=True)))
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

    def _unreserve(self, sequence: Sequence) -> None:
        self.pool.unreserve(sequence.reserved_blocks)
        self.states.unreserve(sequence)
        sequence.reserved = []
        for table in sequence.tables:
            table.tail = []
            table.num_ring = 0

    def _leave_batch(self, sequence: Sequence) -> None:
        self.num_holding -= sequence.num_branches
        self.running.remove(sequence)
        self.dropped.append(sequence.spec.id)


def _leaves_half(pool: BlockPool, leased: list[int]) -> bool:
    """Returns True if at least half of what sequences may use is left to them after the lease."""
    num_leased = pool.count(BlockState.LEASED)
    return 2 * (num_leased + pool.num_evictable(leased)) <= num_leased + pool.num_available


def _check_pool(
    pool: BlockPool, sequences: Items[tuple[bool, tuple[list[int], list[int]]]]
) -> None:
    """Raises RuntimeError unless a pool's counts are those of its holders.

    `sequences` has for each sequence whether it is leased, and its held and reserved blocks.
    """
    pool.check_integrity()
    num_owners = [0] * pool.num_blocks
    num_leases = [0] * pool.num_blocks
    reserved: list[int] = []
    for is_leased, (held, own) in sequences:
        reserved += own
        counts = num_leases if is_leased else num_owners
        for block in held:
            counts[block] += 1
    for block, num_copied in pool.copied.items():
        num_leases[block] += num_copied
    for block, (owners, leases) in enumerate(zip(num_owners, num_leases, strict=True)):
        if (owners, leases) != pool.holders(block):
            raise RuntimeError(
                f"block {block}: {owners} owners, {leases} leases; the pool has "
                f"{pool.holders(block)}"
            )
    if not len(reserved) == len(set(reserved)) == pool.count(BlockState.RESERVED):
        raise RuntimeError(f"{reserved} reserved; the pool has {pool.count(BlockState.RESERVED)}")
