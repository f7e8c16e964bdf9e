"""`tandem plan cost`: figures of known models against figures computed by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tandem.cluster.arithmetic import make_cost
from tandem.cluster.cli.main import app
from tandem.cluster.explain.units import amount, milliseconds
from tandem.tests.bench.engine.shapes import HF_CONFIGS, SHAPES, cost_of
from tandem.tests.profiles import PROFILED, make_profile
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.model.config import Fields
from tandem.workers.model.costs.inference import InferenceCost, ModelSizes, Work, total
from tandem.workers.model.costs.report import cost_report
from tandem.workers.model.costs.roofline import DEVICES, Roofline
from tandem.workers.model.registry import parse_model_config

LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163_840,
    "tie_word_embeddings": False,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}


def llama_2(*sizes: int, num_kv_heads: int) -> dict[str, Any]:
    return LLAMA_2 | dict(zip(SIZES, sizes, strict=True)) | {"num_key_value_heads": num_kv_heads}


def cost_from(fields: dict[str, Any]) -> InferenceCost:
    return make_cost(parse_model_config(Fields("config.json", dict(fields))), "bfloat16")


def test_llama_2_7b() -> None:
    """By hand: a layer has 4 x 4096 x 4096 of attention and 3 x 4096 x 11,008 of MLP, together
    202,375,168. 32 of them, 2 x 32,000 x 4096 of embedding and head and 65 norms of 4096 are
    6,738,415,616 parameters: 13.5 GB in 16 bits, "14 GB". A token keeps keys and values of 4096 in
    32 layers: 512 KiB.
    """
    cost = cost_from(llama_2(4096, 11_008, 32, 32, num_kv_heads=32))
    sizes = cost.sizes
    assert (sizes.parameters, sizes.active) == (6_738_415_616, 6_738_415_616)
    assert sizes.weight_bytes == 13_476_831_232
    assert cost.kv_bytes_per_token == cost.kv_bytes_without_sharing == 524_288
    # A decode step multiplies by 32 layers and the head, 6,607,077,376 parameters, and attends:
    # 4 x 4096 FLOPs for each key in each layer.
    step = cost.decode(1000)
    assert step.flops == 2 * 6_607_077_376 + 32 * 4 * 4096 * 1000
    assert step.num_bytes == 2 * 6_607_077_376 + 1000 * 524_288
    # 1.02 FLOPs for each byte: far below the 295 of an H100, so memory is the bound.
    h100 = DEVICES["h100"].roofline
    assert h100.bound(step) == "memory"
    assert h100.flops_per_s / h100.bytes_per_s == pytest.approx(295, abs=0.5)
    # A prompt of 2,048 tokens: 2 FLOPs for each parameter of the layers and each token, one row of
    # the head, and 2048 x 2049 / 2 pairs of query and key.
    prompt = cost.prefill(2048)
    pairs = 2048 * 2049 // 2
    assert prompt.flops == 2 * 2048 * 6_476_005_376 + 2 * 131_072_000 + 32 * 4 * 4096 * pairs
    assert h100.bound(prompt) == "compute"


def test_llama_2_13b_keeps_0_8_mb_for_each_token() -> None:
    """By hand: 40 layers of 4 x 5120 x 5120 + 3 x 5120 x 13,824, 2 x 32,000 x 5120, and 81 norms;
    2 x 40 x 5120 x 2 bytes for a token.
    """
    cost = cost_from(llama_2(5120, 13_824, 40, 40, num_kv_heads=40))
    assert cost.sizes.parameters == 40 * 317_194_240 + 327_680_000 + 414_720 == 13_015_864_320
    assert cost.kv_bytes_per_token == 819_200


def test_llama_2_70b_shares_keys_among_8_heads() -> None:
    """By hand: 80 layers of 2 x 8192 x 8192 + 2 x 8192 x 1024 + 3 x 8192 x 28,672 = 855,638,016,
    2 x 32,000 x 8192, and 161 norms. 8 KV heads of 128 keep an eighth of 64 heads.
    """
    cost = cost_from(llama_2(8192, 28_672, 80, 64, num_kv_heads=8))
    assert cost.sizes.parameters == 80 * 855_638_016 + 524_288_000 + 1_318_912 == 68_976_648_192
    assert cost.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2 == 327_680
    assert cost.kv_bytes_without_sharing == 8 * 327_680


def test_llama_3_1_8b() -> None:
    cost = cost_of(SHAPES["llama-3-8b"], "bfloat16")
    assert cost.sizes.parameters == 8_030_261_248
    assert (cost.kv_bytes_per_token, cost.kv_bytes_without_sharing) == (131_072, 524_288)


def test_deepseek_v3() -> None:
    """By hand: attention of a layer has 7168 x 1536 + 1536 x 24,576 + 7168 x 576 + 512 x 32,768 +
    16,384 x 7168 = 187,105,280; three dense MLPs 3 x 7168 x 18,432 each; 58 layers have 256 experts
    and a shared one of 3 x 7168 x 2048 = 44,040,192, and a router of 7168 x 256 + 256. The
    model that is counted has seven layers, four of them with experts.
    """
    expert = 44_040_192

    def products(num_layers: int) -> int:
        experts = (num_layers - 3) * (257 * expert + 1_835_008)
        return num_layers * 187_105_280 + 3 * 396_361_728 + experts

    def parameters(num_layers: int) -> int:
        biases = (num_layers - 3) * 256
        norms = num_layers * (2 * 7168 + 1536 + 512) + 7168
        return products(num_layers) + biases + 2 * 129_280 * 7168 + norms

    assert parameters(61) == 671_026_419_200
    assert parameters(61) - 58 * 248 * expert == 37_552_297_472
    cost = cost_from(DEEPSEEK_V3 | {"num_hidden_layers": 7})
    assert cost.sizes.parameters == parameters(7)
    assert (cost.sizes.num_experts, cost.sizes.num_chosen) == (256, 8)
    assert cost.sizes.active == parameters(7) - 4 * 248 * expert
    # A latent row of 512 + 64 numbers in each layer, instead of 128 heads with keys of 192 and
    # values of 128: 1.4 % of the bytes.
    assert cost.kv_bytes_per_token == 7 * 576 * 2 == 8_064
    assert cost.kv_bytes_without_sharing == 7 * 128 * (192 + 128) * 2
    used = products(7) - 4 * 248 * expert + 129_280 * 7168
    step = cost.decode(4096)
    assert step.flops == 2 * used + 7 * 2 * 128 * (576 + 512) * 4096
    assert step.num_bytes == 2 * used + 4096 * 8_064


def test_qwen3_30b_a3b() -> None:
    """By hand: a layer has 2048 x 128 x (32 + 4 + 4 + 32) of attention, 128 experts of 3 x 2048 x
    768, a router of 128 x 2048, and norms of 2 x 2048 + 2 x 128.
    """
    cost = cost_of(SHAPES["qwen3-30b-a3b"], "bfloat16")
    layer = 18_874_368 + 128 * 4_718_592 + 262_144 + 4352
    parameters = 48 * layer + 2 * 151_936 * 2048 + 2048
    assert cost.sizes.parameters == parameters == 30_532_122_624
    assert cost.sizes.active == parameters - 48 * 120 * 4_718_592 == 3_353_032_704
    assert cost.kv_bytes_per_token == 48 * 4 * 128 * 2 * 2 == 98_304
    assert cost.kv_bytes_without_sharing == 8 * 98_304


@pytest.mark.parametrize("form", [{}, {"quantization_config": {"quant_method": "mxfp4"}}])
def test_gpt_oss_20b(form: dict[str, Any]) -> None:
    """By hand: attention of a layer has 2 x 2880 x 4096 + 2 x 2880 x 512 = 26,542,080 and biases of
    4096 + 2 x 512 + 2880, 64 sinks, a router of 32 x 2880 + 32, two norms of 2880, and 32 experts
    of 3 x 2880 x 2880 = 24,883,200 with biases of 3 x 2880. In MXFP4, a file has two of the
    experts' numbers in a byte; they are kept in 16 bits.
    """
    cost = cost_from(GPT_OSS_20B | form)
    layer = 26_542_080 + 32 * 2880
    experts = 24 * 32 * 24_883_200
    others = 24 * (8000 + 64 + 32 + 2 * 2880 + 32 * 3 * 2880) + 2880
    head = 201_088 * 2880
    parameters = 24 * layer + experts + others + 2 * head
    assert cost.sizes.parameters == parameters == 20_914_757_184
    assert (cost.sizes.num_experts, cost.sizes.num_chosen) == (32, 4)
    # "3.6 billion" without the embedding.
    assert cost.sizes.active == parameters - experts * 28 // 32 == 3_614_113_344 + head
    assert cost.sizes.weight_bytes == pytest.approx(2 * parameters, rel=1e-6)
    assert cost.kv_bytes_per_token == 24 * 8 * 64 * 2 * 2 == 49_152
    read = 24 * layer + experts // 8 + head
    assert cost.decode(1).num_bytes == 2 * read + 49_152  # 7.2 GB
    assert cost.prefill(512).num_bytes == 2 * (24 * layer + experts + head) + 512 * 49_152


@pytest.mark.parametrize(
    ("fields", "linear", "experts", "counts"),
    [
        # Attention of 2 x 1024 x 1024 + 2 x 512 x 1024, a router, 32 experts of 3 x 512 x 1024.
        pytest.param(
            {
                "architectures": ["GraniteMoeForCausalLM"],
                "model_type": "granitemoe",
                "vocab_size": 49_155,
                "hidden_size": 1024,
                "intermediate_size": 512,
                "num_hidden_layers": 2,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_local_experts": 32,
                "num_experts_per_tok": 8,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": True,
            },
            2 * (3_145_728 + 32 * 1024 + 32 * 1_572_864),
            2 * 32 * 1_572_864,
            (32, 8),
            id="granitemoe",
        ),
        # Attention of (512 + 2 x 128) x 512 + 512 x 512, a router, 16 experts of 3 x 256 x 512.
        pytest.param(
            {
                "architectures": ["DbrxForCausalLM"],
                "model_type": "dbrx",
                "vocab_size": 1000,
                "d_model": 512,
                "n_layers": 2,
                "n_heads": 8,
                "max_seq_len": 2048,
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
                "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 16, "moe_top_k": 4},
                "tie_word_embeddings": False,
            },
            2 * (655_360 + 16 * 512 + 16 * 393_216),
            2 * 16 * 393_216,
            (16, 4),
            id="dbrx",
        ),
        # Attention of 3 x 64 x 64, a router, a shared MLP and 4 experts of 3 x 32 x 64.
        pytest.param(
            {
                "architectures": ["HunYuanMoEV1ForCausalLM"],
                "model_type": "hunyuan_v1_moe",
                "vocab_size": 500,
                "hidden_size": 64,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_experts": 4,
                "moe_topk": [2, 3],
                "max_position_embeddings": 2048,
                "tie_word_embeddings": False,
            },
            2 * (12_288 + 4 * 64 + 5 * 6_144),
            2 * 4 * 6_144,
            (4, 3),
            id="hunyuan",
        ),
        # Attention of 4 x 64 x 64, an MLP of 2 x 64 x 256, under transformer.h.
        pytest.param(
            {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "vocab_size": 500,
                "n_embd": 64,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 128,
            },
            2 * (16_384 + 32_768),
            0,
            (0, 0),
            id="gpt2",
        ),
    ],
)
def test_matrices_of_other_names(
    fields: dict[str, Any], linear: int, experts: int, counts: tuple[int, int]
) -> None:
    """Of models that run through transformers' code, some with all experts in one tensor."""
    sizes = cost_from(fields).sizes
    assert (sizes.linear, sizes.experts) == (linear, experts)
    assert (sizes.num_experts, sizes.num_chosen) == counts


def test_windows_and_states_bound_the_cache() -> None:
    wide = cost_of(SHAPES["tiny"], "bfloat16")  # two layers of two KV heads of 16
    layers = (wide.config.layers[0], replace(wide.config.layers[1], window=10))
    narrow = cost_of(replace(wide.config, layers=layers), "bfloat16")
    assert wide.kv_bytes(1000) == 1000 * 256
    assert narrow.kv_bytes(1000) == (1000 + 10) * 128
    assert narrow.decode(1000).num_bytes == wide.decode(1000).num_bytes - 990 * 128
    mixed = cost_of(SHAPES["qwen3.5-0.8b"], "bfloat16")
    assert mixed.layout.bytes_per_state > 18 * 10**6  # 18 layers of more than 1 MB
    assert mixed.kv_bytes(1000) == 1000 * mixed.kv_bytes_per_token + mixed.layout.bytes_per_state


@given(
    st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.sampled_from([None, 1, 7, 64])
)
def test_chunks_compute_the_same_products(
    first: int, second: int, output: int, window: int | None
) -> None:
    """The products of two chunks are those of the whole prompt, and a decode step is a chunk of
    one token; only the head runs once more.
    """
    layer = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=16, window=window)
    sizes = ModelSizes(parameters=900, linear=500, head=300, weight_bytes=1800, plain_bytes=1800)
    config = replace(SHAPES["tiny"], layers=(layer,))
    layout = KvLayout(layers=config.layers, dtype="bfloat16", model="")
    cost = InferenceCost(config=config, sizes=sizes, layout=layout)
    together = cost.prefill(first + second).flops
    assert cost.prefill(first).flops + cost.prefill(first + second, first).flops == together + 600
    steps = total(cost.decodes(first, output + 1)).flops
    assert cost.prefill(first + output).flops + 600 * output == cost.prefill(first).flops + steps
    # Without a cache every token costs a prefill, so never less than with one.
    assert total(cost.without_cache(first, output + 1)).flops >= cost.prefill(first).flops + steps


def test_quantized_weights_are_read_in_their_bytes() -> None:
    config = SHAPES["llama-3-8b"]
    plain, rounded = (make_cost(config, "bfloat16", quantization=each) for each in (None, "int8"))
    assert rounded.sizes.parameters == plain.sizes.parameters
    ratio = rounded.decode(1).num_bytes / plain.decode(1).num_bytes
    assert 0.45 < ratio < 0.65
    assert rounded.decode(1).flops == plain.decode(1).flops


def test_the_floor_is_the_longer_of_both_times() -> None:
    device = Roofline(bytes_per_s=100.0, flops_per_s=1000.0)
    assert (device.seconds(Work(200, 1000)), device.bound(Work(200, 1000))) == (2.0, "memory")
    assert (device.seconds(Work(200, 9000)), device.bound(Work(200, 9000))) == (9.0, "compute")


def test_a_report_adds_up() -> None:
    cost = cost_of(SHAPES["tiny"], "float32")
    device = Roofline(bytes_per_s=1e9, flops_per_s=1e9)
    report = cost_report("tiny", cost, prompt_tokens=20, output_tokens=5, devices={"given": device})
    works = [cost.prefill(20), *(cost.decode(20 + number) for number in (1, 2, 3, 4))]
    assert report.with_cache.flops == sum(work.flops for work in works)
    again = [cost.prefill(20 + number) for number in range(5)]
    assert report.without_cache.num_bytes == sum(work.num_bytes for work in again)
    (floor,) = report.floors
    assert floor.with_cache_seconds == pytest.approx(sum(map(device.seconds, works)))
    assert floor.without_cache_seconds == pytest.approx(sum(map(device.seconds, again)))
    assert floor.ttft_seconds == device.seconds(works[0])
    assert floor.tpot_seconds == pytest.approx(device.seconds(cost.decode(22.5)))
    assert report.kv_bytes == 24 * cost.kv_bytes_per_token


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["plan", "cost", *args])
    assert result.exception is None, result.output
    return result.output


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "qwen3.json"
    path.write_text(json.dumps(HF_CONFIGS["qwen3-30b-a3b"]))
    return path


def test_the_command_needs_only_a_config(config_file: Path) -> None:
    text = run(str(config_file), "--prompt", "1000", "--output", "100", "--device", "h100")
    assert "30.5 billion parameters, 3.35 billion of them for each token" in text
    assert "61.1 GB of weights in bfloat16" in text
    assert "98,304 B for each token; 786,432 B if each query head had its own" in text
    assert "108 MB after 1,000 + 100 tokens" in text
    (row,) = (line for line in text.splitlines() if "h100" in line)
    assert row.count("memory") == 2  # 3 billion active of 30 billion read parameters


def test_the_command_writes_json_for_a_device_of_ones_own(config_file: Path) -> None:
    args = [str(config_file), "--bandwidth", "100", "--rate", "10", "--batch", "8", "--json"]
    found = json.loads(run(*args))
    cost = cost_of(SHAPES["qwen3-30b-a3b"], "bfloat16")
    device = Roofline(bytes_per_s=1e11, flops_per_s=1e13)
    report = cost_report(
        str(config_file),
        cost,
        prompt_tokens=512,
        output_tokens=128,
        batch=8,
        devices={"given": device},
    )
    assert found == json.loads(json.dumps(report.as_json()))
    assert found["first_decode"]["num_bytes"] == cost.decode(513, 8).num_bytes


def test_measured_times_are_printed_beside_the_floors(config_file: Path) -> None:
    """A prompt of 300 tokens takes chunks of 128, 128 and 44."""
    profile = config_file.with_name("profile.json")
    profile.write_text(make_profile(1, 2, model=config_file.name).model_dump_json())
    args = [str(config_file), "--prompt", "300", "--output", "11", "--batch", "4"]
    args += ["--profile", str(profile)]
    (first, second) = json.loads(run(*args, "--json"))["measured"]
    assert (first["workers"], second["workers"]) == (1, 2)
    prefill = 3 * (PROFILED.fixed + PROFILED.each_sequence) + 300 * PROFILED.each_prompt_token
    prefill += 300 * 301 / 2 * PROFILED.each_prompt_context
    # The context is read once for every 32 tokens.
    reads = 4 * 64.5 + 4 * 192.5 + 2 * 278.5
    prefill += int(reads) * PROFILED.each_context_token
    assert first["ttft_seconds"] == pytest.approx(prefill)
    step = PROFILED.fixed + 4 * (PROFILED.each_sequence + 306 * PROFILED.each_context_token)
    assert first["tpot_seconds"] == pytest.approx(step)
    assert f"TPOT {milliseconds(step)}, {4 / step:,.0f} tokens/s" in run(*args)
    args[2] = "9000"
    assert "outside the measured grid (prompt context: " in run(*args)
    result = CliRunner().invoke(app, ["plan", "cost", str(config_file.parent / "other"), *args[1:]])
    assert "--profile: " in str(result.exception)


def test_floors_are_those_of_the_numbers_of_the_profile(config_file: Path) -> None:
    numbers = {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "fp8"}
    profile = config_file.with_name("profile.json")
    made = make_profile(1, model=config_file.name).model_copy(update=numbers)
    profile.write_text(made.model_dump_json())
    args = [str(config_file), "--profile", str(profile)]
    options = ("--dtype", "float32", "--quantization", "int8", "--kv-cache-dtype", "fp8")
    found, expected = (
        json.loads(run(*each, "--json")) for each in (args, [str(config_file), *options])
    )
    assert found["measured"]
    assert {**found, "measured": []} == {**expected, "measured": []}
    for option, other in zip(options[::2], ("bfloat16", "int4", "auto"), strict=True):
        result = CliRunner().invoke(app, ["plan", "cost", *args, option, other])
        assert str(result.exception).startswith(f"{option}: is {other}, but the profile")


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--bandwidth", "9"], "--rate"),
        (["--rate", "9"], "--bandwidth"),
        (["--bandwidth", "-1", "--rate", "9"], "--bandwidth"),
        (["--device", "h200x"], "--device"),
        (["--dtype", "int3"], "--dtype"),
        (["--quantization", "int3"], "--quantization"),
    ],
)
def test_wrong_options_are_named(config_file: Path, args: list[str], option: str) -> None:
    result = CliRunner().invoke(app, ["plan", "cost", str(config_file), *args])
    assert option in str(result.exception)


def test_amounts_have_three_digits() -> None:
    assert [amount(each, "B") for each in (0, 7, 999, 1000, 13_476_831_232, 2.5e24)] == [
        "0 B",
        "7 B",
        "999 B",
        "1 kB",
        "13.5 GB",
        "2.5e+03 ZB",
    ]
    assert amount(999_999) == "1 million"
    assert [milliseconds(each) for each in (0.0001234, 0.1234, 3.2, 61)] == [
        "0.123 ms",
        "123 ms",
        "3,200 ms",
        "61.0 s",
    ]
