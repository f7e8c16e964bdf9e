"""Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388).

Both are Llama's tree, with windows in some layers; Qwen2 has biases of query, key and value, Qwen3 a norm of each query
and key head before the rotation."""

from collections.abc import Callable

import torch

from ..config import Fields, ModelConfig, parse_decoder_config
from ..layers.linear import BuildOptions
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin, apply_rotary
from .llama import LlamaAttention, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    """Computes Llama's attention over normed queries and keys."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        dim, epsilon = config.layers[index].head_dim, config.rms_norm_eps
        self.q_norm = RMSNorm(f"{prefix}.q_norm", dim, epsilon, build.dtype)
        self.k_norm = RMSNorm(f"{prefix}.k_norm", dim, epsilon, build.dtype)

    def rotate(self, query_key: torch.Tensor, rotary: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LlamaAttention.rotate`."""
        query, key = torch.split(query_key, self._head_counts, dim=1)
        return apply_rotary(self.q_norm(query), rotary), apply_rotary(self.k_norm(key), rotary)


def build_qwen3(config: ModelConfig, build: BuildOptions) -> LlamaForCausalLM:
    """See `ModelFamily.build`."""
    return LlamaForCausalLM(config, build, attention=Qwen3Attention)


def parse_qwen2_config(fields: Fields) -> ModelConfig:
    """See `ModelFamily.parse_config`."""
    return parse_decoder_config(fields, qkv_bias=True, window=_parse_windows(fields))


def parse_qwen3_config(fields: Fields) -> ModelConfig:
    """See `ModelFamily.parse_config`."""
    bias = fields.boolean("attention_bias", False)
    return parse_decoder_config(fields, qkv_bias=bias, output_bias=bias, window=_parse_windows(fields))


def _parse_windows(fields: Fields) -> Callable[[int], int | None]:
    """Returns the sliding window of each layer by its index."""
    if not fields.boolean("use_sliding_window", False) or fields.is_null("sliding_window"):
        return lambda index: None
    window = fields.integer("sliding_window", 4096)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, minimum=0)
        return lambda index: window if index >= first else None
    types, num_layers = fields.texts("layer_types"), fields.integer("num_hidden_layers")
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"must be {num_layers} times full_attention or sliding_attention")
    return lambda index: window if types[index] == "sliding_attention" else None
