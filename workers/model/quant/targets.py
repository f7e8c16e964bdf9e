"""Matches layers against the names and patterns in quantization_config."""

from typing import Final

import regex

from ..config import Fields

_MATCH_SECONDS: Final = 1.0  # no well-meant pattern needs longer


def is_plain(fields: Fields, name: str) -> bool:
    """Returns True for the head and for layers that the config excludes from quantization.

    modules_to_not_convert and ignored_layers list names, parts of names, or patterns as in
    `matches`. Raises CheckpointError.
    """
    lists = [field for field in ("modules_to_not_convert", "ignored_layers") if fields.has(field)]
    plain = [(field, each) for field in lists for each in fields.texts(field)]
    return name == "lm_head" or any(
        matches(fields, field, each, name) or f".{each}." in f".{name}." for field, each in plain
    )


def matches(fields: Fields, field: str, target: str, name: str) -> bool:
    """Returns True if `target`, an entry of `field`, selects the layer `name`.

    A target is a name, or `re:` and a pattern that matches the beginning of a name. Raises
    CheckpointError.
    """
    if not target.startswith("re:"):
        return target == name
    try:
        return regex.match(target[3:], name, timeout=_MATCH_SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError, MemoryError, OverflowError):
        raise fields.error(field, f"{target!r:.60} is not a pattern that can be matched") from None
