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

from ..engine.plan import LEDGER_BYTES, KvLayout, SharedMemory
from .config import ModelConfig
from .device import to_device
from .weights import DTYPES


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of KV cache memory that one block of `block_size` tokens takes over all layers."""
    return config.num_layers * block_size * kv_layout(config, dtype, "").bytes_per_token_layer


def kv_layout(config: ModelConfig, dtype: str, fingerprint: str) -> KvLayout:
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        model=fingerprint,
    )


class PagedKv:
    """Implements `KvStore`. Blocks lie as [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim].

    Head before token, so that one gather of (block, head) rows gives attention the [head, token, head_dim] it
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
    ) -> None:
        """`shared` lets other processes of the host map the memory; ignored on GPUs."""
        self._layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shared: SharedMemory | None = None
        shape, dtype = _shape(layout, num_blocks, block_size), DTYPES[layout.dtype]
        if shared and device.type == "cpu" and hasattr(os, "memfd_create"):
            memory = self._share(math.prod(shape) * dtype.itemsize)
            self.data = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        # A view of each layer's keys and values; made once, since making views is what a small step spends its time on.
        self._layers = [tuple(layer.unbind(0)) for layer in self.data]
        self._gather = [tuple(part.flatten(0, 1).flatten(1) for part in layer) for layer in self._layers]
        self._scatter = [tuple(part.flatten(0, 2) for part in layer) for layer in self._layers]
        self._tokens = _by_token(self.data)
        self._address = partial(_address, layout, num_blocks, block_size)
        if self.data.is_cuda:
            self._reader = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _share(self, num_bytes: int) -> mmap.mmap:
        """Zeros in a file without a name, which goes away with the last process that maps it."""
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes + LEDGER_BYTES)
        memory = mmap.mmap(fd, num_bytes + LEDGER_BYTES)
        self.shared = SharedMemory(
            fd=fd,
            ledger=memoryview(memory)[num_bytes:],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
        )
        weakref.finalize(self, os.close, fd)
        return memory

    @property
    def layout(self) -> KvLayout:
        return self._layout

    def attach(self, memory: mmap.mmap, *, num_blocks: int, block_size: int) -> "PeerKv":
        """See `KvStore.attach`."""
        return PeerKv(self._layout, memory, num_blocks=num_blocks, block_size=block_size)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer where they lie: each [num_blocks, num_kv_heads, block_size, head_dim]."""
        keys, values = self._layers[layer]
        return keys, values

    def gather_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as rows of (block, head): each [num_blocks * num_kv_heads, tokens * head_dim]."""
        keys, values = self._gather[layer]
        return keys, values

    def scatter_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as rows of (block, head, token): each [rows, head_dim]."""
        keys, values = self._scatter[layer]
        return keys, values

    def read(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, first_layer: int, num_layers: int
    ) -> memoryview:
        """See `KvStore.read`. Raises ValueError if the tokens or layers are out of range."""
        index = self._address(blocks, first_token, num_tokens, first_layer, num_layers)
        return _bytes(self._read_gpu(index) if self.data.is_cuda else self._tokens[index])

    def write(
        self,
        blocks: Sequence[int],
        first_token: int,
        num_tokens: int,
        first_layer: int,
        num_layers: int,
        data: memoryview,
    ) -> None:
        """See `KvStore.write`. Raises ValueError if the tokens, the layers or the length are out of range."""
        index = self._address(blocks, first_token, num_tokens, first_layer, num_layers)
        expected = num_layers * num_tokens * self._layout.bytes_per_token_layer
        if data.nbytes != expected:
            raise ValueError(f"KV data has {data.nbytes} bytes, {expected} are expected")
        shape = (num_layers, 2, num_tokens, self._layout.num_kv_heads)
        if self.data.is_cuda:
            self._write_gpu(index, np.frombuffer(data, np.int32).reshape(*shape, -1))
        else:
            self._tokens[index] = np.frombuffer(data, self._tokens.dtype).reshape(shape)

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
        layers, both, *places = index
        return layers, both, *(to_device(torch.from_numpy(place), self.data.device) for place in places)


class PeerKv:
    """Implements `KvReader` over memory that another process's `PagedKv` shares."""

    def __init__(self, layout: KvLayout, memory: mmap.mmap, *, num_blocks: int, block_size: int) -> None:
        shape, size = _shape(layout, num_blocks, block_size), layout.head_dim * DTYPES[layout.dtype].itemsize
        if min(num_blocks, block_size) < 1 or math.prod(shape[:-1]) * size > len(memory) - LEDGER_BYTES:
            raise ValueError(f"{len(memory)} bytes do not hold {num_blocks} blocks of {block_size} tokens")
        self._address = partial(_address, layout, num_blocks, block_size)
        heads = np.frombuffer(memory, np.dtype((np.void, size)), math.prod(shape[:-1])).reshape(shape[:-1])
        self._tokens = heads.transpose(0, 1, 2, 4, 3)

    def read(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, first_layer: int, num_layers: int
    ) -> memoryview:
        """See `KvReader.read`."""
        return _bytes(self._tokens[self._address(blocks, first_token, num_tokens, first_layer, num_layers)])


def _shape(layout: KvLayout, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return layout.num_layers, 2, num_blocks, layout.num_kv_heads, block_size, layout.head_dim


def _address(
    layout: KvLayout,
    num_blocks: int,
    block_size: int,
    blocks: Sequence[int],
    first_token: int,
    num_tokens: int,
    first_layer: int,
    num_layers: int,
) -> tuple[Any, ...]:
    """Addresses [layer, 2, token, head] of a by-token view. Raises ValueError if there is no such place."""
    if min(first_token, num_tokens - 1) < 0 or first_token + num_tokens > len(blocks) * block_size:
        raise ValueError(f"tokens {first_token} + {num_tokens} are not within {len(blocks)} blocks")
    if min(first_layer, num_layers - 1) < 0 or first_layer + num_layers > layout.num_layers:
        raise ValueError(f"layers {first_layer} + {num_layers} are not within {layout.num_layers}")
    table = np.asarray(blocks, np.int64)
    if table.min() < 0 or table.max() >= num_blocks:
        raise ValueError(f"a block is not within {num_blocks}")
    positions = np.arange(first_token, first_token + num_tokens)
    block, offset = table[positions // block_size], positions % block_size
    return slice(first_layer, first_layer + num_layers), slice(None), block, offset


def _bytes(array: "np.ndarray[Any, Any]") -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _by_token(data: torch.Tensor) -> Any:
    """A view [num_layers, 2, num_blocks, block_size, num_kv_heads] whose item is one head's vector of bytes.

    On CPUs a numpy view: it copies in the calling thread, at 3 to 20 GB/s, where torch would wake a second team of
    OpenMP threads against those of the running step (measured: down to 0.04 GB/s).
    """
    if data.device.type != "cpu":
        return data.view(torch.int32).transpose(3, 4)
    raw = data.view(torch.uint8).numpy()
    return raw.view(np.dtype((np.void, raw.shape[-1])))[..., 0].transpose(0, 1, 2, 4, 3)
