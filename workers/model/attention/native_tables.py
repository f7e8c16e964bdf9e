"""Builds the tables that tell the C attention kernel where each sequence's keys are."""

from array import array
from collections.abc import Sequence
from typing import Final

import torch

from .backend import SequenceSpan

_PART: Final = 5  # numbers of each part, as in paged_attention.c


class NativeTables:
    """Holds the tables that `cpu.paged_attention` reads, at fixed addresses."""

    def __init__(
        self, window: int | None, table: int = 0, rows: Sequence[tuple[int, SequenceSpan]] = ()
    ) -> None:
        """Takes the number of the block table of the layers, and the `rows` of `fill`."""
        self._window = window
        self._table = table
        # Addresses of block tables and parts; see paged_attention.c.
        self.addresses = torch.zeros(2, dtype=torch.int64)
        self._writable = self.addresses.numpy()
        self.fill(rows)

    def fill(self, rows: Sequence[tuple[int, SequenceSpan]]) -> None:
        """Loads the (first row, sequence) pairs of a step."""
        blocks = array("i")
        chunks: list[int] = []
        singles: list[int] = []
        for row, span in rows:
            end = span.start + span.num_tokens
            parts = chunks if span.num_tokens > 1 else singles
            parts += (row, span.num_tokens, span.start, self._window or end, len(blocks))
            blocks.extend(span.tables[self._table])
        table = array("q", (len(chunks) // _PART, len(singles) // _PART, *chunks, *singles))
        self._writable[:] = blocks.buffer_info()[0], table.buffer_info()[0]
        self._held = blocks, table
