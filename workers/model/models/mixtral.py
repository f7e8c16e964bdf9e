"""Mixtral (arXiv 2401.04088) and Qwen3-MoE (arXiv 2505.09388): routed experts instead of MLPs.

Otherwise they are the trees of Llama and Qwen3.
"""

from dataclasses import replace
from typing import ClassVar, Final

from ..config import ExpertsConfig, Fields, ModelConfig
from ..layers.experts import ExpertNames, MlpExperts
from ..layers.linear import BuildOptions
from .llama import LlamaDecoderLayer, LlamaForCausalLM
from .parsing import parse_decoder_config, parse_rope
from .qwen import Qwen3Attention

_MAX_EXPERTS: Final = 2**15


class MixtralDecoderLayer(LlamaDecoderLayer):
    """Uses experts in Llama's layer."""

    names: ClassVar[ExpertNames] = ExpertNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
    )

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        super().__init__(config, index, build)
        experts = config.experts
        prefix = f"model.layers.{index}"
        if experts and index in experts.layers:
            names = replace(
                self.names,
                router=f"{prefix}.{self.names.router}",
                experts=f"{prefix}.{self.names.experts}",
            )
            self.mlp = MlpExperts(
                experts, config.hidden_size, names, build, activation=config.activation
            )


class Qwen3MoeDecoderLayer(MixtralDecoderLayer):
    """Uses Qwen3's attention; layers that config.json excludes have an MLP instead of experts."""

    attention_type = Qwen3Attention
    names = ExpertNames(
        router="mlp.gate", experts="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"
    )


class MixtralForCausalLM(LlamaForCausalLM):
    """Uses Mixtral's layers in Llama's tree."""

    layer_type = MixtralDecoderLayer


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Uses Qwen3-MoE's layers in Llama's tree."""

    layer_type = Qwen3MoeDecoderLayer


def parse_mixtral_config(fields: Fields) -> ModelConfig:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    rope = parse_rope(fields, default_theta=1_000_000.0)
    config = parse_decoder_config(
        fields,
        window=lambda index: window,
        rope=lambda index: rope,
        norm_eps=("rms_norm_eps", 1e-5),
    )
    num_experts = fields.integer("num_local_experts", 8)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 2, maximum=num_experts),
        intermediate_size=config.intermediate_size,
        layers=tuple(range(len(config.layers))),
    )
    return replace(config, experts=experts)


def parse_qwen3_moe_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    slides = fields.boolean("use_sliding_window", False)
    window = (
        fields.integer("sliding_window", 4096)
        if slides and not fields.is_null("sliding_window")
        else None
    )
    config = parse_decoder_config(
        fields, qkv_bias=bias, output_bias=bias, window=lambda index: window
    )
    experts = parse_routed_experts(fields, len(config.layers), defaults=(128, 8, 768))
    return replace(
        config,
        experts=replace(experts, normalised=fields.boolean("norm_topk_prob", False)),
    )


def parse_routed_experts(
    fields: Fields, num_layers: int, *, defaults: tuple[int, int, int]
) -> ExpertsConfig:
    """Parses the fields of routed experts as Qwen's models have them.

    `defaults` are the number of experts, the number that a token chooses, and an expert's size.
    Raises CheckpointError.
    """
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(name, defaults[0], maximum=_MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", defaults[1], maximum=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", defaults[2]),
        layers=tuple(
            index for index in range(num_layers) if index not in dense and (index + 1) % step == 0
        ),
    )
