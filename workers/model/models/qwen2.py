"""Qwen2 (arXiv 2407.10671): Llama's tree with biases of query, key and value, and windows in some layers."""

from collections.abc import Callable

from ..config import Fields, ModelConfig, parse_decoder_config
from .llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama's tree under Qwen2's config."""

    @classmethod
    def parse_config(cls, fields: Fields) -> ModelConfig:
        """See `CausalLM.parse_config`."""
        return parse_decoder_config(fields, qkv_bias=True, window=parse_windows(fields))


def parse_windows(fields: Fields) -> Callable[[int], int | None]:
    """Returns the sliding window of each layer by its index, as Qwen2 and Qwen3 describe it. Raises CheckpointError."""
    if not fields.boolean("use_sliding_window", False) or fields.is_null("sliding_window"):
        return lambda index: None
    window = fields.integer("sliding_window", 4096)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, minimum=0)
        return lambda index: window if index >= first else None
    types, num_layers = fields.texts("layer_types"), fields.integer("num_hidden_layers")
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"must be {num_layers} times full_attention or sliding_attention")
    return lambda index: window if types[index] == "sliding_attention" else None
