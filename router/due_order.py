"""Orders the waiting entries of one tenant by their due times."""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final, Generic, TypeVar

_MAX_CHUNK: Final = 512  # entries


@dataclass(eq=False, slots=True, kw_only=True)
class QueueEntry:
    """Describes a waiting piece of work. Entries compare by identity."""

    tenant: str
    priority: int
    num_tokens: int  # its work, at least 1
    due: float = 0.0  # a time that does not change while it waits


T = TypeVar("T", bound=QueueEntry)

_Key = tuple[float, float]  # due time, number of the arrival


class DueOrder(Generic[T]):
    """Holds entries, the earliest due time first, and the first come first of equal ones.

    The entries lie in sorted chunks with the sums of their tokens, so an operation looks at the
    entries of one chunk and at one number of each other chunk.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # of all entries
        self._keys: dict[T, _Key] = {}
        self._count = count()
        # In order; each with at least one entry and its key.
        self._chunks: list[list[tuple[_Key, T]]] = []
        self._tokens: list[int] = []  # of each chunk

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, entry: T) -> bool:
        return entry in self._keys

    def __iter__(self) -> Iterator[T]:
        return (entry for chunk in self._chunks for _, entry in chunk)

    def __reversed__(self) -> Iterator[T]:
        return (entry for chunk in reversed(self._chunks) for _, entry in reversed(chunk))

    def add(self, entry: T) -> None:
        """Adds an entry that it does not hold."""
        key = self._keys[entry] = (entry.due, next(self._count))
        if self._chunks:
            index = min(self._chunk_of(key), len(self._chunks) - 1)
            insort(self._chunks[index], (key, entry), key=_key)
        else:
            index = 0
            self._chunks.append([(key, entry)])
            self._tokens.append(0)
        self._count_tokens(index, entry.num_tokens)
        chunk = self._chunks[index]
        if len(chunk) > _MAX_CHUNK:
            half = len(chunk) // 2
            self._chunks[index : index + 1] = [chunk[:half], chunk[half:]]
            moved = sum(each.num_tokens for _, each in chunk[half:])
            self._tokens[index : index + 1] = [self._tokens[index] - moved, moved]

    def remove(self, entry: T) -> None:
        """Removes an entry that it holds."""
        key = self._keys.pop(entry)
        index = self._chunk_of(key)
        chunk = self._chunks[index]
        del chunk[bisect_left(chunk, key, key=_key)]
        self._count_tokens(index, -entry.num_tokens)
        if not chunk:
            del self._chunks[index], self._tokens[index]

    def tokens_until(self, due: float) -> int:
        """Returns the tokens of the entries that come before a new one with this due time."""
        key = due, math.inf
        index = self._chunk_of(key)
        if index == len(self._chunks):
            return self.num_tokens
        chunk = self._chunks[index]
        before = chunk[: bisect_right(chunk, key, key=_key)]
        return sum(self._tokens[:index]) + sum(entry.num_tokens for _, entry in before)

    def _chunk_of(self, key: _Key) -> int:
        """Returns the index of the first chunk that ends at or after `key`, or their number."""
        return bisect_left(self._chunks, key, key=lambda chunk: chunk[-1][0])

    def _count_tokens(self, index: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._tokens[index] += num_tokens


def _key(keyed: tuple[_Key, T]) -> _Key:
    return keyed[0]
