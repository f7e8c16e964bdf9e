"""Wraps the C kernels of low-rank terms (linear/low_rank.c), and builds their tables."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

from . import cpu
from .calls import call

# Rows of a segment at most. More rows read a pair again less often, but threads share fewer items.
_SEGMENT_ROWS: Final = 22
PANEL: Final = 32  # columns that are written at once, as in linear.h
_PAIR: Final = 3  # numbers of a pair in a table


def can_multiply(dtype: torch.dtype, inputs: int) -> bool:
    """Returns True if there are kernels for layers of `inputs` on the CPU."""
    return dtype is torch.bfloat16 and inputs % 2 == 0 and cpu.usable(torch.empty(0, dtype=dtype))


class LowRankPairs:
    """Holds the pairs A [rank, inputs] and B [outputs, rank] of some layers, packed."""

    def __init__(self, num_layers: int) -> None:
        self._table = array("q", bytes(8 * _PAIR * num_layers))
        self._packed: list[torch.Tensor] = []

    def add(self, layer: int, down: torch.Tensor, up: torch.Tensor) -> None:
        """Packs A and B of a layer, in bfloat16. The rank must be even."""
        packed = [cpu.pack_linear(down), cpu.pack_linear(up)]
        self._packed += packed
        numbers = (*(each.data_ptr() for each in packed), len(down))
        self._table[_PAIR * layer : _PAIR * (layer + 1)] = array("q", numbers)

    @property
    def address(self) -> int:
        """Returns the address of the table, which is valid as long as this object."""
        return self._table.buffer_info()[0]


PairRows = tuple[int, int, LowRankPairs | None]
"""The first row, the number of rows, and their pairs; None: rows without pairs."""


class LowRankRows:
    """Holds the pairs of a step's rows, as a table at a fixed address for kernels."""

    def __init__(self) -> None:
        self.address = torch.zeros(1, dtype=torch.int64)
        self.fill(())

    def fill(self, runs: Sequence[PairRows]) -> None:
        """Loads the runs of the next step, which must cover its rows."""
        table = array("q", [0])
        for first, count, pairs in runs:
            num_parts = -(-count // _SEGMENT_ROWS)
            ends = [first + count * part // num_parts for part in range(num_parts + 1)]
            for begin, end in pairwise(ends):
                table.extend((begin, end - begin, pairs.address if pairs else 0))
            table[0] += num_parts
        self._held = table, runs
        self.address[0] = table.buffer_info()[0]


def add_low_rank(
    x: torch.Tensor,  # [rows, inputs] bfloat16
    residual: torch.Tensor | None,  # [rows, outputs], contiguous
    outputs: int,
    *,
    layer: int,
    rows_of: LowRankRows,
    width: int,  # at least the rank of each pair, a multiple of PANEL
) -> torch.Tensor:
    """Computes residual + (x A^T) B^T by the pairs of the rows: [rows, outputs].

    A row without a pair gets its residual, or without residuals -0.
    """
    rows, inputs = x.shape
    down = x.new_empty(rows, width)
    y = x.new_empty(rows, outputs)
    table = (rows_of.address, layer)
    call(
        "low_rank_down",
        x.dtype,
        rows,
        x,
        x.stride(0),
        down,
        width,
        *table,
        inputs,
        shared=True,
    )
    call("low_rank_up", x.dtype, rows, down, width, residual, y, *table, outputs, shared=True)
    return y
