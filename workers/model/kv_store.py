"""The KV cache memory of one rank: a paged tensor, and its canonical form for the transfer."""

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..kv_cache.layout import KvLayout, KvSpan
from ..kv_cache.sharding import kv_heads
from ..kv_cache.store import SAMPLE_BYTES, TAIL_BYTES, SharedMemory
from .config import ModelConfig
from .device import DTYPES, indices, to_device
from .footprint import kv_bytes_per_token
from .kernels.build import kernel, library


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: str, tp: int = 1) -> int:
    """Bytes of KV cache memory that one block of `block_size` tokens takes over all layers on each of `tp` ranks.

    Raises ValueError if the model's heads cannot be split so."""
    return block_size * kv_bytes_per_token(config, tp, dtype)


def kv_layout(config: ModelConfig, dtype: str, fingerprint: str) -> KvLayout:
    """`config` is of the whole model."""
    return KvLayout(
        num_layers=len(config.layers),
        num_heads=config.layers[0].num_heads,
        num_kv_heads=config.layers[0].num_kv_heads,
        head_dim=config.layers[0].head_dim,
        dtype=dtype,
        model=fingerprint,
    )


class PagedKv:
    """Implements `KvStore`. Blocks lie as [num_layers, 2, num_blocks, num_slots, block_size, head_dim].

    KV slot before token, so that one gather of (block, slot) rows gives attention the [head, token, head_dim] it
    multiplies with.
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
        """`shared` lets other processes of the host map the memory; ignored on GPUs. Raises ValueError if the layout's
        heads cannot be split over `tp` ranks or there is no such rank."""
        self.layout = layout
        self.tp = tp
        self.rank = rank
        self.num_slots = len(kv_heads(layout.num_heads, layout.num_kv_heads, tp, rank))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shared: SharedMemory | None = None
        shape, dtype = _shape(layout, num_blocks, block_size, self.num_slots), DTYPES[layout.dtype]
        if shared and device.type == "cpu" and hasattr(os, "memfd_create"):
            memory = self._share(math.prod(shape) * dtype.itemsize)
            self.data = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        # A view of each layer's keys and values; made once, since making views is what a small step spends its time on.
        self._layers = [tuple(layer.unbind(0)) for layer in self.data]
        self._gather = [tuple(part.flatten(0, 1).flatten(1) for part in layer) for layer in self._layers]
        self._scatter = [tuple(part.flatten(0, 2) for part in layer) for layer in self._layers]
        if self.data.is_cuda:
            self._tokens = self.data.view(torch.int32).transpose(3, 4)
            self._reader = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._heads = _Heads(self.data.view(torch.uint8).numpy())
        self._address = partial(_address, shape)

    def _share(self, num_bytes: int) -> mmap.mmap:
        """Zeros in a file without a name, which goes away with the last process that maps it."""
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes + TAIL_BYTES)
        memory = mmap.mmap(fd, num_bytes + TAIL_BYTES)
        tail = memoryview(memory)[num_bytes:]
        self.shared = SharedMemory(
            fd=fd,
            sample=tail[:SAMPLE_BYTES],
            ledger=tail[SAMPLE_BYTES:],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
        )
        weakref.finalize(self, os.close, fd)
        return memory

    def attach(self, memory: mmap.mmap, *, num_blocks: int, block_size: int, num_slots: int) -> "PeerKv":
        """See `KvStore.attach`."""
        return PeerKv(self.layout, memory, num_blocks=num_blocks, block_size=block_size, num_slots=num_slots)

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.data.dtype

    def clear_after(self, block: int, first_offset: int) -> None:
        """Zeroes the tokens of a block from `first_offset` on, in all layers."""
        self.data[:, :, block, :, first_offset:] = 0

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer where they lie: each [num_blocks, num_slots, block_size, head_dim]."""
        keys, values = self._layers[layer]
        return keys, values

    def gather_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as rows of (block, slot): each [num_blocks * num_slots, tokens * head_dim]."""
        keys, values = self._gather[layer]
        return keys, values

    def scatter_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as rows of (block, slot, token): each [rows, head_dim]."""
        keys, values = self._scatter[layer]
        return keys, values

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks whole, from and to, in order with the steps. No target may be a source."""
        sources, targets = (indices(blocks, self.data.device) for blocks in zip(*pairs, strict=True))
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))

    def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        """See `KvStore.read`."""
        index = self._address(blocks, span)
        return _bytes(self._read_gpu(index) if self.data.is_cuda else self._heads.read(index))

    def write(self, blocks: Sequence[int], span: KvSpan, data: memoryview) -> None:
        """See `KvStore.write`. Raises ValueError if the span or the length is out of range."""
        index = self._address(blocks, span)
        expected = span.size(self.layout)
        if data.nbytes != expected:
            raise ValueError(f"KV data has {data.nbytes} bytes, {expected} are expected")
        shape = (span.num_layers, 2, span.num_tokens, span.num_slots, -1)
        if self.data.is_cuda:
            self._write_gpu(index, np.frombuffer(data, np.int32).reshape(shape))
        else:
            self._heads.write(index, np.frombuffer(data, np.uint8).reshape(shape))

    def _read_gpu(self, index: tuple[Any, ...]) -> "np.ndarray[Any, Any]":
        """On a stream of its own, so that it waits for no step: whoever reads has heard that the tokens are there. Only
        writes, of which nobody hears when they are done, come first."""
        with torch.cuda.stream(self._reader):
            self._reader.wait_event(self._written)
            picked = self._tokens[self._there(index)]
            host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True).copy_(picked, non_blocking=True)
        self._reader.synchronize()
        return host.numpy()

    def _write_gpu(self, index: tuple[Any, ...], words: "np.ndarray[Any, Any]") -> None:
        """In order with the steps: the last owner's may still run, the new owner's come behind."""
        host = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
        host.numpy()[...] = words
        self._tokens[self._there(index)] = host.to(self.data.device, non_blocking=True)
        self._written.record()

    def _there(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        layers, both, block, offset, slots = index
        block, offset = (to_device(torch.from_numpy(place), self.data.device) for place in (block, offset))
        return layers, both, block, offset, slots


class PeerKv:
    """Implements `KvReader` over memory that another process's `PagedKv` shares."""

    def __init__(
        self, layout: KvLayout, memory: mmap.mmap, *, num_blocks: int, block_size: int, num_slots: int
    ) -> None:
        shape = _shape(layout, num_blocks, block_size, num_slots)
        size = layout.head_dim * DTYPES[layout.dtype].itemsize
        if min(shape) < 1 or math.prod(shape[:-1]) * size > len(memory) - TAIL_BYTES:
            raise ValueError(f"{len(memory)} bytes do not hold {num_blocks} blocks of {block_size} tokens")
        self._address = partial(_address, shape)
        raw = np.frombuffer(memory, np.uint8, math.prod(shape[:-1]) * size)
        self._heads = _Heads(raw.reshape(*shape[:-1], size))

    def read(self, blocks: Sequence[int], span: KvSpan) -> memoryview:
        """See `KvReader.read`."""
        return _bytes(self._heads.read(self._address(blocks, span)))


class _Heads:
    """KV cache in host memory, as vectors of bytes, one for each head. Copies in the calling thread, where torch would
    wake a second team of OpenMP threads against those of the running step (measured: down to 0.04 GB/s)."""

    def __init__(self, raw: "np.ndarray[Any, Any]") -> None:
        """`raw` is [num_layers, 2, num_blocks, num_slots, block_size, bytes of a head] of uint8."""
        self._raw = raw
        self._half_bytes, self._block_bytes, self._slot_bytes, self._head_bytes = raw.strides[1:5]
        self._by_token = raw.transpose(0, 1, 2, 4, 3, 5)
        self._native = library() is not None

    def read(self, index: tuple[Any, ...]) -> "np.ndarray[Any, Any]":
        """[layers, 2, tokens, slots, bytes of a head] at what `_address` gives."""
        if not self._native:
            return self._by_token[index]  # type: ignore[no-any-return]
        layers, _, block, _, slots = index
        shape = (layers.stop - layers.start, 2, len(block), slots.stop - slots.start, self._head_bytes)
        dense = np.empty(shape, np.uint8)
        self._move("read_heads", index, dense)
        return dense

    def write(self, index: tuple[Any, ...], dense: "np.ndarray[Any, Any]") -> None:
        """The inverse of `read`; `dense` is contiguous."""
        if self._native:
            self._move("write_heads", index, dense)
        else:
            self._by_token[index] = dense

    def _move(self, name: str, index: tuple[Any, ...], dense: "np.ndarray[Any, Any]") -> None:
        layers, _, block, offset, slots = index
        places = block * self._block_bytes + offset * self._head_bytes
        kernel(name)(
            self._raw.ctypes.data + layers.start * self._raw.strides[0] + slots.start * self._slot_bytes,
            dense.ctypes.data,
            places.ctypes.data,
            2 * dense.shape[0],
            self._half_bytes,
            dense.shape[2],
            dense.shape[3],
            self._slot_bytes,
            self._head_bytes,
        )


def _shape(layout: KvLayout, num_blocks: int, block_size: int, num_slots: int) -> tuple[int, ...]:
    return layout.num_layers, 2, num_blocks, num_slots, block_size, layout.head_dim


def _address(shape: tuple[int, ...], blocks: Sequence[int], span: KvSpan) -> tuple[Any, ...]:
    """Addresses [layer, 2, token, slot] of a by-token view of memory of this `_shape`. Raises ValueError if there is no
    such place."""
    num_layers, _, num_blocks, num_slots, block_size, _ = shape
    span.check(num_layers=num_layers, num_tokens=len(blocks) * block_size, num_slots=num_slots)
    table = np.asarray(blocks, np.int64)
    if table.min() < 0 or table.max() >= num_blocks:
        raise ValueError(f"a block is not within {num_blocks}")
    positions = np.arange(span.first_token, span.first_token + span.num_tokens)
    block, offset = table[positions // block_size], positions % block_size
    layers = slice(span.first_layer, span.first_layer + span.num_layers)
    return layers, slice(None), block, offset, slice(span.first_slot, span.first_slot + span.num_slots)


def _bytes(array: "np.ndarray[Any, Any]") -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
