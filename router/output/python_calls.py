"""Reads calls in the form of Python, as LFM2 writes them: `[weather(city="Rome", days=3), now()]`.

OLMo 3 writes them without brackets, each in a line of its own.
Values are literals, which are parsed but never evaluated. The names of tools and arguments need not
be names of Python: `from` and `get-weather` are common.
"""

import ast
import json
import re
from typing import Any, Final

from ..frontend.formats.chat_format import CALLED_NAME

_CALL: Final = re.compile(rf"\s*({CALLED_NAME})\s*(\(.*\))\s*", re.DOTALL)
_ARGUMENT: Final = re.compile(r"\s*([\w.-]+)\s*=(.*)", re.DOTALL)
_MARKS: Final = re.compile(
    r""" '(?:[^'\\]|\\.)*+'? | "(?:[^"\\]|\\.)*+"? | [][(){},\n] """,
    re.DOTALL | re.VERBOSE,
)
"""A string, a bracket, a comma or a line break. A string without an end goes on to the text's."""

_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final = "\n\\'\"abfnrtvxuUN"


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and the arguments of a list of calls, or of calls in lines.

    Raises ValueError, and RecursionError for values that are nested too deeply.
    """
    text = text.strip()
    if text.startswith("["):
        return [_call(each) for each in _items(text)]
    return [_call(each) for each in _items(f"[{text}]", separators=",\n") if each.strip()]


def _items(text: str, separators: str = ",") -> list[str]:
    """Returns the texts between the separators of a text in brackets."""
    found: list[str] = []
    depth = 0
    begin = 1
    for mark in _MARKS.finditer(text):
        match mark[0]:
            case "(" | "[" | "{":
                depth += 1
            case ")" | "]" | "}":
                depth -= 1
            case separator if depth == 1 and separator in separators:
                found.append(text[begin : mark.start()])
                begin = mark.end()
        if not depth:
            if mark.end() < len(text):
                break
            last = text[begin : mark.start()]
            return [*found, last] if last.strip() else found
    raise ValueError


def _call(text: str) -> tuple[str, dict[str, Any]]:
    call = _CALL.fullmatch(text)
    if call is None:
        raise ValueError
    arguments: dict[str, Any] = {}
    for each in _items(call[2]):
        argument = _ARGUMENT.fullmatch(each)
        if argument is None or argument[1] in arguments:
            raise ValueError
        arguments[argument[1]] = read_literal(argument[2])
    return call[1], arguments


def read_literal(text: str) -> object:
    """Returns the value of a literal of Python, or of `true`, `false` or `null`.

    Raises ValueError, and RecursionError for values that are nested too deeply.
    """
    # Python warns of an unknown escape and keeps its backslash, as here without a warning.
    text = _ESCAPE.sub(lambda each: each[0] if each[1] in _ESCAPED else f"\\{each[0]}", text)
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError):  # MemoryError: the parser's stack is full
        raise ValueError from None


def _value(node: ast.expr | None) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id="true" | "false" | "null" as name):  # of JSON
            return json.loads(name)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            names = [_value(key) for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_value, values), strict=True))
    raise ValueError
