"""Attention on a GPU: Triton kernels that read the paged cache where it lies, planned on the host in flat arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ..device import Ints, ship, to_device
from ..kernels import gpu
from ..kv_store import PagedKv
from .torch_attention import SequenceSpan, StepAttention

_MAX_GRAPH_ITEMS: Final = 4096  # work items of a captured step, each of gpu.SPLIT_TOKENS keys
_MAX_GRAPH_BLOCKS: Final = 65_536  # entries of its block tables
_PROGRAMS_PER_PROCESSOR: Final = 3  # as many as its shared memory holds


class GpuAttention:
    """Implements `AttentionBackend`. `windows` holds each layer's sliding window or None."""

    reads_whole_blocks = False

    def __init__(self, kv: PagedKv, windows: Sequence[int | None], num_heads: int) -> None:
        self.kv = kv
        self.windows = [window or 0 for window in windows]
        self.device = kv.data.device
        self.tile_tokens = gpu.tile_tokens(num_heads, kv.num_slots(0), kv.layout.layers[0].head_dim)
        self.partial_shape = (num_heads, kv.layout.layers[0].head_dim + 2)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count if kv.data.is_cuda else 1
        self.num_programs = max(1, processors * _PROGRAMS_PER_PROCESSOR // kv.num_slots(0))

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        arrays = _Arrays(spans, self.kv.block_size)
        slots, tables, *rest = ship([*arrays.slots_and_tables(), *arrays.decodes(), *arrays.tiles(self)], self.device)
        decode = gpu.DecodeWork(tables=tables, **dict(zip(_DECODE_FIELDS, rest, strict=False)))
        chunk = gpu.ChunkWork(tables=tables, **dict(zip(_TILE_FIELDS, rest[len(_DECODE_FIELDS) :], strict=True)))
        partial = torch.empty((len(decode.item_splits), *self.partial_shape), device=self.device)
        return GpuStep(
            self, slots, decode if len(decode.rows) else None, chunk if len(chunk.tile_rows) else None, partial
        )


# In the order of _Arrays.decodes and _Arrays.tiles.
_DECODE_FIELDS = ("rows", "last_keys", "offsets", "first_items", "num_items", "item_sequences", "item_splits")
_TILE_FIELDS = ("tile_rows", "tile_counts", "tile_starts", "tile_offsets")


@dataclass(frozen=True, slots=True)
class GpuStep:
    """Implements `StepAttention`."""

    attention: GpuAttention
    slots: torch.Tensor  # [num_tokens] int32, block * block_size + offset, or -1
    decode: gpu.DecodeWork | None
    chunk: gpu.ChunkWork | None
    partial: torch.Tensor  # [work items, num_heads, head_dim + 2] float32, scratch

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self.attention.kv.layer(layer)
        window = self.attention.windows[layer]
        gpu.store_kv(key, value, keys, values, self.slots)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        if self.decode:
            programs = self.attention.num_programs
            gpu.decode_attention(query, keys, values, self.decode, window, self.partial, out, programs)
        if self.chunk:
            gpu.chunk_attention(query, keys, values, self.chunk, window, out)
        return out


class StaticDecodes:
    """The arrays of pure decode steps at fixed addresses, for CUDA graphs: filled anew before each replay."""

    def __init__(self, attention: GpuAttention, max_batch: int) -> None:
        self._attention = attention
        self._max_batch = max_batch
        self._lengths = [max_batch] * 5 + [1, _MAX_GRAPH_ITEMS, _MAX_GRAPH_ITEMS, _MAX_GRAPH_BLOCKS]
        self._ints = torch.full((sum(self._lengths),), -1, dtype=torch.int32, device=attention.device)
        self._ints[-_MAX_GRAPH_BLOCKS:] = 0
        self._partial = torch.empty((_MAX_GRAPH_ITEMS, *attention.partial_shape), device=attention.device)

    def step(self, batch: int) -> tuple[torch.Tensor, StepAttention]:
        """Positions int32 [batch] and the attention of the first `batch` rows, of which `fill` may leave some empty."""
        slots, *work, num_items, sequences, splits, tables = torch.split(self._ints, self._lengths)
        rows, last_keys, offsets, first_items = (part[:batch] for part in work)
        decode = gpu.DecodeWork(
            rows=rows,
            last_keys=last_keys,
            offsets=offsets,
            first_items=first_items,
            num_items=num_items,
            item_sequences=sequences,
            item_splits=splits,
            tables=tables,
        )
        return last_keys, GpuStep(self._attention, slots[:batch], decode, None, self._partial)

    def fill(self, spans: Sequence[SequenceSpan]) -> bool:
        """Loads a step of sequences with one new token each; False if there is no room for it."""
        arrays = _Arrays(spans, self._attention.kv.block_size)
        slots, tables = arrays.slots_and_tables()
        *work, num_items, sequences, splits = arrays.decodes()
        if len(spans) > self._max_batch or len(splits) > _MAX_GRAPH_ITEMS or len(tables) > _MAX_GRAPH_BLOCKS:
            return False
        ints = np.full(len(self._ints) - _MAX_GRAPH_BLOCKS + len(tables), -1, np.int32)
        begin = 0
        for part, length in zip((slots, *work, num_items, sequences, splits, tables), self._lengths, strict=True):
            ints[begin : begin + len(part)] = part
            begin += length
        host = torch.from_numpy(ints)
        self._ints[: len(ints)].copy_(to_device(host, self._attention.device), non_blocking=True)
        return True


class _Arrays:
    """Where everything is, for the sequences of one step: host arrays."""

    def __init__(self, spans: Sequence[SequenceSpan], block_size: int) -> None:
        self._block_size = block_size
        self._counts = np.array([span.num_tokens for span in spans])
        self._starts = np.array([span.start for span in spans])
        self._first_rows = self._counts.cumsum() - self._counts
        self._tables = np.concatenate([np.asarray(span.blocks, np.int32) for span in spans])
        lengths = np.array([len(span.blocks) for span in spans])
        self._offsets = lengths.cumsum() - lengths

    def slots_and_tables(self) -> tuple[Ints, Ints]:
        """Where each token's keys and values go, and all block tables one after the other."""
        first = np.repeat(self._starts - self._first_rows, self._counts)
        positions = first + np.arange(len(first))
        blocks = self._tables[np.repeat(self._offsets, self._counts) + positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size, self._tables

    def decodes(self) -> tuple[Ints, ...]:
        """_DECODE_FIELDS of the sequences with one token."""
        which = np.flatnonzero(self._counts == 1)
        last_keys = self._starts[which]
        num_splits = gpu.num_splits(last_keys)
        first_items = num_splits.cumsum() - num_splits
        sequences = np.repeat(np.arange(len(which)), num_splits)
        splits = np.arange(len(sequences)) - first_items[sequences]
        rows, offsets = self._first_rows[which], self._offsets[which]
        return rows, last_keys, offsets, first_items, np.array([len(splits)]), sequences, splits

    def tiles(self, attention: GpuAttention) -> tuple[Ints, ...]:
        """_TILE_FIELDS of the sequences with several tokens, cut into tiles."""
        which = np.flatnonzero(self._counts > 1)
        counts, size = self._counts[which], attention.tile_tokens
        num_tiles = -(-counts // size)
        sequences = np.repeat(np.arange(len(which)), num_tiles)
        within = (np.arange(len(sequences)) - (num_tiles.cumsum() - num_tiles)[sequences]) * size
        firsts = (values[which][sequences] for values in (self._first_rows, self._starts))
        rows, starts = (first + within for first in firsts)
        return rows, np.minimum(counts[sequences] - within, size), starts, self._offsets[which][sequences]
