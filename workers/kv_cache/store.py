"""Declares how KV transfers read and write one rank's KV cache memory."""

from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Protocol

from .layout import KvLayout, KvSpan
from .sharding import kv_heads

KvRead = Callable[[Sequence[int], KvSpan], memoryview]
"""Reads a span as `KvStore.read` does."""


class KvStore(Protocol):
    """Reads and writes the KV cache memory of one rank in canonical form, for transfers.

    The caller owns the blocks for the whole call. Reads and writes of blocks that the running step
    does not touch are safe from any thread while a step runs.
    """

    num_blocks: int
    block_size: int  # tokens

    @property
    def layout(self) -> KvLayout:
        """Of the whole model; equal on all ranks and on both sides of a transfer."""
        ...

    @property
    def tp(self) -> int:
        """How many ranks share the model."""
        ...

    @property
    def rank(self) -> int: ...

    def num_slots(self, layer: int) -> int:
        """KV slots of this rank in a layer: the length of `sharding.kv_heads`."""
        ...

    @property
    def shared_fd(self) -> int | None:
        """The file that is this memory, for other processes of the host to map; None if there is
        none.
        """
        ...

    def attach(
        self, memory: mmap, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> KvRead:
        """Returns the read of another process's memory of the same layout, which is that of rank
        `rank` of `tp`. Raises ValueError if `memory` is too small or the model cannot be split so.
        """
        ...

    def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        """Copies out a span of the sequence whose block table is `blocks`.

        Returns contiguous bytes of shape [num_layers, 2, num_tokens, num_slots, head_bytes]. Raises
        ValueError if something is out of range.
        """
        ...

    def write(self, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        """Writes what `read` of such a span returns. Raises ValueError if `data` has not exactly
        the expected length.
        """
        ...


def paged_shapes(
    layout: KvLayout, *, num_blocks: int, block_size: int, tp: int, rank: int
) -> list[tuple[int, ...]]:
    """Returns the shape of each group's blocks in one rank's memory, [num_layers, 2, num_blocks,
    num_slots, block_size, head_bytes]; where other processes read it, the groups follow one
    another. Raises ValueError as `check_split` does.
    """
    shapes: list[tuple[int, ...]] = []
    for group in layout.groups:
        geometry = layout.layers[group[0]]
        num_slots = len(kv_heads(geometry.num_heads, geometry.num_kv_heads, tp, rank))
        shapes.append(
            (len(group), 2, num_blocks, num_slots, block_size, layout.bytes_per_slot(group[0]) // 2)
        )
    return shapes
