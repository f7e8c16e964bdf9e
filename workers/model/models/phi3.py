"""Phi-3 (arXiv 2404.14219) and Phi-4: Llama with fused qkv_proj and gate_up_proj weights.

Some of the models use LongRoPE, or rotate only some dimensions of a head.
"""

from ..config import Fields, ModelConfig
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from .parsing import parse_decoder_config, parse_rope


class Phi3Attention(LlamaAttention):
    """Reads query, key and value from one fused weight."""

    fused = True


class Phi3MLP(LlamaMLP):
    """Reads gate and up from one fused weight."""

    gate_up_names = ("gate_up_proj",)


class Phi3DecoderLayer(LlamaDecoderLayer):
    """Uses fused weights in Llama's layer."""

    attention_type = Phi3Attention
    mlp_type = Phi3MLP


class Phi3ForCausalLM(LlamaForCausalLM):
    """Uses Phi-3's layers in Llama's tree."""

    layer_type = Phi3DecoderLayer


def parse_phi3_config(fields: Fields) -> ModelConfig:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    rope = parse_rope(fields, has_partial=True)
    return parse_decoder_config(
        fields,
        window=lambda index: window,
        rope=lambda index: rope,
        norm_eps=("rms_norm_eps", 1e-5),
    )
