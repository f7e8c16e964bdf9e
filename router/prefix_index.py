"""A router's guess at which worker's prefix cache holds what: a memory of what it sent where, the oldest forgotten."""

from collections import OrderedDict
from typing import Final

from ..proto.hashing import hash_chain

_BLOCK: Final = 64
"""Tokens a step of the index; coarser than the workers' blocks, since a guess need not be exact."""


class PrefixIndex:
    """Maps prefixes to the workers that have seen them. Holds at most `capacity` prefixes of 64-token steps."""

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._workers: OrderedDict[bytes, set[str]] = OrderedDict()

    def match(self, tokens: tuple[int, ...], salt: bytes) -> dict[str, int]:
        """For each worker that has seen a prefix of `tokens`, how many tokens of it."""
        found: dict[str, int] = {}
        for index, digest in enumerate(hash_chain(tokens, _BLOCK, salt), start=1):
            workers = self._workers.get(digest)
            if workers is None:
                break
            found.update(dict.fromkeys(workers, index * _BLOCK))
        return found

    def record(self, worker_id: str, tokens: tuple[int, ...], salt: bytes) -> None:
        """`worker_id` now has the KV cache of `tokens`."""
        for digest in reversed(hash_chain(tokens, _BLOCK, salt)):  # what only longer prefixes need is forgotten first
            self._workers.setdefault(digest, set()).add(worker_id)
            self._workers.move_to_end(digest)
        while len(self._workers) > self._capacity:
            self._workers.popitem(last=False)

    def forget(self, worker_id: str) -> None:
        """The worker is gone, and its cache with it."""
        for digest in [digest for digest, workers in self._workers.items() if worker_id in workers]:
            self._workers[digest].discard(worker_id)
            if not self._workers[digest]:
                del self._workers[digest]
