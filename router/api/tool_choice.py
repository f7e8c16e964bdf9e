"""Translates tool_choice as OpenAI's two APIs share it."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument

MODES: Final = {
    None: inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "auto": inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


def numbers_of_allowed(found: Mapping[str, Sequence[int]]) -> list[int]:
    """Returns the numbers of the tools that a tool_choice allows, each once.

    `found`: by field of the tool_choice, the numbers of the tools that it names. Raises
    InvalidArgument if a field names no tool.
    """
    for field, numbers in found.items():
        if not numbers:
            raise InvalidArgument("must name one of the tools", field)
    return list(dict.fromkeys(chain.from_iterable(found.values())))
