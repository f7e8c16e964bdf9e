"""Architectures that transformers does not have, in float32: their checkpoints have the logits of a
model of transformers with the same code, within 1e-4.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import (
    Driver,
    load,
    prompt,
    recorded_logits,
    reference,
    reference_logits,
)
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.registry import load_model_config

SCALE_EMB, SCALE_DEPTH, DIM_MODEL_BASE = 12, 1.4, 32
MINICPM = {"scale_emb": SCALE_EMB, "scale_depth": SCALE_DEPTH, "dim_model_base": DIM_MODEL_BASE}


def rename(folder: Path, architecture: str, **fields: Any) -> None:
    """Changes a checkpoint's config.json to that of an architecture with code in its folder."""
    path = folder / "config.json"
    own = {
        "architectures": [architecture],
        "auto_map": {"AutoModelForCausalLM": f"modeling.{architecture}"},
        "model_type": "unknown",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | own | fields))


def check_logits(folder: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the logits after two chunks."""
    driver, ids = Driver(load(folder)), prompt(70)
    expected = reference_logits(model, ids)
    with recorded_logits(monkeypatch) as logits:
        for start, end in ((0, 40), (40, 70)):
            driver.run(driver.step(1, ids[start:end], start))
    difference = torch.cat(logits) - expected[[39, 69]]
    assert difference.abs().max() <= 1e-4


def with_factors(model: Any) -> torch.nn.Module:
    """Makes transformers' Llama compute MiniCPM, by the definition of its factors."""
    depth = SCALE_DEPTH / math.sqrt(len(model.model.layers))
    width = model.config.hidden_size / DIM_MODEL_BASE

    def scale_attention(module: Any, args: Any, output: Any) -> Any:
        return (output[0] * depth, *output[1:])

    model.model.embed_tokens.register_forward_hook(lambda module, args, x: x * SCALE_EMB)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(scale_attention)
        layer.mlp.register_forward_hook(lambda module, args, x: x * depth)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] / width,))
    changed: torch.nn.Module = model
    return changed


@pytest.mark.parametrize("architecture", ["AquilaForCausalLM", "AquilaModel"])
def test_aquila(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Most of its checkpoints have the second name and a head."""
    folder = make_tiny_model(tmp_path)
    model = reference(folder)
    rename(folder, architecture)
    check_logits(folder, model, monkeypatch)


def test_mimo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints also have layers that predict a second token."""
    folder = make_tiny_model(tmp_path, "qwen2")
    model = reference(folder)
    file = folder / "model.safetensors"
    further = {"model.mtp_layers.0.input_proj.weight": torch.ones(64, 128)}
    save_file(load_file(file) | further, file, {"format": "pt"})
    rename(folder, "MiMoForCausalLM", attention_bias=True, num_nextn_predict_layers=1)
    check_logits(folder, model, monkeypatch)


def test_minicpm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, num_hidden_layers=3)
    model = with_factors(reference(folder))
    rename(folder, "MiniCPMForCausalLM", **MINICPM)
    check_logits(folder, model, monkeypatch)


def test_minicpm_without_factors_has_those_of_its_code(tmp_path: Path) -> None:
    """They are all 1, and the head is tied."""
    folder = make_tiny_model(tmp_path)
    rename(folder, "MiniCPMForCausalLM", tie_word_embeddings=None)
    config = load_model_config(folder)
    assert config.tie_word_embeddings
    assert (config.embedding_scale, config.attention_scale) == (1.0, None)
    assert (config.residual_scale, config.logits_scale) == (1 / math.sqrt(2), 1 / 64)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("num_experts", 8, "MiniCPM with experts is not supported"),
        ("sparse_config", {"dense_len": 8192}, "sparse attention is not supported; remove it"),
    ],
)
def test_minicpm_with_other_layers_is_refused(
    tmp_path: Path, field: str, value: object, reason: str
) -> None:
    folder = make_tiny_model(tmp_path)
    rename(folder, "MiniCPMForCausalLM", **MINICPM | {field: value})
    with pytest.raises(CheckpointError, match=rf"^config\.json: {field}: {reason}"):
        load_model_config(folder)
