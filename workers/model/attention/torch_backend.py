"""Attention in plain torch for any device and, where there are C kernels, by these on CPUs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...kv_cache.layout import LayerGeometry
from ..kernels import cpu
from ..kv_store import PagedKv
from .backend import SequenceSpan, StepAttention


@dataclass(slots=True, kw_only=True)
class _NativeDecodes:
    """Attends for sequences with one new token, on a CPU: the kernel reads their blocks in place."""

    rows: slice | torch.Tensor  # of the flat batch
    tables: torch.Tensor  # [sum of table lengths], the block tables one after the other
    offsets: torch.Tensor  # [batch], where each begins
    first_keys: torch.Tensor  # [batch], the first position each token sees
    last_keys: torch.Tensor  # [batch], its own position

    def attend(self, query: torch.Tensor, kv: PagedKv, layer: int, out: torch.Tensor) -> None:
        """Writes the result for query [rows, num_heads, head_dim] to out [rows, num_heads * head_dim]."""
        keys, values = kv.layer(layer)
        starts = (self.offsets, self.first_keys, self.last_keys)
        cpu.decode_attention(query, keys, values, self.tables, *starts, out)


@dataclass(slots=True, kw_only=True)
class _NativeChunk:
    """Attends for several new tokens of one sequence, on a CPU: the kernel reads the blocks in place."""

    rows: slice | torch.Tensor
    table: torch.Tensor  # [table length], the block table
    start: int
    window: int

    def attend(self, query: torch.Tensor, kv: PagedKv, layer: int, out: torch.Tensor) -> None:
        keys, values = kv.layer(layer)
        cpu.chunk_attention(query, keys, values, self.table, self.start, self.window, out)


@dataclass(slots=True, kw_only=True)
class _Decodes:
    """Attends for sequences with one new token and block tables of similar length by one batched product."""

    rows: slice | torch.Tensor
    table: torch.Tensor  # [batch * num_kv_heads * width]
    mask: torch.Tensor  # [batch * num_kv_heads, 1, width * block_size], 0 or -inf

    def attend(self, query: torch.Tensor, kv: PagedKv, layer: int, out: torch.Tensor) -> None:
        """Makes the heads that share a KV head the rows of one product."""
        head_dim = query.shape[-1]
        products = self.mask.shape[0]
        query = query.reshape(products, -1, head_dim)
        keys, values = (rows[self.table].view(products, -1, head_dim) for rows in kv.gather_rows(layer))
        scores = torch.baddbmm(self.mask, query, keys.transpose(1, 2), alpha=head_dim**-0.5)
        out.view(products, -1, head_dim).copy_(torch.bmm(scores.softmax(-1), values))


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Attends for several new tokens of one sequence."""

    rows: slice | torch.Tensor
    table: torch.Tensor  # [num_kv_heads * width]
    num_kv_heads: int
    num_keys: int
    mask: torch.Tensor | None  # [num_tokens, num_keys], 0 or -inf; None is plain causal from position 0

    def attend(self, query: torch.Tensor, kv: PagedKv, layer: int, out: torch.Tensor) -> None:
        """Makes KV heads the batch of the product; the heads that share one see it expanded, not copied."""
        num_tokens, num_heads, head_dim = query.shape
        group = num_heads // self.num_kv_heads
        query = query.reshape(num_tokens, self.num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        keys, values = (
            rows[self.table].view(self.num_kv_heads, 1, -1, head_dim)[:, :, : self.num_keys].expand(-1, group, -1, -1)
            for rows in kv.gather_rows(layer)
        )
        result = functional.scaled_dot_product_attention(query, keys, values, self.mask, is_causal=self.mask is None)
        out.view(num_tokens, self.num_kv_heads, group, head_dim).copy_(result.permute(2, 0, 1, 3))


_Part = _NativeDecodes | _NativeChunk | _Decodes | _Chunk
"""Some of the step's sequences, attended to at once."""

_LayerTables = tuple[torch.Tensor, list[_Part], bool]
"""Where each token's keys and values go, [num_tokens * num_kv_heads], as rows of (block, head, token); the step's
sequences; whether C kernels store and decode."""


class TorchAttentionBackend:
    """Implements `AttentionBackend`: gathers the blocks that a step needs, then multiplies densely; where there are C
    kernels, these read the blocks in place."""

    reads_whole_blocks = True

    def __init__(self, kv: PagedKv, layers: Sequence[LayerGeometry], *, native: bool = True) -> None:
        """`layers` have this rank's head counts; `native=False` keeps to plain torch."""
        self._kv = kv
        self._layers = tuple(layers)
        self._kernels: dict[LayerGeometry, tuple[bool, bool]] = {}  # whether they decode, and take chunks
        for index, layer in enumerate(self._layers):
            if layer not in self._kernels:
                keys, group = kv.layer(index)[0], layer.num_heads // layer.num_kv_heads
                uses = native and cpu.can_attend(keys, group), native and cpu.can_attend_chunks(keys, group)
                self._kernels[layer] = uses

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        """See `AttentionBackend.plan`. Layers of equal geometry share their tables."""
        slots: dict[int, torch.Tensor] = {}
        tables: dict[LayerGeometry, _LayerTables] = {}
        for layer, (native, native_chunks) in self._kernels.items():
            planner = _Planner(self._kv, layer, spans, native=native, native_chunks=native_chunks)
            if layer.num_kv_heads not in slots:
                slots[layer.num_kv_heads] = planner.slots()
            tables[layer] = (slots[layer.num_kv_heads], planner.parts(), native)
        return _TorchStep(self._kv, [tables[layer] for layer in self._layers])


class _TorchStep:
    """Implements `StepAttention`."""

    def __init__(self, kv: PagedKv, tables: list[_LayerTables]) -> None:
        self._kv = kv
        self._tables = tables  # by layer

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        slots, parts, native = self._tables[layer]
        key_rows, value_rows = self._kv.scatter_rows(layer)
        if native:
            cpu.store_kv(key, value, key_rows, value_rows, slots)
        else:
            key_rows.index_copy_(0, slots, key.reshape(-1, key.shape[-1]))
            value_rows.index_copy_(0, slots, value.reshape(-1, value.shape[-1]))
        result = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for part in parts:
            if isinstance(part.rows, slice):
                part.attend(query[part.rows], self._kv, layer, result[part.rows])
            else:
                out = result.new_empty(len(part.rows), result.shape[1])
                part.attend(query[part.rows], self._kv, layer, out)
                result[part.rows] = out
        return result


class _Planner:
    """Builds the tables of one step for layers of one geometry."""

    def __init__(
        self, kv: PagedKv, layer: LayerGeometry, spans: Sequence[SequenceSpan], *, native: bool, native_chunks: bool
    ) -> None:
        self._native = native
        self._native_chunks = native_chunks
        self._block_size = kv.block_size
        self._num_kv_heads = layer.num_kv_heads
        self._window = layer.window
        self._dtype = kv.dtype
        self._device = kv.device
        self._spans = spans
        self._heads = torch.arange(self._num_kv_heads)
        self._first_rows = [0]
        for span in spans:
            self._first_rows.append(self._first_rows[-1] + span.num_tokens)

    def slots(self) -> torch.Tensor:
        """Returns where each new token's keys and values go: [num_tokens * num_kv_heads], rows of (block, head,
        token)."""
        size = self._block_size
        rows = [  # of each token's first head; in plain Python, since most steps have a token of each sequence
            span.blocks[position // size] * self._num_kv_heads * size + position % size
            for span in self._spans
            for position in range(span.start, span.start + span.num_tokens)
        ]
        return (torch.tensor(rows)[:, None] + self._heads * size).flatten().to(self._device)

    def parts(self) -> list[_Part]:
        """Returns one part for each prompt, and one for all single tokens; without the kernel these are grouped by the
        bit length of their table, so that padding at most doubles."""
        groups: dict[int, list[int]] = {}
        parts: list[_Part] = []
        for index, span in enumerate(self._spans):
            if span.num_tokens == 1:
                group = 0 if self._native else self._num_blocks(span).bit_length()
                groups.setdefault(group, []).append(index)
            else:
                parts.append(self._chunk(index, span))
        decodes = self._native_decodes if self._native else self._decodes
        parts += [decodes(indices) for indices in groups.values()]
        return parts

    def _native_decodes(self, indices: list[int]) -> _NativeDecodes:
        spans = [self._spans[index] for index in indices]
        tables = list(itertools.chain.from_iterable(span.blocks for span in spans))
        lengths = torch.tensor([0, *(len(span.blocks) for span in spans)])
        last_keys = torch.tensor([span.start for span in spans])
        return _NativeDecodes(
            rows=self._rows([self._first_rows[index] for index in indices]),
            tables=torch.tensor(tables, dtype=torch.int32),
            offsets=lengths.cumsum(0)[:-1],
            first_keys=(last_keys + 1 - self._window).clamp(min=0) if self._window else torch.zeros_like(last_keys),
            last_keys=last_keys,
        )

    def _decodes(self, indices: list[int]) -> _Decodes:
        spans = [self._spans[index] for index in indices]
        firsts = [self._first_block(span) for span in spans]
        tables = [list(span.blocks[first : self._num_blocks(span)]) for span, first in zip(spans, firsts, strict=True)]
        width = max(map(len, tables))
        # Padding repeats the sequence's own last block: finite numbers, which the mask takes out.
        table = torch.tensor([blocks + blocks[-1:] * (width - len(blocks)) for blocks in tables])
        first_keys = torch.tensor(firsts)[:, None] * self._block_size
        queries = torch.tensor([span.start for span in spans])
        mask = self._mask(queries, first_keys + torch.arange(width * self._block_size))
        return _Decodes(
            rows=self._rows([self._first_rows[index] for index in indices]),
            table=self._head_rows(table),
            mask=mask[:, None].repeat_interleave(self._num_kv_heads, dim=0),
        )

    def _chunk(self, index: int, span: SequenceSpan) -> _Part:
        rows = slice(self._first_rows[index], self._first_rows[index + 1])
        end = span.start + span.num_tokens
        if self._native_chunks:
            table = torch.tensor(span.blocks, dtype=torch.int32)
            return _NativeChunk(rows=rows, table=table, start=span.start, window=self._window or end)
        first = self._first_block(span)
        queries = torch.arange(span.start, end)
        keys = torch.arange(first * self._block_size, end)
        causal = span.start == 0 and (self._window is None or end <= self._window)
        return _Chunk(
            rows=rows,
            table=self._head_rows(torch.tensor([span.blocks[first : self._num_blocks(span)]])),
            num_kv_heads=self._num_kv_heads,
            num_keys=len(keys),
            mask=None if causal else self._mask(queries, keys[None]),
        )

    def _num_blocks(self, span: SequenceSpan) -> int:
        return (span.start + span.num_tokens + self._block_size - 1) // self._block_size

    def _first_block(self, span: SequenceSpan) -> int:
        return 0 if self._window is None else max(0, span.start + 1 - self._window) // self._block_size

    def _rows(self, rows: list[int]) -> slice | torch.Tensor:
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return torch.tensor(rows, device=self._device)

    def _head_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Maps block tables [batch, width] to flat rows of (block, head), ordered [batch, head, width]."""
        return (table[:, None] * self._num_kv_heads + self._heads[:, None]).flatten().to(self._device)

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Maps positions [n] and [n or 1, m] to what is added to the scores: [n, m], 0 or -inf."""
        hidden = keys > queries[:, None]
        if self._window is not None:
            hidden |= keys <= queries[:, None] - self._window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return mask.to(self._device)
