"""Reads a call in the format of GLM 4.5 and later, whose arguments are texts between tags."""

import re
from collections.abc import Mapping
from typing import Any, Final

from ...proto import inference_pb2
from ..frontend.chat_formats import CALLED_NAME
from .tagged_arguments import ends_with, read_arguments

_BEGIN: Final = re.compile(rf"\s{{0,64}}{CALLED_NAME}\s{{0,64}}(?:<arg_key>|</tool_call>)")
# Possessive (`*+`), so that much white space does not slow a pattern down.
_CALL: Final = re.compile(rf"\s*+({CALLED_NAME})\s*+(<arg_key>.*</arg_value>)?\s*+", re.DOTALL)
_BETWEEN: Final = re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)")
_ARGUMENT: Final = re.compile(
    r"<arg_key>\s*+(?P<name>[^<\s](?:[^<]{0,62}[^<\s])?)\s*+</arg_key>\s*+"
    r"<arg_value>(?P<text>.*)",
    re.DOTALL,
)


def begins_call(text: str, at: int) -> bool:
    """Returns True if a call in this format begins at a position of the text."""
    return _BEGIN.match(text, at) is not None


def ends_call(text: str, begin: int, end: int) -> bool:
    """Returns True if the text from `begin` to `end` is a call with all of its last argument."""
    has_arguments = text.find("<arg_key>", begin, end) >= 0
    return not has_arguments or ends_with(text, end, "</arg_value>")


def read_call(text: str, tools: Mapping[str, inference_pb2.Tool]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a call. Raises ValueError."""
    call = _CALL.fullmatch(text)
    if call is None or (call[2] is None and call[1] not in tools):  # a word between tags is text
        raise ValueError
    return call[1], read_arguments(call[2] or "", _BETWEEN, _ARGUMENT, tools.get(call[1]))
