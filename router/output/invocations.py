"""Reads calls as MiniMax M2 and DeepSeek V3.2 write them, with arguments as texts between tags:

`<invoke name="weather"><parameter name="city">Rome</parameter></invoke>`. DeepSeek's tags have a
mark, and its arguments an attribute `string` that tells texts from JSON.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from ...proto import inference_pb2
from ..frontend.formats.calls import DSML
from ..frontend.formats.chat_format import CALLED_NAME
from .tagged_arguments import read_arguments

_MARK: Final = f"(?:{DSML})?"
# Possessive (`*+`), so that much white space does not slow a pattern down.
_BETWEEN_CALLS: Final = re.compile(rf"</{_MARK}invoke>\s*(?=<{_MARK}invoke name=|\Z)")
_CALL: Final = re.compile(rf"\s*+<{_MARK}invoke name=\"({CALLED_NAME})\">\s*+(.*)", re.DOTALL)
_BETWEEN: Final = re.compile(rf"</{_MARK}parameter>\s*(?=<{_MARK}parameter name=|\Z)")
_ARGUMENT: Final = re.compile(
    rf"<{_MARK}parameter name=\"(?P<name>[^\"]{{1,64}})\""
    r"(?: string=\"(?:(?P<is_text>true)|(?P<is_json>false))\")?>(?P<text>.*)",
    re.DOTALL,
)


def read_calls(
    text: str, tools: Mapping[str, inference_pb2.Tool]
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and the arguments of calls. Raises ValueError."""
    *calls, rest = _BETWEEN_CALLS.split(text)
    if rest:
        raise ValueError
    return [_read_call(each, tools) for each in calls]


def _read_call(text: str, tools: Mapping[str, inference_pb2.Tool]) -> tuple[str, dict[str, Any]]:
    call = _CALL.fullmatch(text)
    if call is None:
        raise ValueError
    return call[1], read_arguments(call[2], _BETWEEN, _ARGUMENT, tools.get(call[1]))
