"""Computes attention in plain torch on any device, or with the C kernels on CPUs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from ...kv_cache.layout import LayerGeometry
from ..kernels.c import cpu
from ..kv.store import PagedKv
from .backend import PLAIN, AttentionOptions, SequenceSpan, StepAttention
from .native_tables import NativeTables
from .quantized_cache import dequantize, quantize

_Attend = Callable[[int, torch.Tensor, AttentionOptions], torch.Tensor]
"""Maps a layer's query [rows, num_heads, head_dim] to [rows, num_heads * value_dim]."""

_Part = tuple[torch.Tensor, _Attend]
"""Sequences computed together: their rows of the flat batch, and their attention function."""

_Kind = tuple[LayerGeometry, int]
"""The geometry of a layer on this rank, and the number of its block table.

Layers that read another layer's cache are of the same kind as layers that keep their own.
"""

_LayerTables = tuple[torch.Tensor, NativeTables | None, list[_Part]]
"""Holds the tables that layers of one kind share in a step.

First the token slots, [num_tokens], which are block * block_size + offset. Then the C kernel's
tables or, without a kernel, the parts of the step.
"""

StaticStep = tuple[StepAttention, Callable[[Sequence[SequenceSpan]], None]]
"""A step whose tables stay in place, and the function that loads its next sequences."""


class TorchAttentionBackend:
    """Implements `AttentionBackend`: gathers a step's blocks, then multiplies densely.

    The C kernels, where available, read the blocks in place instead.
    """

    scratch_bytes_per_block = 0  # not counted in host memory

    def __init__(
        self, kv: PagedKv, layers: Sequence[LayerGeometry], *, native: bool = True
    ) -> None:
        """Takes `layers` with this rank's head counts; `native=False` forces plain torch."""
        self._kv = kv
        self._layers = list(layers)
        # Of each layer; None: the layer has no attention.
        self._kinds: list[_Kind | None] = [
            (replace(layer, reads=None), table) if planes else None
            for layer, table, planes in zip(layers, kv.table_of_layer, kv.layers, strict=False)
        ]
        self._has_kernel: dict[_Kind, bool] = {}
        for kind in filter(None, self._kinds):
            query = torch.empty(kind[0].head_dim, dtype=kv.dtype, device=kv.device)
            self._has_kernel[kind] = native and cpu.can_attend(query)

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        rows = _first_rows(spans)
        slots = {
            table: self._slots(table, spans) for table in {table for _, table in self._has_kernel}
        }
        tables: dict[_Kind, _LayerTables] = {}
        for (layer, table), has_kernel in self._has_kernel.items():
            native = NativeTables(layer.window, table, rows) if has_kernel else None
            parts = [] if has_kernel else _Planner(self._kv, layer, table, rows).parts()
            tables[layer, table] = (slots[table], native, parts)
        return self._step_over(tables)

    def static(self, max_tokens: int) -> StaticStep | None:
        """Returns a step of up to `max_tokens` tokens whose tables stay in place.

        Returns None if a layer has no kernel.
        """
        if not all(self._has_kernel.values()):
            return None
        slots = {table: torch.zeros(max_tokens, dtype=torch.int64) for _, table in self._has_kernel}
        natives = {
            (layer, table): NativeTables(layer.window, table) for layer, table in self._has_kernel
        }

        def fill(spans: Sequence[SequenceSpan]) -> None:
            rows = _first_rows(spans)
            for table, each in slots.items():
                new = self._slots(table, spans)
                each[: len(new)] = new
            for native in natives.values():
                native.fill(rows)

        step = self._step_over(
            {kind: (slots[kind[1]], native, []) for kind, native in natives.items()}
        )
        return step, fill

    def _slots(self, table: int, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        """Returns the slots of the step's tokens in a block table, [num_tokens]."""
        size = self._kv.tables[table].block_size
        # In plain Python, since most steps have one token per sequence.
        slots = [
            span.tables[table][position // size] * size + position % size
            for span in spans
            for position in range(span.start, span.start + span.num_tokens)
        ]
        return torch.tensor(slots, dtype=torch.int64).to(self._kv.device)

    def _step_over(self, tables: Mapping[_Kind, _LayerTables]) -> StepAttention:
        by_layer = [None if kind is None else tables[kind] for kind in self._kinds]
        return partial(self._step, by_layer)

    def _step(
        self,
        tables: list[_LayerTables | None],
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Implements `StepAttention`; `tables` are by layer."""
        found = tables[layer]
        assert found is not None, f"layer {layer} has no attention"
        slots, native, parts = found
        planes = self._kv.layers[layer]  # one for a latent layer
        geometry = self._layers[layer]
        if geometry.reads is None:
            assert key is not None, f"layer {layer} keeps keys"
            assert value is not None, f"layer {layer} keeps values"
            self._store(planes, key, value, slots, is_native=native is not None)
        value_dim = geometry.value_dim or geometry.head_dim
        result = query.new_empty(query.shape[0], query.shape[1] * value_dim)
        if native:
            keys = planes[0]
            values = planes[-1]
            scale = options.scale_of(query.shape[2])
            cpu.paged_attention(
                query,
                keys,
                values,
                native.addresses,
                result,
                scale,
                options.soft_cap,
                options.sinks,
                self._kv.layout.cache_dtype,
            )
        for rows, attend in parts:
            result[rows] = attend(layer, query[rows], options)
        return result

    def _store(
        self,
        planes: tuple[torch.Tensor, ...],
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        is_native: bool,
    ) -> None:
        """Writes the step's keys and values to their slots, [num_tokens], of a layer's planes."""
        if is_native:
            values = planes[1] if len(planes) > 1 else None
            cpu.store_kv(key, value, planes[0], values, slots, self._kv.layout.cache_dtype)
            return
        for rows_of, new in zip(planes, (key, value), strict=False):
            size = rows_of.shape[2]
            heads = quantize(new, self._kv.layout.cache_dtype) if self._kv.is_quantized else new
            rows_of[slots // size, :, slots % size] = heads


def _first_rows(spans: Sequence[SequenceSpan]) -> list[tuple[int, SequenceSpan]]:
    """Returns the sequences, each with its first row of the flat batch."""
    counts = itertools.accumulate((span.num_tokens for span in spans), initial=0)
    return list(zip(counts, spans, strict=False))


def _weigh(
    scores: torch.Tensor, hidden: torch.Tensor, options: AttentionOptions, head_dim: int
) -> torch.Tensor:
    """Maps dot products [..., num_heads, n, m] to attention weights, 0 for `hidden` keys."""
    scores = scores * options.scale_of(head_dim)
    if options.soft_cap is not None:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is None:
        return scores.softmax(-1)
    sinks = options.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


class _Planner:
    """Builds the tables of one step for layers of one kind."""

    def __init__(
        self,
        kv: PagedKv,
        layer: LayerGeometry,
        table: int,
        rows: Sequence[tuple[int, SequenceSpan]],
    ) -> None:
        """Takes the number of the layers' block table, and the sequences with their first rows."""
        self._kv = kv
        self._table = table
        self._block_size = kv.tables[table].block_size
        self._num_kv_heads = layer.num_kv_heads
        self._head_dim = layer.head_dim
        self._value_dim = layer.value_dim or layer.head_dim
        self._window = layer.window
        self._sequences = rows

    def parts(self) -> list[_Part]:
        """Returns one part per chunk, and one per group of single tokens.

        Block tables of a group have lengths of equal bit length, so padding at most doubles them.
        """
        groups: dict[int, list[tuple[int, SequenceSpan]]] = {}
        parts: list[_Part] = []
        for row, span in self._sequences:
            if span.num_tokens == 1:
                groups.setdefault(self._num_blocks(span).bit_length(), []).append((row, span))
            else:
                parts.append((torch.arange(row, row + span.num_tokens), self._chunk(span)))
        for group in groups.values():
            parts.append(
                (
                    torch.tensor([row for row, _ in group]),
                    self._decodes([span for _, span in group]),
                )
            )
        return [(rows.to(self._kv.device), attend) for rows, attend in parts]

    def _decodes(self, spans: Sequence[SequenceSpan]) -> _Attend:
        """Returns the attention of sequences with one new token each, as one batched product.

        Their block tables are of similar length. The rows of a product are the query heads that
        share a KV head.
        """
        firsts = [self._first_block(span) for span in spans]
        tables = [
            list(span.tables[self._table][first : self._num_blocks(span)])
            for span, first in zip(spans, firsts, strict=True)
        ]
        width = max(map(len, tables))
        table = self._on_device(
            torch.tensor([blocks + blocks[-1:] * (width - len(blocks)) for blocks in tables])
        )
        keys_of = torch.tensor(firsts)[:, None] * self._block_size + torch.arange(
            width * self._block_size
        )
        # [batch, keys]
        hidden = self._hidden(torch.tensor([span.start for span in spans]), keys_of)

        def attend(layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
            batch, num_heads, head_dim = query.shape
            products = batch * self._num_kv_heads
            query = query.reshape(products, -1, head_dim)
            keys, values = self._gather(layer, table)
            # Zero times NaN is NaN.
            values = values.masked_fill(hidden[:, None, :, None], 0).flatten(0, 1)
            keys = keys.flatten(0, 1)
            scores = torch.bmm(query, keys.transpose(1, 2)).view(batch, num_heads, 1, -1)
            weights = _weigh(scores, hidden[:, None, None], options, head_dim)
            return torch.bmm(weights.view(products, -1, keys.shape[1]), values).view(batch, -1)

        return attend

    def _chunk(self, span: SequenceSpan) -> _Attend:
        """Returns the attention of several new tokens of one sequence.

        KV heads are the batch of the product. Query heads that share one see it expanded, not
        copied.
        """
        end = span.start + span.num_tokens
        first = self._first_block(span)
        kv_heads = self._num_kv_heads
        blocks = span.tables[self._table][first : self._num_blocks(span)]
        table = self._on_device(torch.tensor([list(blocks)]))
        # The keys that some query sees: others may hold NaN.
        begin = self._first_key(span)
        seen = slice(begin - first * self._block_size, end - first * self._block_size)
        positions = torch.arange(begin, end)
        queries = torch.arange(span.start, end)
        is_causal = span.start == 0 and (self._window is None or end <= self._window)
        hidden = self._hidden(queries, positions[None])

        def attend(layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
            num_tokens, num_heads, head_dim = query.shape
            group = num_heads // kv_heads
            query = query.reshape(num_tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            keys, values = (
                each[0, :, None, seen].expand(-1, group, -1, -1)
                for each in self._gather(layer, table)
            )
            if options.soft_cap is None and options.sinks is None:
                result = functional.scaled_dot_product_attention(
                    query,
                    keys,
                    values,
                    None if is_causal else ~hidden,
                    is_causal=is_causal,
                    scale=options.scale,
                )
            else:
                scores = (query @ keys.transpose(2, 3)).view(num_heads, num_tokens, -1)
                weights = _weigh(scores, hidden, options, head_dim)
                result = weights.view(kv_heads, group, num_tokens, -1) @ values
            return result.permute(2, 0, 1, 3).reshape(num_tokens, -1)

        return attend

    def _gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of the blocks of a table [batch, width].

        They are [batch, num_kv_heads, width * block_size, head_dim] and [.., value_dim].
        """
        heads = torch.arange(self._num_kv_heads, device=table.device)[:, None]
        found = [plane[table[:, None], heads].flatten(2, 3) for plane in self._kv.layers[layer]]
        if self._kv.is_quantized:
            form = self._kv.layout.cache_dtype
            found = [dequantize(each, form, self._head_dim, self._kv.dtype) for each in found]
        return found[0], found[-1][..., : self._value_dim]

    def _num_blocks(self, span: SequenceSpan) -> int:
        return (span.start + span.num_tokens + self._block_size - 1) // self._block_size

    def _first_key(self, span: SequenceSpan) -> int:
        """Returns the position of the first key that a token of the span sees."""
        return 0 if self._window is None else max(0, span.start + 1 - self._window)

    def _first_block(self, span: SequenceSpan) -> int:
        return self._first_key(span) // self._block_size

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._kv.device)

    def _hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns which keys the queries do not see.

        Maps positions [n] and [n or 1, m] to [n, m].
        """
        hidden = keys > queries[:, None]
        if self._window is not None:
            hidden |= keys <= queries[:, None] - self._window
        return self._on_device(hidden)
