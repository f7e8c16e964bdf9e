"""Matches layers against the names and patterns in quantization_config."""

from typing import Final

import regex

from ..config import Fields, multimodal_names

_MATCH_SECONDS: Final = 1.0  # no well-meant pattern needs longer
_SIGNS_OF_PATTERNS: Final = frozenset("*+?[](){}|^$\\")
_PART_OF_MULTIMODAL: Final = "_model"  # of the names language_model and text_model
_END_OF_PART: Final = r"(?:(?<=\.)|(?=\.|$))"  # of a name


def is_plain(fields: Fields, name: str) -> bool:
    """Returns True for the head and for layers that the config excludes from quantization.

    modules_to_not_convert and ignored_layers list names, parts of names, patterns as in `matches`,
    or, as in transformers, patterns of whole parts at the beginning of a name. Raises
    CheckpointError.
    """
    lists = [field for field in ("modules_to_not_convert", "ignored_layers") if fields.has(field)]
    plain = [(field, each) for field in lists for each in fields.texts(field)]
    return name == "lm_head" or any(_excludes(fields, field, each, name) for field, each in plain)


def _excludes(fields: Fields, field: str, entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return matches(fields, field, entry, name)
    if _SIGNS_OF_PATTERNS.isdisjoint(entry):
        # Some tools write a dot after the name, such as `model.layers.1.`.
        return f".{entry.strip('.')}." in f".{name}."
    pattern = f".{entry}" if entry.startswith("*") else entry  # of a shell, such as `*.gate`
    return _match(fields, field, entry, f"(?:{pattern}){_END_OF_PART}", name)


def matches(fields: Fields, field: str, target: str, name: str) -> bool:
    """Returns True if `target`, an entry of `field`, selects the layer `name`.

    A target is a name, or `re:` and a pattern that matches the beginning of a name. Raises
    CheckpointError.
    """
    if not target.startswith("re:"):
        return target == name
    return _match(fields, field, target, target[3:], name)


def _match(fields: Fields, field: str, target: str, pattern: str, name: str) -> bool:
    """Returns True if the pattern of `target` matches the beginning of `name`.

    A pattern for a multimodal model may contain its names of the layers.
    """
    names = [name, *multimodal_names(name)] if _PART_OF_MULTIMODAL in pattern else [name]
    try:
        return any(regex.match(pattern, each, timeout=_MATCH_SECONDS) for each in names)
    except (regex.error, TimeoutError, RecursionError, MemoryError, OverflowError):
        raise fields.error(field, f"{target!r:.60} is not a pattern that can be matched") from None
