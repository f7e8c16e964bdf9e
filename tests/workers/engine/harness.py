"""An engine on a fake executor that checks itself after every step."""

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tandem.proto.hashing import DIGEST_BYTES, hash_chain
from tandem.tests.workers.engine.fake import (
    NO_BLOCK,
    FakeExecutor,
    FakeKv,
    _extend,
    expected_tokens,
)
from tandem.tests.workers.spans import Blocks, read_now, span
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import (
    Admitted,
    CacheChanged,
    Event,
    Failed,
    NewTokens,
    Preempted,
    PrefillFinished,
    Progress,
    Suspended,
)
from tandem.workers.engine.ngram import Drafter
from tandem.workers.engine.plan import PENDING_TOKEN, OnLayers, PrefixSource, Samples, StepPlan
from tandem.workers.engine.resume import LeasedPrefix
from tandem.workers.engine.sequence import Sequence as EngineSequence
from tandem.workers.engine.sequence import SequenceSpec, State, Task
from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.kv_cache.store import Completed
from tandem.workers.kv_cache.tables import TableBlocks

VOCAB_SIZE = 16

SeqEvent = Admitted | Progress | NewTokens | PrefillFinished | Suspended | Preempted | Failed
"""Events of sequences."""


def engine_config(**config: Any) -> EngineConfig:
    """An engine's configuration from the fields of EngineConfig and of Budgets together."""
    own = {
        name: config.pop(name)
        for name in (
            "num_blocks",
            "num_host_blocks",
            "block_size",
            "overlap",
            "tables",
            "num_states",
            "num_host_states",
            "state_tokens",
            "draft_context_tokens",
        )
        if name in config
    }
    return EngineConfig(**own, budgets=Budgets(**config))


class RecordingExecutor(FakeExecutor):
    """Keeps the plans. The fastest of devices: a step has ended when it is launched. What `failing`
    names fails.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            config.num_blocks,
            config.block_size,
            vocab_size=VOCAB_SIZE,
            tables=config.tables,
            num_states=config.num_states,
        )
        self.check_plan: Callable[[StepPlan], None] = lambda plan: None
        self.plans: list[StepPlan] = []
        self.failing: dict[int, str] = {}
        self.restoring: set[int] = set()  # blocks that launched steps restore once they begin

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self.check_plan(plan)
        self.plans.append(plan)
        return self._failing(plan, super().launch(plan, on_layers))

    def _failing(self, plan: StepPlan, collect: Callable[[], Samples]) -> Callable[[], Samples]:
        steps = [
            step for step in plan.sequences if step.num_samples and step.sequence_id in self.failing
        ]
        failed = {step.sequence_id: self.failing[step.sequence_id] for step in steps}

        def collect_failed() -> Samples:
            samples = collect()
            # None of a draft counts then: the next step begins with the token before it again.
            self._num_computed |= {step.sequence_id: step.start for step in steps if step.num_draft}
            return replace(samples, failed=failed)

        return collect_failed


class LateExecutor(RecordingExecutor):
    """The slowest of devices: a step begins when its tokens are collected. Writes of KV cache from
    outside come after the steps launched before them, and reads only after what these restore.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.kv = OrderedKv(config, self)
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        done: list[Callable[[], Samples]] = []
        self.check_plan(plan)
        self.plans.append(plan)
        blocks = {block for _, block in plan.loaded}
        self.restoring |= blocks

        def compute() -> None:
            done.append(FakeExecutor.launch(self, plan))
            self.restoring -= blocks

        self._queue.append(compute)

        def collect() -> Samples:
            while not done:
                self._queue.popleft()()
            return done[0]()

        return self._failing(plan, collect)

    def catch_up(self) -> None:
        while self._queue:
            self._queue.popleft()()


class OrderedKv(FakeKv):
    """The memory of a LateExecutor."""

    def __init__(self, config: EngineConfig, executor: LateExecutor) -> None:
        super().__init__(config.num_blocks, config.block_size, executor.kv.layout, config.tables)
        self._executor = executor

    def write(self, blocks: Blocks, span: KvSpan, data: memoryview) -> None:
        self._executor.catch_up()
        super().write(blocks, span, data)

    def read(self, blocks: Blocks, span: KvSpan) -> Completed[memoryview]:
        if self._executor.restoring:
            self._executor.catch_up()
        return super().read(blocks, span)


class Guesser(Drafter):
    """Drafts what the fake model will sample, and is often wrong."""

    def __init__(self, spec: SequenceSpec) -> None:
        self._seeds = range(spec.sampling.seed, spec.sampling.seed + spec.num_choices)
        self._rng = random.Random(spec.id)

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        count = self._rng.randint(0, max(min(room, 5), 0))
        draft = expected_tokens(tokens, count, VOCAB_SIZE, self._rng.choice(self._seeds))
        if count and self._rng.random() < 0.5:
            draft[self._rng.randrange(count)] = self._rng.randrange(VOCAB_SIZE)
        return tuple(draft)

    def record(self, num_accepted: int) -> None:
        pass


class FakeDisk(PrefixSource):
    """Keeps the bytes of blocks by their hashes, and wants all of them imported."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def count(self, chain: Sequence[bytes], compute_seconds: float) -> int:
        return sum(1 for _ in itertools.takewhile(self.blocks.__contains__, chain))


class Worker:
    """An engine that checks itself after every step."""

    def __init__(
        self, config: EngineConfig, *, late: bool = False, disk: FakeDisk | None = None
    ) -> None:
        self.config = config
        self.executor = (LateExecutor if late else RecordingExecutor)(config)
        self.executor.check_plan = self._check_plan
        self.disk = None if is_sparse(config) or len(config.tables) > 1 else disk
        self.engine = Engine(self.executor, config, source=self.disk)
        self._admitted: dict[int, tuple[TableBlocks, ...]] = {}  # tables at admission
        self.importing: dict[int, Admitted] = {}  # prefixes from the disk, by sequence
        self._copies: list[tuple[int, bytes]] = []  # leased blocks that the disk will have
        self._lent: list[LeasedPrefix] = []  # leased blocks of prefixes
        self._whole = span(self.executor.kv, 0, config.block_size)
        self.specs: dict[int, SequenceSpec] = {}
        self.cached: set[bytes] = set()  # as the events say

    def submit(self, spec: SequenceSpec) -> None:
        self.engine.submit(spec)
        self.specs[spec.id] = spec
        if self.config.budgets.speculative and not spec.beam:
            self.sequences[spec.id].drafter = Guesser(spec)

    @property
    def sequences(self) -> dict[int, EngineSequence]:
        return self.engine.requests.sequences

    def step(self) -> list[SeqEvent]:
        """Events of the cache are checked here and go no further."""
        num_plans = len(self.executor.plans)
        events: list[Event] = []

        def take(emitted: list[Event]) -> None:
            events.extend(emitted)
            for event in emitted:
                if isinstance(event, Admitted):
                    self._admitted[event.id] = tuple(
                        TableBlocks(tuple(table.blocks), table.first)
                        for table in self.sequences[event.id].tables
                    )
                    if self.config.num_host_blocks == 0:
                        self._check_cached(event)
                    if self.specs[event.id].task is Task.DECODE and event.state is not None:
                        self.write_state(event.state, None)
                    if self.specs[event.id].task is Task.DECODE:
                        self._overwrite(event)
                    elif event.import_hashes:
                        self.importing[event.id] = event
                        end = event.num_cached + len(event.import_hashes) * self.config.block_size
                        self._clear(event.import_tables, event.num_cached, end)

        self.engine.step(take)
        if self.config.num_host_blocks:  # part of it comes with the step
            for event in events:
                if isinstance(event, Admitted):
                    self._check_cached(event)
        budgets = self.config.budgets
        for plan in self.executor.plans[num_plans:]:
            decodes = [step for step in plan.sequences if step.start > 0 and step.num_samples]
            decodes = [step for step in decodes if len(step.token_ids) == 1 + step.num_draft]
            num_decoded = sum(len(step.token_ids) for step in decodes)
            assert plan.num_tokens - num_decoded <= max(
                budgets.chunk_tokens, budgets.mixed_chunk_tokens
            )
            if any(step.num_draft for step in plan.sequences):
                assert budgets.speculative
                known = sum(len(step.token_ids) for step in decodes if step.sampling is None)
                assert known <= budgets.speculative.max_step_tokens
            assert len(plan.sequences) <= budgets.max_sequences
            num_rows = sum(step.num_samples for step in plan.sequences)
            most = max((step.num_samples - step.num_draft for step in plan.sequences), default=1)
            # No request with several samples is kept from running beside decodes.
            assert num_rows - max(most - 1, 0) <= budgets.max_step_rows
            assert not any(
                step.sampling and PENDING_TOKEN in step.token_ids for step in plan.sequences
            )
            assert len({step.sequence_id for step in plan.sequences}) == len(plan.sequences)
        changes = [event for event in events if isinstance(event, CacheChanged)]
        assert len(changes) <= 1
        for change in changes:
            self._follow(change)
            if self.disk is not None and len(self._copies) < 3:
                self._copies += self.engine.lease_cached(change.stored[:3])
        self.check()
        pool = self.engine.requests.pool
        if self.config.num_states:
            pool = self.engine.requests.states.pool
        names = {*pool._block_of, *pool.host._host_block_of}
        if len(self.config.tables) > 1:
            names = {name for name in names if len(name) == DIGEST_BYTES}
        assert self.cached == names, "the events differ from the cache"
        return [event for event in events if not isinstance(event, CacheChanged)]

    def _follow(self, change: CacheChanged) -> None:
        stored, evicted = set(change.stored), set(change.evicted)
        assert not stored & self.cached
        assert evicted <= self.cached
        assert (len(stored), len(evicted)) == (len(change.stored), len(change.evicted))
        self.cached = (self.cached | stored) - evicted

    def clear_cache(self) -> None:
        """Empties the prefix cache, as a reset."""
        self._follow(self.engine.clear_cache())
        assert not self.cached, "the change does not name all that was cached"
        assert not self.engine.blocks()[BlockState.CACHED]
        assert not self.engine.states()[BlockState.CACHED]
        self.check()

    def finish_copies(self) -> None:
        """Copies to disk what has been leased for it."""
        for block, digest in self._copies:
            assert self.disk is not None
            self.disk.blocks[digest] = bytes(read_now(self.executor.kv, [block], self._whole))
        self.engine.unlease_cached([block for block, _ in self._copies])
        for lease in self._lent:
            self.engine.unlease_prefix(lease)
        self._copies, self._lent = [], []
        self.check()

    def lend(self, tokens: Sequence[int], salt: bytes) -> int:
        """Leases what is cached of a prefix until the copies are finished; returns how many blocks
        that is.
        """
        lease = self.engine.lease_prefix(hash_chain(tokens, self.config.block_size, salt))
        blocks, num_tokens = lease.blocks, lease.num_tokens
        self._lent.append(lease)
        if num_tokens and not any(
            block in self.executor.restoring for block in blocks
        ):  # the step under way may restore some
            found = self.executor.kv.history_of(padded(lease.tables), num_tokens)
            assert found == functools.reduce(_extend, tokens[:num_tokens], b""), (
                "KV of another prefix"
            )
        pool = self.engine.requests.pool
        assert not blocks or pool.count(BlockState.LEASED) <= pool.num_available, (
            "too few are left to sequences"
        )
        self.check()
        return num_tokens

    def finish_import(self, number: int, num_blocks: int) -> bool:
        """Fills so many blocks of a sequence from the disk and starts it; False if it has ended."""
        event = self.importing.pop(number)
        if number not in self.sequences:
            return False
        if is_sparse(self.config):  # a whole point or nothing
            num_blocks = len(event.import_hashes) if num_blocks else 0
        end = event.num_cached + num_blocks * self.config.block_size
        if event.prefix_source == "remote":
            self._compute_elsewhere(event, end)
        else:
            assert self.disk is not None
            first = event.num_cached // self.config.block_size
            for digest, block in zip(
                event.import_hashes[:num_blocks], event.tables[0].blocks[first:], strict=False
            ):
                self.executor.kv.write([block], self._whole, memoryview(self.disk.blocks[digest]))
        self.engine.commit_prefix(number, num_blocks * self.config.block_size)
        self.check()
        return True

    def _compute_elsewhere(self, event: Admitted, end: int) -> None:
        """Copies the tokens before `end` of a prompt, as another worker has computed them."""
        tokens = self.specs[event.id].tokens[:end]
        source = make_source(self.executor.kv, tokens)
        copy_tokens(source, self.executor.kv, event.import_tables, event.num_cached, end)
        if event.import_state is not None and end > event.num_cached:
            self.write_state(event.import_state, functools.reduce(_extend, tokens, b""))

    def write_state(self, slot: int, history: bytes | None) -> None:
        """Writes a state from outside, after the steps launched before."""
        if isinstance(self.executor, LateExecutor):
            self.executor.catch_up()
        self.executor.states[slot] = history

    def read_state(self, slot: int) -> bytes | None:
        if self.executor.restoring and isinstance(self.executor, LateExecutor):
            self.executor.catch_up()
        return self.executor.states[slot]

    @property
    def in_flight(self) -> set[int]:
        """The ids of the sequences whose step is launched and not collected."""
        launched = self.engine._in_flight
        return {step.sequence_id for step in launched[0].sequences} if launched else set()

    def check(self) -> None:
        self.engine.check_integrity()
        assert sum(self.engine.blocks().values()) == self.config.num_blocks
        assert self.engine.requests.num_holding <= self.config.budgets.max_sequences
        salt_of: dict[int, bytes] = {}
        for number, sequence in self.sequences.items():
            assert number == sequence.spec.id
            assert sequence.state is not State.FINISHED
            most = min(sequence.num_tokens + sequence.num_draft, sequence.spec.max_length)
            assert sequence.num_computed <= sequence.num_scheduled <= most
            assert self.config.overlap or sequence.num_computed == sequence.num_scheduled
            for table in sequence.tables:
                if table.spec.window is None:
                    published = table.num_published * table.spec.block_size
                    assert published <= sequence.num_computed
            most = sum(
                -(-sequence.spec.max_length // table.spec.block_size) for table in sequence.tables
            )
            num_sources = sum(table.copy_source is not None for table in sequence.tables)
            held = sequence.held_blocks + sequence.reserved_blocks
            assert sequence.num_branches > 1 or len(held) - num_sources <= most
            for block in held:
                assert salt_of.setdefault(block, sequence.spec.salt) == sequence.spec.salt, (
                    "tenants share a block"
                )

    def check_idle(self) -> None:
        """Nothing is held, and every block is free or cached."""
        self.finish_copies()
        blocks = self.engine.blocks()
        assert blocks[BlockState.FREE] + blocks[BlockState.CACHED] == self.config.num_blocks, blocks
        requests = self.engine.requests
        states = requests.states.pool
        assert states.num_available == self.config.num_states
        assert (len(requests.waiting), requests.num_holding, requests.num_leased) == (0, 0, 0)

    def _check_cached(self, event: Admitted) -> None:
        """What the prefix cache gave was computed for, or generated after, the same tokens of the
        same tenant, and can be read when it is reported.
        """
        spec = self.specs[event.id]
        prefix = spec.tokens[: event.num_cached]
        if spec.task is not Task.DECODE or not is_sparse(self.config):
            tables = padded(self._admitted.pop(event.id))
            cached = tables[0][: event.num_cached // self.config.tables[0].block_size]
            known = next(
                (i for i, block in enumerate(cached) if block in self.executor.restoring),
                len(cached),
            )
            num_readable = event.num_cached
            if known < len(cached):
                num_readable = 0 if is_sparse(self.config) else known * self.config.block_size
            if not any(block in self.executor.restoring for table in tables[1:] for block in table):
                found = self.executor.kv.history_of(tables, num_readable)
                assert found == functools.reduce(_extend, prefix[:num_readable], b""), (
                    "KV of another prefix"
                )
        assert (
            event.num_cached % self.config.block_size
            == event.num_loaded % self.config.block_size
            == 0
        )
        for table, own in zip(self.config.tables, event.tables, strict=True):
            assert own.first + len(own.blocks) == -(-len(spec.tokens) // table.block_size)
            assert own.first == 0 or table.window is not None
        others = [
            s for s in self.specs.values() if s.salt == spec.salt and s is not spec
        ]  # which may overtake it
        if not any(s.beam for s in others):  # they try anything
            assert not prefix or any(
                history[: len(prefix)] == prefix for s in others for history in _histories(s)
            )

    def _check_plan(self, plan: StepPlan) -> None:
        """Each block that a step reads or writes belongs to its sequence."""
        pool, states = self.engine.requests.pool, self.engine.requests.states.pool
        for step in plan.sequences:
            sequence = self.sequences[step.sequence_id]
            if step.state is not None:
                written = {slot for _, slot in step.state.targets}
                assert step.state.source not in written, "a state is written in place"
                assert all(states.holders(slot)[0] for slot in written)
            for table in sequence.tables:
                size, window = table.spec.block_size, table.spec.window
                start = 0 if window is None else max(step.start - window + 1, 0)
                end = -(-(step.start + len(step.token_ids)) // size)
                assert table.first <= start // size, "a block has left too early"
                held = table.blocks[start // size - table.first : end - table.first]
                assert len(held) == end - start // size, "a block is missing"
                assert all(pool.holders(block)[0] for block in held)

    def _clear(self, tables: tuple[TableBlocks, ...], start: int, end: int) -> None:
        """Begins an import at once, as a transfer in another thread may."""
        for layer, own, first in spans_of(self.executor.kv, tables, start, end):
            part = span(self.executor.kv, first, end - first, layer, 1)
            zeros = memoryview(bytes(part.size(self.executor.kv.layout)))
            self.executor.kv.write(own, part, zeros)

    def _overwrite(self, event: Admitted) -> None:
        """Begins an import at once, as a transfer in another thread may."""
        self._clear(event.tables, event.num_cached, len(self.specs[event.id].tokens))


def is_sparse(config: EngineConfig) -> bool:
    return config.num_states > 0 or any(table.window is not None for table in config.tables)


def padded(tables: Sequence[TableBlocks]) -> list[list[int]]:
    """The blocks of each table at their indices."""
    return [[NO_BLOCK] * table.first + list(table.blocks) for table in tables]


def spans_of(
    kv: FakeKv, tables: Sequence[TableBlocks], start: int, end: int
) -> Iterator[tuple[int, TableBlocks, int]]:
    """Yields each layer, its table, and the first token that a sequence of `end` tokens lacks."""
    for layer, number in enumerate(kv.table_of):
        window = kv.tables[number].window
        first = start if window is None else max(start, end - window + 1)
        if first < end:
            yield layer, tables[number], first


def copy_tokens(
    source: tuple[FakeKv, Sequence[TableBlocks]],
    target: FakeKv,
    tables: Sequence[TableBlocks],
    start: int,
    end: int,
) -> None:
    """Copies what a worker that has `start` tokens lacks to continue after `end` tokens."""
    kv, from_tables = source
    for layer, own, first in spans_of(target, tables, start, end):
        part = span(target, first, end - first, layer, 1)
        target.write(own, part, read_now(kv, from_tables[kv.table_of[layer]], part))


def make_source(like: FakeKv, tokens: Sequence[int]) -> tuple[FakeKv, list[TableBlocks]]:
    """Computes a prompt on another worker."""
    counts = [-(-len(tokens) // table.block_size) for table in like.tables]
    kv = FakeKv(sum(counts), like.block_size, like.layout, like.tables)
    ends = list(itertools.accumulate(counts))
    tables = [
        TableBlocks(tuple(range(end - count, end))) for end, count in zip(ends, counts, strict=True)
    ]
    kv.compute([table.blocks for table in tables], 0, tokens, b"")
    return kv, tables


def _histories(spec: SequenceSpec) -> list[tuple[int, ...]]:
    seeds = range(spec.sampling.seed, spec.sampling.seed + spec.num_choices)
    return [
        spec.tokens + tuple(expected_tokens(spec.tokens, spec.max_tokens, VOCAB_SIZE, seed))
        for seed in seeds
    ]
