"""Parses lines of JSON; errors name the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ..proto.errors import InvalidArgument
from .fields import error_text

_Line = TypeVar("_Line", bound=BaseModel)


def number_lines(
    text: str, path: Path | str, line_type: type[_Line]
) -> Iterator[tuple[int, _Line]]:
    """Yields the lines of JSON objects without the empty ones, each with its number from 1 on.

    Raises InvalidArgument, which names the line of `path`, also for a text without lines.
    """
    has_lines = False
    # Not splitlines: strings in JSON may have other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        has_lines = True
        try:
            parsed = line_type.model_validate_json(line)
        except ValidationError as error:
            found = [
                ": ".join([*map(str, each["loc"]), error_text(each)]) for each in error.errors()
            ]
            raise InvalidArgument("; ".join(found), f"{path}:{number}") from None
        yield number, parsed
    if not has_lines:
        raise InvalidArgument("has no lines", str(path))
