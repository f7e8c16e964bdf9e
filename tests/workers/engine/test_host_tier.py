"""The block pool with host memory behind it: whatever comes and goes, a hash is where its content
is.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.proto.hashing import hash_chain
from tandem.tests.examples import num_examples
from tandem.tests.workers.engine.drive import (
    MakeWorker,
    expected,
    fill,
    first_tokens,
    run,
    spec,
    tokens_of,
)
from tandem.tests.workers.engine.harness import engine_config
from tandem.tests.workers.engine.null import NullExecutor
from tandem.workers.engine.block_pool import BlockPool
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Admitted, Preempted
from tandem.workers.engine.sequence import Task

NUM_BLOCKS = 6
CHAINS = [[bytes([chain, place]) for place in range(4)] for chain in range(4)]
PROMPTS = [
    tuple(range(first, first + 13)) for first in (0, 20, 40)
]  # of three full blocks and one token


class TierMachine(RuleBasedStateMachine):
    """Models the content of each block and host block; hypothesis decides when plans run."""

    @initialize(num_slots=st.integers(0, 9))
    def start(self, num_slots: int) -> None:
        self.pool = BlockPool(NUM_BLOCKS, num_slots)
        self.in_block: dict[int, bytes] = {}
        self.in_slot: dict[int, bytes] = {}
        self.held: list[list[int]] = []
        self.unwritten: dict[
            int, bytes
        ] = {}  # blocks of sequences that are admitted since the last plan
        self.reported: set[bytes] = set()

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 4))
    def admit(self, chain: list[bytes], length: int) -> None:
        """As the scheduler does: shares, pins, reserves, restores; the rest is written after the
        next plan.
        """
        shared = self.pool.match(chain[:length])
        found = self.pool.host.match(chain[len(shared) : length])
        rest = length - len(shared)
        if rest > self.pool.num_available - self.pool.num_evictable(shared):
            return
        self.pool.share(shared)
        self.pool.host.pin(found)
        blocks = self.pool.reserve(rest)
        self.pool.claim(blocks)
        self.pool.load(blocks[: len(found)], found)
        self.unwritten |= dict(
            zip(blocks[len(found) :], chain[len(shared) + len(found) : length], strict=True)
        )
        self.held.append(shared + blocks)

    @rule()
    def plan(self) -> None:
        saved, restored = self.pool.host.take_copies()
        assert len({slot for _, slot in saved}) == len(saved)
        for block, slot in saved:
            self.in_slot[slot] = self.in_block[block]
        for slot, block in restored:
            self.in_block[block] = self.in_slot[slot]
        self.in_block |= self.unwritten
        for block, digest in self.unwritten.items():
            self.pool.publish(block, digest)
        self.unwritten.clear()
        for digest, block in self.pool._block_of.items():
            assert self.in_block[block] == digest
        for digest, slot in self.pool.host._host_block_of.items():
            assert self.in_slot[slot] == digest

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Between two plans, as everything that ends."""
        self.plan()
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(chain=st.sampled_from(CHAINS), tenant=st.sampled_from([b"ada", b"bob"]))
    def retain(self, chain: list[bytes], tenant: bytes) -> None:
        self.pool.retain(chain, tenant, 1.0)

    @rule()
    def end_retentions(self) -> None:
        self.pool.end_retentions(1.0)
        assert not len(self.pool.retained)

    @rule()
    def clear(self) -> None:
        """Between two plans, as a reset."""
        self.plan()
        self.pool.clear()
        assert (len(self.pool.host), len(self.pool.retained)) == (0, 0)
        assert not any(self.pool.has(digest) for chain in CHAINS for digest in chain)

    @rule()
    def take_changes(self) -> None:
        stored, evicted = self.pool.take_changes()
        assert not set(stored) & self.reported
        assert set(evicted) <= self.reported
        self.reported = (self.reported | set(stored)) - set(evicted)
        assert self.reported == {*self.pool._block_of, *self.pool.host._host_block_of}

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert len(self.pool.host) <= self.pool.host.num_blocks


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=num_examples(150), stateful_step_count=40, database=None)


def conversations(worker: MakeWorker, num_host_blocks: int) -> tuple[list[int], int]:
    """Three prompts for which there is room for one, twice each; how many tokens of each were
    cached, and how many are computed.
    """
    target = worker(num_blocks=5, num_host_blocks=num_host_blocks, growth_tokens=2)
    cached = []
    for number, tokens in enumerate([*PROMPTS, *PROMPTS]):
        target.submit(spec(number, tokens, max_tokens=3))
        events = run(target)
        assert tokens_of(events, number) == expected(tokens, 3)
        cached += [event.num_cached for event in events if isinstance(event, Admitted)]
    target.check_idle()
    assert target.engine.requests.num_loaded_tokens == sum(cached)
    return cached, target.executor.num_tokens


def test_evicted_prefixes_come_back(worker: MakeWorker) -> None:
    without, with_tier = conversations(worker, 0), conversations(worker, 9)
    assert without == ([0] * 6, 6 * 15)
    assert with_tier == ([0, 0, 0, 12, 12, 12], 6 * 15 - 36)


def test_the_least_recently_used_leave_host_memory_first(worker: MakeWorker) -> None:
    """Of a sequence its end goes first: what is left can be used."""
    target = worker(num_blocks=5, num_host_blocks=4, growth_tokens=2)
    for number, tokens in enumerate(PROMPTS):
        target.submit(spec(number, tokens, max_tokens=3))
        run(target)
    assert len(target.engine.requests.pool.host) == 4
    pool, (first, second) = (
        target.engine.requests.pool,
        (hash_chain(tokens, 4, b"") for tokens in PROMPTS[:2]),
    )
    assert (len(pool.match(first)), pool.host.match(first)) == (0, first[:2])
    assert (len(pool.match(second)), pool.host.match(second[1:])) == (1, second[1:])


def test_an_import_finds_a_prefix_in_host_memory_and_may_begin_at_once(worker: MakeWorker) -> None:
    """Its blocks are those of what is saved for it, which the harness overwrites as soon as it is
    admitted.
    """
    target = worker(num_blocks=5, num_host_blocks=9, growth_tokens=2)
    for number, tokens in enumerate(PROMPTS[:2]):
        target.submit(spec(number, tokens, max_tokens=3))
        run(target)
    longer = (*PROMPTS[0], 7, 7)
    target.submit(spec(5, longer, task=Task.DECODE, max_tokens=3))
    (admitted,) = [event for event in run(target) if isinstance(event, Admitted)]
    assert (admitted.num_cached, admitted.num_loaded) == (12, 8)
    first = fill(target, admitted, longer)
    target.engine.commit_import(5, first_tokens(first))
    assert [first, *tokens_of(run(target), 5)] == expected(longer, 3)
    target.submit(spec(6, PROMPTS[1], max_tokens=3))
    events = run(target)
    assert tokens_of(events, 6) == expected(PROMPTS[1], 3)
    assert [event.num_cached for event in events if isinstance(event, Admitted)] == [12]
    target.check_idle()


def test_a_prompt_is_admitted_and_preempted_in_a_step_that_saves_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With windows, others may hold the blocks that its ring was to use again."""
    engine = Engine(NullExecutor(), engine_config(num_blocks=8, num_host_blocks=8, block_size=4))
    engine.submit(spec(1, tuple(range(28)), max_tokens=1))
    while engine.has_work:
        engine.step()
    engine.submit(spec(2, tuple(range(100, 128)), max_tokens=1))
    monkeypatch.setattr(engine.scheduler, "_extend", lambda prompt, count: 0)
    events = engine.step()
    assert [type(event) for event in events[:2]] == [Admitted, Preempted]
    engine.check_integrity()


@pytest.mark.parametrize("salt", [b"", b"other"])
def test_tenants_do_not_find_each_others(worker: MakeWorker, salt: bytes) -> None:
    target = worker(num_blocks=5, num_host_blocks=9, growth_tokens=2)
    for number, tokens in enumerate(PROMPTS):
        target.submit(spec(number, tokens, max_tokens=3))
        run(target)
    target.submit(spec(7, PROMPTS[0], max_tokens=3, salt=salt))
    (admitted,) = [event for event in run(target) if isinstance(event, Admitted)]
    assert admitted.num_cached == (0 if salt else 12)
