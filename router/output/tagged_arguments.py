"""Reads arguments that a model wrote as texts between tags, in the types of the tool's schema.

A tag in an argument is text: an argument ends where another one or the end of the call follows.
"""

import json
import re
from contextlib import suppress
from typing import Any, Final

from ...proto import inference_pb2
from ..frontend.chat import parameters_schema
from ..frontend.schemas.json_schemas import resolved
from .python_calls import read_literal

_MAX_SPACE: Final = 64  # characters after the last tag of a call
_NULLS: Final = ("null", "None")


def ends_with(text: str, end: int, tag: str) -> bool:
    """Returns True if the text up to `end` ends with a tag and perhaps white space."""
    return text[max(end - _MAX_SPACE, 0) : end].rstrip().endswith(tag)


def read_arguments(
    text: str,
    between: re.Pattern[str],
    argument: re.Pattern[str],
    tool: inference_pb2.Tool | None,
) -> dict[str, Any]:
    """Returns the arguments in a text, each of which ends with `between`.

    `argument` has the groups `name` and `text`, and perhaps `is_json` and `is_text`, which match if
    the model itself says what the text is. `tool`: None if it is unknown. Raises ValueError.
    """
    *texts, rest = between.split(text)
    matches = [argument.fullmatch(each) for each in texts]
    given = {match["name"]: match for match in matches if match is not None}
    if rest or len(given) < len(texts):
        raise ValueError
    root = {} if tool is None else parameters_schema(tool)
    arguments = resolved(root, root)
    properties = arguments.get("properties") if isinstance(arguments, dict) else None
    schemas = properties if isinstance(properties, dict) else {}
    return {name: _value(each, schemas.get(name), root) for name, each in given.items()}


def _value(argument: re.Match[str], schema: object, root: object) -> object:
    said = argument.groupdict()
    if said.get("is_json"):
        with suppress(ValueError, RecursionError):
            return json.loads(argument["text"])
    if said.get("is_text") and _may_be_text(schema, root, {}):
        return argument["text"]
    return _typed(argument["text"], schema, root)


def _typed(text: str, schema: object, root: object) -> object:
    """Returns an argument in the type of its schema; text unless the schema excludes text.

    A null is no text if the schema names null, because optional texts are common.
    Models also write True, False and None: so the chat template writes the arguments of earlier
    calls.
    """
    if text.strip() in _NULLS and _names_null(schema, root, set()):
        return None
    if _may_be_text(schema, root, {}):
        return text
    for read in (json.loads, read_literal):
        with suppress(ValueError, RecursionError):
            return read(text)
    return text


def _may_be_text(schema: object, root: object, known: dict[int, bool]) -> bool:
    """Returns True unless a keyword of the schema excludes text.

    `known`: the results by the id of the schema, so that each schema is read once.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return True
    if id(schema) not in known:
        known[id(schema)] = True  # for a schema that refers to itself
        known[id(schema)] = all(
            _allows_text(name, value, root, known) for name, value in schema.items()
        )
    return known[id(schema)]


def _allows_text(keyword: str, value: object, root: object, known: dict[int, bool]) -> bool:
    match keyword, value:
        case "type", _:
            return "string" in (value if isinstance(value, list) else [value])
        case "const", _:
            return isinstance(value, str)
        case "enum", list():
            return any(isinstance(each, str) for each in value)
        case "anyOf" | "oneOf", list():
            return any(_may_be_text(each, root, known) for each in value)
        case "allOf", list():
            return all(_may_be_text(each, root, known) for each in value)
    return True


def _names_null(schema: object, root: object, seen: set[int]) -> bool:
    """Returns True if a keyword of the schema names null as a value.

    `seen`: the ids of the schemas that were read, so that each is read once.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or id(schema) in seen:
        return False
    seen.add(id(schema))
    return any(_lists_null(name, value, root, seen) for name, value in schema.items())


def _lists_null(keyword: str, value: object, root: object, seen: set[int]) -> bool:
    match keyword, value:
        case "type", _:
            return "null" in (value if isinstance(value, list) else [value])
        case "nullable", _:
            return value is True
        case "const", _:
            return value is None
        case "enum", list():
            return None in value
        case "anyOf" | "oneOf" | "allOf", list():
            return any(_names_null(each, root, seen) for each in value)
    return False
