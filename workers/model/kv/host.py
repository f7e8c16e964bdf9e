"""Reads and writes KV cache in host memory."""

import ctypes

import numpy as np
import numpy.typing as npt

from ...kv_cache.layout import KvLayout, KvSpan
from ...kv_cache.memory import plan_memory
from ...kv_cache.tables import TableBlocks
from ..kernels.c.build import library, loaded_library
from .spans import check_group, check_length, check_table, place_of

Bytes = npt.NDArray[np.uint8]
# Index of a span in a group's tensor, seen as [layer, plane, token, KV head]: layers, all planes,
# block and offset of each token, KV heads.
_Index = tuple[slice, slice, npt.NDArray[np.int64], npt.NDArray[np.int64], slice]


class HostKv:
    """Reads and writes one rank's KV cache in host memory, its own or mapped from another process.

    Copies in the calling thread. torch would wake a second team of OpenMP threads, which competes
    with the threads of the running step (measured: down to 0.04 GB/s).
    """

    def __init__(
        self, layout: KvLayout, raw: Bytes, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> None:
        """Takes `raw`, the whole memory [bytes].

        Raises ValueError if it is too small, or as `check_split`.
        """
        memory = plan_memory(layout, num_blocks=num_blocks, block_size=block_size, tp=tp, rank=rank)
        memory.check_fits(len(raw))
        # Of each group, [num_layers, planes, num_blocks, num_slots, block_size, row_bytes].
        self._groups = [
            np.ndarray(group.shape, np.uint8, raw, group.offset, group.strides)
            for group in memory.groups
        ]
        self._layout = layout
        self._num_blocks = num_blocks
        self._slots = [group.shape[3] for group in memory.groups]
        self._native = library() is not None

    def read(self, table: TableBlocks, span: KvSpan) -> memoryview:
        index = self._locate(table, span)
        raw = self._groups[span.group]
        if not self._native:
            return _flat(raw.transpose(0, 1, 2, 4, 3, 5)[index])
        dense = np.empty(
            (span.num_layers, raw.shape[1], span.num_tokens, span.num_slots, raw.shape[5]), np.uint8
        )
        _copy("read_heads", raw, index, dense)
        return _flat(dense)

    def write(self, table: TableBlocks, span: KvSpan, data: memoryview) -> None:
        index = self._locate(table, span)
        check_length(span, self._layout, data)
        raw = self._groups[span.group]
        dense = np.frombuffer(data, np.uint8)
        dense = dense.reshape(
            span.num_layers, raw.shape[1], span.num_tokens, span.num_slots, raw.shape[5]
        )
        if self._native:
            _copy("write_heads", raw, index, dense)
        else:
            raw.transpose(0, 1, 2, 4, 3, 5)[index] = dense

    def _locate(self, table: TableBlocks, span: KvSpan) -> _Index:
        """Returns a span's index in its group's tensor [layer, plane, block, token, slot].

        Raises ValueError if the span or a block is out of range.
        """
        check_group(self._layout, span)
        block_size = self._groups[span.group].shape[4]
        tokens = table.tokens(block_size)
        layers, slots = place_of(self._layout, span, tokens=tokens, slots=self._slots)
        blocks = check_table(table, self._num_blocks)
        first = span.first_token - tokens.start
        positions = np.arange(first, first + span.num_tokens)
        block, offset = blocks[positions // block_size], positions % block_size
        return layers, slice(None), block, offset, slots


def _copy(name: str, raw: Bytes, index: _Index, dense: Bytes) -> None:
    """Copies between a group's memory and `dense`: [layers, planes, tokens, slots, row_bytes]."""
    layers, _, block, offset, slots = index
    layer_bytes, half_bytes, block_bytes, slot_bytes, head_bytes = raw.strides[:5]
    places = block * block_bytes + offset * head_bytes
    numbers = (
        raw.ctypes.data + layers.start * layer_bytes + slots.start * slot_bytes,
        dense.ctypes.data,
        places.ctypes.data,
        dense.shape[0] * dense.shape[1],
        half_bytes,
        dense.shape[2],
        dense.shape[3],
        slot_bytes,
        head_bytes,
    )
    getattr(loaded_library(), name)(*map(ctypes.c_int64, numbers))


def _flat(array: Bytes) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).data
