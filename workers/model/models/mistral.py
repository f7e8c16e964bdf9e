"""Mistral (arXiv 2310.06825): Llama without biases, with a sliding window in every layer."""

from ..config import Fields, ModelConfig
from .parsing import parse_decoder_config


def parse_mistral_config(fields: Fields) -> ModelConfig:
    """Parses config.json; a null sliding_window means no window, a missing one 4096."""
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    return parse_decoder_config(fields, window=lambda index: window)
