"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).

Both scale embeddings, normalize before and after attention and MLP, and alternate sliding-window
layers with full-attention layers. Gemma 2 caps scores and logits. Gemma 3 normalizes queries and
keys, and its sliding-window layers have their own rotary base.
"""

from dataclasses import replace
from typing import ClassVar

import torch

from ..attention.backend import AttentionOptions, StepAttention
from ..config import Fields, ModelConfig, RopeConfig
from ..layers.linear import BuildOptions
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin
from ..layers.rows import EmbeddingRows
from ..layers.scaling import scaled, soft_capped
from ..states.steps import StepStates
from .family import DecoderLayer
from .llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from .parsing import RopeOf, WindowOf, parse_alternating_windows, parse_decoder_config, parse_rope
from .qwen import Qwen3Attention


class Gemma2Attention(LlamaAttention):
    """Computes Llama's attention with its own scale and soft-capped scores."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        self._options = AttentionOptions(
            scale=config.attention_scale, soft_cap=config.attention_soft_cap
        )


class Gemma3Attention(Qwen3Attention):
    """Computes Llama's attention over normalized queries and keys, with its own scale."""

    norm_offset = 1.0

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        self._options = AttentionOptions(scale=config.attention_scale)


class Gemma2DecoderLayer(DecoderLayer):
    """Adds attention, then the MLP, each normalized before and after."""

    attention_type: ClassVar[type[LlamaAttention]] = Gemma2Attention

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(
                f"{prefix}.{name}_layernorm",
                config.hidden_size,
                config.norm_eps,
                build.dtype,
                offset=1.0,
            )

        self.input_layernorm = norm("input")
        self.self_attn = self.attention_type(config, index, f"{prefix}.self_attn", build)
        self.post_attention_layernorm = norm("post_attention")
        self.pre_feedforward_layernorm = norm("pre_feedforward")
        self.mlp = LlamaMLP(config, f"{prefix}.mlp", build)
        self.post_feedforward_layernorm = norm("post_feedforward")

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), None, rotary, attention)
        x = self.post_attention_layernorm(attended, x)
        return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), None), x)


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    """Uses Gemma 3's attention in Gemma 2's layer."""

    attention_type = Gemma3Attention


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Scales the embeddings by sqrt(hidden_size) and soft-caps the logits."""

    layer_type: ClassVar[type[DecoderLayer]] = Gemma2DecoderLayer
    norm_offset = 1.0

    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        super().__init__(config, build)
        # transformers rounds this factor to the dtype of the weights.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=build.dtype).item()

    def embed(self, token_ids: torch.Tensor, rows: EmbeddingRows | None) -> torch.Tensor:
        embeddings = scaled(super().embed(token_ids, None), self._embedding_scale)
        return embeddings if rows is None else rows.put(embeddings)  # rows are not scaled

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        cap = self._config.logits_soft_cap
        return logits if cap is None else soft_capped(logits, cap)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Uses Gemma 3's layers in Gemma 2's tree."""

    layer_type = Gemma3DecoderLayer


def parse_gemma2_config(fields: Fields) -> ModelConfig:
    config = _parse_gemma_config(fields, parse_alternating_windows(fields, full_every=2))
    return replace(
        config,
        attention_soft_cap=_parse_cap(fields, "attn_logit_softcapping", 50.0),
        logits_soft_cap=_parse_cap(fields, "final_logit_softcapping", 30.0),
    )


def parse_gemma3_config(fields: Fields) -> ModelConfig:
    window = parse_alternating_windows(
        fields, full_every=fields.integer("sliding_window_pattern", 6)
    )
    rope = parse_rope(fields, layer_type="full_attention", default_theta=1_000_000.0)
    if fields.has("rope_parameters"):
        sliding_rope = parse_rope(fields, layer_type="sliding_attention")
    else:  # the format of transformers 4
        sliding_rope = RopeConfig(theta=fields.number("rope_local_base_freq", 10_000.0))
    config = _parse_gemma_config(
        fields, window, lambda index: rope if window(index) is None else sliding_rope
    )
    return replace(config, logits_soft_cap=_parse_cap(fields, "final_logit_softcapping", None))


def _parse_gemma_config(
    fields: Fields, window: WindowOf, rope: RopeOf | None = None
) -> ModelConfig:
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "is not supported")
    bias = fields.boolean("attention_bias", False)
    config = parse_decoder_config(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        window=window,
        rope=rope,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
    )
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    return replace(config, embedding_scale=config.hidden_size**0.5, attention_scale=scale)


def _parse_cap(fields: Fields, name: str, default: float | None) -> float | None:
    if fields.is_null(name) or not (fields.has(name) or default):
        return None
    return fields.number(name, default)
