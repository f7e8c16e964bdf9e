"""Quantised KV cache: what is stored, what attention reads of it, and that whole models use it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.tiny import DENSE, make_tiny_model
from tandem.tests.workers.model.helpers import (
    GREEDY,
    Driver,
    load,
    mixed_steps,
    prompt,
    recorded_logits,
)
from tandem.tests.workers.model.test_exact import NUM_TOKENS, logits_by_position
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Admitted, NewTokens, Preempted
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.kv_cache.layout import (
    GPU_QUANTIZED,
    QUANTIZED,
    KvLayout,
    LayerGeometry,
    check_quantized,
    head_bytes,
)
from tandem.workers.model.attention.backend import PLAIN, AttentionOptions, SequenceSpan
from tandem.workers.model.attention.quantized_cache import dequantize, quantize
from tandem.workers.model.attention.torch_backend import TorchAttentionBackend
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.kv.store import ITEMS, PagedKv
from tandem.workers.model.runner import ModelRunner

CPU = torch.device("cpu")
NUM_MADE = 60  # tokens of each sequence
NUM_BLOCKS = 128
# Relative error of a layer's result in the 2-norm. In bfloat16 it is that of results; plain torch
# rounds what it has dequantised, too.
TOLERANCE = {"float32": 1e-6, "bfloat16": 3e-3, "float16": 1e-3}
PLAIN_TOLERANCE = TOLERANCE | {"bfloat16": 8e-3}


of_all = pytest.mark.parametrize("cache_dtype", QUANTIZED)
of_gpus = pytest.mark.parametrize("cache_dtype", GPU_QUANTIZED)


def make_kv(layer: LayerGeometry, dtype: str, cache_dtype: str) -> PagedKv:
    layout = KvLayout(layers=(layer,), dtype=dtype, model="m", cache_dtype=cache_dtype)
    return PagedKv(layout, num_blocks=NUM_BLOCKS, block_size=8, device=CPU)


def make_spans(order: list[int], *parts: tuple[int, int]) -> list[SequenceSpan]:
    """Returns a span for each start and number of tokens; takes its blocks from `order`."""
    return [
        SequenceSpan(
            tables=[[order.pop() for _ in range(-(-(start + count) // 8))]],
            start=start,
            num_tokens=count,
        )
        for start, count in parts
    ]


@of_all
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"),
    [
        *((9, 3, 64), (8, 8, 64), (8, 1, 128), (6, 2, 48), (4, 2, 96), (4, 2, 256)),
        *((40, 1, 32), (4, 2, 512)),
    ],
)
@pytest.mark.parametrize(
    ("window", "options"),
    [
        (None, PLAIN),
        (20, AttentionOptions(scale=0.3, soft_cap=2.0)),
        (None, AttentionOptions(sinks=torch.linspace(-2, 4, 40))),
    ],
)
def test_attention_equals_that_over_what_the_numbers_stand_for(
    dtype: str,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    options: AttentionOptions,
    cache_dtype: str,
) -> None:
    """In float32 and plain torch, for single tokens and chunks, across the tiles of the kernels."""
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks[:num_heads])
    torch.manual_seed(0)
    layer = LayerGeometry(
        num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window
    )
    exact, native, plain = (
        make_kv(layer, "float32", "auto"),
        *(make_kv(layer, dtype, cache_dtype) for _ in range(2)),
    )
    for half in range(2):
        rows = quantize(torch.randn(NUM_BLOCKS, kv_heads, 8, head_dim), cache_dtype)
        native.layers[0][half].copy_(rows)
        plain.layers[0][half].copy_(rows)
        exact.layers[0][half].copy_(dequantize(rows, cache_dtype, head_dim, torch.float32))
    order = torch.randperm(NUM_BLOCKS).tolist()
    spans = make_spans(order, (0, 1), (8, 1), (129, 1), (256, 1), (254, 3), (0, 150), (63, 70))
    tokens = sum(span.num_tokens for span in spans)
    query = torch.randn(tokens, num_heads, head_dim).to(native.dtype)
    key, value = (torch.randn(tokens, kv_heads, head_dim).to(native.dtype) for _ in range(2))
    new_key, new_value = (
        dequantize(quantize(each, cache_dtype), cache_dtype, head_dim, torch.float32)
        for each in (key, value)
    )
    attend = TorchAttentionBackend(exact, [layer], native=False).plan(spans)
    expected = attend(0, query.float(), new_key, new_value, options)
    for kv, uses_kernels in ((native, True), (plain, False)):
        found = TorchAttentionBackend(kv, [layer], native=uses_kernels).plan(spans)(
            0, query, key, value, options
        )
        bound = (TOLERANCE if uses_kernels else PLAIN_TOLERANCE)[dtype]
        assert (found.float() - expected).norm() <= bound * expected.norm(), uses_kernels
    assert torch.equal(native.tensors[0], plain.tensors[0])
    for half in range(2):
        stored = dequantize(native.layers[0][half], cache_dtype, head_dim, torch.float32)
        assert torch.equal(stored, exact.layers[0][half])


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 90, 256, 512])
def test_the_kernel_stores_what_plain_torch_makes(
    dtype: torch.dtype, head_dim: int, cache_dtype: str
) -> None:
    torch.manual_seed(0)
    key, value = (torch.randn(40, 3, 2 * head_dim).to(dtype)[..., head_dim:] for _ in range(2))
    key = key.clone() * torch.logspace(-30, 30, 40)[:, None, None].to(dtype)
    value = value.clone()
    value[0], value[1, 1], value[2, 0, 3] = 0, 1e-38, torch.nan
    value[3, 2, 1], value[4, 1, 0] = torch.inf, -torch.inf
    slots = torch.randperm(65)[:40]
    # Blocks of 5 tokens, between which there is other memory.
    row = head_bytes(head_dim, "bfloat16", cache_dtype)
    kept = torch.full((13, 2, 2, 3, 5, row), 7, dtype=ITEMS[cache_dtype])
    cpu.store_kv(key, value, kept[:, 0, 0], kept[:, 0, 1], slots, cache_dtype)
    for half, new in enumerate((key, value)):
        # [tokens, heads, row]
        rows = kept[:, 0, half].transpose(1, 2).reshape(65, 3, -1)
        assert torch.equal(rows[slots], quantize(new, cache_dtype))
        others = torch.ones(65, dtype=torch.bool).index_fill(0, slots, False)
        assert (rows[others] == 7).all()
    assert (kept[:, 1] == 7).all()


def test_numbers_are_rounded_to_the_nearest() -> None:
    """In int8 of 255 steps from the largest one down, beside which the scale's own rounding is
    nothing; in int4 of 15 even steps between the least and the largest one of 32 numbers, which are
    rounded to bfloat16; in fp8 to 4 bits of each number, or where that is more to a step of 2^-9 of
    which the largest one has 448 * 512.
    """
    torch.manual_seed(0)
    heads = torch.randn(1000, 64) * torch.rand(1000, 1).exp()
    largest = heads.abs().amax(1, keepdim=True)
    low, high = heads.view(1000, 2, 32).aminmax(dim=-1)
    steps = (high - low) / 15  # [vectors, groups]
    bounds = {
        "int8": largest / 127 / 2,
        "fp8": (heads.abs() / 16).clamp(min=largest / (448 * 512) / 2),
        "int4": steps.repeat_interleave(32, dim=1) / 2 + largest / 256,
    }
    for cache_dtype, bound in bounds.items():
        rows = quantize(heads, cache_dtype)
        found = dequantize(rows, cache_dtype, 64, torch.float32)
        assert ((found - heads).abs() <= bound * 1.01).all(), cache_dtype
    assert quantize(heads, "int8")[..., :-2].abs().amax(1).eq(127).all()
    assert (quantize(heads, "fp8")[..., :-2] & 0x7F).amax(1).eq(0x7E).all()
    numbers = quantize(heads, "int4")[..., :32]
    for half in (numbers & 15, numbers >> 4):
        assert set(half.flatten().tolist()) == {*range(16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_fp8_is_read_and_written_as_it_is(dtype: torch.dtype) -> None:
    """Attention to one key gives its value, and there are 254 numbers. Those between two are
    rounded to the nearest.
    """
    codes = torch.cat((torch.arange(127), torch.arange(128, 255))).to(torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    middles = (numbers[:126] + numbers[1:127]) / 2
    above, below = middles.nextafter(numbers[1:127]), middles.nextafter(numbers[:126])
    new = torch.cat((numbers, middles, -middles, above, -above, below, -below))
    # The largest number makes the scale 1.
    new = torch.nn.functional.pad(new, (0, -len(new) % 31)).view(-1, 31)
    new = torch.cat((new, torch.full((len(new), 1), 448.0)), dim=1)[:, None].to(dtype)
    layer = LayerGeometry(num_heads=1, num_kv_heads=1, head_dim=32)
    kv = make_kv(layer, str(dtype).removeprefix("torch."), "fp8")
    spans = [SequenceSpan(tables=[[index]], start=0, num_tokens=1) for index in range(len(new))]
    found = TorchAttentionBackend(kv, [layer]).plan(spans)(0, torch.ones_like(new), new, new)
    assert torch.equal(found, new[:, 0].float().to(torch.float8_e4m3fn).to(dtype))


@of_all
def test_what_is_not_finite_reaches_the_result_of_its_sequence_alone(cache_dtype: str) -> None:
    torch.manual_seed(0)
    layer = LayerGeometry(num_heads=6, num_kv_heads=2, head_dim=64)
    for native in (True, False):
        kv = make_kv(layer, "bfloat16", cache_dtype)
        spans = [
            SequenceSpan(tables=[[3 * n, 3 * n + 1, 3 * n + 2]], start=0, num_tokens=20)
            for n in range(2)
        ]
        query, key, value = (torch.randn(40, heads, 64).bfloat16() for heads in (6, 2, 2))
        value[5, :, 9] = torch.nan
        found = TorchAttentionBackend(kv, [layer], native=native).plan(spans)(0, query, key, value)
        # Plain torch and int4 multiply what a token does not see with 0.
        assert found[:5].isfinite().all() or not native or cache_dtype == "int4"
        assert not found[5:20].isfinite().any()
        assert found[20:].isfinite().all()


@of_all
def test_it_holds_almost_twice_the_tokens_and_int4_three_times(cache_dtype: str) -> None:
    for head_dim, eight in ((64, 0.52), (128, 0.51)):
        most = 0.3125 if cache_dtype == "int4" else eight
        layer = LayerGeometry(num_heads=9, num_kv_heads=3, head_dim=head_dim)
        plain, rounded = (make_kv(layer, "bfloat16", each) for each in ("auto", cache_dtype))
        assert rounded.layout.bytes_per_token <= most * plain.layout.bytes_per_token
        assert rounded.tensors[0].nbytes == rounded.layout.bytes_per_token * NUM_BLOCKS * 8


def test_gpus_refuse_int4_with_the_reason() -> None:
    check_quantized("int4", "cpu")
    for cache_dtype in ("auto", "int8", "fp8"):
        check_quantized(cache_dtype, "cuda")
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: int4 has kernels on cpu only, .* int8"):
        check_quantized("int4", "cuda")


@of_all
@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
@pytest.mark.parametrize("family", DENSE)
def test_models_generate_with_it(
    family: str, model_impl: str, cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either code: the logits after a prompt are near those over a plain cache, and not equal to
    them. Numbers of fp8 have three bits of mantissa, which loses about four times as much as int8
    does; int4 loses about ten times as much.
    """
    folder, found = make_tiny_model(tmp_path, family), []
    for each in ("auto", cache_dtype):
        driver = Driver(load(folder, cache_dtype=each, model_impl=model_impl))
        with recorded_logits(monkeypatch) as recorded:
            driver.run(driver.step(0, prompt(100), 0))
        found.append(recorded[0][0])
    plain, rounded = (logits - logits.mean() for logits in found)
    assert (
        0
        < (rounded - plain).norm()
        <= {"int8": 0.05, "fp8": 0.15, "int4": 0.4}[cache_dtype] * plain.norm()
    )


needs_kernels = pytest.mark.skipif(
    not cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="no product of our own with AMX",
)


@needs_kernels
@of_all
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logits_depend_on_the_tokens_alone(
    family: str, cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window: dict[str, Any] = {"sliding_window": 70} if family == "mistral" else {}
    folder = make_tiny_model(tmp_path, family, hidden_size=256, head_dim=32, **window)
    runner = load(folder, dtype="bfloat16", cache_dtype=cache_dtype)
    decoded = logits_by_position(runner, list(range(NUM_TOKENS + 1)), 0, monkeypatch)
    for ends in (
        [0, NUM_TOKENS],
        [0, 16, 17, 80, 81, 82, 147, NUM_TOKENS],
        [0, 65, 98, 99, NUM_TOKENS],
    ):
        mixed = logits_by_position(runner, ends, 3, monkeypatch)
        for end, logits in mixed.items():
            assert torch.equal(logits, decoded[end]), end


@needs_kernels
@of_all
def test_recorded_steps_are_the_same(cache_dtype: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=256, head_dim=32)
    recorded, step_by_step = (
        load(folder, dtype="bfloat16", cache_dtype=cache_dtype) for _ in range(2)
    )
    assert recorded._decode_program is not None
    assert recorded._token_program is not None
    step_by_step._decode_program = step_by_step._token_program = None
    assert mixed_steps(recorded) == mixed_steps(step_by_step)


def generate(
    runner: ModelRunner, prompts: list[list[int]], num_blocks: int
) -> tuple[list[list[int]], int, int]:
    """Returns the tokens of each, those of a preempted one by a second sequence that goes on, as a
    router does; how many tokens came from the prefix cache; and how many preemptions there were.
    """
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=16,
        tables=runner.kv.tables,
        budgets=Budgets(chunk_tokens=32, mixed_chunk_tokens=32, growth_tokens=1),
    )
    engine = Engine(runner, config)
    made: list[list[int]] = [[] for _ in prompts]
    num_cached = num_preemptions = 0

    def submit(number: int) -> None:
        index = number % len(prompts)
        tokens, rest = (*prompts[index], *made[index]), NUM_MADE - len(made[index])
        engine.submit(
            SequenceSpec(
                id=number, tokens=tokens, max_tokens=rest, task=Task.COLOCATED, sampling=GREEDY
            )
        )

    for number in range(len(prompts)):
        submit(number)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, NewTokens):
                made[event.id % len(prompts)] += event.token_ids
            elif isinstance(event, Preempted):
                num_preemptions += 1
                submit(event.id + len(prompts))
            elif isinstance(event, Admitted):
                num_cached += event.num_cached
    engine.check_integrity()
    return made, num_cached, num_preemptions


@needs_kernels
@of_all
def test_prefixes_are_reused_and_preempted_sequences_go_on(
    cache_dtype: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=256, head_dim=32)
    runner = load(folder, dtype="bfloat16", cache_dtype=cache_dtype)
    prompts = [prompt(64) + prompt(20, seed) for seed in range(1, 5)]
    alone = [generate(runner, [each], 128)[0][0] for each in prompts]
    assert [len(tokens) for tokens in alone] == [NUM_MADE] * 4
    made, num_cached, num_preemptions = generate(runner, prompts, 128)
    assert made == alone
    assert num_cached > 0
    assert num_preemptions == 0
    made, _, num_preemptions = generate(runner, prompts, 16)
    assert made == alone
    assert num_preemptions > 0
