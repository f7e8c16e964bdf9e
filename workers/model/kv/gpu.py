"""Reads and writes KV cache in a GPU's memory, beside the steps."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...host.streams import BlockOrder, DeviceData, EventWaiter, device_checksum
from ...kv_cache.layout import SCALE_BYTES, KvLayout, KvSpan
from ...kv_cache.tables import TableBlocks
from ..device import to_device
from .spans import check_group, check_length, check_table, place_of

T = TypeVar("T")

_NUM_LANES: Final = 64  # sequences whose block tables stay on the GPU while they are transferred


def split_scales(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a quantized cache [.., block_size, head_dim + SCALE_BYTES] by memory, not by index.

    Returns the numbers [.., block_size, head_dim] and then the scales, bfloat16 [.., block_size].
    So the rows of numbers are aligned, which copies of whole tiles to shared memory need.
    """
    block_size = cache.shape[-2]
    flat = cache.flatten(-2)
    numbers = flat[..., : block_size * head_dim].view(*flat.shape[:-1], block_size, head_dim)
    if cache.dtype is torch.uint8:
        numbers = numbers.view(torch.float8_e4m3fn)
    return numbers, flat[..., block_size * head_dim :].view(torch.bfloat16)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises MemoryError in place of torch's OutOfMemoryError: transfers do not import torch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError("the GPU has no memory left to copy KV cache") from error


class GpuKv:
    """Reads and writes one rank's KV cache in a GPU's memory, on streams beside the steps.

    Each sequence that is read or written has a lane. Pinned buffers come from torch's allocator,
    which uses one again when its last copy has ended.
    """

    def __init__(
        self, layout: KvLayout, tensors: Sequence[torch.Tensor], order: BlockOrder
    ) -> None:
        """Takes the `tensors` of a `PagedKv`, and the order of all work on its blocks."""
        self._layout = layout
        self._order = order
        self._waiter = EventWaiter()
        # Of each group, the parts of a head's vector, as words: [num_layers, planes,
        # num_blocks, block_size, num_slots, words].
        self._tokens = [[part.transpose(3, 4) for part in _parts_of(tensor)] for tensor in tensors]
        # Of each group.
        self._block_sizes = [parts[0].shape[3] for parts in self._tokens]
        self._slots = [parts[0].shape[4] for parts in self._tokens]
        make = partial(_Lane, device=tensors[0].device, num_blocks=tensors[0].shape[2])
        num_lanes = _NUM_LANES * len({group.part.window for group in layout.token_groups})
        # High priority, because the copy is small, and a decode worker waits for it.
        self._readers = lru_cache(num_lanes)(partial(make, priority=-1))
        self._writers = lru_cache(num_lanes)(partial(make, priority=0))

    def read(self, table: TableBlocks, span: KvSpan) -> Awaitable[memoryview]:
        return self._copy_out(table, span, lambda picked: (picked, lambda host: _bytes(host)))

    def gather(
        self, table: TableBlocks, span: KvSpan, *, is_checked: bool = True
    ) -> Awaitable[DeviceData]:
        """Copies a span to memory of its own on the device; the checksum is 0 unless checked."""

        def keep(picked: torch.Tensor) -> "_Finish[DeviceData]":
            data = picked.reshape(-1).view(torch.uint8)
            # [1], or empty
            sums = device_checksum(data).reshape(1) if is_checked else data[:0]
            return sums, lambda host: DeviceData(data, checksum=int(host.numpy().sum()))

        return self._copy_out(table, span, keep)

    @_memory_errors()
    def write(self, table: TableBlocks, span: KvSpan, data: memoryview | DeviceData) -> None:
        check_group(self._layout, span)
        lane = self._writers(table, self._block_sizes[span.group])
        index = self._index(lane, span)
        check_length(span, self._layout, data)
        parts = self._tokens[span.group]
        word = parts[0].dtype
        shape = (span.num_layers, parts[0].shape[1], span.num_tokens, span.num_slots, -1)
        with self._order.writing(lane.blocks_of(span), lane.stream):
            if isinstance(data, DeviceData):
                data.tensor.record_stream(lane.stream)
                source = data.tensor.view(word).view(shape)
            else:
                words = np.frombuffer(data, np.dtype(f"i{word.itemsize}")).reshape(shape)
                host = torch.empty(words.shape, dtype=word, pin_memory=True)
                host.numpy()[...] = words
                source = host.to(parts[0].device, non_blocking=True)
            sizes = [part.shape[-1] for part in parts]
            for part, new in zip(parts, torch.split(source, sizes, -1), strict=True):
                part[index] = new

    @_memory_errors()
    def _copy_out(
        self,
        table: TableBlocks,
        span: KvSpan,
        finish: "Callable[[torch.Tensor], _Finish[T]]",
    ) -> Awaitable[T]:
        """Queues a gather of a span, and the copy of a tensor made from it to the host.

        `finish` returns this tensor, and a function of the host's copy that returns the result.
        """
        check_group(self._layout, span)
        lane = self._readers(table, self._block_sizes[span.group])
        index = self._index(lane, span)
        with self._order.reading(lane.blocks_of(span), lane.stream) as done:
            picked = [part[index] for part in self._tokens[span.group]]
            source, result = finish(picked[0] if len(picked) == 1 else torch.cat(picked, dim=-1))
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
        return self._waiter.wait(done, lambda: result(host))

    def _index(self, lane: "_Lane", span: KvSpan) -> tuple[Any, ...]:
        """Returns a span's index in the tensor of `_tokens`."""
        layers, slots = place_of(
            self._layout,
            span,
            tokens=lane.tokens,
            slots=self._slots,
        )
        return (layers, slice(None), *lane.places_of(span), slots)


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views a group's tensor as words: a quantized one as its numbers and its scales."""
    if tensor.is_floating_point():
        return (tensor.view(torch.int32),)
    numbers, scales = split_scales(tensor, tensor.shape[-1] - SCALE_BYTES)
    return numbers.view(torch.int16), scales.view(torch.int16)[..., None]


class _Lane:
    """Holds a stream for the transfers of one sequence, and its block table on the device."""

    def __init__(
        self,
        table: TableBlocks,
        block_size: int,
        *,
        device: torch.device,
        num_blocks: int,
        priority: int,
    ) -> None:
        """Raises ValueError if a block is out of range."""
        self.tokens = table.tokens(block_size)  # positions in the sequence
        self._blocks = check_table(table, num_blocks)
        self._block_size = block_size
        self.stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
        offsets = np.arange(len(self.tokens)) % block_size
        places = np.stack([self._blocks.repeat(block_size), offsets])
        with torch.cuda.stream(self.stream):
            # Block and offset of each token, int64 [2, num_tokens].
            self._places = to_device(torch.from_numpy(places), device)

    def blocks_of(self, span: KvSpan) -> npt.NDArray[np.int64]:
        first = span.first_token - self.tokens.start
        end = -(-(first + span.num_tokens) // self._block_size)
        return self._blocks[first // self._block_size : end]

    def places_of(self, span: KvSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block and the offset of each token of a span."""
        first = span.first_token - self.tokens.start
        blocks, offsets = self._places[:, first : first + span.num_tokens].unbind(0)
        return blocks, offsets


_Finish = tuple[torch.Tensor, Callable[[torch.Tensor], T]]


def _bytes(host: torch.Tensor) -> memoryview:
    array: npt.NDArray[np.uint8] = host.reshape(-1).view(torch.uint8).numpy()
    return array.data
