"""Granite 3: Llama with factors for embeddings, attention scores, residuals and logits."""

from dataclasses import replace

import torch

from ..attention.backend import AttentionOptions, StepAttention
from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..layers.rotary import CosSin
from ..layers.rows import EmbeddingRows
from ..layers.scaling import scaled
from ..states.steps import StepStates
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, parse_llama_config


class GraniteAttention(LlamaAttention):
    """Computes Llama's attention with the scale that config.json defines."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        self._options = AttentionOptions(scale=config.attention_scale)


class GraniteDecoderLayer(LlamaDecoderLayer):
    """Multiplies the outputs of attention and MLP by a factor before it adds them."""

    attention_type = GraniteAttention

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        super().__init__(config, index, build)
        self._scale = config.residual_scale

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        x = scaled(self.self_attn(self.input_layernorm(x), None, rotary, attention), self._scale, x)
        return scaled(self.mlp(self.post_attention_layernorm(x), None), self._scale, x)


class GraniteForCausalLM(LlamaForCausalLM):
    """Multiplies the embeddings by one factor and the logits by another."""

    layer_type = GraniteDecoderLayer

    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        super().__init__(config, build)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=build.dtype).item()

    def embed(self, token_ids: torch.Tensor, rows: EmbeddingRows | None) -> torch.Tensor:
        return scaled(super().embed(token_ids, rows), self._embedding_scale)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(scaled(self.norm(hidden), self._config.logits_scale))


def parse_granite_config(fields: Fields) -> ModelConfig:
    return replace(
        parse_llama_config(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )
