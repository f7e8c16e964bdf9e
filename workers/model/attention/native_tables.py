"""Where the keys of a step's sequences are, for the C kernel."""

from array import array
from collections.abc import Sequence

import torch

from .backend import SequenceSpan


class NativeTables:
    """Holds the tables that `cpu.paged_attention` reads, at addresses that stay in place."""

    def __init__(self, window: int | None, rows: Sequence[tuple[int, SequenceSpan]] = ()) -> None:
        self._window = window
        self.addresses = torch.zeros(2, dtype=torch.int64)  # of block tables and parts, see decode_attention.c
        self._writable = self.addresses.numpy()
        self.fill(rows)

    def fill(self, rows: Sequence[tuple[int, SequenceSpan]]) -> None:
        """Loads a step's sequences, each after its first row."""
        blocks = array("i")
        chunks: list[int] = []
        decodes: list[int] = []
        for row, span in rows:
            end = span.start + span.num_tokens
            if span.num_tokens > 1:
                chunks += (row, span.num_tokens, span.start, self._window or end, len(blocks))
            else:
                decodes += (row, max(end - self._window, 0) if self._window else 0, span.start, len(blocks))
            blocks.extend(span.blocks)
        parts = array("q", (len(chunks) // 5, len(decodes) // 4, *chunks, *decodes))
        self._writable[:] = blocks.buffer_info()[0], parts.buffer_info()[0]
        self._held = blocks, parts
