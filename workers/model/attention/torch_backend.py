"""Computes attention in plain torch on any device, or with the C kernels on CPUs."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from ...kv_cache.layout import LayerGeometry
from ..kernels.c import cpu
from ..kv_store import PagedKv
from .backend import PLAIN, AttentionOptions, SequenceSpan, StepAttention
from .native_tables import NativeTables
from .quantized_cache import dequantize, quantize

_Attend = Callable[[int, torch.Tensor, AttentionOptions], torch.Tensor]
"""Maps a layer's query [rows, num_heads, head_dim] to [rows, num_heads * value_dim]."""

_Part = tuple[torch.Tensor, _Attend]
"""Sequences computed together: their rows of the flat batch, and their attention function."""

_LayerTables = tuple[torch.Tensor, NativeTables | None, list[_Part]]
"""Holds the tables that layers of one geometry share in a step.

First the token slots, [num_tokens * num_kv_heads], as rows of (block, head, token). Then the C
kernel's tables or, without a kernel, the parts of the step.
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
        self._layers = tuple(layers)
        self._has_kernel: dict[LayerGeometry, bool] = {}
        for layer in self._layers:
            query = torch.empty(layer.head_dim, dtype=kv.dtype, device=kv.device)
            self._has_kernel[layer] = native and cpu.can_attend(query)
        self.reads_whole_blocks = not all(self._has_kernel.values())

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention:
        rows = _first_rows(spans)
        slots: dict[int, torch.Tensor] = {}
        tables: dict[LayerGeometry, _LayerTables] = {}
        for layer, has_kernel in self._has_kernel.items():
            if layer.num_kv_heads not in slots:
                slots[layer.num_kv_heads] = self._slots(layer.num_kv_heads, spans)
            native = NativeTables(layer.window, rows) if has_kernel else None
            parts = [] if has_kernel else _Planner(self._kv, layer, rows).parts()
            tables[layer] = (slots[layer.num_kv_heads], native, parts)
        return partial(self._step, [tables[layer] for layer in self._layers])

    def static(self, max_tokens: int) -> StaticStep | None:
        """Returns a step of up to `max_tokens` tokens whose tables stay in place.

        Returns None if a layer has no kernel.
        """
        if not all(self._has_kernel.values()):
            return None
        heads = {layer.num_kv_heads for layer in self._has_kernel}
        slots = {
            num_kv_heads: torch.zeros(max_tokens * num_kv_heads, dtype=torch.int64)
            for num_kv_heads in heads
        }
        tables = {layer: NativeTables(layer.window) for layer in self._has_kernel}

        def fill(spans: Sequence[SequenceSpan]) -> None:
            rows = _first_rows(spans)
            for num_kv_heads, each in slots.items():
                new = self._slots(num_kv_heads, spans)
                each[: len(new)] = new
            for table in tables.values():
                table.fill(rows)

        return partial(
            self._step, [(slots[each.num_kv_heads], tables[each], []) for each in self._layers]
        ), fill

    def _slots(self, num_kv_heads: int, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        """Returns token slots [num_tokens * num_kv_heads], as rows of (block, head, token)."""
        size = self._kv.block_size
        # Of each token's first head. In plain Python, since most steps have one token per sequence.
        rows = [
            span.blocks[position // size] * num_kv_heads * size + position % size
            for span in spans
            for position in range(span.start, span.start + span.num_tokens)
        ]
        return (
            (torch.tensor(rows)[:, None] + torch.arange(num_kv_heads) * size)
            .flatten()
            .to(self._kv.device)
        )

    def _step(
        self,
        tables: list[_LayerTables],
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Implements `StepAttention`; `tables` are by layer."""
        slots, native, parts = tables[layer]
        planes = self._kv.scatter_rows[layer]  # one for a latent layer
        if native:
            cpu.store_kv(key, value, planes[0], planes[1] if len(planes) > 1 else None, slots)
        else:
            for rows_of, new in zip(planes, (key, value), strict=False):
                heads = new.reshape(-1, new.shape[-1])
                rows_of.index_copy_(
                    0, slots, quantize(heads, rows_of.dtype) if self._kv.is_quantized else heads
                )
        result = query.new_empty(query.shape[0], query.shape[1] * value.shape[2])
        if native:
            keys = self._kv.layers[layer][0]
            values = self._kv.layers[layer][-1]
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
            )
        for rows, attend in parts:
            result[rows] = attend(layer, query[rows], options)
        return result


def _first_rows(spans: Sequence[SequenceSpan]) -> list[tuple[int, SequenceSpan]]:
    """Returns the sequences, each with its first row of the flat batch."""
    counts = itertools.accumulate((span.num_tokens for span in spans), initial=0)
    return list(zip(counts, spans, strict=False))


def _weigh(
    scores: torch.Tensor, mask: torch.Tensor, options: AttentionOptions, head_dim: int
) -> torch.Tensor:
    """Maps dot products [..., num_heads, n, m] to attention weights; adds `mask` to the scores."""
    scores = scores * options.scale_of(head_dim)
    if options.soft_cap is not None:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    scores = scores + mask
    if options.sinks is None:
        return scores.softmax(-1)
    sinks = options.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


class _Planner:
    """Builds the tables of one step for layers of one geometry."""

    def __init__(
        self, kv: PagedKv, layer: LayerGeometry, rows: Sequence[tuple[int, SequenceSpan]]
    ) -> None:
        """Takes `rows`: the sequences, each with its first row."""
        self._kv = kv
        self._block_size = kv.block_size
        self._num_kv_heads = layer.num_kv_heads
        self._value_dim = layer.value_dim or layer.head_dim
        self._window = layer.window
        self._sequences = rows
        self._heads = torch.arange(self._num_kv_heads)

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
            list(span.blocks[first : self._num_blocks(span)])
            for span, first in zip(spans, firsts, strict=True)
        ]
        width = max(map(len, tables))
        # Padding repeats the sequence's own last block: its numbers are finite, and masked.
        table = self._head_rows(
            torch.tensor([blocks + blocks[-1:] * (width - len(blocks)) for blocks in tables])
        )
        keys_of = torch.tensor(firsts)[:, None] * self._block_size + torch.arange(
            width * self._block_size
        )
        mask = self._mask(torch.tensor([span.start for span in spans]), keys_of)[:, None, None]

        def attend(layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
            batch, num_heads, head_dim = query.shape
            products = batch * self._num_kv_heads
            query = query.reshape(products, -1, head_dim)
            keys, values = (
                each.view(products, -1, each.shape[-1]) for each in self._gather(layer, table)
            )
            scores = torch.bmm(query, keys.transpose(1, 2)).view(batch, num_heads, 1, -1)
            weights = _weigh(scores, mask, options, head_dim).view(products, -1, keys.shape[1])
            return torch.bmm(weights, values).view(batch, -1)

        return attend

    def _chunk(self, span: SequenceSpan) -> _Attend:
        """Returns the attention of several new tokens of one sequence.

        KV heads are the batch of the product. Query heads that share one see it expanded, not
        copied.
        """
        end = span.start + span.num_tokens
        first = self._first_block(span)
        kv_heads = self._num_kv_heads
        table = self._head_rows(torch.tensor([span.blocks[first : self._num_blocks(span)]]))
        positions = torch.arange(first * self._block_size, end)
        queries = torch.arange(span.start, end)
        is_causal = span.start == 0 and (self._window is None or end <= self._window)
        mask = None if is_causal else self._mask(queries, positions[None])

        def attend(layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
            num_tokens, num_heads, head_dim = query.shape
            group = num_heads // kv_heads
            query = query.reshape(num_tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            keys, values = (
                each.view(kv_heads, 1, -1, each.shape[-1])[:, :, : len(positions)].expand(
                    -1, group, -1, -1
                )
                for each in self._gather(layer, table)
            )
            if options.soft_cap is None and options.sinks is None:
                result = functional.scaled_dot_product_attention(
                    query, keys, values, mask, is_causal=is_causal, scale=options.scale
                )
            else:
                scores = (query @ keys.transpose(2, 3)).view(num_heads, num_tokens, -1)
                hidden = self._mask(queries, positions[None]) if mask is None else mask
                weights = _weigh(scores, hidden, options, head_dim)
                result = weights.view(kv_heads, group, num_tokens, -1) @ values
            return result.permute(2, 0, 1, 3).reshape(num_tokens, -1)

        return attend

    def _gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values at rows of (block, head).

        They are [rows * block_size, head_dim] and [rows * block_size, value_dim].
        """
        found = [
            rows[table].view(len(table) * self._block_size, -1)
            for rows in self._kv.gather_rows[layer]
        ]
        if self._kv.is_quantized:
            found = [dequantize(each, self._kv.dtype) for each in found]
        return found[0], found[-1][:, : self._value_dim]

    def _num_blocks(self, span: SequenceSpan) -> int:
        return (span.start + span.num_tokens + self._block_size - 1) // self._block_size

    def _first_block(self, span: SequenceSpan) -> int:
        return (
            0 if self._window is None else max(0, span.start + 1 - self._window) // self._block_size
        )

    def _head_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Maps block tables [batch, width] to flat (block, head) rows: [batch, head, width]."""
        return (
            (table[:, None] * self._num_kv_heads + self._heads[:, None])
            .flatten()
            .to(self._kv.device)
        )

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Maps positions [n] and [n or 1, m] to the additive mask [n, m] of 0 or -inf."""
        hidden = keys > queries[:, None]
        if self._window is not None:
            hidden |= keys <= queries[:, None] - self._window
        mask = torch.zeros(hidden.shape, dtype=self._kv.dtype).masked_fill_(hidden, -torch.inf)
        return mask.to(self._kv.device)
