"""Parses HTTP bodies into pydantic models; errors name a field as the body does."""

import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from ....proto.errors import InvalidArgument
from ...garbage import collections_paused
from ..large_messages import check_json_elements
from .bodies import REASONS, OpenModel

MAX_NAME: Final = 64
"""Characters of a name in a body that an error repeats."""

_MAX_LEFT_OUT: Final = 16
"""Bound on the unknown fields that a header lists."""

_PIECE: Final = 4_096  # values of a long list that are written in one call
# Elements that pydantic adds to the path of a field with several types.
_UNION_TAGS: Final = frozenset({"str"})

_FIELDS: Final = (
    (re.compile(r"^prompt\.chat\.template_kwargs"), "chat_template_kwargs"),
    (re.compile(r"^prompt\.chat\.tool_choice.*"), "tool_choice"),
    (
        re.compile(r"^prompt\.chat\.(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)"),
        r"\1.function.\2",
    ),
    (re.compile(r"^prompt\.chat\.(tools\[\d+\])\."), r"\1.function."),
    (re.compile(r"^prompt\.chat\.(.+)"), r"\1"),
    (re.compile(r"^prompt\.chat$"), "messages"),
    (re.compile(r"^prompt\.suffix"), "suffix"),
    (re.compile(r"^prompt\..*"), "prompt"),
    (re.compile(r"^token_ids"), "tokens"),
    (re.compile(r"^beam_search\.width"), "beam_width"),
    (re.compile(r"^(sampling|stopping|beam_search)\."), ""),
)
"""Maps patterns of fields of tandem.v1 to names in bodies; the first match counts."""

_B = TypeVar("_B", bound=OpenModel)


def http_field(path: str) -> str:
    """Returns the name of a field of tandem.v1 in bodies: `stop[3]` for `stopping.stop[3]`."""
    for pattern, name in _FIELDS:
        if pattern.search(path):
            return pattern.sub(name, path)
    return path


def parse(kind: type[_B], body: bytes, *, ignores_unknown: bool = False) -> _B:
    """Returns the checked body. Raises InvalidArgument with the field's name in the body.

    `ignores_unknown`: unknown fields at the top are no error; `left_out` names them.
    """
    check_json_elements(body)
    try:
        # Parsing makes no cycles, but each list in a body counts towards the next collection. With
        # a million lists, collections take four fifths of the time, and no other thread runs
        # meanwhile.
        with collections_paused():
            parsed = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = REASONS.get(str(first["loc"][0])) if first["loc"] else None
    else:
        _refuse_unknown(parsed, "", ignores_unknown=ignores_unknown)
        return parsed
    if first["type"] == "json_invalid":
        raise InvalidArgument("the body is not valid JSON")
    message: str = reason or first["msg"]
    raise InvalidArgument(message[:1].lower() + message[1:], _path(first["loc"]))


def left_out(body: OpenModel, others: Sequence[str] = ()) -> str:
    """Returns the value of LEFT_OUT: the first unknown fields of a body, and `others`; "": nothing.

    Escapes characters that a header cannot have.
    """
    unknown = (name for name, value in (body.model_extra or {}).items() if value is not None)
    names = [ascii(name[:MAX_NAME])[1:-1][:MAX_NAME] for name in islice(unknown, _MAX_LEFT_OUT)]
    return ", ".join([*names, *others]).strip()


def json_text(value: Any, path: str) -> str:
    """Returns a value of a body as JSON.

    Raises InvalidArgument if it is nested too deeply, or has a number that JSON does not support.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidArgument(
            "is not valid JSON, too deep, or has a number that is too long", path
        ) from None


def json_list(values: Sequence[Any]) -> str:
    """Returns values as a JSON list; writes it in pieces.

    `json.dumps` of a million tokens would hold the interpreter's lock for 70 ms.
    """
    pieces = (json.dumps(values[i : i + _PIECE])[1:-1] for i in range(0, len(values), _PIECE))
    return f"[{', '.join(pieces)}]"


def _path(loc: tuple[int | str, ...]) -> str:
    parts = [
        str(part)[:MAX_NAME] for part in loc if part not in _UNION_TAGS and "[" not in str(part)
    ]
    return re.sub(r"\.(\d+)", r"[\1]", ".".join(parts))


def _refuse_unknown(model: OpenModel, prefix: str, *, ignores_unknown: bool = False) -> None:
    """Raises InvalidArgument if an OpenModel has an unknown field that is not null.

    `ignores_unknown`: raises only for fields with a reason, and within nested models.
    """
    for name, value in (model.model_extra or {}).items():
        reason = REASONS.get(name) if not prefix else None
        if value is not None and (reason or not ignores_unknown):
            raise InvalidArgument(
                reason or "is not a field of this request", f"{prefix}{name[:MAX_NAME]}"
            )
    for name, value in model:
        if isinstance(value, OpenModel):
            _refuse_unknown(value, f"{prefix}{name}.")
