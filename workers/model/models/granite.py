"""Granite 3 and MiniCPM, which are Llama with factors, and Granite 4, a hybrid with Mamba 2.

The factors are of embeddings, residuals and logits and, in Granite, of attention scores. Most
layers of Granite 4 have a mixer in place of attention; some of its models have experts beside the
MLP.
"""

import math
from dataclasses import replace
from typing import ClassVar, Final

import torch

from ..attention.backend import AttentionOptions, StepAttention
from ..config import ExpertsConfig, Fields, Mamba2Config, ModelConfig
from ..layers.experts import ExpertNames, MlpExperts
from ..layers.linear import BuildOptions
from ..layers.mamba2 import Mamba2, mamba2_states
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin
from ..layers.rows import EmbeddingRows
from ..layers.scaling import scaled
from ..states.steps import StepStates
from .family import DecoderLayer, HybridDecoderLayer
from .llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    parse_llama_config,
)
from .parsing import (
    parse_decoder_config,
    parse_groups,
    parse_layer_kinds,
    parse_rope,
    parse_time_steps,
)

_MAMBA: Final = "linear_attention"
_KINDS: Final = {
    "linear_attention": _MAMBA,
    "full_attention": "full_attention",
    "mamba": _MAMBA,
    "attention": "full_attention",
}
"""Kinds of layers by their names in checkpoints; transformers 4 has the last ones."""


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

    layer_type: ClassVar[type[DecoderLayer]] = GraniteDecoderLayer

    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        super().__init__(config, build)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=build.dtype).item()

    def embed(self, token_ids: torch.Tensor, rows: EmbeddingRows | None) -> torch.Tensor:
        return scaled(super().embed(token_ids, rows), self._embedding_scale)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(scaled(self.norm(hidden), self._config.logits_scale))


def parse_granite_config(fields: Fields) -> ModelConfig:
    return _with_factors(fields, parse_llama_config(fields))


def _with_factors(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )


def parse_minicpm_config(fields: Fields) -> ModelConfig:
    """Parses config.json of MiniCPM (arXiv 2404.06395), whose factors follow width and depth."""
    if fields.integer("num_experts", 0, minimum=0):
        raise fields.error("num_experts", "MiniCPM with experts is not supported")
    if fields.has("sparse_config"):
        raise fields.error(
            "sparse_config", "sparse attention is not supported; remove it for dense attention"
        )
    config = parse_llama_config(fields.with_defaults({"tie_word_embeddings": True}))
    return replace(
        config,
        embedding_scale=fields.number("scale_emb", 1.0),
        residual_scale=fields.number("scale_depth", 1.0) / math.sqrt(len(config.layers)),
        logits_scale=fields.number("dim_model_base", 1.0) / config.hidden_size,
    )


class GraniteSharedMLP(LlamaMLP):
    """Computes Llama's MLP under other names of weights."""

    gate_up_names = ("input_linear",)
    down_name = "output_linear"


class GraniteHybridDecoderLayer(HybridDecoderLayer):
    """Adds attention or a mixer, then an MLP and experts, each times a factor."""

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"
        size = config.hidden_size
        self._scale = config.residual_scale
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(f"{prefix}.{name}", size, config.norm_eps, build.dtype)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.self_attn = None
        self.mixer = None
        if config.layers[index].states:
            self.mixer = Mamba2(config, index, f"{prefix}.mamba", build)
        else:
            self.self_attn = GraniteAttention(config, index, f"{prefix}.self_attn", build)
        self.shared_mlp = GraniteSharedMLP(config, f"{prefix}.shared_mlp", build)
        self.experts: MlpExperts | None = None
        if config.experts is not None:
            experts = f"{prefix}.block_sparse_moe"
            names = ExpertNames(
                router=f"{experts}.router.layer",
                experts=f"{experts}.experts",
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
            )
            self.experts = MlpExperts(config.experts, size, names, build)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        mixed = self.mix(self.input_layernorm(x), None, rotary, attention, states)
        x = scaled(mixed, self._scale, x)
        normed = self.post_attention_layernorm(x)
        output = self.shared_mlp(normed, None)
        if self.experts is not None:
            output = self.experts(normed, output)
        return scaled(output, self._scale, x)


class GraniteHybridForCausalLM(GraniteForCausalLM):
    """Uses Granite 4's layers in Granite's tree."""

    layer_type = GraniteHybridDecoderLayer


def parse_granite_hybrid_config(fields: Fields) -> ModelConfig:
    kinds = [_KINDS[kind] for kind in parse_layer_kinds(fields, _KINDS)]
    position = fields.text("position_embedding_type", "nope")
    if position not in ("rope", "nope"):
        raise fields.error(
            "position_embedding_type", f"{position!r:.60} is not supported, only rope"
        )
    rope = parse_rope(fields) if position == "rope" else None
    mamba2 = _parse_mamba2(fields)
    states = mamba2_states(mamba2)
    bias = fields.boolean("attention_bias", False)
    config = parse_decoder_config(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        rope=lambda index: rope,
        states=lambda index: states if kinds[index] == _MAMBA else (),
    )
    if config.activation != "silu":  # mixers and experts have no other one
        raise fields.error("hidden_act", "must be silu")
    experts = None
    if num_experts := fields.integer("num_local_experts", 8, minimum=0):
        experts = ExpertsConfig(
            num_experts=num_experts,
            num_chosen=fields.integer("num_experts_per_tok", 2, maximum=num_experts),
            intermediate_size=config.intermediate_size,
            layers=tuple(range(len(kinds))),
            may_be_stacked=True,
        )
    return replace(
        _with_factors(fields, config),
        intermediate_size=fields.integer("shared_intermediate_size", 1024),
        experts=experts,
        mamba2=mamba2,
    )


def _parse_mamba2(fields: Fields) -> Mamba2Config:
    channels = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    num_heads = fields.integer("mamba_n_heads", 128)
    is_auto = dict(fields.items()).get("mamba_d_head") == "auto"
    derived = max(channels // num_heads, 1)
    head_dim = derived if is_auto else fields.integer("mamba_d_head", derived)
    if head_dim * num_heads != channels:
        raise fields.error(
            "mamba_n_heads", f"{num_heads} heads of {head_dim} are not the {channels} channels"
        )
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=parse_groups(fields, "mamba_n_groups", 1, num_heads),
        state_size=fields.integer("mamba_d_state", 256),
        conv_width=fields.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        proj_bias=fields.boolean("mamba_proj_bias", False),
        limits=parse_time_steps(fields, "time_step_limit"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )
