"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: hybrids of Mamba 2, attention, MLPs and experts.

Each layer is one of these. Attention has no positions; MLPs and experts use squared ReLU.
"""

from dataclasses import replace
from typing import Final

import torch

from ..attention.backend import StepAttention
from ..config import ExpertsConfig, Fields, Mamba2Config, ModelConfig
from ..layers.experts import ExpertNames, MlpExperts
from ..layers.linear import BuildOptions, ColumnParallelLinear, RowParallelLinear
from ..layers.mamba2 import Mamba2, mamba2_states
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin
from ..layers.scaling import relu_squared
from ..module import Module
from ..states.steps import StepStates
from .family import HybridDecoderLayer
from .llama import LlamaAttention, LlamaForCausalLM
from .parsing import parse_decoder_config, parse_groups, parse_layer_kinds, parse_time_steps

_MAMBA: Final = "linear_attention"
_ATTENTION: Final = "full_attention"
_MLP: Final = "mlp"
_EXPERTS: Final = "moe"
_KINDS: Final = {
    "linear_attention": _MAMBA,
    "full_attention": _ATTENTION,
    "mlp": _MLP,
    "moe": _EXPERTS,
    "mamba": _MAMBA,
    "attention": _ATTENTION,
}
"""Kinds of layers by their names in checkpoints; transformers 4 has the last ones."""
_PATTERN: Final = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
"""Kinds of layers by their letters in hybrid_override_pattern."""


class NemotronMLP(Module):
    """Computes down(relu(up(x)) ** 2)."""

    def __init__(self, config: ModelConfig, size: int, prefix: str, build: BuildOptions) -> None:
        hidden = config.hidden_size
        bias = config.mlp_bias
        part = build.tp.part(size)
        outputs = [(f"{prefix}.up_proj", size, part)]
        self.up_proj = ColumnParallelLinear(outputs, hidden, build, bias=bias)
        self.down_proj = RowParallelLinear(
            f"{prefix}.down_proj", hidden, size, part, build, bias=bias
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        return self.down_proj(relu_squared(self.up_proj(x)), residual)


class NemotronExperts(Module):
    """Adds routed experts and one that all tokens share.

    The routed ones may work on smaller vectors, to and from which every rank maps as a whole.
    """

    def __init__(self, config: ModelConfig, prefix: str, build: BuildOptions) -> None:
        assert config.experts is not None
        hidden = config.hidden_size
        latent = config.experts.latent_size
        names = ExpertNames(
            router=f"{prefix}.gate",
            experts=f"{prefix}.experts",
            gate=None,
            up="up_proj",
            down="down_proj",
            score_bias=f"{prefix}.gate.e_score_correction_bias",
        )
        self.experts = MlpExperts(config.experts, hidden, names, build, inputs=latent)
        shared = config.experts.shared_size
        assert shared is not None
        self.shared_experts = NemotronMLP(config, shared, f"{prefix}.shared_experts", build)
        self.to_latent: ColumnParallelLinear | None = None
        self.from_latent: ColumnParallelLinear | None = None
        if latent is not None:
            self.to_latent, self.from_latent = (
                ColumnParallelLinear(
                    [(f"{prefix}.{name}_latent_proj", outputs, slice(0, outputs))],
                    inputs,
                    build,
                    bias=config.mlp_bias,
                )
                for name, outputs, inputs in (("fc1", latent, hidden), ("fc2", hidden, latent))
            )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        total = self.shared_experts(x, residual)
        if self.to_latent is None or self.from_latent is None:
            return self.experts(x, total)
        return total + self.from_latent(self.experts(x, None, self.to_latent(x)))


class NemotronDecoderLayer(HybridDecoderLayer):
    """Adds one of the four kinds, applied to normalized hidden states."""

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        layer = config.layers[index]
        prefix = f"backbone.layers.{index}"
        self.norm = RMSNorm(f"{prefix}.norm", config.hidden_size, config.norm_eps, build.dtype)
        mixer = f"{prefix}.mixer"
        self.self_attn = None
        self.mixer = None
        self.mlp: NemotronMLP | NemotronExperts | None = None
        if layer.states:
            self.mixer = Mamba2(config, index, mixer, build)
        elif layer.keeps_tokens:
            self.self_attn = LlamaAttention(config, index, mixer, build)
        elif config.experts is not None and index in config.experts.layers:
            self.mlp = NemotronExperts(config, mixer, build)
        else:
            self.mlp = NemotronMLP(config, config.intermediate_size, mixer, build)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        normed = self.norm(x)
        if self.mlp is not None:
            return self.mlp(normed, x)
        return self.mix(normed, x, rotary, attention, states)


class NemotronHForCausalLM(LlamaForCausalLM):
    """Uses Nemotron-H's layers in Llama's tree, under other names of weights."""

    layer_type = NemotronDecoderLayer
    embedding_name = "backbone.embeddings"
    norm_name = "backbone.norm_f"


def parse_nemotron_h_config(fields: Fields) -> ModelConfig:
    kinds = _parse_kinds(fields)
    head_dim = fields.integer("attention_head_dim", 128)
    known = fields.with_defaults({"intermediate_size": 21_504, "head_dim": head_dim})
    config = parse_decoder_config(
        _counted(known, len(kinds)),
        mlp_bias=fields.boolean("mlp_bias", False),
        rope=lambda index: None,
        norm_eps=("layer_norm_epsilon", 1e-5),
    )
    activation = fields.text("mlp_hidden_act", "relu2")
    if activation != "relu2":
        raise fields.error("mlp_hidden_act", f"{activation!r:.60} is not supported, only relu2")
    mamba2 = _parse_mamba2(fields, config)
    attention = config.layers[0]
    nothing = replace(attention, num_kv_heads=0)
    mixer = replace(nothing, states=mamba2_states(mamba2))
    layer_of = {_MAMBA: mixer, _ATTENTION: attention}
    return replace(
        config,
        layers=tuple(layer_of.get(kind, nothing) for kind in kinds),
        experts=_parse_experts(fields, kinds) if _EXPERTS in kinds else None,
        mamba2=mamba2,
    )


def _parse_kinds(fields: Fields) -> list[str]:
    """Returns the kind of each layer."""
    name = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
    if fields.has(name):
        counted = _counted(fields, len(fields.texts(name)))
        return [_KINDS[each] for each in parse_layer_kinds(counted, _KINDS, name)]
    pattern = fields.text("hybrid_override_pattern")
    if not pattern or not set(pattern) <= set(_PATTERN):
        raise fields.error(
            "hybrid_override_pattern", f"must consist of {' '.join(_PATTERN)}, is {pattern!r:.60}"
        )
    return [_PATTERN[each] for each in pattern]


def _counted(fields: Fields, num_layers: int) -> Fields:
    """Returns the fields with the number of the kinds of layers.

    As in transformers, it takes precedence over num_hidden_layers.
    """
    return fields.with_values({"num_hidden_layers": num_layers})


def _parse_experts(fields: Fields, kinds: list[str]) -> ExpertsConfig:
    num_experts = fields.integer("n_routed_experts", 8)
    num_groups = fields.integer("n_group", 1)
    if num_experts % num_groups:
        raise fields.error("n_group", f"{num_groups} does not divide the {num_experts} experts")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 2, maximum=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 7688),
        layers=tuple(index for index, kind in enumerate(kinds) if kind == _EXPERTS),
        normalised=fields.boolean("norm_topk_prob", True),
        sigmoid=True,
        has_score_bias=True,
        num_groups=num_groups,
        num_chosen_groups=fields.integer("topk_group", 1, maximum=num_groups),
        scale=fields.number("routed_scaling_factor", 1.0),
        latent_size=fields.integer("moe_latent_size") if fields.has("moe_latent_size") else None,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
    )


def _parse_mamba2(fields: Fields, config: ModelConfig) -> Mamba2Config:
    activation = fields.text("mamba_hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("mamba_hidden_act", f"{activation!r:.60} is not supported, only silu")
    num_heads = fields.integer("mamba_num_heads", 128)
    bias = fields.boolean("use_bias", False)
    limits = "mamba_dt_limit" if fields.has("mamba_dt_limit") else "time_step_limit"
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=fields.integer("mamba_head_dim", 64),
        num_groups=parse_groups(fields, "n_groups", 8, num_heads),
        state_size=fields.integer("ssm_state_size", 128),
        conv_width=fields.integer("conv_kernel", 4, minimum=2),
        conv_bias=fields.boolean("use_conv_bias", True),
        proj_bias=bias,
        limits=parse_time_steps(fields, limits),
        norm_eps=config.norm_eps,
    )
