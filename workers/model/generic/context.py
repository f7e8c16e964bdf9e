"""Reads the context length of a model before it is loaded.

Routers use it, so it imports no torch unless it must.
"""

from pathlib import Path

from ..config import CONTEXT_NAMES, context_tokens, read_fields, text_fields


def read_context_tokens(folder: Path) -> int:
    """Reads the context length of a model of any family, as workers do. Raises CheckpointError."""
    fields = read_fields(folder)
    text = text_fields(fields)
    if any(map(text.has, CONTEXT_NAMES)):
        return context_tokens(text)
    from .config import parsed_context_tokens  # imports transformers with torch: seconds

    return parsed_context_tokens(fields)
