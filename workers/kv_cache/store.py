"""The interface of one rank's KV cache memory, as KV transfers read and write it."""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Final, Protocol

from .layout import KvLayout, KvSpan

LEDGER_BYTES: Final = 64 * 1024
SAMPLE_BYTES: Final = 2 * 1024 * 1024
TAIL_BYTES: Final = SAMPLE_BYTES + LEDGER_BYTES
"""At the end of KV cache memory that is shared; for those who move the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """KV cache memory that other processes of the host can map."""

    fd: int  # of a file that is the memory
    sample: memoryview  # SAMPLE_BYTES, before
    ledger: memoryview  # its last LEDGER_BYTES
    num_blocks: int
    block_size: int
    num_slots: int


class KvReader(Protocol):
    """KV cache that can be read."""

    def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        """Copies out a span of the sequence whose block table is `blocks`.

        Returns contiguous bytes of shape [num_layers, 2, num_tokens, num_slots, head_dim]. Raises ValueError if
        something is out of range."""
        ...


class KvStore(KvReader, Protocol):
    """The KV cache memory of one rank, as the transfer reads and writes it in canonical form.

    The caller owns the blocks for the whole call. Reads and writes of blocks that the running step does not touch
    are safe from any thread while a step runs.
    """

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

    @property
    def num_slots(self) -> int:
        """KV slots of this rank: `len(kv_heads(layout.num_heads, layout.num_kv_heads, tp, rank))` of `sharding`."""
        ...

    @property
    def shared(self) -> SharedMemory | None:
        """None if other processes cannot map it."""
        ...

    def attach(self, memory: mmap, *, num_blocks: int, block_size: int, num_slots: int) -> KvReader:
        """The cache of another process, of the same layout. Raises ValueError if `memory` is too small for it."""
        ...

    def write(self, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        """The inverse of `read`. Raises ValueError if `data` has not exactly the expected length."""
        ...
