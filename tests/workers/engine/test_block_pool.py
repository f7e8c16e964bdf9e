"""The block pool against a model that knows only lists, and the order in which cached blocks go."""

import sys
import threading
from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tandem.proto.hashing import hash_block, hash_chain, hash_root
from tandem.tests.examples import num_examples
from tandem.workers.engine.block_pool import BlockPool, BlockState

NUM_BLOCKS = 8
DIGESTS = [bytes([n]) for n in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """The model: who holds which blocks, which block carries which digest, and the cached blocks by
    age.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.reserved: list[list[int]] = []
        self.owned: list[list[int]] = []
        self.leased: list[list[int]] = []
        self.copied: list[list[int]] = []
        self.digest_of: dict[int, bytes] = {}
        self.cached: list[int] = []
        # (digest, tenant, end) of retained digests, the next to drop first.
        self.retained: list[tuple[bytes, bytes, int]] = []
        self.now = 0
        self.reported: set[bytes] = set()  # the digests, as the changes say

    def pick(self, data: st.DataObject, groups: list[list[int]]) -> list[int]:
        return groups.pop(data.draw(st.integers(0, len(groups) - 1)))

    def held(self) -> set[int]:
        groups = self.reserved + self.owned + self.leased + self.copied
        return {block for group in groups for block in group}

    def let_go(self, blocks: list[int]) -> None:
        """The model's view of a release: the last block becomes the oldest of those without an
        owner.
        """
        self.cached += [b for b in reversed(blocks) if b not in self.held() and b in self.digest_of]
        self.sort()

    def is_retained(self, block: int) -> bool:
        return self.digest_of[block] in [digest for digest, _, _ in self.retained]

    def sort(self) -> None:
        """Retained blocks go last."""
        self.cached.sort(key=self.is_retained)

    def drop(self, dropped: list[tuple[bytes, bytes, int]]) -> None:
        """Ends retentions: the last of them is evicted next."""
        for each in dropped:
            self.retained.remove(each)
            for block in [b for b in self.cached if self.digest_of[b] == each[0]]:
                self.cached.remove(block)
                self.cached.insert(0, block)
        self.sort()

    @rule(count=st.integers(0, 5))
    def reserve(self, count: int) -> None:
        free = NUM_BLOCKS - len(self.held()) - len(self.cached)
        if count > free + len(self.cached):
            with pytest.raises(RuntimeError, match="requested"):
                self.pool.reserve(count)
            return
        evicted, self.cached = (
            self.cached[: max(count - free, 0)],
            self.cached[max(count - free, 0) :],
        )
        blocks = self.pool.reserve(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & (self.held() | set(self.cached))
        assert [b for b in blocks if b in self.digest_of] == evicted
        for block in evicted:
            gone = self.digest_of.pop(block)
            self.retained = [each for each in self.retained if each[0] != gone]
        self.reserved.append(blocks)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        self.pool.unreserve(self.pick(data, self.reserved))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        blocks = self.pick(data, self.reserved)
        self.pool.claim(blocks)
        self.owned.append(blocks)

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS))
    def publish(self, data: st.DataObject, digest: bytes) -> None:
        block = data.draw(st.sampled_from([b for group in self.owned for b in group]))
        self.pool.publish(block, digest)
        if digest not in self.digest_of.values():
            self.digest_of.setdefault(block, digest)

    @rule(chain=st.lists(st.sampled_from(DIGESTS), max_size=4, unique=True))
    def share(self, chain: list[bytes]) -> None:
        block_of = {digest: block for block, digest in self.digest_of.items()}
        known = next((i for i, digest in enumerate(chain) if digest not in block_of), len(chain))
        blocks = self.pool.match(chain)
        assert blocks == [block_of[digest] for digest in chain[:known]]
        assert self.pool.num_evictable(blocks) == sum(block in self.cached for block in blocks)
        self.pool.share(blocks)
        self.owned.append(blocks)
        self.cached = [block for block in self.cached if block not in blocks]

    @rule(chain=st.lists(st.sampled_from(DIGESTS), max_size=4, unique=True))
    def lease_copy(self, chain: list[bytes]) -> None:
        blocks = self.pool.match(chain)
        self.pool.lease_copy(blocks)
        self.copied.append(blocks)
        self.cached = [block for block in self.cached if block not in blocks]

    @precondition(lambda self: self.copied)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        blocks = self.pick(data, self.copied)
        self.pool.end_copy(blocks)
        self.let_go(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.pick(data, self.owned)
        self.pool.release(blocks)
        self.let_go(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        blocks = self.pick(data, self.owned)
        self.pool.lease(blocks)
        self.leased.append(blocks)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        blocks = self.pick(data, self.leased)
        self.pool.unlease(blocks)
        self.let_go(blocks)

    @rule(
        chain=st.lists(st.sampled_from(DIGESTS), max_size=4, unique=True),
        tenant=st.sampled_from([b"ada", b"bob", b"eve"]),
        seconds=st.integers(1, 9),
    )
    def retain(self, chain: list[bytes], tenant: bytes, seconds: int) -> None:
        """A tenant has a quarter of the blocks, and all together have half of them.

        Cached blocks that were not retained before go behind all others.
        """
        self.pool.retain(chain, tenant, self.now + seconds)
        known = list(takewhile(set(self.digest_of.values()).__contains__, chain))
        before = {digest for digest, _, _ in self.retained}
        for digest in reversed(known[: NUM_BLOCKS // 4]):
            ends = [end for other, _, end in self.retained if other == digest]
            self.retained = [each for each in self.retained if each[0] != digest]
            self.retained.append((digest, tenant, max([self.now + seconds, *ends])))
        own = [each for each in self.retained if each[1] == tenant]
        dropped = own[: max(len(own) - NUM_BLOCKS // 4, 0)]
        rest = [each for each in self.retained if each not in dropped]
        self.drop(dropped + rest[: max(len(rest) - NUM_BLOCKS // 2, 0)])
        block_of = {digest: block for block, digest in self.digest_of.items()}
        for digest in known:
            block = block_of[digest]
            if digest not in before and block in self.cached and self.is_retained(block):
                self.cached.remove(block)
                self.cached.append(block)

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.pool.end_retentions(self.now)
        self.drop(
            sorted(
                [each for each in self.retained if each[2] <= self.now],
                key=lambda each: (each[2], each[0]),
            )
        )

    @rule()
    def clear(self) -> None:
        """What is held stays held, and is not found any more."""
        self.pool.clear()
        self.digest_of, self.cached, self.retained = {}, [], []
        assert not any(map(self.pool.has, DIGESTS))

    @rule()
    def take_changes(self) -> None:
        stored, evicted = self.pool.take_changes()
        assert not set(stored) & self.reported
        assert set(evicted) <= self.reported
        self.reported = (self.reported | set(stored)) - set(evicted)
        assert self.reported == set(self.digest_of.values())
        assert self.pool.take_changes() == ((), ())

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert list(self.pool.retained) == [digest for digest, _, _ in self.retained]
        assert list(self.pool._order) == [self.digest_of[block] for block in self.cached]
        owned = {block for group in self.owned for block in group}
        leases = self.leased + self.copied
        leased = {block for group in leases for block in group} - owned
        assert self.pool.copied == Counter(block for group in self.copied for block in group)
        counts = {
            BlockState.OWNED: len(owned),
            BlockState.LEASED: len(leased),
            BlockState.RESERVED: sum(map(len, self.reserved)),
            BlockState.CACHED: len(self.cached),
        }
        counts[BlockState.FREE] = NUM_BLOCKS - sum(counts.values())
        assert {state: self.pool.count(state) for state in BlockState} == counts
        assert self.pool.num_available == counts[BlockState.FREE] + counts[BlockState.CACHED]
        for block in range(NUM_BLOCKS):
            owners = sum(group.count(block) for group in self.owned)
            assert self.pool.holders(block) == (
                owners,
                sum(group.count(block) for group in leases),
            )


def test_pool_agrees_with_a_model_of_lists() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(max_examples=num_examples(80), stateful_step_count=40, database=None),
    )


def owned(pool: BlockPool, digests: list[bytes]) -> list[int]:
    """Blocks of one sequence, published under `digests`."""
    blocks = pool.reserve(len(digests))
    pool.claim(blocks)
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    return blocks


def test_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    pool = BlockPool(4)
    first, second = owned(pool, [b"a0", b"a1"]), owned(pool, [b"b0", b"b1"])
    pool.release(first)
    pool.release(second)
    touched = pool.match([b"a0", b"a1"])
    pool.share(touched)
    pool.release(touched)
    order = [pool.reserve(1)[0] for _ in range(4)]
    assert order == [second[1], second[0], first[1], first[0]]
    assert pool.match([b"a0"]) == []


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    kept = owned(pool, [b"a"])
    pool.release(kept)
    assert kept[0] not in pool.reserve(2)
    assert pool.match([b"a"]) == kept


def test_first_block_of_a_hash_wins_and_the_other_becomes_free() -> None:
    pool = BlockPool(2)
    first, twin = owned(pool, [b"a"]), owned(pool, [b"a"])
    pool.release(twin)
    assert pool.count(BlockState.FREE) == 1
    pool.release(first)
    assert pool.match([b"a"]) == first


def test_a_lease_outlives_its_sequence_and_a_sharer_outlives_the_lease() -> None:
    pool = BlockPool(1)
    blocks = owned(pool, [b"a"])
    pool.lease(blocks)
    assert pool.count(BlockState.LEASED) == 1
    with pytest.raises(RuntimeError, match="requested"):
        pool.reserve(1)
    pool.share(blocks)
    pool.unlease(blocks)
    assert pool.count(BlockState.OWNED) == 1
    pool.release(blocks)
    assert pool.count(BlockState.CACHED) == 1


@pytest.mark.parametrize(
    "verb",
    [
        "unreserve",
        "claim",
        "share",
        "release",
        "lease",
        "unlease",
        "lease_copy",
        "end_copy",
    ],
)
def test_verbs_refuse_free_blocks(verb: str) -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="block 0 is free"):
        getattr(pool, verb)([0])
    pool.check_integrity()


def test_second_release_and_second_unlease_are_refused() -> None:
    pool = BlockPool(2)
    blocks = owned(pool, [b"a"])
    pool.share(blocks)
    pool.lease(blocks)
    pool.unlease(blocks)
    with pytest.raises(RuntimeError, match="no lease"):
        pool.unlease(blocks)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="cached"):
        pool.release(blocks)


def test_hash_chain_covers_full_blocks_and_the_whole_prefix() -> None:
    chain = hash_chain([1, 2, 3, 4, 5], 2)
    assert len(chain) == 2
    assert chain == hash_chain([1, 2, 3, 4], 2)
    assert chain[0] == hash_block(hash_root(b""), [1, 2])
    other = hash_chain([9, 2, 3, 4], 2)
    assert other[1] != chain[1], "equal tokens after an unequal prefix"
    assert not set(hash_chain([1, 2, 3, 4], 2, b"tenant")) & set(chain)


def test_no_salt_continues_the_chain_of_another_tenant() -> None:
    tokens = [7, 8]
    stolen = hash_root(b"") + b"".join(token.to_bytes(4, "little") for token in tokens)
    assert hash_root(stolen) != hash_block(hash_root(b""), tokens)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.pop(),
        lambda pool: pool._owners.__setitem__(0, 0),
        lambda pool: pool._leases.__setitem__(3, 1),
        lambda pool: pool._order.remove(b"b"),
        lambda pool: pool.retained.add([b"gone"], b"", 1.0),
        lambda pool: pool.retained.add([b"b"], b"", 1.0),
        lambda pool: pool._block_of.clear(),
        lambda pool: pool._count.__setitem__(BlockState.FREE, 0),
        lambda pool: pool._state.__setitem__(1, BlockState.FREE),
    ],
)
def test_integrity_check_finds_damage(damage: object) -> None:
    pool = BlockPool(4)
    owned(pool, [b"a"])
    pool.release(owned(pool, [b"b"]))
    pool.check_integrity()
    assert callable(damage)
    damage(pool)
    with pytest.raises(RuntimeError):
        pool.check_integrity()


def test_what_comes_and_goes_between_two_looks_is_no_change() -> None:
    pool = BlockPool(2)
    pool.release(owned(pool, [b"a", b"b"]))
    pool.unreserve(pool.reserve(2))
    assert pool.take_changes() == ((), ())
    pool.release(owned(pool, [b"a"]))
    assert pool.take_changes() == ((b"a",), ())
    pool.unreserve(pool.reserve(2))
    pool.release(owned(pool, [b"a"]))
    assert pool.take_changes() == ((), ())
    pool.unreserve(pool.reserve(2))
    assert pool.take_changes() == ((), (b"a",))


def test_another_thread_reads_counts_of_one_time() -> None:
    """All blocks change between owned and cached, so a torn read would miss many of them."""
    pool = BlockPool(64)
    blocks = owned(pool, [bytes([n]) for n in range(64)])
    is_over = threading.Event()

    def keep_moving() -> None:
        while not is_over.is_set():
            pool.release(blocks)
            pool.share(blocks)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    moving = threading.Thread(target=keep_moving)
    moving.start()
    try:
        found = {sum(pool.counts().values()) for _ in range(20_000)}
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        moving.join()
    assert found <= {63, 64}
