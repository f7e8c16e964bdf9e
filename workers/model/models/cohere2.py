"""Cohere's Command R7B and Command A (arXiv 2504.00698): parallel attention and MLP after one norm.

Most layers have a sliding window and rotate neighbouring dimensions. Every fourth layer has full
attention and no position embedding.
"""

from dataclasses import replace

import torch

from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..layers.norm import LayerNorm
from ..layers.rotary import CosSin
from ..layers.scaling import scaled
from ..states.steps import StepStates
from .family import DecoderLayer
from .llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from .parsing import parse_alternating_windows, parse_decoder_config, parse_rope


class Cohere2DecoderLayer(DecoderLayer):
    """Adds attention and MLP of the same normalized hidden states."""

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"
        self.input_layernorm = LayerNorm(
            f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps, build.dtype
        )
        self.self_attn = LlamaAttention(config, index, f"{prefix}.self_attn", build)
        self.mlp = LlamaMLP(config, f"{prefix}.mlp", build)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(x)
        return self.mlp(normed, self.self_attn(normed, x, rotary, attention))


class Cohere2ForCausalLM(LlamaForCausalLM):
    """Uses Cohere's layers, a final layer norm, and a factor for the logits."""

    layer_type = Cohere2DecoderLayer

    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        super().__init__(config, build)
        self.norm = LayerNorm("model.norm", config.hidden_size, config.norm_eps, build.dtype)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(scaled(self.norm(hidden), self._config.logits_scale))


def parse_cohere2_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    window = parse_alternating_windows(
        fields, full_every=fields.integer("sliding_window_pattern", 4)
    )
    rope = replace(parse_rope(fields), interleaved=True)
    config = parse_decoder_config(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        window=window,
        rope=lambda index: None if window(index) is None else rope,
        norm_eps=("layer_norm_eps", 1e-5),
        tied=True,
    )
    return replace(config, logits_scale=fields.number("logit_scale", 0.0625))
