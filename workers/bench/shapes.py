"""What the benchmark runs: shapes without a checkpoint, random weights, and what a step must read and compute."""

import zlib
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch

from ..model.checkpoint import expected_tensors
from ..model.config import ModelConfig, RopeConfig
from ..model.kv_store import kv_bytes_per_block
from ..model.weights import DTYPES, Weights


class BenchError(ValueError):
    """The benchmark cannot run as asked; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The least that a step, or a whole prefill, moves and computes."""

    num_bytes: int  # weights and KV cache read, each once
    flops: int  # of matrix products, attention's included


_LLAMA_3_8B: Final = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig(theta=500_000.0),
    windows=(None,) * 32,
    eos_token_ids=(),
    dtype="bfloat16",
)

SHAPES: Final[dict[str, ModelConfig]] = {
    "tiny": replace(
        _LLAMA_3_8B,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        windows=(None,) * 2,
    ),
    "smollm2-135m": replace(
        _LLAMA_3_8B,
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=100_000.0),
        windows=(None,) * 30,
    ),
    "llama-3-8b": _LLAMA_3_8B,
    "mistral-7b": replace(
        _LLAMA_3_8B,
        architecture="MistralForCausalLM",
        vocab_size=32_768,
        max_position_embeddings=32_768,
        rope=RopeConfig(theta=1_000_000.0),
    ),
    "qwen3-8b": replace(
        _LLAMA_3_8B,
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        intermediate_size=12_288,
        num_layers=36,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        qk_norm=True,
        rope=RopeConfig(theta=1_000_000.0),
        windows=(None,) * 36,
    ),
}


class RandomWeights(Weights):
    """Weights of a shape that no file holds. Each tensor depends on its name alone; activations stay near 1."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._shapes = expected_tensors(config)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def _stored(self, name: str, *slices: slice) -> torch.Tensor:
        """Makes one tensor on the device. Raises KeyError if the shape has none of this name."""
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if "norm" in name:
            tensor.fill_(1)
        else:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(0, 0.4 if "embed" in name else shape[-1] ** -0.5, generator=generator)
        return tensor[slices] if slices else tensor


def decode_cost(config: ModelConfig, dtype: str, batch: int, context: float) -> StepCost:
    """One decode step of `batch` sequences whose tokens see `context` positions each."""
    key_bytes = kv_bytes_per_block(config, 1, dtype) // config.num_layers  # a token's keys and values in one layer
    visible = sum(min(context, window or context) for window in config.windows)  # positions over all layers
    params = _linear_params(config) + _head_params(config)
    attention = 4 * config.num_heads * config.head_dim * visible
    return StepCost(
        num_bytes=params * DTYPES[dtype].itemsize + int(batch * visible * key_bytes),
        flops=int(batch * (2 * params + attention)),
    )


def prefill_cost(config: ModelConfig, dtype: str, prompt: int) -> StepCost:
    """A prompt's whole prefill, as if in one step; the head runs once."""
    visible = sum(_causal_pairs(prompt, window) for window in config.windows)
    attention = 4 * config.num_heads * config.head_dim * visible
    return StepCost(
        num_bytes=(_linear_params(config) + _head_params(config)) * DTYPES[dtype].itemsize,
        flops=2 * prompt * _linear_params(config) + 2 * _head_params(config) + attention,
    )


def weight_bytes(config: ModelConfig, dtype: str, device: torch.device) -> int:
    """Bytes of the loaded model, with the largest copy that loading makes."""
    params = sum(prod(shape) for shape in expected_tensors(config).values())
    if config.tie_word_embeddings and device.type == "cpu":
        params += _head_params(config)  # the embedding's rows and the head's packed form
    copied = max(_head_params(config), 2 * config.intermediate_size * config.hidden_size)
    return (params + copied) * DTYPES[dtype].itemsize


def _linear_params(config: ModelConfig) -> int:
    shapes = expected_tensors(config).items()
    return sum(prod(shape) for name, shape in shapes if name.startswith("model.layers.") and len(shape) == 2)


def _head_params(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def _causal_pairs(num_tokens: int, window: int | None) -> int:
    """How many (query, key) pairs a causal layer computes."""
    seen = min(num_tokens, window or num_tokens)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen
