"""Short ways to name and to read a part of a rank's KV cache."""

from collections.abc import Sequence

from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.kv_cache.store import KvStore


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


def read_now(kv: KvStore, blocks: Sequence[int], part: KvSpan) -> memoryview:
    """Reads from a cache in host memory, where the copy must be complete at once."""
    reading = kv.read(blocks, part).__await__()
    try:
        next(reading)
    except StopIteration as done:
        copy: memoryview = done.value
        return copy
    raise AssertionError("the copy is not complete")
