"""Reading HTTP bodies: JSON to pydantic models, and errors that name a field as the body has it."""

import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from ....proto.errors import InvalidArgument
from .bodies import OpenModel

MAX_NAME: Final = 64  # characters of a name out of a body that an error repeats

_UNION_TAGS: Final = frozenset({"str", "NamedTool"})  # what pydantic puts into paths where a field has several types

_FIELDS: Final = (
    (re.compile(r"^prompt\.chat\.template_kwargs"), "chat_template_kwargs"),
    (re.compile(r"^prompt\.chat\.tool_choice.*"), "tool_choice"),
    (re.compile(r"^prompt\.chat\.(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)"), r"\1.function.\2"),
    (re.compile(r"^prompt\.chat\.(tools\[\d+\])\."), r"\1.function."),
    (re.compile(r"^prompt\.chat\.(.+)"), r"\1"),
    (re.compile(r"^prompt\.chat$"), "messages"),
    (re.compile(r"^prompt\..*"), "prompt"),
    (re.compile(r"^token_ids"), "tokens"),
    (re.compile(r"^beam_search\.width"), "beam_width"),
    (re.compile(r"^(sampling|stopping|beam_search)\."), ""),
)
"""What the fields of tandem.v1 are called in a body; the first that fits counts."""

_B = TypeVar("_B", bound=OpenModel)


def http_field(path: str) -> str:
    """The name in most bodies of a field of tandem.v1: `stopping.stop[3]` is `stop[3]`."""
    for pattern, name in _FIELDS:
        if pattern.search(path):
            return pattern.sub(name, path)
    return path


def parse(kind: type[_B], body: bytes) -> _B:
    """The checked body. Raises InvalidArgument, which names the field as the body has it."""
    try:
        with _without_collection():
            parsed = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    else:
        _refuse_unknown(parsed, "")
        return parsed
    if first["type"] == "json_invalid":
        raise InvalidArgument("the body is not valid JSON")
    message: str = first["msg"]
    raise InvalidArgument(message[:1].lower() + message[1:], _path(first["loc"]))


@contextmanager
def _without_collection() -> Iterator[None]:
    """Nothing here makes a cycle, but each list in a body brings the next search for cycles nearer. With a million of
    them that is four fifths of the time, in which no other thread runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def json_text(value: Any, path: str) -> str:
    """The JSON of a value that came in a body. Raises InvalidArgument if it is too deep, or has a number that JSON does
    not know."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidArgument("is not valid JSON, too deep, or has a number that is too long", path) from None


def _path(loc: tuple[int | str, ...]) -> str:
    parts = [str(part)[:MAX_NAME] for part in loc if part not in _UNION_TAGS and "[" not in str(part)]
    return re.sub(r"\.(\d+)", r"[\1]", ".".join(parts))


def _refuse_unknown(model: BaseModel, prefix: str) -> None:
    """Raises InvalidArgument for a field that is not known and not null, here or deeper."""
    for name, value in (model.model_extra or {}).items():
        if value is not None:
            raise InvalidArgument("is not a field that is known here", f"{prefix}{name[:MAX_NAME]}")
    for name, value in model:
        values = value if isinstance(value, list) else [value]
        for i, inner in enumerate(values):
            if isinstance(inner, BaseModel):
                place = f"{name.rstrip('_')}[{i}]" if isinstance(value, list) else name.rstrip("_")
                _refuse_unknown(inner, f"{prefix}{place}.")
