"""Attention over layers of different geometry against layers of one geometry each, by every
backend.
"""

import pytest
import torch

from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.model.attention.backend import AttentionBackend, AttentionOptions, SequenceSpan
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


def make_kv(layers: tuple[LayerGeometry, ...], dtype: str) -> PagedKv:
    kv = PagedKv(
        KvLayout(layers=layers, dtype=dtype, model="m"), num_blocks=32, block_size=8, device=CPU
    )
    for index in range(len(layers)):
        for part in kv.layers[index]:
            part.normal_(generator=torch.Generator().manual_seed(0))
    return kv


def attend(
    kv: PagedKv, backend: AttentionBackend, layers: tuple[LayerGeometry, ...], first: int
) -> list[torch.Tensor]:
    step = backend.plan(SPANS)
    results = []
    for index, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(first + index)
        heads = layer.num_heads + 2 * layer.num_kv_heads
        fused = torch.randn(NUM_TOKENS, heads, layer.head_dim, generator=generator).to(kv.dtype)
        query, key, value = torch.split(
            fused, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1
        )
        results.append(step(index, query, key, value).clone())
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["plain", "native", "triton"])
def test_layers_of_different_geometry(backend: str, dtype: str) -> None:
    def make(kv: PagedKv, layers: tuple[LayerGeometry, ...]) -> AttentionBackend:
        if backend == "triton":
            return TritonAttentionBackend(kv, layers)
        return TorchAttentionBackend(kv, layers, native=backend == "native")

    kv, alone = make_kv(LAYERS, dtype), [make_kv((layer,), dtype) for layer in LAYERS]
    results = attend(kv, make(kv, LAYERS), LAYERS, 0)
    for index, layer in enumerate(LAYERS):
        (expected,) = attend(alone[index], make(alone[index], (layer,)), (layer,), index)
        assert torch.equal(results[index], expected)
        assert torch.equal(kv.layers[index][0], alone[index].layers[0][0])


@pytest.mark.parametrize("native", [False, True])
def test_options_are_those_of_the_formula(native: bool) -> None:
    """Scale, soft cap and sinks against their definition in float64, for chunks and single
    tokens.
    """
    layer = LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16, window=20)
    options = AttentionOptions(scale=0.5, soft_cap=3.0, sinks=torch.linspace(-1, 2, 6))
    kv = make_kv((layer,), "float32")
    fused = torch.randn(NUM_TOKENS, 10, 16, generator=torch.Generator().manual_seed(1))
    query, key, value = torch.split(fused, [6, 2, 2], dim=1)
    step = TorchAttentionBackend(kv, (layer,), native=native).plan(SPANS)
    result = step(0, query, key, value, options).view(-1, 6, 16)
    row = 0
    for span in SPANS:
        for position in range(span.start, span.start + span.num_tokens):
            seen = torch.arange(max(0, position + 1 - 20), position + 1)
            keys, values = (
                part[torch.tensor(span.blocks)[seen // 8], :, seen % 8]
                .double()
                .repeat_interleave(3, dim=1)
                for part in kv.layers[0]
            )  # [tokens, heads, head_dim]
            scores = 3.0 * torch.tanh(
                torch.einsum("hd,nhd->hn", query[row].double(), keys) * 0.5 / 3.0
            )
            assert options.sinks is not None
            weights = torch.cat((scores, options.sinks.double()[:, None]), dim=1).softmax(-1)[
                :, :-1
            ]
            expected = torch.einsum("hn,nhd->hd", weights, values)
            assert (result[row] - expected).abs().max() < 1e-5
            row += 1
