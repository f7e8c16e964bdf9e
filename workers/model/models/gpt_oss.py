"""gpt-oss (arXiv 2508.10925): Llama with biases, attention sinks, alternating windows and experts.

Expert weights may be in MXFP4; they are converted to the model's dtype when they are loaded.
"""

from dataclasses import replace
from functools import partial
from typing import Final

import torch

from ..config import ExpertsConfig, Fields, ModelConfig
from ..layers.experts import ExpertMaps, RoutedExperts
from ..layers.linear import BuildOptions
from ..layers.scaling import clamped_gate
from ..layers.stacked import StackedMap, inputs_together
from ..module import Parameter, WeightSlice
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from .parsing import parse_alternating_windows, parse_decoder_config, parse_rope

_ALPHA: Final = 1.702  # of the sigmoid
_LIMIT: Final = 7.0  # of the gate and up projections
_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary embedding of a config.json that describes none, as in transformers."""


class GptOssAttention(LlamaAttention):
    """Computes Llama's attention with one sink per query head."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        layer = config.layers[index]
        sinks = WeightSlice(f"{prefix}.sinks", (layer.num_heads,), (build.tp.query_heads(layer),))
        self.sinks = Parameter(sinks, dtype=torch.float32)

    def process_after_load(self) -> None:
        """Passes the loaded sinks to the attention."""
        self._options = replace(self._options, sinks=self.sinks.data)


class GptOssExperts(RoutedExperts):
    """Routes to experts with clamped gate and up projections, interleaved in the checkpoint."""

    def __init__(
        self, config: ExpertsConfig, hidden: int, prefix: str, build: BuildOptions
    ) -> None:
        super().__init__(config, hidden, f"{prefix}.router", build, router_bias=True)
        size = config.intermediate_size
        tp = build.tp
        unit = inputs_together(is_mxfp4=config.is_mxfp4)
        part = tp.part(size // unit)
        begin = part.start * unit
        end = part.stop * unit
        every = slice(None)
        form = partial(
            StackedMap, num_experts=config.num_experts, build=build, is_mxfp4=config.is_mxfp4
        )
        name = f"{prefix}.experts"
        pairs = slice(2 * begin, 2 * end)
        self.gate_up = form(
            f"{name}.gate_up_proj", sizes=(2 * size, hidden), kept=(pairs, every), bias=True
        )
        inputs = slice(begin, end)
        self.down = form(
            f"{name}.down_proj", sizes=(hidden, size), kept=(every, inputs), bias=tp.rank == 0
        )

    def maps(self) -> ExpertMaps:
        return self.gate_up.maps, self.down.maps

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return clamped_gate(gate_up, _ALPHA, _LIMIT)


class GptOssDecoderLayer(LlamaDecoderLayer):
    """Uses sinks and experts in Llama's layer."""

    attention_type = GptOssAttention

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        super().__init__(config, index, build)
        assert config.experts is not None
        self.mlp = GptOssExperts(
            config.experts, config.hidden_size, f"model.layers.{index}.mlp", build
        )


class GptOssForCausalLM(LlamaForCausalLM):
    """Uses gpt-oss's layers in Llama's tree."""

    layer_type = GptOssDecoderLayer


def parse_gpt_oss_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", True)
    rope = parse_rope(
        fields.with_defaults({"rope_parameters": _ROPE}),
        default_theta=150_000.0,
    )
    config = parse_decoder_config(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        window=parse_alternating_windows(fields, full_every=2, default=128),
        rope=lambda index: rope,
        norm_eps=("rms_norm_eps", 1e-5),
    )
    for name, value in (("swiglu_alpha", _ALPHA), ("swiglu_limit", _LIMIT)):
        if fields.number(name, value) != value:
            raise fields.error(name, f"is not supported; must be {value}")
    is_mxfp4 = config.quantization.get("quant_method") == "mxfp4"
    unit = inputs_together(is_mxfp4=is_mxfp4)
    if config.hidden_size % unit or config.intermediate_size % unit:
        raise fields.error(
            "intermediate_size", f"must be a multiple of {unit} in MXFP4, as must hidden_size"
        )
    num_experts = fields.integer("num_local_experts", 128)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 4, maximum=num_experts),
        intermediate_size=config.intermediate_size,
        layers=tuple(range(len(config.layers))),
        is_mxfp4=is_mxfp4,
    )
    return replace(config, experts=experts, quantization={} if is_mxfp4 else config.quantization)
