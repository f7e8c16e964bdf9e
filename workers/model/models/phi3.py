"""Phi-3 (arXiv 2404.14219) and Phi-4: Llama's tree, with query, key and value as one map of the
checkpoint, gate and up as another, and in some models LongRoPE and dimensions without positions.
"""

from ..config import Fields, ModelConfig
from .llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from .parsing import parse_decoder_config, parse_rope


class Phi3Attention(LlamaAttention):
    """Is Llama's attention with one map for query, key and value."""

    fused = True


class Phi3MLP(LlamaMLP):
    """Is Llama's MLP with one map for gate and up."""

    fused = True


class Phi3DecoderLayer(LlamaDecoderLayer):
    """Is Llama's layer but for the names of its weights."""

    attention_type = Phi3Attention
    mlp_type = Phi3MLP


class Phi3ForCausalLM(LlamaForCausalLM):
    """Is Llama's tree but for the layers."""

    layer_type = Phi3DecoderLayer


def parse_phi3_config(fields: Fields) -> ModelConfig:
    """See `ModelFamily.parse_config`."""
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    rope = parse_rope(fields, has_partial=True)
    norm_eps = "rms_norm_eps", 1e-5
    return parse_decoder_config(
        fields, window=lambda index: window, rope=lambda index: rope, norm_eps=norm_eps
    )
