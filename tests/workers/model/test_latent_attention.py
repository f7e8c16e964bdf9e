"""Attention over latent rows: one row for all heads, whose first elements are also the value."""

import random

import pytest
import torch
from torch import nn

from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.model.attention.backend import PLAIN, AttentionOptions, SequenceSpan
from tandem.workers.model.attention.native_tables import NativeTables
from tandem.workers.model.attention.torch_backend import TorchAttentionBackend
from tandem.workers.model.attention.triton_backend import TritonAttentionBackend
from tandem.workers.model.generic.latent import LatentHeads
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.kv.store import PagedKv

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BLOCK = 8
# Number of query heads, elements of a row, and elements of the value: DeepSeek-V3's heads in two
# items, MiniCPM3's sizes with few heads, and sizes that are no multiple of a vector.
SHAPES = [(130, 576, 512), (6, 288, 256), (3, 44, 30)]


def random_spans(*chunks: tuple[int, int], num_blocks: int) -> list[SequenceSpan]:
    """Returns sequences of (start, tokens) with random blocks."""
    order = torch.randperm(num_blocks).tolist()
    return [
        SequenceSpan(
            tables=[[order.pop() for _ in range(-(-(start + count) // BLOCK))]],
            start=start,
            num_tokens=count,
        )
        for start, count in chunks
    ]


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, row]
    rows: torch.Tensor,  # [num_blocks, 1, BLOCK, row]
    spans: list[SequenceSpan],
    value_dim: int,
    options: AttentionOptions = PLAIN,
    window: int | None = None,
) -> torch.Tensor:
    """Returns the kernel's results [num_tokens, num_heads, value_dim]."""
    firsts = [sum(span.num_tokens for span in spans[:index]) for index in range(len(spans))]
    tables = NativeTables(window, rows=list(zip(firsts, spans, strict=True)))
    out = query.new_full((len(query), query.shape[1] * value_dim), torch.nan)
    cpu.paged_attention(
        query,
        rows,
        rows,
        tables.addresses,
        out,
        options.scale_of(query.shape[2]),
        options.soft_cap,
        options.sinks,
    )
    return out.view(len(query), -1, value_dim)


def reference(
    query: torch.Tensor,
    rows: torch.Tensor,
    spans: list[SequenceSpan],
    value_dim: int,
    options: AttentionOptions = PLAIN,
    window: int | None = None,
) -> torch.Tensor:
    """Computes the same as `attend` in float32, token by token."""
    results = []
    queries = iter(query.float())
    for span in spans:
        keys = rows[torch.tensor(span.tables[0])].flatten(0, 2).float()
        for position in range(span.start, span.start + span.num_tokens):
            first = max(0, position + 1 - window) if window else 0
            seen = keys[first : position + 1]
            scores = next(queries) @ seen.T * options.scale_of(query.shape[2])
            if options.soft_cap is not None:
                scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
            if options.sinks is not None:
                scores = torch.cat((scores, options.sinks[:, None]), dim=1)
            results.append(scores.softmax(1)[:, : len(seen)] @ seen[:, :value_dim])
    return torch.stack(results)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("num_heads", "row", "value_dim"), SHAPES)
@pytest.mark.parametrize(
    ("window", "options"),
    [
        (None, PLAIN),
        (20, AttentionOptions(scale=0.05, soft_cap=2.0)),
        (None, AttentionOptions(sinks=torch.linspace(-2, 4, 130))),
    ],
)
def test_the_kernel_equals_plain_torch(
    dtype: str,
    num_heads: int,
    row: int,
    value_dim: int,
    window: int | None,
    options: AttentionOptions,
) -> None:
    torch.manual_seed(0)
    if options.sinks is not None:
        options = AttentionOptions(sinks=options.sinks[:num_heads])
    rows = torch.randn(96, 1, BLOCK, row).to(DTYPES[dtype])
    spans = random_spans((0, 1), (7, 1), (129, 1), (254, 3), (0, 70), num_blocks=len(rows))
    tokens = sum(span.num_tokens for span in spans)
    query = torch.randn(tokens, num_heads, row).to(DTYPES[dtype])
    found = attend(query, rows, spans, value_dim, options, window)
    expected = reference(query, rows, spans, value_dim, options, window)
    assert (found.float() - expected).abs().max() <= TOLERANCE[DTYPES[dtype]]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("num_heads", "row", "value_dim"), SHAPES)
def test_a_token_has_the_same_bits_in_any_chunk_and_batch(
    dtype: str, num_heads: int, row: int, value_dim: int
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(96, 1, BLOCK, row).to(DTYPES[dtype])
    whole, mate = random_spans((0, 150), (90, 40), num_blocks=len(rows))
    query = torch.randn(190, num_heads, row).to(DTYPES[dtype])
    expected = attend(query, rows, [whole, mate], value_dim)
    for seed in range(3):
        sizes = random.Random(seed)
        at = 0
        while at < 150:
            count = min(sizes.choice((1, 1, 2, 5, 33)), 150 - at)
            part = SequenceSpan(tables=whole.tables, start=at, num_tokens=count)
            single = SequenceSpan(tables=mate.tables, start=90, num_tokens=1)
            # A single token beside the chunk, before or after it.
            spans = [part, single] if seed % 2 else [single, part]
            mine = slice(0, count) if seed % 2 else slice(1, count + 1)
            parts = [query[at : at + count], query[150:151]]
            found = attend(torch.cat(parts if seed % 2 else parts[::-1]), rows, spans, value_dim)
            assert torch.equal(found[mine], expected[at : at + count]), (seed, at)
            assert torch.equal(found[-1 if seed % 2 else 0], expected[150]), (seed, at)
            at += count


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_heads_have_the_same_bits_alone(dtype: str) -> None:
    """A rank has some of the heads, so that its items have other rows."""
    torch.manual_seed(0)
    rows = torch.randn(48, 1, BLOCK, 576).to(DTYPES[dtype])
    spans = random_spans((100, 1), (3, 40), (200, 1), num_blocks=len(rows))
    query = torch.randn(42, 128, 576).to(DTYPES[dtype])
    whole = attend(query, rows, spans, 512)
    for heads in (slice(0, 32), slice(64, 128), slice(127, 128)):
        alone = attend(query[:, heads].contiguous(), rows, spans, 512)
        assert torch.equal(alone, whole[:, heads])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_any_number_of_threads_gives_the_same_bits(dtype: str) -> None:
    """Heads of few tokens are split into an item for each thread."""
    torch.manual_seed(0)
    rows = torch.randn(48, 1, BLOCK, 576).to(DTYPES[dtype])
    spans = random_spans((100, 1), (200, 1), num_blocks=len(rows))
    query = torch.randn(2, 20, 576).to(DTYPES[dtype])
    before = torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2, 5, 16):
            torch.set_num_threads(num_threads)
            found.append(attend(query, rows, spans, 512))
    finally:
        torch.set_num_threads(before)
    expected = reference(query, rows, spans, 512)
    assert (found[0].float() - expected).abs().max() <= TOLERANCE[DTYPES[dtype]]
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_keys_alone_are_stored() -> None:
    new = torch.randn(5, 1, 576).bfloat16()
    keys = torch.zeros(10, 1, 4, 576, dtype=torch.bfloat16)
    slots = torch.tensor([3, 39, 0, 17, 8])
    cpu.store_kv(new, new, keys, None, slots)
    rows = keys.view(40, 576)
    assert torch.equal(rows[slots], new[:, 0])
    assert rows.count_nonzero(1).count_nonzero() == 5


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("backend", ["plain", "native", "triton"])
@pytest.mark.parametrize("window", [None, 20])
def test_the_backends_store_a_row_and_attend_over_it(
    backend: str, dtype: str, window: int | None
) -> None:
    torch.manual_seed(0)
    layer = LayerGeometry(num_heads=6, num_kv_heads=1, head_dim=80, value_dim=64, window=window)
    layout = KvLayout(layers=(layer, layer), dtype=dtype, model="m")
    kv = PagedKv(layout, num_blocks=64, block_size=BLOCK, device=torch.device("cpu"))
    kv.data.normal_()
    spans = random_spans((0, 1), (30, 1), (100, 1), (50, 3), (0, 20), num_blocks=64)
    tokens = sum(span.num_tokens for span in spans)
    query = torch.randn(tokens, 6, 80).to(DTYPES[dtype])
    row = torch.randn(tokens, 1, 80).to(DTYPES[dtype])
    before = kv.data.clone()
    made = (
        TritonAttentionBackend(kv, layout.layers)
        if backend == "triton"
        else TorchAttentionBackend(kv, layout.layers, native=backend == "native")
    )
    step = made.plan(spans)
    found = step(1, query, row, row[..., :64], AttentionOptions(scale=0.1))
    rows = before[1, 0]
    new = iter(row)
    for span in spans:
        for position in range(span.start, span.start + span.num_tokens):
            rows[span.tables[0][position // BLOCK], :, position % BLOCK] = next(new)
    assert torch.equal(kv.data, before)
    expected = reference(query, rows, spans, 64, AttentionOptions(scale=0.1), window)
    difference = found.view(tokens, 6, 64).float() - expected
    assert difference.abs().max() <= 1.5 * TOLERANCE[DTYPES[dtype]]


class Expanding(nn.Module):
    """Has what a module of transformers has for latent attention."""

    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim = 48, 32, 8, 64

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(48, num_heads * 96, bias=False, dtype=dtype)

    def expand_kv(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps latents [num_keys, 48] to keys and values [num_keys, heads, 32 and 64]."""
        heads = self.kv_b_proj.weight.float().view(-1, 96, 48)
        both = torch.einsum("nl,hdl->nhd", latent, heads)
        return both[..., :32], both[..., 32:]


@pytest.mark.parametrize("heads", [slice(0, 6), slice(2, 5)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_queries_and_results_take_the_weight_of_keys_and_values(dtype: str, heads: slice) -> None:
    torch.manual_seed(0)
    module = Expanding(6, DTYPES[dtype])
    latent = torch.randn(9, 48)
    keys, values = (each[:, heads] for each in module.expand_kv(latent))
    query = torch.randn(4, heads.stop - heads.start, 40).to(DTYPES[dtype])
    weights = torch.rand(4, heads.stop - heads.start, 9)
    absorbing = LatentHeads(module, 6, heads)
    assert not list(module.parameters()), "the weight is kept once"
    absorbed = absorbing.absorb(query)
    assert torch.equal(absorbed[..., 48:], query[..., 32:])
    tolerance = {"float32": 1e-5, "bfloat16": 6e-3}[dtype]
    scores = absorbed[..., :48].float() @ latent.T
    expected = torch.einsum("qhd,nhd->qhn", query[..., :32].float(), keys)
    assert (scores - expected).norm() <= tolerance * expected.norm()
    results = absorbing.expand((weights @ latent).to(DTYPES[dtype])).float()
    expected = torch.einsum("qhn,nhd->qhd", weights, values)
    assert (results - expected).norm() <= tolerance * expected.norm()
