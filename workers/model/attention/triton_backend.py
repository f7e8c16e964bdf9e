"""Computes attention on GPUs with Triton kernels that read the paged cache in place.

Steps are planned on the host in flat arrays.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from ...kv_cache.layout import LayerGeometry
from ..device import Ints, copy_to_device, to_device
from ..kernels.triton.attention import MAX_NARROW_DIM, Scales, Scoring
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
from ..kv_store import PagedKv
from .backend import PLAIN, AttentionOptions, SequenceSpan, StepAttention

# The tokens of a captured step's sequences together, as a multiple of the tokens in the KV cache:
# sequences with a common prefix share its blocks.
_GRAPH_SHARING: Final = 2
_DECODE_SHARED_BYTES: Final = 77_824  # the most that a decode program takes
_WIDE_PROGRAMS: Final = 2  # at once, limited by registers: programs of heads above MAX_NARROW_DIM

Partials = dict[tuple[int, int], torch.Tensor]
"""Scratch memory of decodes, float32 [num_items, num_heads, value_dim + 2].

The keys are num_heads and value_dim of the layers.
"""


class TritonAttentionBackend:
    """Implements `AttentionBackend`."""

    reads_whole_blocks = False

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
        self.tile_tokens = [
            tile_tokens(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers
        ]
        self._caches = [
            _cache_of(planes, layer) for planes, layer in zip(kv.layers, layers, strict=True)
        ]
        self.num_programs = [_num_programs(processors, layer) for layer in layers]

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        arrays = _Arrays(spans, self.kv.block_size, least_chunk=1 if self.batch_invariant else 2)
        tile_sizes = sorted(set(self.tile_tokens))
        tiles = [array for size in tile_sizes for array in arrays.tiles(size)]
        slots, tables, *rest = copy_to_device(
            [*arrays.slots_and_tables(), *arrays.decodes(), *tiles], self.device
        )
        num_decode = len(DecodeWork._fields) - 1
        decode = DecodeWork._make([*rest[:num_decode], tables])
        chunks: dict[int, ChunkWork] = {}
        if len(arrays.counts) > len(decode.rows):
            num_chunk = len(ChunkWork._fields) - 1
            each = (
                rest[first : first + num_chunk] for first in range(num_decode, len(rest), num_chunk)
            )
            chunks = {
                size: ChunkWork._make([*fields, tables])
                for size, fields in zip(tile_sizes, each, strict=True)
            }
        partials = self.make_partials(len(decode.item_splits))
        return self.step(slots, decode if len(decode.rows) else None, chunks, partials)

    def step(
        self,
        slots: torch.Tensor,
        decode: DecodeWork | None,
        chunks: dict[int, ChunkWork],
        partials: Partials,
    ) -> StepAttention:
        """Returns the attention of a step.

        `slots`, int32 [num_tokens], are block * block_size + offset, or -1 for padding. `chunks`
        are by tile_tokens; empty if no sequence has several tokens.
        """

        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            options: AttentionOptions = PLAIN,
        ) -> torch.Tensor:
            keys, values, scales = self._caches[layer]
            scoring = Scoring(
                window=self.layers[layer].window or 0,
                scale=options.scale_of(query.shape[2]),
                soft_cap=options.soft_cap or 0.0,
                sinks=options.sinks,
            )
            is_latent = self.layers[layer].value_dim is not None
            store_kv(key, value, keys, None if is_latent else values, slots, scales)
            out = query.new_empty(query.shape[0], query.shape[1] * value.shape[2])
            if decode:
                partial = partials[query.shape[1], value.shape[2]]
                num_programs = self.num_programs[layer]
                decode_attention(
                    query, keys, values, decode, scoring, partial, out, num_programs, scales
                )
            if chunks:
                tiles = chunks[self.tile_tokens[layer]]
                chunk_attention(query, keys, values, tiles, scoring, out, scales)
            return out

        return attend

    def make_partials(self, num_items: int) -> Partials:
        return {
            (heads, dim): torch.empty((num_items, heads, dim + 2), device=self.device)
            for heads, dim in self._shapes
        }

    @property
    def _shapes(self) -> set[tuple[int, int]]:
        return {(layer.num_heads, layer.value_dim or layer.head_dim) for layer in self.layers}

    @property
    def scratch_bytes_per_block(self) -> int:
        """Returns the bytes beside a block of KV cache that steps over a full cache need.

        These are the partial sums and tables of a captured step, and as much for a step without a
        graph: 0.2 % of a block for Llama-3.1-8B.
        """
        tokens = _GRAPH_SHARING * self.kv.block_size
        item_bytes = 4 * sum(heads * (dim + 2) for heads, dim in self._shapes)
        return 2 * (-(-tokens * item_bytes // SPLIT_TOKENS) + 4 * _GRAPH_SHARING)


def graph_capacity(num_blocks: int, block_size: int, max_batch: int) -> tuple[int, int]:
    """Returns the number of work items, and of entries of block tables, in a captured step.

    They fit `max_batch` sequences over a KV cache of `num_blocks`.
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
    return min(fitting, _WIDE_PROGRAMS) if head_dim > MAX_NARROW_DIM else fitting


class StaticDecodes:
    """Holds the arrays of pure decode steps at fixed addresses, for CUDA graphs.

    They are filled again before each replay.
    """

    def __init__(self, backend: TritonAttentionBackend, max_batch: int) -> None:
        self._backend = backend
        self._max_batch = max_batch
        self._max_items, self._max_entries = graph_capacity(
            backend.kv.num_blocks, backend.kv.block_size, max_batch
        )
        self._lengths = [max_batch] * 6 + [1, self._max_items, self._max_items, self._max_entries]
        self._ints = torch.full((sum(self._lengths),), -1, dtype=torch.int32, device=backend.device)
        self._ints[-self._max_entries :] = 0
        self._partials = backend.make_partials(self._max_items)

    def step(self, batch: int) -> tuple[torch.Tensor, StepAttention]:
        """Returns positions, int32 [batch], and the attention of the first `batch` rows.

        `fill` may leave some of these rows empty.
        """
        slots, counts, *of_sequences, num_items, sequences, splits, tables = torch.split(
            self._ints, self._lengths
        )
        if self._backend.batch_invariant:
            _, rows, last_keys, offsets = (part[:batch] for part in of_sequences)
            work = ChunkWork(rows, counts[:batch], last_keys, offsets, tables)
            chunks = dict.fromkeys(self._backend.tile_tokens, work)
            return last_keys, self._backend.step(slots[:batch], None, chunks, {})
        decode = DecodeWork._make(
            [*(part[:batch] for part in of_sequences), num_items, sequences, splits, tables]
        )
        return decode.last_keys, self._backend.step(slots[:batch], decode, {}, self._partials)

    def fill(self, spans: Sequence[SequenceSpan]) -> bool:
        """Loads a step of sequences with one new token each; returns False if it does not fit."""
        arrays = _Arrays(spans, self._backend.kv.block_size)
        slots, tables = arrays.slots_and_tables()
        decodes = arrays.decodes()
        splits = decodes[-1]
        if (
            len(spans) > self._max_batch
            or len(splits) > self._max_items
            or len(tables) > self._max_entries
        ):
            return False
        ints = np.full(len(self._ints) - self._max_entries + len(tables), -1, np.int32)
        begin = 0
        for part, length in zip(
            (slots, arrays.counts, *decodes, tables), self._lengths, strict=True
        ):
            ints[begin : begin + len(part)] = part
            begin += length
        host = torch.from_numpy(ints)
        self._ints[: len(ints)].copy_(to_device(host, self._backend.device), non_blocking=True)
        return True


class _Arrays:
    """Computes the index arrays of one step on the host."""

    def __init__(
        self, spans: Sequence[SequenceSpan], block_size: int, least_chunk: int = 2
    ) -> None:
        """Treats sequences of at least `least_chunk` tokens as chunks, the others as decodes."""
        self._block_size = block_size
        self._least_chunk = least_chunk
        self.counts = np.array([span.num_tokens for span in spans])
        self._starts = np.array([span.start for span in spans])
        self._first_rows = self.counts.cumsum() - self.counts
        self._tables = np.concatenate([np.asarray(span.blocks, np.int32) for span in spans])
        lengths = np.array([len(span.blocks) for span in spans])
        self._offsets = lengths.cumsum() - lengths

    def slots_and_tables(self) -> tuple[Ints, Ints]:
        """Returns the slot of each token, and the concatenated block tables."""
        first = np.repeat(self._starts - self._first_rows, self.counts)
        positions = first + np.arange(len(first))
        blocks = self._tables[np.repeat(self._offsets, self.counts) + positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size, self._tables

    def decodes(self) -> tuple[Ints, ...]:
        """Returns the fields of `DecodeWork` except `tables`."""
        which = np.flatnonzero(self.counts < self._least_chunk)
        last_keys = self._starts[which]
        counts = num_splits(last_keys)
        first_items = counts.cumsum() - counts
        sequences = np.repeat(np.arange(len(which)), counts)
        splits = np.arange(len(sequences)) - first_items[sequences]
        rows = self._first_rows[which]
        offsets = self._offsets[which]
        return first_items, rows, last_keys, offsets, np.array([len(splits)]), sequences, splits

    def tiles(self, size: int) -> tuple[Ints, ...]:
        """Returns the fields of `ChunkWork` except `tables`."""
        which = np.flatnonzero(self.counts >= self._least_chunk)
        counts = self.counts[which]
        num_tiles = -(-counts // size)
        sequences = np.repeat(np.arange(len(which)), num_tiles)
        within = (np.arange(len(sequences)) - (num_tiles.cumsum() - num_tiles)[sequences]) * size
        firsts = (values[which][sequences] for values in (self._first_rows, self._starts))
        rows, starts = (first + within for first in firsts)
        return (
            rows,
            np.minimum(counts[sequences] - within, size),
            starts,
            self._offsets[which][sequences],
        )
