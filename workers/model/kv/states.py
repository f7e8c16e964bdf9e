"""Holds one rank's states of sequences, and their canonical form for transfers, in host memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...kv_cache.layout import KvLayout, KvSpan
from ...kv_cache.memory import plan_state
from ...kv_cache.store import slots_of
from ...kv_cache.tables import STATE_TABLE, TableBlocks
from .allocate import host_memory
from .spans import check_length, check_table


class StateStore:
    """Keeps the states of sequences in slots; a slot has the states of all layers.

    A slot has each group in turn, [layer, plane, KV head, row]. Kernels read and write the memory
    of a part through a view with the distance of two slots as its first stride.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_slots: int,
        tp: int = 1,
        rank: int = 0,
        setting: str = "kv_cache_gb",
    ) -> None:
        """Allocates zeros.

        Raises ValueError as `check_split` does, and one that names `setting` if host memory is
        insufficient.
        """
        self.num_slots = num_slots
        self._layout = layout
        self._first_group = len(layout.token_groups)
        self._heads = slots_of(layout, tp, rank)
        plan = plan_state(layout, tp=tp, rank=rank)
        padded = [group.padded_bytes for group in plan]
        self.slot_bytes = sum(padded)
        # [num_slots, slot_bytes]
        memory = host_memory(num_slots * self.slot_bytes, setting)
        self.slots = memory.view(num_slots, self.slot_bytes)
        # Of each group, uint8 [num_slots, num_layers, planes, KV heads, row_bytes].
        self._groups = [
            part[:, : group.num_bytes].view(num_slots, *group.shape)
            for part, group in zip(torch.split(self.slots, padded, dim=1), plan, strict=True)
        ]
        self._parts = {
            (layer, group.part.state): self._view(number, index, layer)
            for number, group in enumerate(layout.state_groups)
            for index, layer in enumerate(group.layers)
        }

    def _view(self, number: int, index: int, layer: int) -> torch.Tensor:
        name = self._layout.state_groups[number].part.state
        (part,) = (part for part in self._layout.layers[layer].states if part.name == name)
        dtype: torch.dtype = getattr(torch, self._layout.state_dtype(part))
        return self._groups[number][:, index].view(dtype)

    def memory(self, layer: int, part: str) -> torch.Tensor:
        """Returns the slots of a part of a layer's state, [num_slots, planes, KV heads, row]."""
        return self._parts[layer, part]

    def read(self, table: TableBlocks, span: KvSpan) -> memoryview:
        """Returns a copy of a span of a group of states; `table` has the slot.

        Raises ValueError if the span or the slot is out of range.
        """
        return np.ascontiguousarray(self._locate(table, span)).reshape(-1).data

    def write(self, table: TableBlocks, span: KvSpan, data: memoryview) -> None:
        """Writes a span as `read` returns it. Raises ValueError as `read`, and for its length."""
        place = self._locate(table, span)
        check_length(span, self._layout, data)
        place[...] = np.frombuffer(data, np.uint8).reshape(place.shape)

    def copy(self, pairs: Sequence[tuple[int, int]], source: "StateStore") -> None:
        """Copies whole slots, given as (source, target), from a store of the same layout."""
        for slot, target in pairs:
            self.slots[target].copy_(source.slots[slot])

    def _locate(self, table: TableBlocks, span: KvSpan) -> npt.NDArray[np.uint8]:
        """Returns the memory of a span, [num_layers, planes, KV heads, row_bytes]."""
        tokens = table.tokens(STATE_TABLE.block_size)
        span.check(self._layout, tokens=tokens, num_slots=self._heads)
        if span.group < self._first_group:
            raise ValueError(f"group {span.group} is not one of states")
        (slot,) = check_table(table, self.num_slots).tolist()
        heads = slice(span.first_slot, span.first_slot + span.num_slots)
        layers = slice(span.first_layer, span.first_layer + span.num_layers)
        found: npt.NDArray[np.uint8] = self._groups[span.group - self._first_group].numpy()
        return found[slot, layers, :, heads]
