"""Finds spans of KV cache in a rank's memory, and checks them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...host.streams import DeviceData
from ...kv_cache.layout import KvLayout, KvSpan
from ...kv_cache.tables import TableBlocks


def check_group(layout: KvLayout, span: KvSpan) -> None:
    """Raises ValueError unless the span's group is one of tokens."""
    if not 0 <= span.group < len(layout.token_groups):
        raise ValueError(f"group {span.group} is not within {len(layout.token_groups)}")


def place_of(
    layout: KvLayout, span: KvSpan, *, tokens: range, slots: Sequence[int]
) -> tuple[slice, slice]:
    """Returns a span's layers and KV slots within its group.

    `slots` has the number of slots of each group. Raises ValueError if the span is not within the
    positions `tokens` or within the rank's layers and slots.
    """
    span.check(layout, tokens=tokens, num_slots=slots)
    layers = slice(span.first_layer, span.first_layer + span.num_layers)
    return layers, slice(span.first_slot, span.first_slot + span.num_slots)


def check_table(table: TableBlocks, num_blocks: int) -> npt.NDArray[np.int64]:
    """Returns the blocks of a table. Raises ValueError if a block is out of range."""
    blocks = np.asarray(table.blocks, np.int64)
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= num_blocks):
        raise ValueError(f"a block is not within the range from 0 to {num_blocks - 1}")
    return blocks


def check_length(span: KvSpan, layout: KvLayout, data: memoryview | DeviceData) -> None:
    if data.nbytes != span.size(layout):
        raise ValueError(f"KV data has {data.nbytes} bytes; must have {span.size(layout)}")
