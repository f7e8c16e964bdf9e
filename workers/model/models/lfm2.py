"""LFM2 (arXiv 2511.23404): most layers have a short convolution in place of Llama's attention.

Some of its models have routed experts in place of most MLPs.
"""

from dataclasses import replace
from typing import Final

import torch

from ..attention.backend import StepAttention
from ..config import ExpertsConfig, Fields, ModelConfig, ShortConvConfig
from ..layers.experts import ExpertNames, MlpExperts
from ..layers.linear import BuildOptions
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin
from ..layers.short_conv import ShortConv, short_conv_states
from ..states.steps import StepStates
from .family import HybridDecoderLayer
from .llama import FeedForward, LlamaForCausalLM, LlamaMLP
from .parsing import MAX_LAYERS, parse_decoder_config, parse_layer_kinds, parse_rope
from .qwen import Qwen3Attention

_ATTENTION: Final = "full_attention"
_CONV: Final = "conv"
_INTERMEDIATE_SIZE: Final = 12_288  # if config.json has none


class Lfm2Attention(Qwen3Attention):
    """Computes Qwen3's attention under other names of weights."""

    norm_names = ("q_layernorm", "k_layernorm")
    output_name = "out_proj"


class Lfm2MLP(LlamaMLP):
    """Computes Llama's MLP under other names of weights."""

    gate_up_names = ("w1", "w3")
    down_name = "w2"


class Lfm2DecoderLayer(HybridDecoderLayer):
    """Adds attention or a short convolution, then the MLP, each applied to normalized states."""

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"
        size = config.hidden_size
        self.operator_norm, self.ffn_norm = (
            RMSNorm(f"{prefix}.{name}", size, config.norm_eps, build.dtype)
            for name in ("operator_norm", "ffn_norm")
        )
        self.self_attn = None
        self.mixer = None
        if config.layers[index].states:
            self.mixer = ShortConv(config, index, f"{prefix}.conv", build)
        else:
            self.self_attn = Lfm2Attention(config, index, f"{prefix}.self_attn", build)
        self.feed_forward = _feed_forward(config, index, f"{prefix}.feed_forward", build)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        x = self.mix(self.operator_norm(x), x, rotary, attention, states)
        return self.feed_forward(self.ffn_norm(x), x)


def _feed_forward(config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> FeedForward:
    """Returns the MLP or the experts of a layer."""
    experts = config.experts
    if experts is None or index not in experts.layers:
        return Lfm2MLP(config, prefix, build)
    names = ExpertNames(
        router=f"{prefix}.gate",
        experts=f"{prefix}.experts",
        gate="w1",
        up="w3",
        down="w2",
        score_bias=f"{prefix}.expert_bias" if experts.has_score_bias else None,
    )
    return MlpExperts(experts, config.hidden_size, names, build)


class Lfm2ForCausalLM(LlamaForCausalLM):
    """Uses LFM2's layers in Llama's tree."""

    layer_type = Lfm2DecoderLayer
    norm_name = "model.embedding_norm"


def parse_lfm2_config(fields: Fields) -> ModelConfig:
    return replace(_parse_layers(fields), intermediate_size=_intermediate_size(fields))


def parse_lfm2_moe_config(fields: Fields) -> ModelConfig:
    config = _parse_layers(fields)
    num_layers = len(config.layers)
    num_dense = fields.integer("num_dense_layers", 2, minimum=0)
    num_experts = fields.integer("num_experts", 32)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 4, maximum=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 1792),
        layers=tuple(range(min(num_dense, num_layers), num_layers)),
        normalised=fields.boolean("norm_topk_prob", True),
        sigmoid=True,
        has_score_bias=fields.boolean("use_expert_bias", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return replace(config, experts=experts)


def _parse_layers(fields: Fields) -> ModelConfig:
    """Parses what models with and without experts have in common."""
    rope = parse_rope(fields, default_theta=1_000_000.0)
    kinds = _parse_kinds(fields)
    width = fields.integer("conv_L_cache", 3, minimum=2)
    states = short_conv_states(fields.integer("hidden_size"), width)
    config = parse_decoder_config(
        fields,
        rope=lambda index: rope,
        states=lambda index: states if kinds[index] == _CONV else (),
        norm_eps=("norm_eps", 1e-5),
        tied=True,
        intermediate_size=_INTERMEDIATE_SIZE,
    )
    return replace(
        config,
        tie_word_embeddings=fields.boolean("tie_embedding", config.tie_word_embeddings),
        short_conv=ShortConvConfig(width=width, has_bias=fields.boolean("conv_bias", False)),
    )


def _parse_kinds(fields: Fields) -> tuple[str, ...]:
    """Returns the kind of each layer."""
    if fields.has("layer_types"):
        return parse_layer_kinds(fields, (_ATTENTION, _CONV))
    every = range(fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    attending = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else every
    return tuple(_ATTENTION if index in attending else _CONV for index in every)


def _intermediate_size(fields: Fields) -> int:
    """Returns the size that transformers derives from the declared one."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", _INTERMEDIATE_SIZE))
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if fields.is_null("block_ffn_dim_multiplier"):
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple
