"""Declares the interface by which KV transfers read and write one rank's KV cache memory."""

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from mmap import mmap
from typing import Generic, Protocol, TypeVar

from .layout import KvLayout, KvSpan
from .sharding import kv_heads
from .tables import TableBlocks, TableSpec

T = TypeVar("T")

KvRead = Callable[[TableBlocks, KvSpan], memoryview]
"""A function that reads a span as `KvStore.read` does, and returns the copy at once."""


@dataclass(frozen=True, slots=True)
class Completed(Generic[T]):
    """Holds a result for `await`, which continues at once."""

    result: T

    def __await__(self) -> Generator[None, None, T]:
        yield from ()
        return self.result


class KvStore(Protocol):
    """Reads and writes the KV cache memory of one rank in canonical form, for transfers.

    The caller owns the blocks for the whole call. After the call they may have another owner: on a
    GPU, reads and writes are queued, and the other owner's steps and writes wait for them. Reads
    and writes of blocks that the running step does not touch are safe from any thread while a step
    runs.
    """

    num_blocks: int
    block_size: int  # tokens of a base block
    tables: tuple[TableSpec, ...]  # the block tables of each sequence

    @property
    def layout(self) -> KvLayout:
        """Returns the whole model's layout; equal on all ranks and both sides of a transfer."""
        ...

    @property
    def tp(self) -> int:
        """Returns the number of ranks that share the model."""
        ...

    @property
    def rank(self) -> int: ...

    def num_slots(self, group: int) -> int:
        """Returns the number of KV slots of this rank in a group: the length of `kv_heads`."""
        ...

    @property
    def shared_fd(self) -> int | None:
        """Returns the file of this memory, which other processes of the host can map, or None."""
        ...

    def attach(
        self, memory: mmap, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> KvRead:
        """Returns a function that reads the mapped memory of another process.

        It is the memory of rank `rank` of `tp` and has the same layout. Raises ValueError if
        `memory` is too small or the model cannot be split into `tp` ranks.
        """
        ...

    def read(self, table: TableBlocks, span: KvSpan) -> Awaitable[memoryview]:
        """Copies a span of the sequence that owns the blocks of `table`; await the copy.

        It is the block table of the span's group, and the span's tokens must be computed. On a GPU
        the running event loop gets the copy; in host memory it is complete at once.

        The copy has contiguous bytes of shape [num_layers, planes, num_tokens, num_slots,
        row_bytes].
        Raises ValueError if the span or a block is out of range, and MemoryError if the copy does
        not fit into the memory of a GPU.
        """
        ...

    def write(self, table: TableBlocks, span: KvSpan, data: memoryview) -> None:
        """Writes a span from bytes in the form that `read` returns.

        Raises ValueError if the length of `data` is not exactly the expected length, and
        MemoryError as `read`.
        """
        ...


def slots_of(layout: KvLayout, tp: int, rank: int) -> list[int]:
    """Returns the number of KV slots of a rank in each group of the layout.

    Raises ValueError as `check_split` does.
    """
    return [
        len(kv_heads(group.part.num_heads, group.part.num_kv_heads, tp, rank))
        for group in layout.groups
    ]
