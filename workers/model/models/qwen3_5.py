"""Qwen3-Next and Qwen3.5: layers with a gated delta net (arXiv 2412.06464), or gated attention.

A gated delta net keeps a state for each sequence. The attention is Qwen3's; its result is
multiplied by the sigmoid of a gate, and a part of a head's dimensions is rotated. Each layer has an
MLP, or routed experts and one for all tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final

import torch

from ..attention.backend import StepAttention
from ..config import DeltaConfig, Fields, ModelConfig
from ..layers.experts import ExpertNames, MlpExperts
from ..layers.gated_delta import GatedDeltaNet, GroupedGatedDeltaNet, delta_states
from ..layers.linear import BuildOptions
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin
from ..layers.scaling import sigmoid_gated
from ..module import Module
from ..quant.base import LinearPartition
from ..quant.unquantized import UnquantizedLinearMethod
from ..states.steps import StepStates
from .family import DecoderLayer, HybridDecoderLayer
from .llama import FeedForward, LlamaForCausalLM, LlamaMLP
from .mixtral import parse_routed_experts
from .parsing import parse_decoder_config, parse_layer_kinds, parse_rope
from .qwen import Qwen3Attention

_MIXER: Final = "linear_attention"


class GatedAttention(Qwen3Attention):
    """Computes Qwen3's attention and multiplies it by the sigmoid of a gate."""

    gated = True
    norm_offset = 1.0

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: CosSin | None,
        attention: StepAttention,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self._head_counts
        num_gated = num_heads * self._head_dim
        outputs = self.qkv_proj(x)
        qkv, gate = torch.split(outputs, [outputs.shape[1] - num_gated, num_gated], dim=1)
        heads = qkv.view(x.shape[0], -1, self._head_dim)
        query_key, value = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        query, key = self.rotate(query_key, rotary)
        attended = attention(self._index, query, key, value, self._options)
        return self.o_proj(sigmoid_gated(attended, gate), residual)


class Qwen35DecoderLayer(HybridDecoderLayer):
    """Adds attention or a gated delta net, then the MLP, each applied to normalized states."""

    mixer_type: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"
        size = config.hidden_size
        epsilon = config.norm_eps

        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"{prefix}.{name}_layernorm", size, epsilon, build.dtype, offset=1.0)

        self.input_layernorm = norm("input")
        self.self_attn = None
        self.mixer = None
        if config.delta and config.layers[index].states:
            mixer = f"{prefix}.linear_attn"
            self.mixer = self.mixer_type(config.delta, index, mixer, size, epsilon, build)
        else:
            self.self_attn = GatedAttention(config, index, f"{prefix}.self_attn", build)
        self.post_attention_layernorm = norm("post_attention")
        self.mlp = self.feed_forward(config, index, f"{prefix}.mlp", build)

    def feed_forward(
        self, config: ModelConfig, index: int, prefix: str, build: BuildOptions
    ) -> FeedForward:
        """Returns the layer's MLP."""
        return LlamaMLP(config, prefix, build)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        x = self.mix(self.input_layernorm(x), x, rotary, attention, states)
        return self.mlp(self.post_attention_layernorm(x), x)


class ExpertsBesideShared(Module):
    """Adds an expert of all tokens, times the sigmoid of a gate, to the routed experts."""

    def __init__(self, config: ModelConfig, prefix: str, build: BuildOptions) -> None:
        experts = config.experts
        assert experts is not None
        assert experts.shared_size is not None
        hidden = config.hidden_size
        names = ExpertNames(
            router=f"{prefix}.gate",
            experts=f"{prefix}.experts",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
        )
        self.routed = MlpExperts(experts, hidden, names, build, activation=config.activation)
        as_mlp = replace(config, intermediate_size=experts.shared_size)
        self.shared = LlamaMLP(as_mlp, f"{prefix}.shared_expert", build)
        self.gate = UnquantizedLinearMethod(batch_invariant=build.batch_invariant)
        outputs = ((f"{prefix}.shared_expert_gate", 1, slice(None)),)
        self.gate.create_weights(LinearPartition(outputs=outputs, num_inputs=hidden), build.dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        shared = sigmoid_gated(self.shared(x, None), self.gate.apply(x))
        return self.routed(x, shared if residual is None else residual + shared)


class Qwen35MoeDecoderLayer(Qwen35DecoderLayer):
    """Uses experts in Qwen3.5's layer; layers that config.json excludes have an MLP."""

    def feed_forward(
        self, config: ModelConfig, index: int, prefix: str, build: BuildOptions
    ) -> FeedForward:
        if config.experts and index in config.experts.layers:
            return ExpertsBesideShared(config, prefix, build)
        return super().feed_forward(config, index, prefix, build)


class Qwen3NextDecoderLayer(Qwen35MoeDecoderLayer):
    """Uses Qwen3-Next's gated delta net, whose checkpoints have the maps by key head."""

    mixer_type = GroupedGatedDeltaNet


class Qwen35ForCausalLM(LlamaForCausalLM):
    """Uses Qwen3.5's layers in Llama's tree."""

    layer_type: ClassVar[type[DecoderLayer]] = Qwen35DecoderLayer
    norm_offset = 1.0


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """Uses Qwen3.5's layers with experts."""

    layer_type = Qwen35MoeDecoderLayer


class Qwen3NextForCausalLM(Qwen35ForCausalLM):
    """Uses Qwen3-Next's layers in Qwen3.5's tree."""

    layer_type = Qwen3NextDecoderLayer


def parse_qwen3_5_config(fields: Fields) -> ModelConfig:
    return _parse_config(fields, None)


def parse_qwen3_5_moe_config(fields: Fields) -> ModelConfig:
    return _parse_experts(fields, (256, 8, 512))


def parse_qwen3_next_config(fields: Fields) -> ModelConfig:
    config = _parse_experts(fields, (512, 10, 512))
    assert config.experts is not None
    normalised = fields.boolean("norm_topk_prob", True)
    return replace(config, experts=replace(config.experts, normalised=normalised))


def _parse_experts(fields: Fields, defaults: tuple[int, int, int]) -> ModelConfig:
    """Parses a model with experts; `defaults` as in `parse_routed_experts`."""
    config = _parse_config(fields, 5632)
    experts = replace(
        parse_routed_experts(fields, len(config.layers), defaults=defaults),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        may_be_stacked=True,
    )
    return replace(config, experts=experts)


def _parse_config(fields: Fields, intermediate_size: int | None) -> ModelConfig:
    """Parses a model without its experts; takes the default of intermediate_size."""
    if not fields.boolean("attn_output_gate", True):
        raise fields.error("attn_output_gate", "must be true")
    delta = _parse_delta(fields)
    is_mixer = _parse_mixers(fields)
    states = delta_states(delta)
    rope = parse_rope(fields, default_rotated=0.25, has_partial=True)
    bias = fields.boolean("attention_bias", False)
    config = parse_decoder_config(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        rope=lambda index: rope,
        states=lambda index: states if is_mixer(index) else (),
        intermediate_size=intermediate_size,
    )
    if config.activation != "silu":
        raise fields.error("hidden_act", "must be silu")
    return replace(config, delta=delta)


def _parse_mixers(fields: Fields) -> Callable[[int], bool]:
    """Returns a function from a layer's index to whether it has a gated delta net."""
    if fields.has("layer_types"):
        kinds = parse_layer_kinds(fields, (_MIXER, "full_attention"))
        return lambda index: kinds[index] == _MIXER
    period = fields.integer("full_attention_interval", 4)
    return lambda index: (index + 1) % period != 0


def _parse_delta(fields: Fields) -> DeltaConfig:
    num_key_heads = fields.integer("linear_num_key_heads", 16)
    num_value_heads = fields.integer("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        raise fields.error(
            "linear_num_value_heads",
            f"{num_value_heads} is not a multiple of linear_num_key_heads {num_key_heads}",
        )
    return DeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
