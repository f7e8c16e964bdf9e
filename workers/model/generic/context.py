"""Reads the context length of a model before it is loaded.

Routers use it, so it imports no torch unless it must.
"""

from pathlib import Path

from ..config import CONTEXT_NAMES, context_tokens, read_fields, text_fields


def read_context_tokens(folder: Path) -> int:
    """Reads the context length of a model of any family. Raises CheckpointError.

    A multimodal model's text_config may leave it to transformers' default.
    """
    fields = read_fields(folder)
    text = text_fields(fields)
    if text is fields or any(map(text.has, CONTEXT_NAMES)):
        return context_tokens(text)
    kind = text.text("model_type")
    from transformers import CONFIG_MAPPING  # with torch, which takes seconds

    default = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else None
    return context_tokens(text, getattr(default, "max_position_embeddings", None))
