"""Qwen2 (arXiv 2407.10671), MiMo (arXiv 2505.07608) and Qwen3 (arXiv 2505.09388).

They are Llama's tree, with sliding windows in some layers. Qwen2 has biases of query, key and
value. MiMo is Qwen2; its further layers, which predict more than one token, are not read. Qwen3
normalizes each query and key head before the rotation.
"""

from typing import ClassVar

import torch

from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin, apply_rotary, rotated_order
from .family import DecoderLayer
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from .parsing import WindowOf, parse_decoder_config, parse_layer_types


class Qwen3Attention(LlamaAttention):
    """Computes Llama's attention over normalized queries and keys."""

    norm_offset: ClassVar[float] = 0.0  # added to the norms' weights; see `RMSNorm`
    norm_names: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        dim = config.layers[index].head_dim
        epsilon = config.norm_eps
        order = rotated_order(config.ropes[index], dim)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(
                f"{prefix}.{name}",
                dim,
                epsilon,
                build.dtype,
                offset=self.norm_offset,
                order=order,
            )

        self.q_norm = norm(self.norm_names[0])
        self.k_norm = norm(self.norm_names[1])

    def rotate(
        self, query_key: torch.Tensor, rotary: CosSin | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = torch.split(query_key, self._head_counts, dim=1)
        query = self.q_norm(query)
        key = self.k_norm(key)
        return (apply_rotary(query, rotary), apply_rotary(key, rotary)) if rotary else (query, key)


class Qwen3DecoderLayer(LlamaDecoderLayer):
    """Uses Qwen3's attention in Llama's layer."""

    attention_type = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Uses Qwen3's layers in Llama's tree."""

    layer_type: ClassVar[type[DecoderLayer]] = Qwen3DecoderLayer


def parse_qwen2_config(fields: Fields) -> ModelConfig:
    return parse_decoder_config(fields, qkv_bias=True, window=_parse_windows(fields))


def parse_qwen3_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return parse_decoder_config(
        fields, qkv_bias=bias, output_bias=bias, window=_parse_windows(fields)
    )


def _parse_windows(fields: Fields) -> WindowOf:
    """Returns a function from a layer's index to its sliding window."""
    if not fields.boolean("use_sliding_window", False) or fields.is_null("sliding_window"):
        return lambda index: None
    window = fields.integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28, minimum=0)
    slides = parse_layer_types(fields, lambda index: index >= first)
    return lambda index: window if slides(index) else None
