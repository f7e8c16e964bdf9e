"""Mistral (arXiv 2310.06825): Llama's tree without biases, with a sliding window in every layer."""

from ..config import Fields, ModelConfig, parse_decoder_config
from .llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama's tree under Mistral's config."""

    @classmethod
    def parse_config(cls, fields: Fields) -> ModelConfig:
        """See `CausalLM.parse_config`. As in transformers, a null sliding_window is none, a missing one 4096."""
        window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
        return parse_decoder_config(fields, window=lambda index: window)
