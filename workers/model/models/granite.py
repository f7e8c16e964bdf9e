"""Granite 3: Llama's tree with factors of embeddings, scores, residuals and logits."""

from dataclasses import replace

import torch

from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..layers.rotary import CosSin
from ..layers.scaling import scaled
from .llama import LlamaDecoderLayer, LlamaForCausalLM, parse_llama_config


class GraniteDecoderLayer(LlamaDecoderLayer):
    """Is Llama's layer with a factor of what attention and MLP add."""

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        super().__init__(config, index, build)
        self._scale = config.residual_scale

    def __call__(
        self, x: torch.Tensor, rotary: CosSin | None, attention: StepAttention
    ) -> torch.Tensor:
        """See `DecoderLayer.__call__`."""
        x = scaled(self.self_attn(self.input_layernorm(x), None, rotary, attention), self._scale, x)
        return scaled(self.mlp(self.post_attention_layernorm(x), None), self._scale, x)


class GraniteForCausalLM(LlamaForCausalLM):
    """Is Llama's tree but for the layers."""

    layer_type = GraniteDecoderLayer


def parse_granite_config(fields: Fields) -> ModelConfig:
    """See `ModelFamily.parse_config`."""
    return replace(
        parse_llama_config(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )
