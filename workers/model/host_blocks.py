"""Holds in host memory what leaves the KV cache of one rank."""

import math
from collections.abc import Iterable

import torch

from ..kv_cache.store import paged_shapes
from .kv_store import PagedKv, host_memory


class HostBlocks:
    """Keeps whole blocks of a `PagedKv` in slots of host memory, which is pinned if the KV cache is a GPU's.

    A slot is contiguous, [bytes of a block]: of each group in turn [num_layers, 2, num_slots, block_size,
    head_bytes]."""

    def __init__(self, kv: PagedKv, num_slots: int) -> None:
        """Raises ValueError if host memory is short."""
        self._kv = kv
        shapes = paged_shapes(kv.layout, num_blocks=1, block_size=kv.block_size, tp=kv.tp, rank=kv.rank)
        sizes = [math.prod(shape) for shape in shapes]
        memory = host_memory(num_slots * sum(sizes), "kv_host_gb", pinned=kv.device.type == "cuda")
        parts = torch.split(memory.view(num_slots, -1), sizes, dim=1)  # of each group, [num_slots, bytes]
        # Of each group: in the KV cache [num_layers, 2, num_blocks, ...], here [num_slots, num_layers, 2, ...].
        self._groups = [
            (tensor.view(torch.uint8), part.view(num_slots, *shape[:2], *shape[3:]))
            for tensor, part, shape in zip(kv.tensors, parts, shapes, strict=True)
        ]

    def save(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies blocks to slots, given as (block, slot), in order with the steps."""
        for block, slot in pairs:
            for tensor, slots in self._groups:
                slots[slot].copy_(tensor[:, :, block], non_blocking=True)

    def restore(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies slots to blocks, given as (slot, block), in order with the steps."""
        for slot, block in pairs:
            for tensor, slots in self._groups:
                tensor[:, :, block].copy_(slots[slot], non_blocking=True)
        self._kv.mark_written()
