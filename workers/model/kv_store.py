"""Holds one rank's KV cache: paged tensors, and their canonical form for transfers."""

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..host.memory import available_memory
from ..host.pinned import pinned_memory, unpin
from ..kv_cache.layout import KvLayout, KvSpan
from ..kv_cache.store import KvRead, paged_shapes
from .device import indices, to_device
from .kernels.c.build import library, loaded_library

ITEMS: Final = {"int8": torch.int8, "fp8": torch.uint8}
"""The dtypes of a quantized cache's tensors.

FP8 uses uint8 for the bits of E4M3, because the rows also have the bytes of a scale.
"""

Bytes = npt.NDArray[np.uint8]
# Index of a span in a group's tensor, seen as [layer, key or value, token, KV head]: layers, both,
# block and offset of each token, KV heads.
_Index = tuple[slice, slice, npt.NDArray[np.int64], npt.NDArray[np.int64], slice]


class PagedKv:
    """Implements `KvStore` with one tensor per group of equal layers.

    Its shape is [num_layers, 2, num_blocks, num_slots, block_size, head_dim], where a slot holds
    one KV head. The tensors of the groups are adjacent in one allocation. In a quantized cache the
    last dimension also has the bytes of the scale: [.., head_dim + SCALE_BYTES].

    The slot comes before the token, so that one gather of (block, slot) rows returns the [head,
    token, head_dim] that attention multiplies.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        shared: bool = False,
        tp: int = 1,
        rank: int = 0,
    ) -> None:
        """Allocates the memory; `shared` lets other processes of the host map it (CPUs only).

        Raises ValueError if the layout's heads cannot be split over `tp` ranks, there is no such
        rank, host memory is insufficient, or a quantized cache is on a GPU.
        """
        self.layout = layout
        self.tp = tp
        self.rank = rank
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.dtype: torch.dtype = getattr(torch, layout.dtype)  # of the model's activations
        self.is_quantized = layout.cache_dtype in ITEMS
        if self.is_quantized and device.type != "cpu":
            raise ValueError(
                f"kv_cache_dtype: {layout.cache_dtype} has kernels on cpu only, on cuda it must be "
                "auto"
            )
        self.shared_fd: int | None = None
        shapes = paged_shapes(
            layout, num_blocks=num_blocks, block_size=block_size, tp=tp, rank=rank
        )
        sizes = [math.prod(shape) for shape in shapes]
        memory = self._allocate(sum(sizes), shared=shared)  # [bytes of all groups]
        item = ITEMS.get(layout.cache_dtype, self.dtype)
        parts = zip(torch.split(memory, sizes), shapes, strict=True)
        # One tensor for each group.
        self.tensors = tuple(part.view(item).view(*shape[:-1], -1) for part, shape in parts)
        # Views of each layer's keys and values. They are created once, because a small step would
        # spend most of its time on creating them: in place, each [num_blocks, num_slots,
        # block_size, head_dim]; as rows of (block, slot), each [rows, block_size * head_dim]; and
        # as rows of (block, slot, token), each [rows, head_dim].
        self.layers = [
            tuple(self.tensors[group][index].unbind(0)) for group, index in layout.places
        ]
        self.gather_rows = [
            tuple(part.flatten(0, 1).flatten(1) for part in layer) for layer in self.layers
        ]
        self.scatter_rows = [tuple(part.flatten(0, 2) for part in layer) for layer in self.layers]
        if device.type == "cuda":
            slots = [shape[3] for shape in shapes]
            self._locate = partial(
                _locate, layout, num_blocks=num_blocks, block_size=block_size, slots=slots
            )
            self._tokens = [tensor.view(torch.int32).transpose(3, 4) for tensor in self.tensors]
            self._reader = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._host = HostKv(
                layout,
                memory.numpy(),
                num_blocks=num_blocks,
                block_size=block_size,
                tp=tp,
                rank=rank,
            )

    def _allocate(self, num_bytes: int, *, shared: bool) -> torch.Tensor:
        """Returns zeros, uint8 [num_bytes]."""
        if self.device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        if not shared:
            return host_memory(num_bytes, "kv_cache_gb")
        _check_available(num_bytes, "kv_cache_gb")
        # The kernel frees an unnamed file with the last process that maps it.
        self.shared_fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.shared_fd)
        try:
            os.posix_fallocate(self.shared_fd, 0, num_bytes)
        except OSError as error:
            raise ValueError(_misfit("kv_cache_gb", num_bytes, available_memory())) from error
        shared_memory: torch.Tensor = torch.frombuffer(
            mmap.mmap(self.shared_fd, num_bytes), dtype=torch.uint8
        )
        return shared_memory

    @property
    def data(self) -> torch.Tensor:
        """Returns the only tensor of a model whose layers are equal."""
        (tensor,) = self.tensors
        return tensor

    def num_slots(self, layer: int) -> int:
        return int(self.tensors[self.layout.places[layer][0]].shape[3])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, given as (source, target), in order with the steps.

        No target may be a source.
        """
        sources, targets = (indices(blocks, self.device) for blocks in zip(*pairs, strict=True))
        for tensor in self.tensors:
            tensor.index_copy_(2, targets, tensor.index_select(2, sources))

    def clear_after(self, block: int, first_offset: int) -> None:
        """Clears the tokens of a block from `first_offset` on, in all layers and KV heads."""
        for tensor in self.tensors:
            tensor[:, :, block, :, first_offset:] = 0

    def attach(
        self, memory: mmap.mmap, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> KvRead:
        raw = np.frombuffer(memory, np.uint8)
        return HostKv(
            self.layout, raw, num_blocks=num_blocks, block_size=block_size, tp=tp, rank=rank
        ).read

    def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        if self.device.type != "cuda":
            return self._host.read(blocks, span)
        group, index = self._locate(blocks, span)
        # On a separate stream, so that it waits for no step: the reader knows that the tokens are
        # computed. It waits only for earlier writes, whose end is not reported.
        with torch.cuda.stream(self._reader):
            self._reader.wait_event(self._written)
            picked = self._tokens[group][self._index_on_device(index)]
            host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True).copy_(
                picked, non_blocking=True
            )
        self._reader.synchronize()
        return _bytes(host.numpy())

    def write(self, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        """Implements `KvStore.write`. Raises ValueError if span or length is out of range."""
        if self.device.type != "cuda":
            self._host.write(blocks, span, data)
            return
        group, index = self._locate(blocks, span)
        _check_length(span, self.layout, data)
        # In order with the steps: the last owner's step may still run, the new owner's come later.
        shape = (span.num_layers, 2, span.num_tokens, span.num_slots, -1)
        source = np.frombuffer(data, np.int32).reshape(shape)
        host = torch.empty(source.shape, dtype=torch.int32, pin_memory=True)
        host.numpy()[...] = source
        self._tokens[group][self._index_on_device(index)] = host.to(self.device, non_blocking=True)
        self.mark_written()

    def mark_written(self) -> None:
        """Makes later reads wait for all writes so far; needed only on GPUs."""
        if self.device.type == "cuda":
            self._written.record()

    def _index_on_device(self, index: _Index) -> tuple[Any, ...]:
        layers, both, block, offset, slots = index
        block_device, offset_device = (
            to_device(torch.from_numpy(place), self.device) for place in (block, offset)
        )
        return layers, both, block_device, offset_device, slots


class HostBlocks:
    """Keeps copies of whole blocks of a `PagedKv` in host memory.

    The memory is pinned if the KV cache is on a GPU. A host block is contiguous, [bytes of a
    block]: of each group in turn [num_layers, 2, num_slots, block_size, head_bytes].
    """

    def __init__(self, kv: PagedKv, num_blocks: int) -> None:
        """Raises ValueError if host memory is insufficient or cannot be pinned."""
        self._kv = kv
        shapes = paged_shapes(
            kv.layout, num_blocks=1, block_size=kv.block_size, tp=kv.tp, rank=kv.rank
        )
        sizes = [math.prod(shape) for shape in shapes]
        memory = self._allocate(num_blocks * sum(sizes))
        # Of each group, [num_blocks, bytes].
        parts = torch.split(memory.view(num_blocks, -1), sizes, dim=1)
        # Of each group: in the KV cache [num_layers, 2, num_blocks, ...], in host memory
        # [num_blocks, num_layers, 2, ...].
        self._groups = [
            (tensor.view(torch.uint8), part.view(num_blocks, *shape[:2], *shape[3:]))
            for tensor, part, shape in zip(kv.tensors, parts, shapes, strict=True)
        ]

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns zeros, uint8 [num_bytes], that are freed with this object."""
        if self._kv.device.type != "cuda":
            return host_memory(num_bytes, "kv_host_gb")
        _check_available(num_bytes, "kv_host_gb")
        try:
            memory = pinned_memory(num_bytes)
        except MemoryError as error:
            raise ValueError(f"kv_host_gb: {error}; lower it") from error
        # The end of the process unpins by itself, when CUDA may already be gone.
        weakref.finalize(self, unpin, memory, self._kv.device).atexit = False
        return memory

    def save(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies blocks to host memory, given as (block, host block), in order with the steps."""
        for block, host_block in pairs:
            for tensor, host in self._groups:
                host[host_block].copy_(tensor[:, :, block], non_blocking=True)

    def load(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies blocks from host memory, given as (host block, block), in order with the steps."""
        for host_block, block in pairs:
            for tensor, host in self._groups:
                tensor[:, :, block].copy_(host[host_block], non_blocking=True)
        self._kv.mark_written()


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
        shapes = paged_shapes(
            layout, num_blocks=num_blocks, block_size=block_size, tp=tp, rank=rank
        )
        sizes = [math.prod(shape) for shape in shapes]
        if min(num_blocks, block_size) < 1 or sum(sizes) > len(raw):
            raise ValueError(
                f"{len(raw)} bytes are too few for {num_blocks} blocks of {block_size} tokens"
            )
        ends = np.cumsum(sizes).tolist()
        # Of each group, [num_layers, 2, num_blocks, num_slots, block_size, bytes of a head].
        self._groups = [
            raw[end - size : end].reshape(shape)
            for end, size, shape in zip(ends, sizes, shapes, strict=True)
        ]
        self._layout = layout
        slots = [shape[3] for shape in shapes]
        self._locate = partial(
            _locate, layout, num_blocks=num_blocks, block_size=block_size, slots=slots
        )
        self._native = library() is not None

    def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        group, index = self._locate(blocks, span)
        raw = self._groups[group]
        if not self._native:
            return _bytes(raw.transpose(0, 1, 2, 4, 3, 5)[index])
        dense = np.empty(
            (span.num_layers, 2, span.num_tokens, span.num_slots, raw.shape[5]), np.uint8
        )
        _copy("read_heads", raw, index, dense)
        return _bytes(dense)

    def write(self, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        group, index = self._locate(blocks, span)
        _check_length(span, self._layout, data)
        raw = self._groups[group]
        dense = np.frombuffer(data, np.uint8)
        dense = dense.reshape(span.num_layers, 2, span.num_tokens, span.num_slots, raw.shape[5])
        if self._native:
            _copy("write_heads", raw, index, dense)
        else:
            raw.transpose(0, 1, 2, 4, 3, 5)[index] = dense


def host_memory(num_bytes: int, setting: str) -> torch.Tensor:
    """Returns zeros in host memory, uint8 [num_bytes].

    Raises ValueError, which names the setting, if they do not fit. All pages are allocated now:
    insufficient memory must fail here, not under load by the kernel's OOM killer.
    """
    _check_available(num_bytes, setting)
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _check_available(num_bytes: int, setting: str) -> None:
    if num_bytes > (available := available_memory()):
        raise ValueError(_misfit(setting, num_bytes, available))


def _misfit(setting: str, num_bytes: int, available: int) -> str:
    return (
        f"{setting}: {num_bytes / 2**30:.3g} GiB do not fit into the {available / 2**30:.3g} GiB "
        "that are available"
    )


def _copy(name: str, raw: Bytes, index: _Index, dense: Bytes) -> None:
    """Copies between a group's memory and `dense`: [layers, 2, tokens, slots, bytes of a head]."""
    layers, _, block, offset, slots = index
    layer_bytes, half_bytes, block_bytes, slot_bytes, head_bytes = raw.strides[:5]
    places = block * block_bytes + offset * head_bytes
    numbers = (
        raw.ctypes.data + layers.start * layer_bytes + slots.start * slot_bytes,
        dense.ctypes.data,
        places.ctypes.data,
        2 * dense.shape[0],
        half_bytes,
        dense.shape[2],
        dense.shape[3],
        slot_bytes,
        head_bytes,
    )
    getattr(loaded_library(), name)(*map(ctypes.c_int64, numbers))


def _locate(
    layout: KvLayout,
    blocks: Sequence[int],
    span: KvSpan,
    *,
    num_blocks: int,
    block_size: int,
    slots: Sequence[int],
) -> tuple[int, _Index]:
    """Returns a span's group and its index in the tensor [layer, 2, block, token, slot].

    `slots` has the number of slots of each group. Raises ValueError if the span or a block is out
    of range.
    """
    span.check(
        layout,
        num_tokens=len(blocks) * block_size,
        num_slots=lambda layer: slots[layout.places[layer][0]],
    )
    table = np.asarray(blocks, np.int64)
    if table.min() < 0 or table.max() >= num_blocks:
        raise ValueError(f"a block is not within the range from 0 to {num_blocks - 1}")
    positions = np.arange(span.first_token, span.first_token + span.num_tokens)
    group, first = layout.places[span.first_layer]
    layers = slice(first, first + span.num_layers)
    both = slice(None)
    slot_range = slice(span.first_slot, span.first_slot + span.num_slots)
    return group, (layers, both, table[positions // block_size], positions % block_size, slot_range)


def _check_length(span: KvSpan, layout: KvLayout, data: memoryview) -> None:
    if data.nbytes != span.size(layout):
        raise ValueError(f"KV data has {data.nbytes} bytes; must have {span.size(layout)}")


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
