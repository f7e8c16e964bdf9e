"""Holds one rank's KV cache: paged tensors, and their canonical form for transfers."""

import mmap
import os
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import numpy as np
import torch

from ...host.cuda_ipc import export_memory, open_memory
from ...host.memory import available_memory
from ...host.pinned import pinned_memory, unpin
from ...host.streams import BlockOrder, DeviceData
from ...kv_cache.layout import KvLayout, KvSpan, check_quantized
from ...kv_cache.memory import KvMemory, plan_memory
from ...kv_cache.store import Completed, KvRead, slots_of
from ...kv_cache.tables import TableBlocks, table_of
from ..device import FP8_GPUS, can_compute_fp8, indices
from .allocate import check_available, host_memory, misfit
from .gpu import GpuKv
from .host import HostKv
from .states import StateStore

ITEMS: Final = {"int8": torch.int8, "fp8": torch.uint8, "int4": torch.uint8}
"""The dtypes of a quantized cache's tensors.

FP8 uses uint8 for the bits of E4M3, because the rows also have the bytes of a scale. So does int4,
which has two numbers in a byte.
"""


class PagedKv:
    """Implements `KvStore` with one tensor per group of equal layers.

    The tensors are views of one allocation of blocks, see `KvMemory`. Their shape is [num_layers,
    planes, num_blocks, num_slots, block_size, head_dim], where a slot holds one KV head. In a
    quantized cache the last dimension also has the bytes of the scales: [.., head_bytes]. On GPUs a
    slot of that size holds all numbers first and then all scales; see `split_scales`.

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
        num_states: int = 0,
    ) -> None:
        """Allocates the memory; `shared` lets other processes of the host map it (CPUs only).

        `num_states` is the number of slots in host memory, if the model keeps states.

        Raises ValueError if the layout's heads cannot be split over `tp` ranks, there is no such
        rank, host memory is insufficient, or the GPU does not support the cache's dtype.
        """
        self.layout = layout
        self.tp = tp
        self.rank = rank
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.dtype: torch.dtype = getattr(torch, layout.dtype)  # of the model's activations
        self.is_quantized = layout.cache_dtype in ITEMS
        check_quantized(layout.cache_dtype, device.type)
        if layout.cache_dtype == "fp8" and not can_compute_fp8(device):
            raise ValueError(f"kv_cache_dtype: fp8 needs {FP8_GPUS}; use int8 or auto")
        self.shared_fd: int | None = None
        plan = plan_memory(layout, num_blocks=num_blocks, block_size=block_size, tp=tp, rank=rank)
        self.tables = plan.tables
        self.block_bytes = plan.block_bytes
        self.memory = self._allocate(plan.num_bytes, shared=shared)  # [num_bytes]
        # One tensor for each group.
        self.tensors = self._split(self.memory, plan)
        # The same memory by blocks, uint8 [planes, num_blocks, bytes] of each of `KvMemory.parts`.
        sizes = [planes * num_blocks * size for planes, size in plan.parts]
        self.parts = tuple(
            part.view(planes, num_blocks, size)
            for part, (planes, size) in zip(
                torch.split(self.memory, sizes), plan.parts, strict=True
            )
        )
        # Views of each layer's keys and values, each [num_blocks, num_slots, block_size, head_dim];
        # of a latent layer the keys alone. They are created once, because a small step would spend
        # most of its time on creating them.
        self.layers = [
            () if place is None else tuple(self.tensors[place[0]][place[1]].unbind(0))
            for place in layout.places
        ]
        # The number of the block table of each layer.
        self.table_of_layer = [
            0 if place is None else table_of(self.tables, layout.groups[place[0]])
            for place in layout.places
        ]
        # None: the model keeps no state.
        self.states = (
            StateStore(layout, num_slots=num_states, tp=tp, rank=rank)
            if layout.state_groups and num_states
            else None
        )
        # Orders steps and transfers; None on CPUs, where `Executor.launch` ends with the step.
        self.order: BlockOrder | None = None
        if device.type == "cuda":
            self._exported = b""
            self.order = BlockOrder(num_blocks)
            self._gpu = GpuKv(layout, self.tensors, self.order)
        else:
            self._host = HostKv(
                layout,
                self.memory.numpy(),
                num_blocks=num_blocks,
                block_size=block_size,
                tp=tp,
                rank=rank,
            )

    def _split(self, memory: torch.Tensor, plan: KvMemory) -> tuple[torch.Tensor, ...]:
        """Returns the tensor of each group in a rank's memory, uint8 [num_bytes].

        Raises ValueError if the memory is too small.
        """
        plan.check_fits(len(memory))
        item = ITEMS.get(self.layout.cache_dtype, self.dtype)
        items = memory[: plan.num_bytes].view(item)
        return tuple(
            items.as_strided(
                (*group.shape[:-1], group.shape[-1] // item.itemsize),
                (*(stride // item.itemsize for stride in group.strides[:-1]), 1),
                group.offset // item.itemsize,
            )
            for group in plan.groups
        )

    def _allocate(self, num_bytes: int, *, shared: bool) -> torch.Tensor:
        """Returns zeros, uint8 [num_bytes]."""
        if self.device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        if not shared:
            return host_memory(num_bytes, "kv_cache_gb")
        check_available(num_bytes, "kv_cache_gb")
        # A model without attention has blocks without bytes, but no empty file can be mapped.
        size = max(num_bytes, 1)
        # The kernel frees an unnamed file with the last process that maps it.
        self.shared_fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.shared_fd)
        try:
            os.posix_fallocate(self.shared_fd, 0, size)
        except OSError as error:
            raise ValueError(misfit("kv_cache_gb", num_bytes, available_memory())) from error
        shared_memory: torch.Tensor = torch.frombuffer(
            mmap.mmap(self.shared_fd, size), dtype=torch.uint8
        )
        return shared_memory[:num_bytes]

    @property
    def data(self) -> torch.Tensor:
        """Returns the only tensor of a model whose layers are equal."""
        (tensor,) = self.tensors
        return tensor

    def num_slots(self, group: int) -> int:
        if group < len(self.tensors):
            return int(self.tensors[group].shape[3])
        return slots_of(self.layout, self.tp, self.rank)[group]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, given as (source, target), in order with the steps.

        No target may be a source.
        """
        sources, targets = (indices(blocks, self.device) for blocks in zip(*pairs, strict=True))
        for part in self.parts:
            part.index_copy_(1, targets, part.index_select(1, sources))

    def attach(
        self, memory: mmap.mmap, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> KvRead:
        raw = np.frombuffer(memory, np.uint8)
        return HostKv(
            self.layout, raw, num_blocks=num_blocks, block_size=block_size, tp=tp, rank=rank
        ).read

    def read(self, table: TableBlocks, span: KvSpan) -> Awaitable[memoryview]:
        if self.states is not None and span.group >= len(self.tensors):
            return Completed(self.states.read(table, span))
        if self.order is None:
            return Completed(self._host.read(table, span))
        return self._gpu.read(table, span)

    def gather(self, table: TableBlocks, span: KvSpan) -> Awaitable[DeviceData]:
        """Does the same as `read` on a GPU, but leaves the copy there."""
        return self._gpu.gather(table, span)

    def export(self) -> bytes:
        """Returns a description of the memory of a GPU for `attach_device`. Raises OSError.

        All connections share it: each export keeps an event of CUDA for good, and after 1,000 of
        them torch waits for the running step in each export. Not measured.
        """
        if not self._exported:
            self._exported = export_memory(self.memory)
        return self._exported

    def attach_device(
        self, description: bytes, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> Callable[[TableBlocks, KvSpan], Awaitable[DeviceData]]:
        """Returns a function that gathers from another process's memory of a GPU.

        Its copies have no checksum. The owner of the memory does not know of them, so the reader
        checks a lease after the last one. Arguments as of `attach`. Raises OSError and ValueError
        as `open_memory`, and ValueError as `attach`.
        """
        memory = open_memory(description, self.device)
        plan = plan_memory(
            self.layout, num_blocks=num_blocks, block_size=block_size, tp=tp, rank=rank
        )
        tensors = self._split(memory, plan)
        return partial(GpuKv(self.layout, tensors, BlockOrder(num_blocks)).gather, is_checked=False)

    def write(self, table: TableBlocks, span: KvSpan, data: memoryview) -> None:
        """Implements `KvStore.write`. Raises ValueError if span or length is out of range."""
        if self.states is not None and span.group >= len(self.tensors):
            self.states.write(table, span, data)
        elif self.order is None:
            self._host.write(table, span, data)
        else:
            self._gpu.write(table, span, data)

    def scatter(self, table: TableBlocks, span: KvSpan, data: DeviceData) -> None:
        """Does the same as `write` on a GPU, from a copy that is there."""
        self._gpu.write(table, span, data)


class HostBlocks:
    """Keeps copies of whole blocks of a `PagedKv` in host memory.

    The memory is pinned if the KV cache is on a GPU. A host block is contiguous.
    """

    def __init__(self, kv: PagedKv, num_blocks: int) -> None:
        """Raises ValueError if host memory is insufficient or cannot be pinned."""
        self._kv = kv
        memory = self._allocate(num_blocks * kv.block_bytes).view(num_blocks, kv.block_bytes)
        sizes = [part.shape[0] * part.shape[2] for part in kv.parts]
        # Of each part of the KV cache [num_blocks, planes, bytes], the same in host memory.
        self._parts = [
            (part.transpose(0, 1), own.view(num_blocks, part.shape[0], part.shape[2]))
            for part, own in zip(kv.parts, torch.split(memory, sizes, dim=1), strict=True)
        ]

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns zeros, uint8 [num_bytes], that are freed with this object."""
        if self._kv.device.type != "cuda":
            return host_memory(num_bytes, "kv_host_gb")
        check_available(num_bytes, "kv_host_gb")
        try:
            memory = pinned_memory(num_bytes)
        except MemoryError as error:
            raise ValueError(f"kv_host_gb: {error}; lower it") from error
        # The end of the process unpins by itself, when CUDA may already be gone.
        weakref.finalize(self, unpin, memory, self._kv.device).atexit = False
        return memory

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to host memory, given as (block, host block), in order with the steps."""
        order = self._kv.order
        blocks = np.array([block for block, _ in pairs], np.int64)
        with order.reading(blocks) if order else nullcontext():
            for part, own in self._parts:
                self._copy(part, own, pairs)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks from host memory, given as (host block, block), in order with the steps."""
        order = self._kv.order
        blocks = np.array([block for _, block in pairs], np.int64)
        with order.writing(blocks) if order else nullcontext():
            for part, own in self._parts:
                self._copy(own, part, pairs)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Copies blocks of a part, given as (block of the source, block of the target).

        Both are uint8 [num_blocks, planes, bytes].
        """
        if self._kv.device.type == "cpu" and torch.get_num_threads() == 1:
            # numpy takes 0.6 to 1.0 times as long as torch, which copies a block with all threads.
            # One gather of all blocks and one scatter took 2 to 10 times as long as torch's loop.
            rows, places = source.numpy(), target.numpy()
            for block, place in pairs:
                places[place] = rows[block]
            return
        for block, place in pairs:
            target[place].copy_(source[block], non_blocking=True)
