"""Reads a call in Qwen3-Coder's format, whose arguments are texts between tags."""

import re
from collections.abc import Mapping
from typing import Any, Final

import regex

from ...proto import inference_pb2
from ..frontend.formats.chat_format import CALLED_NAME
from .tagged_arguments import ends_with, read_arguments

_BEGIN: Final = re.compile(r"\s*<function=")
_BARE: Final = regex.compile(rf"<function={CALLED_NAME}>\s{{0,64}}(?:<parameter=|</function>)")
_CALL: Final = re.compile(rf"\s*<function=({CALLED_NAME})>(.*)</function>\s*", re.DOTALL)
_BETWEEN: Final = re.compile(r"</parameter>\s*(?=<parameter=|\Z)")
_ARGUMENT: Final = re.compile(r"<parameter=(?P<name>[^>]{1,64})>\n?(?P<text>.*?)\n?", re.DOTALL)


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
    return ends_with(text, end, "</function>")


def read_call(text: str, tools: Mapping[str, inference_pb2.Tool]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a call. Raises ValueError."""
    call = _CALL.fullmatch(text)
    if call is None:
        raise ValueError
    return call[1], read_arguments(call[2].lstrip(), _BETWEEN, _ARGUMENT, tools.get(call[1]))
