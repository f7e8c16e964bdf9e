"""Reads calls of GLM 4.5, LongCat and Hunyuan, whose arguments are texts between tags.

GLM writes `weather<arg_key>city</arg_key><arg_value>Rome</arg_value>`. The names of LongCat's tags
have a prefix, and those of most checkpoints of Hunyuan 3 and 4 a suffix.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from ...proto import inference_pb2
from ..frontend.formats.chat_format import CALLED_NAME, HY_SUFFIX
from .tagged_arguments import ends_with, read_arguments

_BEGIN: Final = re.compile(rf"\s{{0,64}}{CALLED_NAME}\s{{0,64}}(?:<arg_key>|</tool_call>)")
_BETWEEN_HY_CALLS: Final = re.compile(
    rf"</tool_call{HY_SUFFIX}>\s*(?:\Z|</tool_calls{HY_SUFFIX}>\s*\Z|(?=<tool_call{HY_SUFFIX}>))"
)


class _Form:
    """Reads a call. The parameters are patterns of what differs from GLM's format."""

    def __init__(
        self, prefix: str = "", suffix: str = "", before_name: str = "", after_name: str = ""
    ) -> None:
        key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
        # Possessive (`*+`), so that much white space does not slow a pattern down.
        self._call: Final = re.compile(
            rf"\s*+{before_name}\s*+({CALLED_NAME})\s*+{after_name}\s*+(<{key}.*</{value})?\s*+",
            re.DOTALL,
        )
        self._between: Final = re.compile(rf"</{value}\s*(?=<{key}|\Z)")
        self._argument: Final = re.compile(
            rf"<{key}\s*+(?P<name>[^<\s](?:[^<]{{0,62}}[^<\s])?)\s*+</{key}\s*+"
            rf"<{value}(?P<text>.*)",
            re.DOTALL,
        )

    def read(
        self, text: str, tools: Mapping[str, inference_pb2.Tool]
    ) -> tuple[str, dict[str, Any]]:
        """Returns the name and the arguments of a call. Raises ValueError."""
        call = self._call.fullmatch(text)
        # A word between tags is text.
        if call is None or (call[2] is None and call[1] not in tools):
            raise ValueError
        tool = tools.get(call[1])
        return call[1], read_arguments(call[2] or "", self._between, self._argument, tool)


_HY: Final = _Form(
    suffix=HY_SUFFIX,
    before_name=f"<tool_call{HY_SUFFIX}>",
    after_name=f"(?:<tool_sep{HY_SUFFIX}>)?",
)
read_call: Final = _Form().read
read_longcat_call: Final = _Form(prefix="longcat_").read


def begins_call(text: str, at: int) -> bool:
    """Returns True if a call in GLM's format begins at a position of the text."""
    return _BEGIN.match(text, at) is not None


def ends_call(text: str, begin: int, end: int) -> bool:
    """Returns True if the text from `begin` to `end` is a call with all of its last argument."""
    has_arguments = text.find("<arg_key>", begin, end) >= 0
    return not has_arguments or ends_with(text, end, "</arg_value>")


def read_hy_calls(
    text: str, tools: Mapping[str, inference_pb2.Tool]
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and the arguments of Hunyuan's calls, which a tag may end.

    Raises ValueError.
    """
    *calls, rest = _BETWEEN_HY_CALLS.split(text)
    if rest:
        raise ValueError
    return [_HY.read(each, tools) for each in calls]
