"""Decoders that run through transformers' code with quantised weights: equality with transformers
over the weights that their numbers stand for, and what is refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.bench.engine.options import ROUNDED
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.tiny_multimodal import make_tiny_multimodal
from tandem.tests.tiny_quantized import AWQ, DEQUANTISED, FORMATS, FP8, make_quantized_decoder
from tandem.tests.workers.model import decoder_checks as checks
from tandem.tests.workers.model.helpers import load, mixed_steps, recorded_logits, reference
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.tests.workers.model.test_text_models import change_names
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.generic.causal_lm import TransformersForCausalLM
from tandem.workers.model.generic.linear import LinearSource
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.loader import (
    check_checkpoint,
    open_checkpoint,
    rank_weight_bytes,
    weight_schemes,
)
from tandem.workers.model.quant.base import LinearMethod
from tandem.workers.model.quant.rounded import RoundedLinearMethod
from tandem.workers.model.quant.stored import StoredLinearMethod
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod
from tandem.workers.model.runner import ModelRunner

NO_LATENTS = {"names": r"layers\.(?!.*kv_b_proj)", "num_key_value_heads": 8}
# Biases, a fused product, a head with another name, states, layers with few outputs, latents and
# experts that stay plain.
CASES = [
    ("starcoder2", "GPTQ act-order", {}),
    ("starcoder2", "W4A16 asymmetric", {}),
    ("glm4", "AWQ", {}),
    ("glm4", "FP8 channels", {}),
    ("gpt_neox", "W8A8 channels", {}),
    ("gpt_neox", "GPTQ 8 asymmetric", {}),
    ("qwen3_5_text", "fp8", {}),
    ("minicpm3", "FP8 tensor", NO_LATENTS),
    ("qwen3_moe", "AWQ", {"names": r"self_attn"}),
]


@pytest.mark.parametrize(("kind", "form", "options"), CASES)
def test_the_tokens_are_those_of_transformers(
    tmp_path: Path, kind: str, form: str, options: dict[str, Any]
) -> None:
    quantized, plain = make_quantized_decoder(tmp_path, kind, FORMATS[form], **options)
    model = reference(plain)
    runner = load(quantized, model_impl="transformers")
    assert checks.logit_difference(model, runner) <= checks.TOLERANCE
    tokens = checks.tokens_alone(runner)
    checks.check_greedy(model, tokens)
    assert checks.tokens_of_two_ranks(quantized) in (None, [tokens] * 2)


def test_a_text_model_may_be_quantized(tmp_path: Path) -> None:
    """Its layers have other names in the checkpoint than in the text model alone."""
    names = r"^model\.layers|language_model.*layers"
    quantized, plain = make_quantized_decoder(
        tmp_path, "qwen2_5_vl", AWQ, names=names, make=make_tiny_multimodal, num_key_value_heads=2
    )
    runner = load(quantized, model_impl="transformers")
    assert linears(runner)
    tokens = checks.tokens_alone(runner)
    checks.check_greedy(reference(plain), tokens)
    change_names(quantized, {"model.": "model.language_model."})  # those of transformers' modules
    assert checks.tokens_alone(load(quantized, model_impl="transformers")) == tokens


def linears(runner: ModelRunner) -> list[LinearSource]:
    model = runner._model
    assert isinstance(model, TransformersForCausalLM)
    return model.linears


@pytest.mark.parametrize("form", ["W4A16 64", "fp8", "GPTQ act-order"])
def test_kernels_multiply_by_the_numbers_and_the_plan_counts_them(
    tmp_path: Path, form: str
) -> None:
    quantized, plain = make_quantized_decoder(tmp_path, "glm4", FORMATS[form])
    runner = load(quantized, dtype="bfloat16", model_impl="transformers")
    methods = [each.method for each in linears(runner)]
    assert len(methods) == 2 * 6
    whole = cpu.can_multiply_fp8(64, 64) if form == "fp8" else cpu.can_multiply_int(64, 64)
    has_kernel = whole and form not in DEQUANTISED
    for each in methods:
        assert isinstance(each, StoredLinearMethod)
        assert isinstance(each._method, RoundedLinearMethod) == has_kernel
    counted, of_plain = (
        rank_weight_bytes(open_checkpoint(each, "transformers").config, "bfloat16", 1, 0)
        for each in (quantized, plain)
    )
    saved = sum(rank_bytes(each) for each in methods)
    weights = 2 * sum(
        each._plain.in_features * each._plain.out_features for each in linears(runner)
    )
    assert of_plain - counted == weights - saved
    (scheme,) = weight_schemes(check_checkpoint(quantized, "transformers"), "bfloat16")
    assert ("multiplied so on CPUs" in scheme) == has_kernel


def rank_bytes(method: LinearMethod) -> int:
    """The bytes of the numbers, scales and zeros that a method keeps."""
    assert isinstance(method, StoredLinearMethod)
    made = method._method
    if isinstance(made, RoundedLinearMethod):
        kept = [each for each in made._packed if each is not None]
    else:
        assert isinstance(made, UnquantizedLinearMethod)
        kept = [made._matrix]
    return sum(each.numel() * each.itemsize for each in kept)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", ROUNDED)
def test_rounded_weights_give_what_a_family_of_ours_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, is_tied: bool
) -> None:
    """In float32, where the products are those of torch; the head is rounded too."""
    folder = make_tiny_model(
        tmp_path, hidden_size=128, intermediate_size=256, tie_word_embeddings=is_tied
    )
    results = []
    for impl in ("auto", "transformers"):
        with recorded_logits(monkeypatch) as logits:
            tokens = mixed_steps(load(folder, model_impl=impl, quantization=quantization))
        results.append((tokens, torch.cat(logits)))
    (expected, of_ours), (tokens, found) = results
    assert tokens == expected
    assert (found - of_ours).abs().max() <= checks.TOLERANCE
    with recorded_logits(monkeypatch) as logits:
        mixed_steps(load(folder, model_impl="transformers"))
    assert (found - torch.cat(logits)).abs().max() > 10 * checks.TOLERANCE


@pytest.mark.parametrize("is_tied", [True, False])
def test_two_ranks_round_to_the_tokens_of_one(tmp_path: Path, is_tied: bool) -> None:
    """With groups of inputs that are within one rank."""
    folder = make_tiny_decoder(
        tmp_path, "cohere", hidden_size=128, intermediate_size=256, tie_word_embeddings=is_tied
    )
    options: dict[str, Any] = {"model_impl": "transformers", "quantization": "int8"}
    expected = checks.tokens_alone(load(folder, **options))
    assert on_ranks(folder, 2, checks.tokens_alone, **options) == [expected] * 2


@pytest.mark.parametrize(
    ("kind", "config", "names", "reason"),
    [
        (
            "qwen3_moe",
            AWQ,
            "layers",
            "model.layers.0.mlp.experts.0.down_proj.weight: missing, but "
            "model.layers.0.mlp.experts.0.down_proj.qweight exists: the weight is quantized, but ",
        ),
        (
            "deepseek_v2",
            FP8,
            "kv_b_proj",
            "model.layers.0.self_attn.kv_b_proj.weight: dtype F8_E4M3 is not supported, only F32, "
            "BF16, F16; the weight is quantized, but ",
        ),
    ],
)
def test_other_quantized_weights_are_refused_by_name(
    tmp_path: Path, kind: str, config: dict[str, Any], names: str, reason: str
) -> None:
    folder, _ = make_quantized_decoder(
        tmp_path, kind, config, names=names, num_key_value_heads=8, moe_intermediate_size=64
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, "transformers")
    assert str(caught.value) == (
        f"model.safetensors: {reason}transformers' code of this model supports that only for "
        "linear layers: not for stacked experts, latent projections and weights that it multiplies "
        "by itself"
    )


def test_experts_are_not_rounded(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "granitemoe")
    reason = (
        "^config.json: architectures: 'GraniteMoeForCausalLM' runs through transformers' code, and "
        "int4 cannot be applied to its experts model.layers.0.block_sparse_moe"
    )
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder, "transformers", quantization="int4")
