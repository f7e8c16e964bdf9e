"""Qwen3 (arXiv 2505.09388): Llama's tree with a norm of each query and key head before the rotation."""

import torch

from ..config import Fields, ModelConfig, parse_decoder_config
from ..layers.build import BuildOptions
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin, apply_rotary
from .llama import LlamaAttention, LlamaForCausalLM
from .qwen2 import parse_windows


class Qwen3Attention(LlamaAttention):
    """Llama's attention over normed queries and keys."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        dim, epsilon = config.layers[index].head_dim, config.rms_norm_eps
        self.q_norm = RMSNorm(f"{prefix}.q_norm", dim, epsilon, build.dtype)
        self.k_norm = RMSNorm(f"{prefix}.k_norm", dim, epsilon, build.dtype)

    def rotate(self, query_key: torch.Tensor, rotary: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LlamaAttention.rotate`."""
        query, key = torch.split(query_key, self._head_counts, dim=1)
        return apply_rotary(self.q_norm(query), rotary), apply_rotary(self.k_norm(key), rotary)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama's tree with Qwen3's attention."""

    attention = Qwen3Attention

    @classmethod
    def parse_config(cls, fields: Fields) -> ModelConfig:
        """See `CausalLM.parse_config`."""
        bias = fields.boolean("attention_bias", False)
        return parse_decoder_config(fields, qkv_bias=bias, output_bias=bias, window=parse_windows(fields))
