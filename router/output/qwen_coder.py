"""Reads a call in Qwen3-Coder's format, whose arguments are texts between tags.

A tag in an argument is text: an argument ends where another one or the end of the call follows.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import regex

from ...proto import inference_pb2
from ..frontend.chat import parameters_schema
from ..frontend.chat_formats import CALLED_NAME
from ..frontend.json_schemas import resolved
from .python_calls import read_literal

_BEGIN: Final = re.compile(r"\s*<function=")
_BARE: Final = regex.compile(rf"<function={CALLED_NAME}>\s{{0,64}}(?:<parameter=|</function>)")
_CALL: Final = re.compile(rf"\s*<function=({CALLED_NAME})>(.*)</function>\s*", re.DOTALL)
_BETWEEN: Final = re.compile(r"</parameter>\s*(?=<parameter=|\Z)")
_ARGUMENT: Final = re.compile(r"<parameter=([^>]{1,64})>\n?(.*?)\n?", re.DOTALL)
_MAX_SPACE: Final = 64  # characters after the closing tag of the function


def find_bare_call(text: str) -> tuple[int, bool]:
    """Returns where a call without its opening tag begins, or may begin, and True if it does.

    Without one, returns the length of the text.
    """
    found = _BARE.search(text, partial=True)
    return (len(text), False) if found is None else (found.start(), not found.partial)


def begins_call(text: str, at: int) -> bool:
    """Returns True if a call in this format begins at a position of the text."""
    return _BEGIN.match(text, at) is not None


def ends_call(text: str, end: int) -> bool:
    """Returns True if the text up to `end` ends a call."""
    return text[max(end - _MAX_SPACE, 0) : end].rstrip().endswith("</function>")


def read_call(text: str, tools: Mapping[str, inference_pb2.Tool]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a call. Raises ValueError."""
    call = _CALL.fullmatch(text)
    if call is None:
        raise ValueError
    name = call[1]
    *texts, rest = _BETWEEN.split(call[2].lstrip())
    given = [_argument(each) for each in texts]
    if rest or len(dict(given)) < len(given):
        raise ValueError
    return name, typed_arguments(name, given, tools)


def typed_arguments(
    tool_name: str, given: Iterable[tuple[str, str]], tools: Mapping[str, inference_pb2.Tool]
) -> dict[str, Any]:
    """Returns arguments that a model wrote as texts, in the types of the schema of the tool."""
    root = parameters_schema(tools[tool_name]) if tool_name in tools else {}
    arguments = resolved(root, root)
    properties = arguments.get("properties") if isinstance(arguments, dict) else None
    schemas = properties if isinstance(properties, dict) else {}
    return {key: _typed(text, schemas.get(key), root) for key, text in given}


def _argument(text: str) -> tuple[str, str]:
    match = _ARGUMENT.fullmatch(text)
    if match is None:
        raise ValueError
    return match[1], match[2]


def _typed(text: str, schema: object, root: object) -> object:
    """Returns an argument in the type of its schema; text unless the schema excludes text.

    Models also write True, False and None: so the chat template writes the arguments of earlier
    calls.
    """
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
