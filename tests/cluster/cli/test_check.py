"""`tandem check`: what it says of folders that would run, and of broken ones."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.tiny_multimodal import make_tiny_multimodal
from tandem.tests.tiny_quantized import FORMATS, make_quantized_model
from tandem.workers.model.kernels.c import cpu


def check(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_model_with_code_of_ours(tmp_path: Path) -> None:
    code, text = check(str(make_tiny_model(tmp_path)), "--dtype", "float32")
    assert code == 0
    assert f"{tmp_path}: runs, by Tandem's own LlamaForCausalLM" in text
    assert "parameters, stored as float32; context of 2,048 tokens" in text
    assert "512 B" in text  # keys and values of 2 KV heads x 16 x 4 bytes, in 2 layers


def test_a_quantised_model_says_its_scheme(tmp_path: Path) -> None:
    """And counts the weights that it stands for, not the numbers that it is stored in."""
    folder, plain = make_quantized_model(tmp_path, FORMATS["FP8 channels"])
    code, text = check(str(folder))
    assert code == 0
    scheme = "compressed-tensors float-quantized W8A8 FP8, a scale for each output"
    has_kernel = cpu.can_multiply_fp8(64, 64)
    kept = (
        "multiplied so on CPUs like this one"
        if has_kernel
        else "turned into bfloat16 when they are loaded"
    )
    assert f"weights: {scheme}, {kept}" in text
    counts = [re.search(r"([\d,]+) parameters", each) for each in (text, check(str(plain))[1])]
    assert len({each and each[1] for each in counts}) == 1


def test_for_a_gpu_it_counts_the_weights_that_a_gpu_keeps(tmp_path: Path) -> None:
    """Integers have no kernel there."""
    quantized, plain = make_quantized_model(tmp_path, FORMATS["W8A16 channels"])
    code, text = check(str(quantized), "--device", "cuda")
    assert code == 0
    assert "turned into bfloat16 when they are loaded" in text
    tables = [
        check(str(folder), "--device", "cuda")[1].partition("on cuda, on each rank:")[2]
        for folder in (quantized, plain)
    ]
    assert tables[0]
    assert tables[0] == tables[1]


def test_for_exact_numerics_a_gpu_converts_weights(tmp_path: Path) -> None:
    quantized, plain = make_quantized_model(tmp_path, FORMATS["FP8 channels"])
    exact = ["--device", "cuda", "--numerics", "exact"]
    texts = [check(str(folder), *exact)[1] for folder in (quantized, plain)]
    assert "turned into bfloat16 when they are loaded" in texts[0]
    tables = [text.partition("on cuda, on each rank:")[2] for text in texts]
    assert tables[0]
    assert tables[0] == tables[1]
    assert "multiplied so on GPUs with FP8" in check(str(quantized), "--device", "cuda")[1]


def test_a_model_with_code_of_transformers(tmp_path: Path) -> None:
    code, text = check(str(make_tiny_decoder(tmp_path, "cohere")))
    assert code == 0
    assert "runs, by transformers' CohereForCausalLM over Tandem's attention" in text
    assert check(str(tmp_path), "--model-impl", "tandem")[0] == 1


def test_a_model_without_a_plan_says_so(tmp_path: Path) -> None:
    folder = str(make_tiny_decoder(tmp_path, "gpt2"))
    code, text = check(folder)
    assert (
        code,
        "transformers has no plan to split GPT2LMHeadModel; use 1" in text,
    ) == (0, True)
    assert check(folder, "--tp", "2")[0] == 1
    assert check(folder, "--device", "cuda")[0] == 0
    code, text = check(folder, "--device", "cuda", "--numerics", "exact")
    assert code == 1
    assert text.startswith(f"{folder}: refused: numerics: exact on cuda needs Tandem's own code; ")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        # In layers 0 and 2, 4 value heads keep a matrix of 16 x 16 in float32, and the
        # convolution of 128 channels keeps three inputs in bfloat16.
        ("qwen3_5_text", "layers 0, 2 (of 3 with a cache) keep 9,728 B"),
        ("mamba2", "layers 0-1 (of 2 with a cache) keep 18,688 B"),
    ],
)
def test_a_model_with_states_names_their_layers_and_bytes(
    tmp_path: Path, kind: str, line: str
) -> None:
    folder = str(make_tiny_decoder(tmp_path, kind))
    code, text = check(folder)
    assert code == 0
    assert f"\nstates: {line} for each of the 2 states of a sequence\n" in text
    code, text = check(folder, "--device", "cuda")
    assert code == 1
    reason = "device: cuda: models that keep states run on cpu only; "
    assert text.startswith(f"{folder}: refused: {reason}")


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_text_model_names_the_parts_that_are_not_loaded(tmp_path: Path, model_impl: str) -> None:
    folder = make_tiny_multimodal(tmp_path, "gemma3")
    code, text = check(str(folder), "--model-impl", model_impl)
    assert code == 0
    lines = [line for line in text.splitlines() if line.startswith("text only")]
    assert lines == ["text only: vision_config is not loaded"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("truncated", "model.safetensors: .*truncated"),
        ("shape", "model.safetensors: .*shape is .* config.json requires"),
        ("shard", "model-00002-of-00002.safetensors: cannot be read"),
        ("weights", "model.safetensors: not found"),
        ("json", "config.json: not valid JSON"),
        ("rwkv", "config.json: .*keeps state in a way that is not supported"),
        ("tokenizer", "tokenizer.json: not found"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "cohere"])
def test_a_broken_folder_is_refused_by_file_field_and_reason(
    tmp_path: Path, kind: str, damage: str, reason: str
) -> None:
    folder = make_tiny_decoder(tmp_path, kind)
    break_folder(folder, damage)
    result = CliRunner().invoke(app, ["check", str(folder)])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"{folder}: refused: ")
    assert re.search(reason, line), line


def break_folder(folder: Path, damage: str) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    fields = json.loads(config.read_text())
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "shape":
        config.write_text(json.dumps(fields | {"intermediate_size": 112}))
    elif damage == "shard":
        weights.rename(folder / "model-00001-of-00002.safetensors")
        index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif damage == "weights":
        weights.unlink()
    elif damage == "json":
        config.write_text("{")
    elif damage == "rwkv":
        config.write_text(json.dumps({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}))
    elif damage == "tokenizer":
        (folder / "tokenizer.json").unlink()
