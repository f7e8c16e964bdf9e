"""Maps prefixes to the workers whose prefix caches hold them.

The sources are the workers' reports and the prompts that this router has sent. Blocks are
identified by their hashes (proto/hashing.py) at each worker's block size. Knows nothing of load or
time.
"""

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from ...proto.hashing import hash_chain

DEFAULT_CAPACITY: Final = 65_536
"""Blocks expected at a worker that has not reported its number of blocks."""

MAX_REPORTED: Final = 1_048_576
"""Blocks of one worker that are remembered from its reports; they take about 250 MB.

Not the number of blocks of its KV cache, because it also reports those in host memory and on disk.
A block that is forgotten is not known again until the worker has evicted it and stored it again.
"""


class _Spacing(NamedTuple):
    """The positions of a prefix that a worker reports: the ends of every `stride`-th block."""

    block_size: int  # tokens
    stride: int

    def chain(self, prefix: "Prefix") -> list[bytes]:
        """Returns the hashes at these positions of a prompt."""
        chain = prefix.chain(self.block_size)
        return chain if self.stride == 1 else chain[self.stride - 1 :: self.stride]


class Prefix:
    """Holds a prompt's hash chains, one for each block size; each is computed once."""

    def __init__(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        self.chain: Callable[[int], list[bytes]] = functools.cache(
            partial(hash_chain, tokens, salt=salt)
        )
        """Returns the hashes of the prompt's full blocks for a block size in tokens."""


class _Cache:
    """Holds one worker's blocks, the least recently used first.

    A block is either among those that the worker has reported or among those that this router
    expects there.
    """

    def __init__(
        self, bit: int, pool: int, spacing: _Spacing, capacity: int, *, is_sparse: bool
    ) -> None:
        self.bit = bit
        self.pool = pool
        self.spacing = spacing
        self.capacity = capacity  # of expected blocks
        self.is_sparse = is_sparse
        self.reported: OrderedDict[bytes, None] = OrderedDict()
        self.expected: OrderedDict[bytes, None] = OrderedDict()
        self.reports = False  # True after the first report


class Matches:
    """Knows which workers hold the beginning of a prompt, and how many of its tokens.

    Looks workers up when they are asked for, because a common beginning is on all workers.
    """

    def __init__(
        self,
        levels: list[tuple[int, int]],
        caches: Mapping[str, _Cache],
        names: Mapping[int, str],
        pools: Mapping[int, int],
    ) -> None:
        """`levels`: numbers of tokens, and the bits of the workers with this many.

        The other parameters come from the index: by id, by the number of a bit, and by pool.
        """
        self._levels = sorted(levels, reverse=True)
        self._caches = caches
        self._names = names
        self._pools = pools

    def num_tokens(self, worker_id: str) -> int:
        """Returns the tokens that a worker of the index holds; 0 if none."""
        bit = self._caches[worker_id].bit
        for num_tokens, bits in self._levels:
            if bits & bit:
                return num_tokens
        return 0

    def longest(self, pool: int, count: int, rng: random.Random) -> list[tuple[str, int]]:
        """Returns at most `count` workers of a pool and their tokens, the most tokens first.

        If `count` ends among workers with equal tokens, it takes neighbours from a random one on.
        """
        members = self._pools.get(pool, 0)
        found: list[tuple[str, int]] = []
        for num_tokens, bits in self._levels:
            holding = bits & members
            missing = count - len(found)
            if holding.bit_count() > missing:
                start = rng.randrange(holding.bit_length())
                upper = holding >> start << start
                chosen = [*_numbers(upper, missing), *_numbers(holding ^ upper, missing)][:missing]
            else:
                chosen = list(_numbers(holding))
            found += [(worker_id, num_tokens) for worker_id in self._named(chosen)]
            if len(found) == count:
                break
        return found

    def _named(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yields the workers of these bits that are still in the index."""
        return (self._names[number] for number in numbers if number in self._names)


def _numbers(bits: int, count: int = -1) -> Iterator[int]:
    """Yields the numbers of the lowest `count` bits that are set; of all by default."""
    while bits and count:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
        count -= 1


class PrefixIndex:
    """Maps block hashes to the workers that hold them; each worker is one bit of a number."""

    def __init__(self, max_reported: int = MAX_REPORTED) -> None:
        self._max_reported = max_reported
        self._caches: dict[str, _Cache] = {}
        self._names: dict[int, str] = {}  # worker ids by the number of their bit
        self._pools: dict[int, int] = {}  # the bits of the workers in each pool
        # The bits of the workers with this spacing: of contiguous blocks, and of sparse points.
        self._dense: dict[_Spacing, int] = {}
        self._sparse: dict[_Spacing, int] = {}
        self._holders: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        """Returns the number of known blocks; a block counts once for each worker with it."""
        return sum(len(each.reported) + len(each.expected) for each in self._caches.values())

    def add(
        self,
        worker_id: str,
        block_size: int,
        capacity: int = 0,
        *,
        pool: int = 0,
        stride: int = 1,
        is_sparse: bool = False,
    ) -> None:
        """Adds a worker with an empty cache.

        `capacity`: the maximum number of expected blocks; 0 means DEFAULT_CAPACITY.
        `pool`: the number of its pool, see Matches.longest.
        The worker reports the hashes of every `stride`-th block: of contiguous ones or, if
        `is_sparse`, of points that each stand for the whole prefix before them.
        """
        self.remove(worker_id)
        number = next(each for each in range(len(self._names) + 1) if each not in self._names)
        bit = 1 << number
        spacing = _Spacing(block_size, stride)
        self._caches[worker_id] = _Cache(
            bit, pool, spacing, capacity or DEFAULT_CAPACITY, is_sparse=is_sparse
        )
        self._names[number] = worker_id
        self._pools[pool] = self._pools.get(pool, 0) | bit
        sizes = self._sparse if is_sparse else self._dense
        sizes[spacing] = sizes.get(spacing, 0) | bit

    def remove(self, worker_id: str) -> None:
        """Removes a worker and its cache. Idempotent."""
        cache = self._caches.pop(worker_id, None)
        if cache is None:
            return
        self._drop(cache, cache.reported, list(cache.reported))
        self._drop(cache, cache.expected, list(cache.expected))
        del self._names[cache.bit.bit_length() - 1]
        self._pools[cache.pool] ^= cache.bit
        sizes = self._sparse if cache.is_sparse else self._dense
        sizes[cache.spacing] ^= cache.bit
        if not sizes[cache.spacing]:
            del sizes[cache.spacing]

    def match(self, prefix: Prefix) -> Matches:
        """Returns the number of leading prompt tokens that each worker holds, if any.

        The result is valid until the index changes.
        """
        levels: list[tuple[int, int]] = []
        for spacing, bits in self._dense.items():
            num_tokens = 0
            for digest in spacing.chain(prefix):
                holding = bits & self._holders.get(digest, 0)
                if holding != bits and num_tokens:
                    levels.append((num_tokens, bits ^ holding))
                bits = holding
                if not bits:
                    break
                num_tokens += spacing.block_size * spacing.stride
            if bits and num_tokens:
                levels.append((num_tokens, bits))
        for spacing, bits in self._sparse.items():
            chain = spacing.chain(prefix)
            for index in range(len(chain), 0, -1):
                holding = bits & self._holders.get(chain[index - 1], 0)
                if holding:
                    levels.append((index * spacing.block_size * spacing.stride, holding))
                    bits ^= holding
                    if not bits:
                        break
        return Matches(levels, self._caches, self._names, self._pools)

    def expect(self, worker_id: str, prefix: Prefix) -> None:
        """Adds the blocks of a prompt that was sent to the worker, which will soon hold them.

        The blocks that the worker has reported become its most recently used ones.
        """
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        chain = cache.spacing.chain(prefix)
        reported = cache.reported
        # Reversed, so that the first blocks are the most recently used ones.
        for digest in reversed(chain):
            if digest in reported:
                reported.move_to_end(digest)
            # Of sparse points only the last one: the others depend on the worker's cache.
            elif not cache.is_sparse or digest == chain[-1]:
                self._put(cache, cache.expected, digest)
        self._trim(cache, cache.expected, cache.capacity)

    def settle(self, worker_id: str, prefix: Prefix) -> None:
        """Removes the expected blocks that the worker has not reported when the request ends.

        A worker that has never reported anything keeps its expected blocks.
        """
        cache = self._caches.get(worker_id)
        if cache is not None and cache.reports:
            self._drop(cache, cache.expected, cache.spacing.chain(prefix))

    def report(self, worker_id: str, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Applies a worker's report of blocks stored in its cache and evicted from it."""
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        cache.reports = True
        # Reversed, because workers report the first blocks of a prompt first.
        for digest in reversed(stored):
            if digest in cache.expected:
                del cache.expected[digest]
                cache.reported[digest] = None
            else:
                self._put(cache, cache.reported, digest)
        self._drop(cache, cache.reported, evicted)
        self._trim(cache, cache.reported, self._max_reported)

    def check_integrity(self) -> None:
        """Raises AssertionError if the two directions of the map disagree."""
        held: dict[bytes, int] = {}
        for cache in self._caches.values():
            assert len(cache.reported) <= self._max_reported
            assert len(cache.expected) <= cache.capacity
            assert cache.reported.keys().isdisjoint(cache.expected)
            for digest in (*cache.reported, *cache.expected):
                held[digest] = held.get(digest, 0) | cache.bit
        assert held == self._holders
        bits = {worker_id: cache.bit for worker_id, cache in self._caches.items()}
        assert bits == {worker_id: 1 << number for number, worker_id in self._names.items()}

    def _put(self, cache: _Cache, blocks: OrderedDict[bytes, None], digest: bytes) -> None:
        """Adds a block to `blocks`, which are one of the two of a cache, as the last one."""
        if digest in blocks:
            blocks.move_to_end(digest)
            return
        # Most blocks are on one worker, and share the number of its bit: with 1,000 workers, a
        # number of its own takes 160 bytes.
        holders = self._holders.get(digest)
        self._holders[digest] = cache.bit if holders is None else holders | cache.bit
        blocks[digest] = None

    def _drop(
        self, cache: _Cache, blocks: OrderedDict[bytes, None], digests: Iterable[bytes]
    ) -> None:
        """Removes blocks from `blocks`, which are one of the two of a cache; skips all others."""
        for digest in digests:
            if digest not in blocks:
                continue
            del blocks[digest]
            holders = self._holders[digest]
            if holders == cache.bit:
                del self._holders[digest]
            else:
                self._holders[digest] = holders ^ cache.bit

    def _trim(self, cache: _Cache, blocks: OrderedDict[bytes, None], capacity: int) -> None:
        """Removes the least recently used blocks above `capacity`."""
        while len(blocks) > capacity:
            self._drop(cache, blocks, [next(iter(blocks))])
