"""Checkpoints in quantised formats: products, tokens and bytes against the weights that their
numbers stand for, and folders that are refused.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_quantized import (
    AWQ,
    DEQUANTISED,
    FLOATS,
    FORMATS,
    FP8,
    compressed_config,
    gptq_config,
    make_quantized_decoder,
    make_quantized_model,
    set_quantization,
)
from tandem.tests.workers.model.helpers import Driver, load, prompt, reference, reference_greedy
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.loader import (
    build_model,
    check_checkpoint,
    checkpoint_reader,
    load_weights,
    open_checkpoint,
    rank_weight_bytes,
    weight_bytes,
    weight_schemes,
)
from tandem.workers.model.module import all_parameters
from tandem.workers.model.quant.int4 import Int4LinearMethod
from tandem.workers.model.quant.rounded import RoundedLinearMethod
from tandem.workers.model.quant.scaled import ScaledLinearMethod
from tandem.workers.model.quant.stored import StoredLinearMethod, quantization_fields
from tandem.workers.model.quant.targets import is_plain
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod
from tandem.workers.model.runner import ModelRunner

WEIGHTS = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj"
HAS_KERNEL = cpu.can_multiply_int(64, 64)
HAS_FP8_KERNEL = cpu.can_multiply_fp8(64, 64)


@pytest.fixture(scope="module", params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(form: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_quantized_model(
        tmp_path_factory.mktemp("model"), FORMATS[form], attention_bias=True
    )


def generate(runner: ModelRunner) -> list[int]:
    return Driver(runner).generate(1, prompt(30), 12)


def test_the_tokens_are_those_of_the_dequantised_weights(folders: tuple[Path, Path]) -> None:
    quantized, plain = folders
    expected = reference_greedy(reference(plain), prompt(30), 12)
    assert len(set(expected)) > 4
    assert generate(load(quantized)) == expected
    assert on_ranks(quantized, 2, generate) == [expected] * 2


def test_the_products_are_those_of_the_dequantised_weights(
    folders: tuple[Path, Path], form: str
) -> None:
    """In bfloat16: by the kernel, where it has the format, and else by the weights in bfloat16;
    each layer whole and split over two ranks, gates fused and not, and a row whatever the others.
    """
    quantized, plain = folders
    weights = load_file(plain / WEIGHTS)
    gate_up = torch.cat(
        [weights[DOWN.replace("down", name) + ".weight"] for name in ("gate", "up")]
    )
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

    def layer(runner: ModelRunner) -> Any:
        return runner._model.layers[0].mlp  # type: ignore[attr-defined]

    def down(runner: ModelRunner) -> torch.Tensor:
        begin = 128 * runner.kv.rank
        return layer(runner).down_proj.method.apply(x[:, begin : begin + 128]).float()  # type: ignore[no-any-return]

    whole = load(quantized, dtype="bfloat16")
    mlp = layer(whole)
    assert_near(mlp.down_proj.method.apply(x), x.float() @ weights[f"{DOWN}.weight"].T)
    assert_near(
        sum(on_ranks(quantized, 2, down, dtype="bfloat16")), x.float() @ weights[f"{DOWN}.weight"].T
    )
    expected = x[:, :128].float() @ gate_up.T
    assert_near(mlp.gate_up_proj.method.apply(x[:, :128]), expected)
    gate, up = expected.chunk(2, dim=-1)
    assert_near(
        mlp.gate_up_proj.method.apply_gated(x[:, :128]), torch.nn.functional.silu(gate) * up
    )
    for each, inputs in ((mlp.down_proj, x), (mlp.gate_up_proj, x[:, :128])):
        alone = [each.method.apply(row[None]) for row in inputs]
        assert torch.equal(torch.cat(alone), each.method.apply(inputs))
    made = mlp.down_proj.method._method
    assert isinstance(made, RoundedLinearMethod) == (
        HAS_FP8_KERNEL if form in FLOATS else HAS_KERNEL and form not in DEQUANTISED
    )


def assert_near(found: Any, expected: torch.Tensor) -> None:
    """Within the rounding of bfloat16, and of inputs to 8 bits."""
    assert (found.float() - expected).norm() / expected.norm() < 0.015


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_the_bytes_that_are_kept(folders: tuple[Path, Path], dtype: str) -> None:
    runner = load(folders[0], dtype=dtype)
    modules = list(runner._model.modules())
    tensors = [each.data for each in all_parameters(runner._model)]
    for each in modules:
        if isinstance(each, RoundedLinearMethod):
            tensors += [tensor for tensor in (*each._packed, each._bias) if tensor is not None]
        elif isinstance(each, UnquantizedLinearMethod):
            tensors.append(each._matrix)
    kept = {id(each): each.numel() * each.itemsize for each in tensors}
    assert rank_weight_bytes(runner.config, dtype, 1, 0) == sum(kept.values())


@pytest.mark.parametrize("tp", [1, 2])
def test_on_a_gpu_weights_are_kept_or_converted(folders: tuple[Path, Path], tp: int) -> None:
    """In FP8 if a scale is of a whole output, in 4 bits by groups; the plan counts what is kept."""
    quantized, plain = (open_checkpoint(each) for each in folders)
    schemes = weight_schemes(quantized.config, "bfloat16", "cuda")
    ends = ("multiplied so on GPUs with FP8", "kept so on GPUs")
    is_kept = any(scheme.endswith(ends) for scheme in schemes)
    counted, of_plain = (
        weight_bytes(each.config, tp, "bfloat16", "cuda") for each in (quantized, plain)
    )
    # Loading converts them: the tree of a GPU, loaded into this machine's memory.
    model = build_model(quantized.config, torch.bfloat16, device_type="cuda")
    load_weights(model, checkpoint_reader(quantized), torch.device("cpu"))
    assert not [each for each in model.modules() if isinstance(each, RoundedLinearMethod)]
    stored = [each for each in model.modules() if isinstance(each, StoredLinearMethod)]
    if not is_kept:
        assert counted == of_plain
        assert all(
            scheme.endswith("turned into bfloat16 when they are loaded") for scheme in schemes
        )
        assert all(isinstance(each._method, UnquantizedLinearMethod) for each in stored)
        return
    assert counted < of_plain
    exact = build_model(plain.config, torch.float32)
    load_weights(exact, checkpoint_reader(plain), torch.device("cpu"))
    matrices = [
        each._matrix for each in exact.modules() if isinstance(each, UnquantizedLinearMethod)
    ]
    for each, matrix in zip(stored, matrices, strict=False):
        if isinstance(each._method, Int4LinearMethod):
            weight = each._method.restore().float()
            bound = 8 * 2**-8 * float(each._method._terms[..., 0].max())
            torch.testing.assert_close(weight, matrix, rtol=2**-7, atol=bound)
            continue
        assert isinstance(each._method, ScaledLinearMethod)
        weight = each._method._numbers.float() * each._method._scales.t()
        torch.testing.assert_close(weight, matrix, rtol=2**-8, atol=1e-6)


def test_ignored_layers_are_plain(tmp_path: Path) -> None:
    config = compressed_config("pack-quantized", 4, "group", 32)
    config["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*", "re:.*down_proj$"]
    config["ignore"] = ["lm_head", "model.layers.1.mlp.down_proj"]
    quantized, plain = make_quantized_model(tmp_path, config)
    stored, restored = load_file(quantized / WEIGHTS), load_file(plain / WEIGHTS)
    for name in list(restored):
        if (
            "gate_proj" in name
            or "up_proj" in name
            or name == "model.layers.1.mlp.down_proj.weight"
        ):
            stored[name] = restored[name]
    save_file(stored, quantized / WEIGHTS)
    assert generate(load(quantized)) == reference_greedy(reference(plain), prompt(30), 12)


def test_each_map_of_a_layer_may_have_its_own_act_order(tmp_path: Path) -> None:
    """GPTQ gives maps of one input the same, but the format does not say so."""
    config = gptq_config(size=32, order=True)
    quantized, plain = make_quantized_model(tmp_path, config)
    stored, restored = load_file(quantized / WEIGHTS), load_file(plain / WEIGHTS)
    query = "model.layers.0.self_attn.q_proj"
    stored[f"{query}.g_idx"] = stored[f"{query}.g_idx"].flip(0)
    scales = stored[f"{query}.scales"].float().T
    before = scales[:, stored[f"{query}.g_idx"].flip(0).long()]
    after = scales[:, stored[f"{query}.g_idx"].long()]
    restored[f"{query}.weight"] = (restored[f"{query}.weight"] / before).round() * after
    save_file(stored, quantized / WEIGHTS)
    save_file(restored, plain / WEIGHTS, {"format": "pt"})
    assert generate(load(quantized)) == reference_greedy(reference(plain), prompt(30), 12)


Damage = Callable[[dict[str, torch.Tensor]], object]
W4, GPTQ = FORMATS["W4A16 64"], FORMATS["GPTQ act-order"]


@pytest.mark.parametrize(
    ("config", "damage", "reason"),
    [
        (W4, lambda tensors: tensors.pop(f"{DOWN}.weight_scale"), f"{DOWN}.weight_scale: missing"),
        (
            W4,
            lambda tensors: tensors.pop(f"{DOWN}.weight_packed"),
            f"{DOWN}.weight_packed: missing",
        ),
        (
            W4,
            lambda tensors: tensors.update(
                {f"{DOWN}.weight_packed": tensors[f"{DOWN}.weight_packed"][:, 1:].clone()}
            ),
            f"{DOWN}.weight_packed: shape is [128, 31], config.json requires [128, 32]",
        ),
        (
            W4,
            lambda tensors: tensors.update(
                {f"{DOWN}.weight_packed": tensors[f"{DOWN}.weight_packed"].long()}
            ),
            f"{DOWN}.weight_packed: dtype I64 is not supported, only I32",
        ),
        (
            W4,
            lambda tensors: tensors.update(
                {f"{DOWN}.weight_scale": tensors[f"{DOWN}.weight_scale"][:, :1].clone()}
            ),
            f"{DOWN}.weight_scale: shape is [128, 1], config.json requires [128, 4]",
        ),
        (
            W4,
            lambda tensors: tensors[f"{DOWN}.weight_scale"].fill_(float("inf")),
            f"{DOWN}.weight_scale: has NaN or infinite numbers in torch.float32",
        ),
        (GPTQ, lambda tensors: tensors.pop(f"{DOWN}.qzeros"), f"{DOWN}.qzeros: missing"),
        (
            GPTQ,
            lambda tensors: tensors[f"{DOWN}.g_idx"].add_(1),
            f"{DOWN}.g_idx: must have numbers from 0 to 7",
        ),
        (
            GPTQ,
            lambda tensors: tensors[f"{DOWN}.g_idx"].sub_(1),
            f"{DOWN}.g_idx: must have numbers from 0 to 7",
        ),
        (AWQ, lambda tensors: tensors.pop(f"{DOWN}.scales"), f"{DOWN}.scales: missing"),
        (
            AWQ | {"zero_point": False},
            lambda tensors: tensors.pop(f"{DOWN}.qzeros"),
            f"{DOWN}.qzeros: missing",
        ),
        (
            AWQ,
            lambda tensors: tensors.update(
                {f"{DOWN}.qzeros": tensors[f"{DOWN}.qzeros"].t().contiguous()}
            ),
            f"{DOWN}.qzeros: shape is [16, 4], config.json requires [4, 16]",
        ),
        (
            FP8,
            lambda tensors: tensors[f"{DOWN}.weight"].view(torch.uint8)[3, 5:6].fill_(0xFF),
            f"{DOWN}.weight: has NaN or infinite numbers in torch.float8_e4m3fn",
        ),
    ],
)
def test_broken_tensors_are_refused_by_file_tensor_and_reason(
    tmp_path: Path, config: dict[str, Any], damage: Damage, reason: str
) -> None:
    folder, _ = make_quantized_model(tmp_path, config)
    tensors = load_file(folder / WEIGHTS)
    damage(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(caught.value) == f"{WEIGHTS}: {reason}"


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    config = deepcopy(config)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method: 'bitsandbytes' is not supported, only compressed-tensors, gptq, awq, ",
        ),
        ({"quant_method": "x" * 999}, f"quant_method: '{'x' * 59} is not supported, only "),
        (
            W4 | {"format": "marlin-24"},
            "format: 'marlin-24' is not supported, only pack-quantized, ",
        ),
        (
            W4 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: is not supported",
        ),
        (
            W4 | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config: is not supported",
        ),
        (W4 | {"ignore": "lm_head"}, "ignore: must be a list of strings"),
        (W4 | {"ignore": ["re:("]}, "ignore: 're:(' is not a pattern that can be matched"),
        (
            changed(W4, num_bits=3),
            "config_groups.group_0.weights.num_bits: 3 is not supported, only 4 and 8",
        ),
        (changed(W4, num_bits="4"), "config_groups.group_0.weights.num_bits: must be an integer"),
        (
            changed(W4, strategy="tensor"),
            "config_groups.group_0.weights.strategy: 'tensor' is not supported for int",
        ),
        (
            changed(W4, group_size=0),
            "config_groups.group_0.weights.group_size: must be an integer from 1",
        ),
        (
            changed(W4, type="float"),
            "config_groups.group_0.weights.num_bits: 4 of floating point is not supported",
        ),
        (gptq_config(3), "bits: 3 is not supported, only 4 and 8"),
        (gptq_config(size=0), "group_size: must be -1 or above 0"),
        (
            gptq_config() | {"checkpoint_format": "marlin"},
            "checkpoint_format: 'marlin' is not supported, only gptq, ",
        ),
        (
            gptq_config() | {"dynamic": {"-:(": {}}},
            "dynamic: 're:(' is not a pattern that can be matched",
        ),
        (
            gptq_config() | {"dynamic": {"+:.*q_proj": True}},
            "dynamic: '+:.*q_proj': must be an object",
        ),
        (
            gptq_config() | {"dynamic": {".*q_proj": {"bits": 3}}},
            "bits: 3 is not supported, only 4 and 8",
        ),
        (AWQ | {"version": "gemv"}, "version: 'gemv' is not supported, only 'gemm'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size: must be two integers above 0"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo: 'NVFP4' is not supported, only 'FP8'",
        ),
        (FP8 | {"fmt": "e5m2"}, "fmt: 'e5m2' is not supported, only 'e4m3'"),
    ],
)
def test_unknown_schemes_are_refused_in_a_line(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder, _ = make_quantized_model(tmp_path, AWQ, num_hidden_layers=1)
    set_quantization(folder, config)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder)
    assert str(caught.value).startswith(f"config.json: quantization_config.{reason}")
    assert "\n" not in str(caught.value)


def test_a_pattern_that_takes_for_ever_is_given_up(tmp_path: Path) -> None:
    folder, _ = make_quantized_model(tmp_path, W4, num_hidden_layers=1)
    set_quantization(folder, W4 | {"ignore": [r"re:(?:[\w.]|[\w.]{2}|[\w.]{3})+[^\w.]"]})
    with pytest.raises(CheckpointError, match=r"ignore: .* is not a pattern that can be matched"):
        check_checkpoint(folder)


def with_own_map(
    tmp_path: Path, config: dict[str, Any], name: str, other: dict[str, Any] | None
) -> tuple[Path, Path]:
    """Returns a quantised model whose maps of a name are as another one has them, or plain; and the
    plain model.
    """
    quantized, plain = make_quantized_model(tmp_path / "first", config)
    source = make_quantized_model(tmp_path / "second", other)[0] if other else plain
    stored, restored = load_file(quantized / WEIGHTS), load_file(plain / WEIGHTS)
    for key in [key for key in stored if f".{name}." in key]:
        del stored[key]
    stored |= {key: each for key, each in load_file(source / WEIGHTS).items() if f".{name}." in key}
    save_file(stored, quantized / WEIGHTS)
    if other:
        second = load_file(source.parent / plain.name / WEIGHTS)
        restored |= {key: each for key, each in second.items() if f".{name}." in key}
        save_file(restored, plain / WEIGHTS, {"format": "pt"})
    return quantized, plain


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "up_proj"])
@pytest.mark.parametrize("bits", [None, 8])
def test_maps_of_one_input_may_be_stored_in_different_ways(
    tmp_path: Path, name: str, bits: int | None
) -> None:
    other = compressed_config("pack-quantized", bits, "group", 32) if bits else None
    quantized, plain = with_own_map(tmp_path, W4, name, other)
    groups = dict(W4["config_groups"])
    if other:
        own = other["config_groups"]["group_0"] | {"targets": [f"re:.*{name}"]}
        set_quantization(quantized, W4 | {"config_groups": {"group_1": own} | groups})
    else:
        set_quantization(quantized, W4 | {"ignore": ["lm_head", f"re:.*{name}"]})
    expected = reference_greedy(reference(plain), prompt(30), 12)
    assert generate(load(quantized)) == expected
    assert on_ranks(quantized, 2, generate) == [expected] * 2


def test_parts_of_a_map_may_lie_on_both_sides_of_maps_in_another_format(tmp_path: Path) -> None:
    """In Qwen3.5, q_proj has queries and their gates; keys and values lie between them."""
    quantized, plain = make_quantized_decoder(tmp_path, "qwen3_5_text", FP8, names="q_proj")
    expected = reference_greedy(reference(plain), prompt(30), 12)
    assert generate(load(quantized)) == expected
    assert on_ranks(quantized, 2, generate) == [expected] * 2


@pytest.mark.parametrize("bits", [None, 8])
def test_dynamic_settings_of_gptq_exclude_layers_or_change_them(
    tmp_path: Path, bits: int | None
) -> None:
    """As in the checkpoints of Qwen3.5, which exclude all attention."""
    other = gptq_config(bits, 32) if bits else None
    quantized, plain = with_own_map(tmp_path, gptq_config(), "down_proj", other)
    own = {"+:.*down_proj": {"bits": 8, "group_size": 32}} if bits else {"-:.*down_proj": {}}
    patterns = {"lm_head": {}, **own, ".*down": {"bits": 3}}
    set_quantization(quantized, gptq_config() | {"dynamic": patterns})
    expected = reference_greedy(reference(plain), prompt(30), 12)
    assert generate(load(quantized)) == expected
    assert on_ranks(quantized, 2, generate) == [expected] * 2


@pytest.mark.parametrize(
    ("entry", "excluded", "kept"),
    [
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj_2"),
        ("model.layers.*.mlp.gate", "model.layers.9.mlp.gate", "model.layers.9.mlp.gate_proj"),
        ("*.gate", "model.layers.9.mlp.gate", "model.layers.9.mlp.gate_proj"),
        (".*self_attn.*", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"),
        (
            r"re:model\.language_model\.layers\.(?:1|2)\.mlp.*",
            "model.layers.1.mlp.up_proj",
            "model.layers.11.mlp.up_proj",
        ),
        ("re:.*language_model[.].*mlp.*", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn"),
        ("re:.*up_proj$", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"),
    ],
)
def test_layers_are_excluded_by_name_part_and_pattern(entry: str, excluded: str, kept: str) -> None:
    """AWQ checkpoints write a dot after a name, and transformers reads an entry as a pattern."""
    fields = quantization_fields({"modules_to_not_convert": [entry]})
    assert is_plain(fields, excluded)
    assert not is_plain(fields, kept)


FP8_OF_MAPS: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", (1,)),
    "one number": ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", ()),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", ()),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, "weight_scale", (-1, 1)),
}


@pytest.mark.parametrize("name", FP8_OF_MAPS)
def test_fp8_without_blocks_is_read(tmp_path: Path, name: str) -> None:
    config, suffix, shape = FP8_OF_MAPS[name]
    folder = make_tiny_model(tmp_path / "model")
    stored = {key: each.clone() for key, each in load_file(folder / WEIGHTS).items()}
    restored = dict(stored)
    for key in [key for key in stored if key.endswith("_proj.weight") and "o_proj" not in key]:
        scale = (
            stored[key].abs().amax(1, keepdim=True) / 448
            if shape == (-1, 1)
            else stored[key].abs().max() / 448
        )
        stored[key] = (restored[key] / scale).to(torch.float8_e4m3fn)
        restored[key] = stored[key].float() * scale
        stored[key.replace(".weight", f".{suffix}")] = scale.reshape(shape)
        stored[key.replace(".weight", ".input_scale")] = torch.tensor(0.02)
    save_file(restored, folder / WEIGHTS, {"format": "pt"})
    expected = reference_greedy(reference(folder), prompt(30), 12)
    save_file(stored, folder / WEIGHTS)
    with pytest.raises(
        CheckpointError, match="the weights are quantized in another way than quantization_config"
    ):
        check_checkpoint(folder)
    field = "exclude_modules" if name == "ModelOpt" else "ignored_layers"
    plain = ["lm_head", "*.o_proj"] if name == "ModelOpt" else ["lm_head", "re:.*o_proj"]
    set_quantization(folder, config | {field: plain})
    assert generate(load(folder)) == expected


@pytest.mark.parametrize(
    ("file", "config"),
    [("quantize_config.json", gptq_config(size=32)), ("quant_config.json", AWQ)],
)
def test_a_quantisation_may_be_described_beside_config_json(
    tmp_path: Path, file: str, config: dict[str, Any]
) -> None:
    quantized, plain = make_quantized_model(tmp_path, config)
    named = {name: value for name, value in config.items() if name != "quant_method"}
    if file == "quant_config.json":  # by the names that AWQ's own files have
        named |= {"w_bit": named.pop("bits"), "q_group_size": named.pop("group_size")}
    for folder in (quantized, plain):  # where weights are plain, such a file counts for nothing
        values = json.loads((folder / "config.json").read_text())
        values.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(values))
        (folder / file).write_text(json.dumps(named))
        assert generate(load(folder)) == reference_greedy(reference(plain), prompt(30), 12)
    assert generate(load(quantized, model_impl="transformers")) == generate(load(quantized))


def test_the_first_name_of_compressed_tensors_configs_is_read(tmp_path: Path) -> None:
    quantized, plain = make_quantized_model(tmp_path, W4)
    values = json.loads((quantized / "config.json").read_text())
    values["compression_config"] = values.pop("quantization_config")
    (quantized / "config.json").write_text(json.dumps(values))
    assert generate(load(quantized)) == reference_greedy(reference(plain), prompt(30), 12)
    assert generate(load(quantized, model_impl="transformers")) == generate(load(quantized))


def test_the_scheme_is_said(tmp_path: Path) -> None:
    folder, plain = make_quantized_model(tmp_path, FP8, num_hidden_layers=1)
    kept = (
        "multiplied so on CPUs like this one"
        if HAS_FP8_KERNEL
        else "turned into bfloat16 when they are loaded"
    )
    assert weight_schemes(check_checkpoint(folder), "bfloat16") == [
        f"FP8, blocks of 48 x 32, {kept}"
    ]
    text = "FP8, blocks of 48 x 32, turned into float16 when they are loaded"
    assert weight_schemes(check_checkpoint(folder), "float16") == [text]
    assert weight_schemes(check_checkpoint(plain), "bfloat16") == []
    set_quantization(folder, AWQ)
    with pytest.raises(CheckpointError, match=r"down_proj\.qweight|q_proj\.qweight: missing"):
        check_checkpoint(folder)
