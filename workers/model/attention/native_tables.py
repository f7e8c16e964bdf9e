"""Where the keys of a step's sequences are, for the C kernel."""

from array import array
from collections.abc import Sequence
from typing import Final

import torch

from .backend import SequenceSpan

_PART: Final = 5  # numbers of each part, as in paged_attention.c


class NativeTables:
    """Holds the tables that `cpu.paged_attention` reads, at addresses that stay in place."""

    def __init__(self, window: int | None, rows: Sequence[tuple[int, SequenceSpan]] = ()) -> None:
        self._window = window
        self.addresses = torch.zeros(
            2, dtype=torch.int64
        )  # of block tables and parts, see paged_attention.c
        self._writable = self.addresses.numpy()
        self.fill(rows)

    def fill(self, rows: Sequence[tuple[int, SequenceSpan]]) -> None:
        """Loads a step's sequences, each after its first row."""
        blocks = array("i")
        chunks: list[int] = []
        singles: list[int] = []
        for row, span in rows:
            end = span.start + span.num_tokens
            parts = chunks if span.num_tokens > 1 else singles
            parts += (row, span.num_tokens, span.start, self._window or end, len(blocks))
            blocks.extend(span.blocks)
        table = array("q", (len(chunks) // _PART, len(singles) // _PART, *chunks, *singles))
        self._writable[:] = blocks.buffer_info()[0], table.buffer_info()[0]
        self._held = blocks, table
