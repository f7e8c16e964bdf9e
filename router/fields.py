"""Checks texts of configurations and files, and words the errors of pydantic."""

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import AfterValidator

_MOST_SHOWN: Final = 80  # characters of a wrong value
_REASONS: Final = {"missing": "missing", "extra_forbidden": "unknown key"}


def matching(pattern: str, words: str, *, is_secret: bool = False) -> AfterValidator:
    """Returns a validator of texts that match all of a regular expression of ASCII characters.

    An error says that the text must be `words`, and shows the text unless it is secret.
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            got = "" if is_secret else f", got {shorten(text)}"
            raise ValueError(f"must be {words}{got}")
        return text

    return AfterValidator(check)


def error_text(entry: Mapping[str, Any]) -> str:
    """Returns the reason of an entry of `ValidationError.errors()`, without the field's name."""
    if entry["type"] == "value_error":
        return str(entry["ctx"]["error"])
    # Pydantic's "Input should be ..." or "String should have ...", with the bound.
    return _REASONS.get(entry["type"]) or re.sub(r"^[A-Z][a-z]+ should", "must", entry["msg"])


def shorten(value: object) -> str:
    """Returns a value as Python shows it, of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
