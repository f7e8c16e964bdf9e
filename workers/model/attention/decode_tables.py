"""Where the keys of a step's decodes are, for the C kernel."""

import itertools
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ..kernels import cpu
from .backend import SequenceSpan


class DecodeTables:
    """Holds what `cpu.decode_attention` reads of sequences with one new token, in memory that stays in place."""

    def __init__(self, max_batch: int, window: int | None) -> None:
        self._window = window
        self._rows = np.zeros((3, max_batch), np.int64)
        self._offsets, self._first_keys, self._last_keys = torch.from_numpy(self._rows).unbind()
        self._address = torch.zeros(1, dtype=torch.int64)  # of the block tables

    def fill(self, spans: Sequence[SequenceSpan]) -> None:
        """Loads a step's sequences, at most max_batch."""
        self._blocks = array("i")
        for span in spans:
            self._blocks.extend(span.blocks)
        self._address[0] = self._blocks.buffer_info()[0]
        starts = np.array([span.start for span in spans])
        lengths = itertools.accumulate((len(span.blocks) for span in spans[:-1]), initial=0)
        first_keys = np.maximum(starts + 1 - self._window, 0) if self._window else 0
        for row, numbers in zip(self._rows, (list(lengths), first_keys, starts), strict=True):
            row[: len(spans)] = numbers

    def attend(
        self,
        query: torch.Tensor,  # [num_rows, num_heads, head_dim]
        keys: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
        values: torch.Tensor,  # the same
        out: torch.Tensor,  # [num_rows, num_heads * head_dim]
    ) -> None:
        """Attends for the first rows."""
        starts = (self._offsets, self._first_keys, self._last_keys)
        cpu.decode_attention(query, keys, values, self._address, *starts, out)
