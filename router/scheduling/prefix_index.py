"""Maps prefixes to the workers whose prefix caches hold them.

The sources are the workers' reports and the prompts that this router has sent. Blocks are
identified by their hashes (proto/hashing.py) at each worker's block size. Knows nothing of load or
time.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from ...proto.hashing import hash_chain

DEFAULT_CAPACITY: Final = 65_536
"""Blocks remembered for a worker that has not reported its number of blocks."""


class Prefix:
    """Holds a prompt's hash chains, one for each block size; each is computed once."""

    def __init__(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        self.chain: Callable[[int], list[bytes]] = functools.cache(
            partial(hash_chain, tokens, salt=salt)
        )
        """Returns the hashes of the prompt's full blocks for a block size in tokens."""


class _Cache:
    """Holds one worker's blocks, the least recently used first."""

    def __init__(self, bit: int, block_size: int, capacity: int) -> None:
        self.bit = bit
        self.block_size = block_size
        self.capacity = capacity
        # True: the worker has reported the block. False: this router expects it there.
        self.blocks: OrderedDict[bytes, bool] = OrderedDict()
        self.reports = False  # True after the first report


class PrefixIndex:
    """Maps block hashes to the workers that hold them; each worker is one bit of a number."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._names: dict[int, str] = {}  # worker ids by bit
        self._sizes: dict[int, int] = {}  # by block size: the bits of its workers
        self._holders: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        """Returns the number of known blocks; a block counts once for each worker with it."""
        return sum(len(cache.blocks) for cache in self._caches.values())

    def add(self, worker_id: str, block_size: int, capacity: int = 0) -> None:
        """Adds a worker with an empty cache of `capacity` blocks; 0 means DEFAULT_CAPACITY."""
        self.remove(worker_id)
        bit = next(
            1 << index for index in range(len(self._names) + 1) if 1 << index not in self._names
        )
        self._caches[worker_id] = _Cache(bit, block_size, capacity or DEFAULT_CAPACITY)
        self._names[bit] = worker_id
        self._sizes[block_size] = self._sizes.get(block_size, 0) | bit

    def remove(self, worker_id: str) -> None:
        """Removes a worker and its cache. Idempotent."""
        cache = self._caches.pop(worker_id, None)
        if cache is None:
            return
        self._drop(cache, list(cache.blocks))
        del self._names[cache.bit]
        self._sizes[cache.block_size] ^= cache.bit
        if not self._sizes[cache.block_size]:
            del self._sizes[cache.block_size]

    def match(self, prefix: Prefix) -> dict[str, int]:
        """Returns the number of leading prompt tokens that each worker holds, if any."""
        found: dict[str, int] = {}
        for block_size, bits in self._sizes.items():
            num_tokens = 0
            for digest in prefix.chain(block_size):
                holding = bits & self._holders.get(digest, 0)
                self._record(bits ^ holding, num_tokens, found)
                bits = holding
                if not bits:
                    break
                num_tokens += block_size
            self._record(bits, num_tokens, found)
        return found

    def expect(self, worker_id: str, prefix: Prefix) -> None:
        """Adds the blocks of a prompt that was sent to the worker, which will soon hold them."""
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        # Reversed, so that the first blocks are the most recently used ones.
        for digest in reversed(prefix.chain(cache.block_size)):
            if not cache.blocks.get(digest, False):
                self._put(cache, digest, reported=False)
        self._trim(cache)

    def settle(self, worker_id: str, prefix: Prefix) -> None:
        """Removes the expected blocks that the worker has not reported when the request ends.

        A worker that has never reported anything keeps its expected blocks.
        """
        cache = self._caches.get(worker_id)
        if cache is not None and cache.reports:
            chain = prefix.chain(cache.block_size)
            self._drop(cache, [digest for digest in chain if cache.blocks.get(digest) is False])

    def report(self, worker_id: str, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Applies a worker's report of blocks stored in its cache and evicted from it."""
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        cache.reports = True
        for digest in stored:
            self._put(cache, digest, reported=True)
        self._drop(cache, [digest for digest in evicted if digest in cache.blocks])
        self._trim(cache)

    def check_integrity(self) -> None:
        """Raises AssertionError if the two directions of the map disagree."""
        held: dict[bytes, int] = {}
        for cache in self._caches.values():
            assert len(cache.blocks) <= cache.capacity
            for digest in cache.blocks:
                held[digest] = held.get(digest, 0) | cache.bit
        assert held == self._holders
        assert self._names == {cache.bit: worker_id for worker_id, cache in self._caches.items()}

    def _record(self, bits: int, num_tokens: int, found: dict[str, int]) -> None:
        while bits and num_tokens:
            lowest = bits & -bits
            found[self._names[lowest]] = num_tokens
            bits ^= lowest

    def _put(self, cache: _Cache, digest: bytes, *, reported: bool) -> None:
        cache.blocks[digest] = reported
        cache.blocks.move_to_end(digest)
        self._holders[digest] = self._holders.get(digest, 0) | cache.bit

    def _drop(self, cache: _Cache, digests: Iterable[bytes]) -> None:
        for digest in digests:
            del cache.blocks[digest]
            if holders := self._holders[digest] & ~cache.bit:
                self._holders[digest] = holders
            else:
                del self._holders[digest]

    def _trim(self, cache: _Cache) -> None:
        while len(cache.blocks) > cache.capacity:
            self._drop(cache, [next(iter(cache.blocks))])
