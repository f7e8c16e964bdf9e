"""Checks the operator's defaults for requests: parameters, and variables of the chat template."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from ..proto.errors import InvalidArgument
from ..proto.parameters import PARAMETERS, RequestParameter, check_value

DEFAULTED: Final = tuple(row for row in PARAMETERS if row.generation_config)
"""The parameters whose default generation_config.json or the operator may replace."""

_SAMPLING: Final = "sampling_defaults"
_TEMPLATE: Final = "chat_template_kwargs"
_ROWS: Final = {name: row for row in DEFAULTED for name in (row.client_name, row.generation_config)}


def check_default(row: RequestParameter, value: Any, name: str) -> None:
    """Raises InvalidArgument, which has `name`, the bound and the value, for a wrong default."""
    if type(value) is not int and (row.kind == "int32" or type(value) is not float):
        kind = "an integer" if row.kind == "int32" else "a number"
        raise InvalidArgument(f"must be {kind}, got {value!r:.60}", name)
    try:
        check_value(row, value, name, minimum=1 if row.field == "stopping.max_tokens" else None)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message}, got {value!r:.60}") from None


def by_field(defaults: Mapping[str, float]) -> dict[str, float]:
    """Returns checked `sampling_defaults` by field of proto/parameters.py."""
    return {_ROWS[name].field: value for name, value in defaults.items()}


def _check_sampling(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name not in _ROWS:
            known = ", ".join(row.client_name for row in DEFAULTED)
            raise ValueError(f"{_SAMPLING}.{name}: cannot have a default; choose among {known}")
        try:
            check_default(_ROWS[name], value, f"{_SAMPLING}.{name}")
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
    return given


def _check_template_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    from ..router.frontend.chat import read_template_kwargs  # with Jinja

    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            f"{_TEMPLATE}: must have values of JSON; write a date as a text in quotes"
        ) from None
    try:
        return read_template_kwargs(text, _TEMPLATE)
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


SamplingDefaults = Annotated[dict[str, Any], AfterValidator(_check_sampling)]
"""Values by name, such as {"temperature": 0.6}; the names are also those of the model's file."""

TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_check_template_kwargs)]
"""Variables of the chat template by name, such as {"enable_thinking": False}."""
