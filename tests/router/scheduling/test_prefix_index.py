"""Tests that the index knows each worker's blocks: against a model, in bounds, by block size."""

import random

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.proto.hashing import hash_chain
from tandem.router.scheduling.prefix_index import Prefix, PrefixIndex
from tandem.tests.examples import num_examples
from tandem.workers.engine.block_pool import BlockPool

WORKERS = ("a", "b", "c")
PROMPTS = [tuple(range(start, start + length)) for start in (0, 100) for length in (3, 8, 13, 24)]
PROMPTS += [(*range(8), *range(50, 62))]  # begins as another and goes on otherwise


def index_of(*sizes: int) -> PrefixIndex:
    index = PrefixIndex()
    for worker_id, size in zip(WORKERS, sizes, strict=False):
        index.add(worker_id, size)
    return index


def held(index: PrefixIndex, prefix: Prefix) -> dict[str, int]:
    """Returns the tokens of a prompt that each worker holds, if any."""
    matches = index.match(prefix)
    found = dict(matches.longest(0, len(WORKERS), random.Random(0)))
    each = {worker_id: matches.num_tokens(worker_id) for worker_id in index._caches}
    assert found == {worker_id: count for worker_id, count in each.items() if count}
    return found


class AgainstAModel(RuleBasedStateMachine):
    """Compares the index with a model: each worker's reported and expected blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.sizes: dict[str, int] = {}
        self.strides: dict[str, int] = {}
        self.sparse: set[str] = set()
        self.held: dict[str, set[bytes]] = {}

    @initialize(
        kinds=st.lists(
            st.tuples(st.sampled_from([2, 4]), st.sampled_from([1, 2, 3]), st.booleans()),
            min_size=3,
            max_size=3,
        )
    )
    def begin(self, kinds: list[tuple[int, int, bool]]) -> None:
        for worker_id, (size, stride, is_sparse) in zip(WORKERS, kinds, strict=True):
            self.sizes[worker_id], self.strides[worker_id] = size, stride
            if is_sparse:
                self.sparse.add(worker_id)
            self.begin_anew(worker_id)

    def chain(self, worker: str, prompt: tuple[int, ...]) -> list[bytes]:
        """Returns the hashes that the worker may report of a prompt."""
        stride = self.strides[worker]
        return hash_chain(prompt, self.sizes[worker])[stride - 1 :: stride]

    @rule(worker=st.sampled_from(WORKERS), prompt=st.sampled_from(PROMPTS))
    def store(self, worker: str, prompt: tuple[int, ...]) -> None:
        chain = self.chain(worker, prompt)
        if worker in self.sparse:
            chain = chain[-1:]
        self.index.expect(worker, Prefix(prompt))
        self.index.report(worker, chain, [])
        self.index.settle(worker, Prefix(prompt))
        self.held[worker] |= set(chain)

    @rule(worker=st.sampled_from(WORKERS), prompt=st.sampled_from(PROMPTS), data=st.data())
    def evict(self, worker: str, prompt: tuple[int, ...], data: st.DataObject) -> None:
        chain = self.chain(worker, prompt)
        gone = data.draw(st.lists(st.sampled_from(chain), unique=True)) if chain else []
        self.index.report(worker, [], gone)
        self.held[worker] -= set(gone)

    @rule(worker=st.sampled_from(WORKERS), prompt=st.sampled_from(PROMPTS))
    def send_in_vain(self, worker: str, prompt: tuple[int, ...]) -> None:
        self.index.expect(worker, Prefix(prompt))
        self.index.settle(worker, Prefix(prompt))

    @rule(worker=st.sampled_from(WORKERS))
    def begin_anew(self, worker: str) -> None:
        self.index.add(
            worker,
            self.sizes[worker],
            capacity=2,  # less than the worker reports
            stride=self.strides[worker],
            is_sparse=worker in self.sparse,
        )
        self.index.report(worker, [], [])
        self.held[worker] = set()

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        for prompt in PROMPTS if self.held else []:
            expected = {}
            for worker, size in self.sizes.items():
                count = 0
                for index, digest in enumerate(self.chain(worker, prompt), 1):
                    if digest in self.held[worker]:
                        count = index * size * self.strides[worker]
                    elif worker not in self.sparse:
                        break
                if count:
                    expected[worker] = count
            assert held(self.index, Prefix(prompt)) == expected


AgainstAModel.TestCase.settings = settings(max_examples=num_examples(40), stateful_step_count=20)
TestAgainstAModel = AgainstAModel.TestCase


def test_a_dispatched_prompt_is_expected_until_the_worker_reports() -> None:
    index, prompt = index_of(16), Prefix(range(40))
    index.expect("a", prompt)
    assert held(index, prompt) == {"a": 32}
    index.settle("a", prompt)
    assert held(index, prompt) == {"a": 32}  # of a worker that never reports the expectation stays
    index.report("a", [], [])
    index.settle("a", prompt)
    assert held(index, prompt) == {}


def test_the_salt_separates_tenants() -> None:
    index = index_of(16)
    index.expect("a", Prefix(range(40), b"one"))
    assert held(index, Prefix(range(40), b"one")) == {"a": 32}
    assert held(index, Prefix(range(40), b"two")) == {}


def test_a_prompt_is_hashed_once_for_each_block_size() -> None:
    index, prompt = index_of(16, 64), Prefix(range(200))
    assert prompt.chain(16) is prompt.chain(16)
    index.expect("a", prompt)
    index.expect("b", prompt)
    assert held(index, prompt) == {"a": 192, "b": 192}
    assert held(index, Prefix(range(100))) == {"a": 96, "b": 64}


def test_each_worker_is_bounded_and_the_ends_of_prompts_are_forgotten_first() -> None:
    index = PrefixIndex(max_reported=5)
    index.add("a", 16, capacity=3)
    index.add("b", 16)
    index.expect("a", Prefix(range(80)))
    index.expect("b", Prefix(range(80)))
    assert held(index, Prefix(range(80))) == {"a": 48, "b": 80}
    index.expect("a", Prefix(range(1000, 1016)))
    assert held(index, Prefix(range(80))) == {"a": 32, "b": 80}
    index.report("a", hash_chain(range(500, 600), 16), [])
    assert held(index, Prefix(range(500, 600))) == {"a": 80}
    index.report("b", hash_chain(range(500, 600), 16), [])
    assert held(index, Prefix(range(500, 600))) == {"a": 80, "b": 80}
    assert index.num_blocks == 3 + 5 + 5 + 5
    index.check_integrity()


@given(
    prompts=st.lists(st.sampled_from(PROMPTS[:8])),
    capacity=st.integers(1, 4),
    max_reported=st.integers(3, 8),
    is_sparse=st.booleans(),
)
@settings(max_examples=num_examples(40))
def test_the_beginning_that_most_prompts_share_is_never_forgotten(
    prompts: list[tuple[int, ...]], capacity: int, max_reported: int, is_sparse: bool
) -> None:
    """Neither for other blocks that the worker reports, nor for its own continuations."""
    index, shared = PrefixIndex(max_reported), tuple(range(1000, 1008))
    index.add("a", 4, capacity, is_sparse=is_sparse)
    index.report("a", hash_chain(shared, 4), [])
    for number, prompt in enumerate(prompts):
        asked = Prefix((*shared, *prompt[:4], number, *prompt[4:]))
        assert index.match(asked).num_tokens("a") >= len(shared)
        index.expect("a", asked)
        index.report("a", asked.chain(4)[-max_reported + 2 :] if is_sparse else asked.chain(4), [])
        index.settle("a", asked)
        index.check_integrity()


def test_a_worker_may_hold_more_blocks_than_its_kv_cache() -> None:
    """It also reports those that have moved to host memory."""
    index, pool = index_of(), BlockPool(4, num_host_blocks=8)
    index.add("a", 16, pool.num_blocks)
    prompts = [range(start, start + 64) for start in (0, 100, 200)]
    for prompt in prompts:
        index.expect("a", Prefix(prompt))
        blocks = pool.reserve(4)
        pool.claim(blocks)
        for block, digest in zip(blocks, hash_chain(prompt, 16), strict=True):
            pool.publish(block, digest)
        pool.release(blocks)
        index.report("a", *pool.take_changes())
        index.settle("a", Prefix(prompt))
    assert [held(index, Prefix(prompt)) for prompt in prompts] == [{"a": 64}] * 3


def test_a_removed_worker_leaves_nothing_and_its_bit_is_reused() -> None:
    index = index_of(16, 16)
    for worker_id in ("a", "b"):
        index.expect(worker_id, Prefix(range(64)))
    index.remove("a")
    index.remove("a")
    index.add("c", 16)
    assert held(index, Prefix(range(64))) == {"b": 64}
    index.report("a", hash_chain(range(64), 16), [])
    index.expect("a", Prefix(range(64)))
    index.settle("a", Prefix(range(64)))
    index.remove("b")
    index.remove("c")
    assert index.num_blocks == 0
    index.check_integrity()
