"""Computes attention on GPUs with Triton kernels that read the paged cache in place.

Steps are planned on the host in flat arrays.
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ...kv_cache.layout import LayerGeometry
from ...kv_cache.tables import TableSpec
from ..device import Ints, copy_to_device, to_device
from ..kernels.triton.attention import Scales, Scoring
from ..kernels.triton.chunk import ChunkWork, chunk_attention, tile_tokens
from ..kernels.triton.decode import (
    SPLIT_TOKENS,
    DecodeWork,
    decode_attention,
    num_head_groups,
    num_splits,
)
from ..kernels.triton.elementwise import store_kv
from ..kv.gpu import split_scales
from ..kv.store import PagedKv
from .backend import PLAIN, AttentionOptions, SequenceSpan, StepAttention

# The tokens of a captured step's sequences together, as a multiple of the tokens in the KV cache:
# sequences with a common prefix share its blocks.
_GRAPH_SHARING: Final = 2
_DECODE_SHARED_BYTES: Final = 77_824  # the most that a decode program takes
_WIDE_DIM: Final = 128
_WIDE_PROGRAMS: Final = 2
"""Programs at once of heads above _WIDE_DIM: their registers allow no more with Triton 3.6."""


Partials = dict[tuple[int, int], torch.Tensor]
"""Scratch memory of decodes, float32 [num_items, num_heads, value_dim + 2].

The keys are num_heads and value_dim of the layers.
"""


class TableWork(NamedTuple):
    """Describes the work of a step for the layers of one block table."""

    slots: torch.Tensor  # int32 [num_tokens], block * block_size + offset; negative for padding
    decode: DecodeWork | None
    chunks: dict[int, ChunkWork]  # by tokens of a tile; empty if no sequence has several tokens


class TritonAttentionBackend:
    """Implements `AttentionBackend`."""

    def __init__(
        self, kv: PagedKv, layers: Sequence[LayerGeometry], *, batch_invariant: bool = False
    ) -> None:
        """Takes `layers` with this rank's head counts.

        With `batch_invariant`, single tokens also use the chunk kernel, because the decode kernel
        adds in another order.
        """
        self.kv = kv
        self.batch_invariant = batch_invariant
        self.device = kv.device
        is_cuda = kv.device.type == "cuda"
        processors = torch.cuda.get_device_properties(kv.device) if is_cuda else None
        self.layers = list(layers)
        self._caches = [
            _cache_of(planes, layer) if planes else None
            for planes, layer in zip(kv.layers, layers, strict=True)
        ]
        with_attention = [layer for layer, planes in zip(layers, kv.layers, strict=True) if planes]
        self._shapes = {
            (layer.num_heads, layer.value_dim or layer.head_dim) for layer in with_attention
        }
        self.tile_tokens = {
            layer: tile_tokens(layer.num_heads, layer.num_kv_heads, layer.head_dim)
            for layer in with_attention
        }
        self.num_programs = {layer: _num_programs(processors, layer) for layer in with_attention}

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        arrays = _Arrays(spans, self.kv.tables, least_chunk=1 if self.batch_invariant else 2)
        sizes = sorted(set(self.tile_tokens.values()))
        decodes = arrays.decodes()
        tiles = [arrays.tiles(size) for size in sizes]
        own = [arrays.of_table(table, sizes) for table in range(len(self.kv.tables))]
        copies = iter(
            copy_to_device(
                [arrays.tables, *decodes, *chain(*tiles), *chain(*own)],
                self.device,
            )
        )
        tables = next(copies)
        first_items, rows, last_keys, *items = islice(copies, len(decodes))
        tile_fields = [tuple(islice(copies, len(each))) for each in tiles]
        works: list[TableWork] = []
        for each in own:
            slots, offsets, *tile_offsets = islice(copies, len(each))
            decode = DecodeWork._make((first_items, rows, last_keys, offsets, *items, tables))
            chunks = {
                size: ChunkWork._make((*fields, offset, tables))
                for size, fields, offset in zip(sizes, tile_fields, tile_offsets, strict=True)
                if len(arrays.counts) > len(rows)
            }
            works.append(TableWork(slots, decode if len(rows) else None, chunks))
        return self.step(works, self.make_partials(len(items[-1])))

    def step(self, works: Sequence[TableWork], partials: Partials) -> StepAttention:
        """Returns the attention of a step, from the work of each block table."""

        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor | None,
            value: torch.Tensor | None,
            options: AttentionOptions = PLAIN,
        ) -> torch.Tensor:
            cache = self._caches[layer]
            assert cache is not None, f"layer {layer} has no attention"
            keys, values, scales = cache
            geometry = self.layers[layer]
            slots, decode, chunks = works[self.kv.table_of_layer[layer]]
            scoring = Scoring(
                window=geometry.window or 0,
                scale=options.scale_of(query.shape[2]),
                soft_cap=options.soft_cap or 0.0,
                sinks=options.sinks,
            )
            if geometry.reads is None:
                assert key is not None, f"layer {layer} keeps keys"
                assert value is not None, f"layer {layer} keeps values"
                is_latent = geometry.value_dim is not None
                store_kv(key, value, keys, None if is_latent else values, slots, scales)
            value_dim = geometry.value_dim or geometry.head_dim
            out = query.new_empty(query.shape[0], query.shape[1] * value_dim)
            if decode:
                partial = partials[query.shape[1], value_dim]
                num_programs = self.num_programs[geometry]
                decode_attention(
                    query, keys, values, decode, scoring, partial, out, num_programs, scales
                )
            if chunks:
                tiles = chunks[self.tile_tokens[geometry]]
                chunk_attention(query, keys, values, tiles, scoring, out, scales)
            return out

        return attend

    def make_partials(self, num_items: int) -> Partials:
        return {
            (heads, dim): torch.empty((num_items, heads, dim + 2), device=self.device)
            for heads, dim in self._shapes
        }

    @property
    def scratch_bytes_per_block(self) -> int:
        """Returns the bytes beside a block of KV cache that steps over a full cache need.

        These are the partial sums and tables of a captured step, and as much for a step without a
        graph: 0.2 % of a block for Llama-3.1-8B.
        """
        tokens = _GRAPH_SHARING * max(table.block_size for table in self.kv.tables)
        item_bytes = 4 * sum(heads * (dim + 2) for heads, dim in self._shapes)
        return 2 * (-(-tokens * item_bytes // SPLIT_TOKENS) + 4 * _GRAPH_SHARING)


def graph_capacity(num_blocks: int, block_size: int, max_batch: int) -> tuple[int, int]:
    """Returns the number of work items, and of entries of block tables, in a captured step.

    They fit `max_batch` sequences over a KV cache of `num_blocks`, of which those of the table with
    the largest blocks hold `block_size` tokens.
    """
    entries = _GRAPH_SHARING * num_blocks + max_batch
    return -(-entries * block_size // SPLIT_TOKENS) + max_batch, entries


def _cache_of(
    planes: Sequence[torch.Tensor], layer: LayerGeometry
) -> tuple[torch.Tensor, torch.Tensor, Scales | None]:
    """Returns a layer's keys [.., head_dim], its values and the scales of a quantized cache.

    The values of a latent layer are a view of its keys, [.., value_dim].
    """
    keys = planes[0]
    values = planes[-1][..., : layer.value_dim]
    if keys.is_floating_point():
        return keys, values, None
    key_numbers, key_scales = split_scales(keys, layer.head_dim)
    value_numbers, value_scales = split_scales(values, layer.head_dim)
    return key_numbers, value_numbers, Scales(key_scales, value_scales)


def _num_programs(processors: Any, layer: LayerGeometry) -> int:
    """Returns the number of decode programs for each group of query heads.

    `processors` are CUDA's properties of the device; None: it has no multiprocessors.
    """
    if processors is None:
        return 1
    at_once: int = processors.multi_processor_count * programs_per_processor(
        processors.shared_memory_per_multiprocessor, layer.head_dim
    )
    groups = num_head_groups(layer.num_heads, layer.num_kv_heads, layer.head_dim)
    return max(1, at_once // groups)


def programs_per_processor(shared_bytes: int, head_dim: int) -> int:
    """Returns how many decode programs run at once on a multiprocessor with this shared memory."""
    fitting = max(1, shared_bytes // _DECODE_SHARED_BYTES)
    return min(fitting, _WIDE_PROGRAMS) if head_dim > _WIDE_DIM else fitting


class StaticDecodes:
    """Holds the arrays of pure decode steps at fixed addresses, for CUDA graphs.

    They are filled again before each replay.
    """

    def __init__(self, backend: TritonAttentionBackend, max_batch: int) -> None:
        self._backend = backend
        self._max_batch = max_batch
        self._max_items, self._max_entries = graph_capacity(
            backend.kv.num_blocks,
            max(table.block_size for table in backend.kv.tables),
            max_batch * len(backend.kv.tables),
        )
        # Numbers of tokens, and of sequences: first items, rows and last keys. Then slots and
        # offsets of each table.
        of_rows = [max_batch] * (4 + 2 * len(backend.kv.tables))
        self._lengths = [*of_rows, 1, self._max_items, self._max_items, self._max_entries]
        self._ints = torch.full((sum(self._lengths),), -1, dtype=torch.int32, device=backend.device)
        self._ints[-self._max_entries :] = 0
        self._partials = backend.make_partials(self._max_items)

    def step(self, batch: int) -> tuple[torch.Tensor, StepAttention]:
        """Returns positions, int32 [batch], and the attention of the first `batch` rows.

        `fill` may leave some of these rows empty.
        """
        *of_rows, num_items, sequences, splits, tables = torch.split(self._ints, self._lengths)
        counts, first_items, rows, last_keys, *own = (part[:batch] for part in of_rows)
        works: list[TableWork] = []
        for slots, offsets in zip(own[::2], own[1::2], strict=True):
            if self._backend.batch_invariant:
                work = ChunkWork(rows, counts, last_keys, offsets, tables)
                chunks = dict.fromkeys(self._backend.tile_tokens.values(), work)
                works.append(TableWork(slots, None, chunks))
            else:
                decode = DecodeWork(
                    first_items, rows, last_keys, offsets, num_items, sequences, splits, tables
                )
                works.append(TableWork(slots, decode, {}))
        return last_keys, self._backend.step(works, self._partials)

    def fill(self, spans: Sequence[SequenceSpan]) -> bool:
        """Loads a step of sequences with one new token each; returns False if it does not fit."""
        tables = self._backend.kv.tables
        arrays = _Arrays(spans, tables)
        first_items, rows, last_keys, *items = arrays.decodes()
        if (
            len(spans) > self._max_batch
            or len(items[-1]) > self._max_items
            or len(arrays.tables) > self._max_entries
        ):
            return False
        own = chain(*(arrays.of_table(table, ()) for table in range(len(tables))))
        parts = (arrays.counts, first_items, rows, last_keys, *own, *items, arrays.tables)
        ints = np.full(len(self._ints) - self._max_entries + len(arrays.tables), -1, np.int32)
        begin = 0
        for part, length in zip(parts, self._lengths, strict=True):
            ints[begin : begin + len(part)] = part
            begin += length
        host = torch.from_numpy(ints)
        self._ints[: len(ints)].copy_(to_device(host, self._backend.device), non_blocking=True)
        return True


class _Arrays:
    """Computes the index arrays of one step on the host."""

    def __init__(
        self, spans: Sequence[SequenceSpan], tables: Sequence[TableSpec], least_chunk: int = 2
    ) -> None:
        """Treats sequences of at least `least_chunk` tokens as chunks, the others as decodes."""
        self._block_sizes = [table.block_size for table in tables]
        self._least_chunk = least_chunk
        self.counts = np.array([span.num_tokens for span in spans])
        self._starts = np.array([span.start for span in spans])
        self._first_rows = self.counts.cumsum() - self.counts
        # The blocks that the step reads and writes: of all sequences in one table, then in the
        # next one.
        parts: list[Ints] = []
        # Of each table, where the index 0 of each sequence's table is in `tables`, or would be: the
        # blocks before the window are left out.
        self._offsets: list[Ints] = []
        num_before = 0
        for number, table in enumerate(tables):
            firsts = first_blocks(self._starts, table)
            ends = -(-(self._starts + self.counts) // table.block_size)
            parts += [
                np.asarray(span.tables[number][first:end], np.int32)
                for span, first, end in zip(spans, firsts, ends, strict=True)
            ]
            lengths = ends - firsts
            self._offsets.append(num_before + lengths.cumsum() - lengths - firsts)
            num_before += int(lengths.sum())
        self.tables: Ints = np.concatenate(parts)

    def of_table(self, table: int, tile_sizes: Sequence[int]) -> list[Ints]:
        """Returns the arrays that depend on the table.

        These are the slot of each token, `DecodeWork.offsets`, and `ChunkWork.tile_offsets` for
        each size of tiles.
        """
        size = self._block_sizes[table]
        offsets = self._offsets[table]
        first = np.repeat(self._starts - self._first_rows, self.counts)
        positions = first + np.arange(len(first))
        blocks = self.tables[np.repeat(offsets, self.counts) + positions // size]
        slots = blocks * size + positions % size
        chunks = np.flatnonzero(self.counts >= self._least_chunk)
        tile_offsets = (
            np.repeat(offsets[chunks], -(-self.counts[chunks] // tile_size))
            for tile_size in tile_sizes
        )
        return [slots, offsets[self.counts < self._least_chunk], *tile_offsets]

    def decodes(self) -> tuple[Ints, ...]:
        """Returns the fields of `DecodeWork` except those of `of_table` and `tables`."""
        which = np.flatnonzero(self.counts < self._least_chunk)
        last_keys = self._starts[which]
        counts = num_splits(last_keys)
        first_items = counts.cumsum() - counts
        sequences = np.repeat(np.arange(len(which)), counts)
        splits = np.arange(len(sequences)) - first_items[sequences]
        rows = self._first_rows[which]
        return first_items, rows, last_keys, np.array([len(splits)]), sequences, splits

    def tiles(self, size: int) -> tuple[Ints, ...]:
        """Returns the fields of `ChunkWork` except those of `of_table` and `tables`."""
        which = np.flatnonzero(self.counts >= self._least_chunk)
        counts = self.counts[which]
        num_tiles = -(-counts // size)
        sequences = np.repeat(np.arange(len(which)), num_tiles)
        within = (np.arange(len(sequences)) - (num_tiles.cumsum() - num_tiles)[sequences]) * size
        firsts = (values[which][sequences] for values in (self._first_rows, self._starts))
        rows, starts = (first + within for first in firsts)
        return rows, np.minimum(counts[sequences] - within, size), starts


def first_blocks(starts: Ints, table: TableSpec) -> Ints:
    """Returns the index of the first block that tokens from the positions `starts` on see."""
    if table.window is None:
        return np.zeros_like(starts)
    return np.maximum(starts + 1 - table.window, 0) // table.block_size
