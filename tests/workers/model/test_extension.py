"""What an extension adds from outside the package: a model family, a linear method; each in one
file, this one.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import Driver, load, prompt, reference, reference_greedy
from tandem.tests.workers.model.test_parallel import on_ranks
from tandem.workers.engine.plan import OnLayers
from tandem.workers.model import registry
from tandem.workers.model.attention.backend import StepAttention
from tandem.workers.model.config import CheckpointError, Fields, ModelConfig
from tandem.workers.model.layers.linear import (
    BuildOptions,
    ColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    qkv_outputs,
)
from tandem.workers.model.layers.rows import EmbeddingRows
from tandem.workers.model.loader import (
    check_checkpoint,
    open_checkpoint,
    rank_weight_bytes,
    weight_bytes,
)
from tandem.workers.model.models.family import CausalLM, ModelFamily
from tandem.workers.model.models.parsing import parse_decoder_config
from tandem.workers.model.module import Module, Parameter
from tandem.workers.model.quant.base import LinearMethod, LinearPartition
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.states.steps import StepStates

# A model family: embedding, layers of attention without norms, rotation or MLP, head.


class ToyAttention(Module):
    """Attention without positions."""

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        layer, prefix, heads = (
            config.layers[index],
            f"toy.{index}",
            build.tp.query_heads(config.layers[index]),
        )
        self._index, self._dim = index, layer.head_dim
        local = build.tp.local_geometry(layer)
        self._counts = [local.num_heads, local.num_kv_heads, local.num_kv_heads]
        self.qkv = ColumnParallelLinear(
            qkv_outputs(prefix, layer, build.tp), config.hidden_size, build
        )
        inputs = slice(heads.start * layer.head_dim, heads.stop * layer.head_dim)
        size = layer.num_heads * layer.head_dim
        self.out = RowParallelLinear(
            f"{prefix}.out", config.hidden_size, size, inputs, build, bias=False
        )

    def __call__(self, x: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """[num_tokens, hidden] to the same."""
        heads = self.qkv(x).view(len(x), -1, self._dim)
        query, key, value = torch.split(heads, self._counts, dim=1)
        return self.out(attention(self._index, query, key, value), x)


class ToyForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        size = (config.vocab_size, config.hidden_size)
        self.embedding = VocabParallelEmbedding("toy.embedding", *size, build)
        self.layers = [ToyAttention(config, index, build) for index in range(len(config.layers))]
        self.head = ParallelLMHead("toy.head", size, build)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        on_layers: OnLayers | None = None,
        rows: EmbeddingRows | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        if rows is not None:
            raise ValueError("rows: this family takes no rows in place of embeddings")
        x = self.embedding(token_ids)
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def parse_toy_config(fields: Fields) -> ModelConfig:
    """The second layer has a window; a family may also have other head counts in some layers."""
    return parse_decoder_config(fields, window=lambda index: 9 if index else None)


TOY = ModelFamily(parse_toy_config, ToyForCausalLM)


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    """A Llama folder whose weights are the toy's."""
    folder = make_tiny_model(tmp_path / "toy")
    fields = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["ToyForCausalLM"]
    }
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = {
        f"toy.{layer}.{name}_proj": (rows, 64)
        for layer in (0, 1)
        for name, rows in zip("qkv", (64, 32, 32), strict=True)
    }
    shapes |= {
        "toy.0.out": (64, 64),
        "toy.1.out": (64, 64),
        "toy.embedding": (512, 64),
        "toy.head": (512, 64),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def toy_greedy(folder: Path, tokens: list[int], num_tokens: int) -> list[int]:
    """The toy in plain torch, whole prompts at once."""
    weights = load_file(folder / "model.safetensors")
    tokens = list(tokens)
    for _ in range(num_tokens):
        x = weights["toy.embedding.weight"][tokens]
        for layer, window in ((0, len(tokens)), (1, 9)):
            q, k, v = (
                functional.linear(x, weights[f"toy.{layer}.{name}_proj.weight"])
                .view(len(x), -1, 16)
                .transpose(0, 1)
                for name in "qkv"
            )
            distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
            mask = (distance >= 0) & (distance < window)
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            x = x + functional.linear(
                mixed.transpose(0, 1).flatten(1), weights[f"toy.{layer}.out.weight"]
            )
        tokens.append(int(functional.linear(x[-1], weights["toy.head.weight"]).argmax()))
    return tokens[-num_tokens:]


def test_a_family_from_outside_generates(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and split over ranks; checkpoint check and memory plan come with the tree."""
    with pytest.raises(CheckpointError, match="'ToyForCausalLM' is no decoder that transformers"):
        check_checkpoint(toy_folder)
    monkeypatch.setitem(registry.MODELS, "ToyForCausalLM", TOY)
    expected = toy_greedy(toy_folder, prompt(30), 12)
    assert len(set(expected)) > 4

    def generate(runner: ModelRunner) -> list[int]:
        return Driver(runner).generate(1, prompt(30), 12)

    assert generate(load(toy_folder)) == expected
    assert on_ranks(toy_folder, 2, generate) == [expected] * 2
    config = check_checkpoint(toy_folder)
    assert weight_bytes(config, 1, "float32") == 4 * (2 * 512 * 64 + 2 * (64 + 64 + 64) * 64)
    weights = load_file(toy_folder / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "1.out" not in name},
        toy_folder / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=r"^model\.safetensors: toy\.1\.out\.weight: missing$"
    ):
        check_checkpoint(toy_folder)


def test_an_installed_package_brings_a_family(toy_folder: Path, tmp_path: Path) -> None:
    """By an entry point, so that workers in processes of their own find it."""
    installed = tmp_path / "site" / "toy-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        f"[tandem.models]\nToyForCausalLM = {__name__}:TOY\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(installed.parent)!r}); from pathlib import Path; "
        "from tandem.workers.model.loader import check_checkpoint; "
        f"print(check_checkpoint(Path({str(toy_folder)!r})).layers[1].window)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "9\n", done.stderr


# A linear method: 8-bit weights with a scale for each output.


class ToyLinearMethod(LinearMethod):
    def create_weights(self, partition: LinearPartition, dtype: torch.dtype) -> None:
        self.weight = Parameter(*partition.slices("weight"), dtype=torch.int8)
        self.scale = Parameter(*partition.output_slices("scale"), dtype=dtype)

    def process_after_load(self) -> None:
        self._transposed = self.weight.data.t().to(self.scale.data.dtype)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = (x @ self._transposed) * self.scale.data
        return y if residual is None else residual + y


def toy_method(quantization: Mapping[str, Any], name: str) -> LinearMethod:
    is_plain = name in quantization["not_converted"]
    return UnquantizedLinearMethod() if is_plain else ToyLinearMethod()


@pytest.fixture
def quantized_folder(tmp_path: Path) -> Path:
    """A Llama model in 8 bits beside the same in float32, in the folder `plain`."""
    folder, plain = make_tiny_model(tmp_path / "quantized"), make_tiny_model(tmp_path / "plain")
    quantized, dequantized = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if "_proj." not in name:
            quantized[name] = dequantized[name] = weight
            continue
        scale = weight.abs().amax(1) / 127
        quantized[name] = (weight / scale[:, None]).round().to(torch.int8)
        quantized[name.replace(".weight", ".scale")] = scale
        dequantized[name] = quantized[name] * scale[:, None]
    save_file(quantized, folder / "model.safetensors")
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "toy", "not_converted": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_linear_method_from_outside_generates(
    quantized_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="quant_method: 'toy' is not supported"):
        check_checkpoint(quantized_folder)
    monkeypatch.setitem(registry.LINEAR_METHODS, "toy", toy_method)
    plain = quantized_folder.parent / "plain"
    expected = reference_greedy(reference(plain), prompt(30), 12)

    def generate(runner: ModelRunner) -> list[int]:
        return Driver(runner).generate(1, prompt(30), 12)

    assert generate(load(quantized_folder)) == expected
    assert on_ranks(quantized_folder, 2, generate) == [expected] * 2
    config, plain_config = check_checkpoint(quantized_folder), check_checkpoint(plain)
    saved = rank_weight_bytes(plain_config, "float32", 2, 1) - rank_weight_bytes(
        config, "float32", 2, 1
    )
    weights = load_file(plain / "model.safetensors")
    projections = [weight for name, weight in weights.items() if "_proj." in name]
    columns = [
        name
        for name in weights
        if "_proj." in name and not name.endswith(("o_proj.weight", "down_proj.weight"))
    ]
    rows = sum(len(weights[name]) // 2 for name in columns) + sum(64 for _ in range(4))
    assert saved == 3 * sum(weight.numel() for weight in projections) // 2 - 4 * rows


def test_weights_of_another_dtype_than_the_method_s_are_refused(
    quantized_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.LINEAR_METHODS, "toy", toy_method)
    weights = load_file(quantized_folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(
        weights | {name: weights[name].to(torch.int16)}, quantized_folder / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=rf"^model\.safetensors: {name}: dtype I16 is not supported, only I8$"
    ):
        open_checkpoint(quantized_folder)
