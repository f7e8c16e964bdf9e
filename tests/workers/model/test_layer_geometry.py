"""Attention over layers of different geometry against layers of one geometry each, by every
backend.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tandem.tests.workers.spans import read_now, span
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.tables import TableBlocks
from tandem.workers.model.attention.backend import AttentionBackend, AttentionOptions, SequenceSpan
from tandem.workers.model.attention.torch_backend import TorchAttentionBackend
from tandem.workers.model.attention.triton_backend import TritonAttentionBackend
from tandem.workers.model.kernels.c.calls import Recorder
from tandem.workers.model.kv.store import PagedKv

CPU = torch.device("cpu")
LAYERS = (
    LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16),
    LayerGeometry(num_heads=4, num_kv_heads=4, head_dim=32, window=20),
    LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16, window=20),
    LayerGeometry(num_heads=4, num_kv_heads=1, head_dim=16),
    LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16),
)
CHUNKS = ((4, 1), (38, 1), (0, 30), (20, 3), (150, 1), (61, 20))  # start, number of tokens
NUM_TOKENS = sum(count for _, count in CHUNKS)


def make_kv(layers: tuple[LayerGeometry, ...], dtype: str) -> tuple[PagedKv, list[SequenceSpan]]:
    """Returns a cache and block tables with random keys and values where tokens of the chunks see
    them. All other memory is NaN, also what the tables name before their windows.
    """
    layout = KvLayout(layers=layers, dtype=dtype, model="m")
    kv = PagedKv(layout, num_blocks=160, block_size=8, device=CPU)
    for tensor in kv.tensors:
        tensor.fill_(torch.nan)
    blocks = torch.randperm(159, generator=torch.Generator().manual_seed(3)).tolist()
    spans = []
    for start, count in CHUNKS:
        tables = []
        for spec in kv.tables:
            first = max(start + 1 - (spec.window or start + 1), 0) // spec.block_size
            num_blocks = -(-(start + count) // spec.block_size)
            tables.append([159] * first + [blocks.pop() for _ in range(first, num_blocks)])
        spans.append(SequenceSpan(tables=tables, start=start, num_tokens=count))
        for index, layer in enumerate(layers):
            seen = max(start + 1 - (layer.window or start + 1), 0)
            if seen < start:
                part = span(kv, seen, start - seen, index, 1)
                generator = torch.Generator().manual_seed(10 * start + layer.num_heads)
                numbers = torch.randn(
                    (2, start, layer.num_kv_heads, layer.head_dim), generator=generator
                )[:, seen:].to(kv.dtype)
                data = memoryview(numbers.contiguous().view(torch.uint8).numpy().tobytes())
                kv.write(TableBlocks(tuple(tables[kv.table_of_layer[index]])), part, data)
    return kv, spans


def stored(kv: PagedKv, spans: list[SequenceSpan], layer: int) -> list[bytes]:
    """Returns the keys and values of the last tokens of each sequence."""
    table = kv.table_of_layer[layer]
    return [
        bytes(read_now(kv, each.tables[table], span(kv, each.start, each.num_tokens, layer, 1)))
        for each in spans
    ]


def attend(
    kv: PagedKv,
    spans: list[SequenceSpan],
    backend: AttentionBackend,
    layers: tuple[LayerGeometry, ...],
    first: int,
) -> list[torch.Tensor]:
    step = backend.plan(spans)
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


def make_backend(name: str, kv: PagedKv, layers: tuple[LayerGeometry, ...]) -> AttentionBackend:
    if name == "triton":
        return TritonAttentionBackend(kv, layers)
    return TorchAttentionBackend(kv, layers, native=name == "native")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["plain", "native", "triton"])
def test_layers_of_different_geometry(backend: str, dtype: str) -> None:
    """Each layer reads its own block table, and nothing that its tokens do not see."""
    make = partial(make_backend, backend)
    kv, spans = make_kv(LAYERS, dtype)
    assert [(table.window, table.block_size) for table in kv.tables] == [(None, 16), (20, 8)]
    results = attend(kv, spans, make(kv, LAYERS), LAYERS, 0)
    for index, layer in enumerate(LAYERS):
        alone, own = make_kv((layer,), dtype)
        (expected,) = attend(alone, own, make(alone, (layer,)), (layer,), index)
        assert expected.isfinite().all()
        if backend == "plain":  # whose products have the lengths of whole blocks
            assert torch.allclose(results[index], expected, rtol=0, atol=1e-2)
        else:
            assert torch.equal(results[index], expected)
        assert stored(kv, spans, index) == stored(alone, own, 0)


WINDOWED = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=16, window=20)
LATENT = LayerGeometry(num_heads=3, num_kv_heads=1, head_dim=24, value_dim=16)
# Sequences from their beginnings, then chunks beside single tokens, beyond the window.
STEPS = (((0, 30), (0, 7)), ((30, 1), (7, 18)), ((31, 1), (25, 1)))


def run_steps(
    kv: PagedKv, backend: AttentionBackend, layers: tuple[LayerGeometry, ...]
) -> list[torch.Tensor]:
    """Returns the results of all layers in STEPS, whose second half is given the keys and values of
    the first.
    """
    tables = [
        [list(range(first, kv.num_blocks, 4)) for first in (number, number + 2)]
        for number in range(2)
    ]
    results = []
    for number, chunks in enumerate(STEPS):
        spans = [
            SequenceSpan(tables=tables[i], start=start, num_tokens=count)
            for i, (start, count) in enumerate(chunks)
        ]
        step = backend.plan(spans)
        num_tokens = sum(count for _, count in chunks)
        for index, layer in enumerate(layers):
            query = randn(kv, 100 * number + index, num_tokens, layer.num_heads, layer.head_dim)
            seed = 100 * number + 50 + index % (len(layers) // 2)
            key, value = randn(kv, seed, 2, num_tokens, layer.num_kv_heads, layer.head_dim)
            if layer.value_dim is not None:
                value = key[..., : layer.value_dim]
            is_kept = layer.reads is None
            results.append(
                step(index, query, key if is_kept else None, value if is_kept else None).clone()
            )
    return results


def randn(kv: PagedKv, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kv.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("backend", ["plain", "native", "triton"])
def test_a_layer_reads_the_cache_of_another_and_keeps_none(backend: str, dtype: str) -> None:
    """It gives the bits of a layer that keeps the same keys and values."""
    kept: tuple[LayerGeometry, ...] = (LAYERS[0], WINDOWED, LATENT)
    if dtype == "int8":  # latents are not quantized
        kept = kept[:2]
    readers = tuple(replace(layer, reads=index) for index, layer in enumerate(kept))
    results = []
    num_bytes = []
    for layers in (kept + kept, kept + readers):
        layout = KvLayout(
            layers=layers,
            dtype="bfloat16" if dtype == "int8" else dtype,
            model="m",
            cache_dtype="int8" if dtype == "int8" else "auto",
        )
        kv = PagedKv(layout, num_blocks=64, block_size=8, device=CPU)
        results.append(run_steps(kv, make_backend(backend, kv, layers), layers))
        num_bytes.append(len(kv.memory))
    assert num_bytes[0] == 2 * num_bytes[1]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "kept",
    [
        LATENT,
        replace(WINDOWED, window=None),
        replace(WINDOWED, head_dim=32),
        replace(WINDOWED, num_heads=8),
        replace(WINDOWED, num_kv_heads=0),
    ],
)
def test_a_layer_reads_only_the_rows_of_an_equal_layer(kept: LayerGeometry) -> None:
    with pytest.raises(ValueError, match="layer 1 cannot read the cache of 0"):
        KvLayout(layers=(kept, replace(WINDOWED, reads=0)), dtype="bfloat16", model="m")


def test_a_layer_that_reads_another_is_part_of_a_recorded_step() -> None:
    layers = (WINDOWED, replace(WINDOWED, reads=0))
    found = []
    for is_recorded in (False, True):
        layout = KvLayout(layers=layers, dtype="bfloat16", model="m")
        kv = PagedKv(layout, num_blocks=16, block_size=8, device=CPU)
        backend = TorchAttentionBackend(kv, layers)
        if (static := backend.static(8)) is None:
            pytest.skip("no kernel")
        step, fill = static
        query, key, value = (torch.zeros(8, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        with Recorder() as recorder:
            step(0, query, key, value)
            result = step(1, query, None, None)
        program = recorder.program(result, 8)
        for start in range(0, 40, 8):
            spans = [SequenceSpan(tables=[[3, 1, 4, 0, 5]], start=start, num_tokens=8)]
            for index, each in enumerate((query, key, value)):
                each.copy_(randn(kv, start + index, *each.shape))
            if is_recorded:
                fill(spans)
                program.run(8)
                found.append(program.result.clone())
            else:
                planned = backend.plan(spans)
                planned(0, query, key, value)
                found.append(planned(1, query, None, None))
    assert len(found) == 10
    assert all(map(torch.equal, found[:5], found[5:]))


@pytest.mark.parametrize("native", [False, True])
def test_options_are_those_of_the_formula(native: bool) -> None:
    """Scale, soft cap and sinks against their definition in float64, for chunks and single
    tokens.
    """
    layer = LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=16, window=20)
    options = AttentionOptions(scale=0.5, soft_cap=3.0, sinks=torch.linspace(-1, 2, 6))
    kv, spans = make_kv((layer,), "float32")
    fused = torch.randn(NUM_TOKENS, 10, 16, generator=torch.Generator().manual_seed(1))
    query, key, value = torch.split(fused, [6, 2, 2], dim=1)
    step = TorchAttentionBackend(kv, (layer,), native=native).plan(spans)
    result = step(0, query, key, value, options).view(-1, 6, 16)
    row = 0
    for each in spans:
        for position in range(each.start, each.start + each.num_tokens):
            seen = torch.arange(max(0, position + 1 - 20), position + 1)
            keys, values = (
                part[torch.tensor(each.tables[0])[seen // 8], :, seen % 8]
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
