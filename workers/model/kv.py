"""The KV cache memory of one rank: a paged tensor, and its canonical form for the transfer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..engine.plan import KvLayout
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

    def __init__(self, layout: KvLayout, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.data = torch.zeros(
            (layout.num_layers, 2, num_blocks, layout.num_kv_heads, block_size, layout.head_dim),
            dtype=DTYPES[layout.dtype],
            device=device,
        )
        # A view of each layer's keys and values; made once, since making views is what a small step spends its time on.
        self._layers = [tuple(layer.unbind(0)) for layer in self.data]
        self._gather = [tuple(part.flatten(0, 1).flatten(1) for part in layer) for layer in self._layers]
        self._scatter = [tuple(part.flatten(0, 2) for part in layer) for layer in self._layers]
        self._token_bytes = layout.bytes_per_token_layer
        self._tokens = _by_token(self.data)
        if self.data.is_cuda:
            self._reader = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def layout(self) -> KvLayout:
        return self._layout

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
        index = self._index(blocks, first_token, num_tokens, first_layer, num_layers)
        host = self._read_gpu(index) if self.data.is_cuda else np.ascontiguousarray(self._tokens[index])
        return memoryview(host.reshape(-1).view(np.uint8).data)

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
        index = self._index(blocks, first_token, num_tokens, first_layer, num_layers)
        expected = num_layers * num_tokens * self._token_bytes
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

    def _index(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, first_layer: int, num_layers: int
    ) -> tuple[Any, ...]:
        """Addresses [layer, 2, token, head] of the by-token view."""
        if min(first_token, num_tokens - 1) < 0 or first_token + num_tokens > len(blocks) * self.block_size:
            raise ValueError(f"tokens {first_token} + {num_tokens} are not within {len(blocks)} blocks")
        if min(first_layer, num_layers - 1) < 0 or first_layer + num_layers > self._layout.num_layers:
            raise ValueError(f"layers {first_layer} + {num_layers} are not within {self._layout.num_layers}")
        table = np.asarray(blocks, np.int64)
        if table.min() < 0 or table.max() >= self.num_blocks:
            raise ValueError(f"a block is not within {self.num_blocks}")
        positions = np.arange(first_token, first_token + num_tokens)
        block, offset = table[positions // self.block_size], positions % self.block_size
        return slice(first_layer, first_layer + num_layers), slice(None), block, offset


def _by_token(data: torch.Tensor) -> Any:
    """A view [num_layers, 2, num_blocks, block_size, num_kv_heads] whose item is one head's vector of bytes.

    On CPUs a numpy view: it copies in the calling thread, at 3 to 20 GB/s, where torch would wake a second team of
    OpenMP threads against those of the running step (measured: down to 0.04 GB/s).
    """
    if data.device.type != "cpu":
        return data.view(torch.int32).transpose(3, 4)
    raw = data.view(torch.uint8).numpy()
    return raw.view(np.dtype((np.void, raw.shape[-1])))[..., 0].transpose(0, 1, 2, 4, 3)
