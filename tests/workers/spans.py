"""Short ways to name and to read a part of a rank's KV cache."""

from collections.abc import Sequence

from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.kv_cache.store import KvStore
from tandem.workers.kv_cache.tables import TableBlocks

Blocks = TableBlocks | Sequence[int]
"""A block table, or the blocks of a table from its first one on."""


def as_table(blocks: Blocks) -> TableBlocks:
    return blocks if isinstance(blocks, TableBlocks) else TableBlocks(tuple(blocks))


def span(
    kv: KvStore,
    first_token: int,
    num_tokens: int,
    first_layer: int = 0,
    num_layers: int | None = None,
) -> KvSpan:
    """All KV slots of layers of the model; of all layers of the group if num_layers is None."""
    group, first = kv.layout.place(first_layer)
    return KvSpan(
        group=group,
        first_layer=first,
        num_layers=len(kv.layout.groups[group].layers) if num_layers is None else num_layers,
        first_token=first_token,
        num_tokens=num_tokens,
        first_slot=0,
        num_slots=kv.num_slots(group),
    )


def read_now(kv: KvStore, blocks: Blocks, part: KvSpan) -> memoryview:
    """Reads from a cache in host memory, where the copy must be complete at once."""
    reading = kv.read(as_table(blocks), part).__await__()
    try:
        next(reading)
    except StopIteration as done:
        copy: memoryview = done.value
        return copy
    raise AssertionError("the copy is not complete")
