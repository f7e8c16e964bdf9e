"""Attention over layers of different geometry against layers of one geometry each, by every backend."""

from typing import cast

import pytest
import torch

from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.model.attention.backend import AttentionBackend, SequenceSpan
from tandem.workers.model.attention.torch_backend import TorchAttentionBackend
from tandem.workers.model.attention.triton_backend import TritonAttentionBackend
from tandem.workers.model.kv_store import PagedKv

CPU = torch.device("cpu")
LAYERS = (
    LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16),
    LayerGeometry(num_heads=4, num_kv_heads=4, head_dim=32, window=20),
    LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16, window=20),
    LayerGeometry(num_heads=4, num_kv_heads=1, head_dim=16),
    LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16),
)
SPANS = (
    SequenceSpan(blocks=[3], start=4, num_tokens=1),
    SequenceSpan(blocks=[9, 1, 30, 2, 5], start=38, num_tokens=1),
    SequenceSpan(blocks=[7, 8, 20, 21], start=0, num_tokens=30),
    SequenceSpan(blocks=[11, 6, 25], start=20, num_tokens=3),
)
NUM_TOKENS = sum(span.num_tokens for span in SPANS)


class LayeredKv:
    """What attention takes of a `PagedKv` whose layers differ."""

    def __init__(self, stores: list[PagedKv]) -> None:
        """Each store is one layer's."""
        self.stores = stores
        self.device, self.dtype, self.block_size = CPU, stores[0].dtype, stores[0].block_size

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.stores[layer].layer(0)

    def gather_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.stores[layer].gather_rows(0)

    def scatter_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.stores[layer].scatter_rows(0)


def make_stores(dtype: str) -> list[PagedKv]:
    stores = []
    for layer in LAYERS:
        sizes = {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
        store = PagedKv(
            KvLayout(num_layers=1, dtype=dtype, model="m", **sizes), num_blocks=32, block_size=8, device=CPU
        )
        for part in store.layer(0):
            part.normal_(generator=torch.Generator().manual_seed(0))
        stores.append(store)
    return stores


def attend(kv: PagedKv, backend: AttentionBackend, layers: tuple[LayerGeometry, ...], first: int) -> list[torch.Tensor]:
    step = backend.plan(SPANS)
    results = []
    for index, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(first + index)
        heads = layer.num_heads + 2 * layer.num_kv_heads
        fused = torch.randn(NUM_TOKENS, heads, layer.head_dim, generator=generator).to(kv.dtype)
        parts = torch.split(fused, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        results.append(step(index, *parts).clone())
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["plain", "native", "triton"])
def test_layers_of_different_geometry(backend: str, dtype: str) -> None:
    def make(kv: PagedKv, layers: tuple[LayerGeometry, ...]) -> AttentionBackend:
        if backend == "triton":
            return TritonAttentionBackend(kv, layers)
        return TorchAttentionBackend(kv, layers, native=backend == "native")

    together, alone = make_stores(dtype), make_stores(dtype)
    kv = cast(PagedKv, LayeredKv(together))
    results = attend(kv, make(kv, LAYERS), LAYERS, 0)
    for index, layer in enumerate(LAYERS):
        (expected,) = attend(alone[index], make(alone[index], (layer,)), (layer,), index)
        assert torch.equal(results[index], expected)
        assert torch.equal(together[index].layer(0)[0], alone[index].layer(0)[0])
