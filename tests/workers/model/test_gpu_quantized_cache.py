"""A quantized KV cache in Triton kernels against the CPU's: the same bytes, the same results."""

from pathlib import Path

import pytest
import torch

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import load, mixed_steps
from tandem.tests.workers.model.test_quantized_cache import (
    NUM_BLOCKS,
    PLAIN_TOLERANCE,
    TOLERANCE,
    make_kv,
    make_spans,
    of_gpus,
)
from tandem.workers.kv_cache.layout import SCALE_BYTES, KvLayout, LayerGeometry
from tandem.workers.model import device, kernels
from tandem.workers.model.attention.backend import PLAIN, AttentionOptions
from tandem.workers.model.attention.quantized_cache import dequantize, quantize
from tandem.workers.model.attention.torch_backend import TorchAttentionBackend
from tandem.workers.model.attention.triton_backend import TritonAttentionBackend
from tandem.workers.model.kernels.triton import elementwise
from tandem.workers.model.kernels.triton.attention import Scales
from tandem.workers.model.kv.gpu import split_scales
from tandem.workers.model.kv.store import ITEMS, PagedKv

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu compares the GPU itself with the CPU"
)


@of_gpus
@pytest.mark.parametrize(
    ("dtype", "num_heads", "kv_heads", "head_dim", "window", "options", "batch_invariant"),
    [
        ("float32", 9, 3, 64, None, PLAIN, False),
        ("bfloat16", 8, 2, 128, 20, AttentionOptions(scale=0.3, soft_cap=2.0), False),
        ("float16", 6, 2, 48, None, AttentionOptions(sinks=torch.linspace(-2, 4, 6)), False),
        ("bfloat16", 4, 2, 256, None, PLAIN, True),
    ],
)
def test_attention(
    dtype: str,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    options: AttentionOptions,
    cache_dtype: str,
    batch_invariant: bool,
) -> None:
    """Single tokens and chunks, over a cache of random numbers; slots that no one sees are NaN."""
    torch.manual_seed(0)
    layer = LayerGeometry(
        num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window
    )
    ours, cpu = (make_kv(layer, dtype, cache_dtype) for _ in range(2))
    exact = make_kv(layer, "float32", "auto")
    order = torch.randperm(NUM_BLOCKS).tolist()
    spans = make_spans(order, (0, 1), (8, 1), (129, 1), (256, 1), (254, 3), (63, 70))
    for half in range(2):
        numbers = torch.randn(NUM_BLOCKS, kv_heads, 8, head_dim) * torch.rand(NUM_BLOCKS, 1, 1, 1)
        rows = quantize(numbers, cache_dtype)
        cpu.layers[0][half].copy_(rows)
        nan = quantize(torch.full((1, head_dim), torch.nan), cache_dtype)
        rows[order] = nan[0]
        for each in spans:
            last = (each.start + each.num_tokens - 1) % 8
            rows[each.tables[0][-1], :, last + 1 :] = nan[0]
        write_rows(ours.layers[0][half], rows)
        exact.layers[0][half].copy_(
            dequantize(cpu.layers[0][half], cache_dtype, head_dim, torch.float32)
        )
    tokens = sum(span.num_tokens for span in spans)
    query = torch.randn(tokens, num_heads, head_dim).to(ours.dtype)
    key, value = (torch.randn(tokens, kv_heads, head_dim).to(ours.dtype) for _ in range(2))
    new_key, new_value = (
        dequantize(quantize(each, cache_dtype), cache_dtype, head_dim, torch.float32)
        for each in (key, value)
    )
    expected = TorchAttentionBackend(exact, [layer], native=False).plan(spans)(
        0, query.float(), new_key, new_value, options
    )
    backend = TritonAttentionBackend(ours, [layer], batch_invariant=batch_invariant)
    found = backend.plan(spans)(0, query, key, value, options)
    assert (found.float() - expected).norm() <= PLAIN_TOLERANCE[dtype] * expected.norm()
    native = TorchAttentionBackend(cpu, [layer]).plan(spans)(0, query, key, value, options)
    bound = PLAIN_TOLERANCE[dtype] + TOLERANCE[dtype]
    assert (found.float() - native.float()).norm() <= bound * native.float().norm()
    for each in spans:
        positions = torch.arange(each.start + each.num_tokens)
        blocks = torch.tensor(each.tables[0])[positions // 8]
        for one, other in zip(ours.layers[0], cpu.layers[0], strict=True):
            rows = read_rows(one)
            assert torch.equal(rows[blocks, :, positions % 8], other[blocks, :, positions % 8])


def read_rows(cache: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a GPU's cache as on CPUs: each vector's numbers and then its scale."""
    numbers, scales = split_scales(cache, cache.shape[-1] - SCALE_BYTES)
    return torch.cat((numbers.view(cache.dtype), scales[..., None].view(cache.dtype)), dim=-1)


def write_rows(cache: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows as on CPUs to a GPU's cache."""
    head_dim = cache.shape[-1] - SCALE_BYTES
    numbers, scales = split_scales(cache, head_dim)
    numbers.view(cache.dtype).copy_(rows[..., :head_dim])
    scales.copy_(rows[..., head_dim:].contiguous().view(torch.bfloat16)[..., 0])


@of_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_the_bytes_are_the_cpus(dtype: torch.dtype, head_dim: int, cache_dtype: str) -> None:
    """From 1e-30 to 1e30, in between two numbers, and where a number is not finite."""
    torch.manual_seed(0)
    item = ITEMS[cache_dtype]
    key, value = (torch.randn(70, 3, head_dim).to(dtype) for _ in range(2))
    key *= torch.logspace(-30, 30, 70)[:, None, None].to(dtype)
    value[0], value[1, 1], value[2, 0, 3] = 0, 1e-38, torch.nan
    value[3, 2, 1], value[4, 1, 0] = torch.inf, -torch.inf
    value[5:] = numbers_and_middles(65 * 3, head_dim, item).view(65, 3, head_dim).to(dtype)
    cache = torch.full((2, 25, 3, 8, head_dim + 2), 7, dtype=item)
    slots = torch.randperm(200)[:70].int()
    (keys, key_scales), (values, value_scales) = (split_scales(each, head_dim) for each in cache)
    elementwise.store_kv(key, value, keys, values, slots, Scales(key_scales, value_scales))
    others = torch.ones(200, dtype=torch.bool).index_fill(0, slots.long(), False)
    for half, new in zip(cache, (key, value), strict=True):
        rows = read_rows(half).transpose(1, 2).flatten(0, 1)
        assert torch.equal(rows[slots.long()], quantize(new, cache_dtype))
        assert (rows[others] == 7).all()


def numbers_and_middles(rows: int, head_dim: int, item: torch.dtype) -> torch.Tensor:
    """Returns numbers of the format with scale 1, their middles, and what lies beside these."""
    numbers = torch.arange(128).float()
    if item is torch.uint8:
        numbers = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[:-1] + numbers[1:]) / 2
    around = (middles.nextafter(numbers[1:]), middles.nextafter(numbers[:-1]))
    found = torch.cat((numbers, middles, *around))
    found = torch.cat((found, -found)).repeat(-(-rows * head_dim // (2 * len(found))))
    found = found[: rows * head_dim].view(rows, head_dim).clone()
    found[:, 0] = numbers[-1]  # makes the scale 1
    return found


@of_gpus
def test_a_model_generates_the_tokens_of_the_cpu(
    cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, num_hidden_layers=1)
    expected = mixed_steps(load(folder, cache_dtype=cache_dtype))
    monkeypatch.setattr(kernels, "of", lambda tensor: elementwise)
    assert mixed_steps(load(folder, cache_dtype=cache_dtype)) == expected


def test_fp8_is_refused_before_capability_8_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    cuda = torch.device("cuda")
    assert not device.can_compute_fp8(cuda)
    layer = LayerGeometry(num_heads=2, num_kv_heads=1, head_dim=16)
    layout = KvLayout(layers=(layer,), dtype="bfloat16", model="m", cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype: fp8 needs .* 8\.9"):
        PagedKv(layout, num_blocks=2, block_size=16, device=cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    assert device.can_compute_fp8(cuda)
