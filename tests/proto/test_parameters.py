"""The table of parameters: complete, true to the messages, and the same as what is written by hand
beside it.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.message import Message

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.proto.parameters import (
    PARAMETERS,
    ROWS,
    RequestParameter,
    check_value,
    markdown,
    parameters_of,
)
from tandem.router.client.types import Options
from tandem.workers.engine.plan import SamplingParams

PARENTS: Final[dict[str, type[Message]]] = {
    "": inference_pb2.GenerateRequest,
    "sampling": inference_pb2.SamplingParams,
    "stopping": inference_pb2.StoppingParams,
    "beam_search": inference_pb2.BeamSearch,
    "constraint": inference_pb2.Constraint,
}
NO_ROWS: Final = {
    "prompt",
    "sampling",
    "stopping",
    "beam_search",
    "constraint",
    "resume",
    "pooling",
    "cache_breakpoints",
    "only_cache_breakpoints",
}
NUMBERS: Final = [
    row for row in PARAMETERS if math.isfinite(row.bounds[1]) and row.kind != "logit_bias"
]
TYPES: Final = {
    "bool": "bool",
    "float": "float",
    "string": "str",
    "json": "Mapping[str, object] | str",
    "strings": "Sequence[str]",
    "token_ids": "Sequence[int]",
    "logit_bias": "Mapping[int, float]",
}


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    fields = {
        f"{parent}.{name}".removeprefix(".")
        for parent, message in PARENTS.items()
        for name in message.DESCRIPTOR.fields_by_name
    }
    assert fields - NO_ROWS == set(ROWS)
    assert len(ROWS) == len(PARAMETERS)


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.field)
def test_a_row_has_the_type_and_the_presence_of_its_field(row: RequestParameter) -> None:
    field = PARENTS[row.field.rpartition(".")[0]].DESCRIPTOR.fields_by_name[row.leaf]
    default = getattr(field.message_type or field, "name", "") if field.message_type else field.type
    names: dict[Any, set[str]] = {
        field.TYPE_BOOL: {"bool"},
        field.TYPE_INT32: {"int32"},
        field.TYPE_UINT32: {"token_ids" if field.is_repeated else "uint32"},
        field.TYPE_UINT64: {"uint64"},
        field.TYPE_FLOAT: {"float"},
        field.TYPE_STRING: {"strings"} if field.is_repeated else {"string", "json"},
        "LogitBiasEntry": {"logit_bias"},
        "StringChoices": {"strings"},
    }
    assert row.kind in names[default]
    assert row.has_presence == field.has_presence


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.field)
def test_every_bound_is_the_last_good_value(row: RequestParameter) -> None:
    least, most = row.limits
    step = 1 if row.kind != "float" else 1e-6 * max(abs(least), abs(most))
    check_value(row, most, row.field)
    past = [
        most + step,
        least - step,
        *([math.nan, math.inf, -math.inf] if row.kind == "float" else []),
    ]
    if row.excludes_minimum:
        past.append(least)
    else:
        check_value(row, least, row.field)
    for value in past:
        with pytest.raises(InvalidArgument, match="must be") as caught:
            check_value(row, value, "here")
        assert caught.value.field == "here"


def test_the_options_of_clients_are_the_rows() -> None:
    written = Options.__annotations__
    assert set(written) == {row.client_name for row in PARAMETERS}
    for row in PARAMETERS:
        expected = TYPES.get(row.kind, "int") if row.leaf != "stop" else "str | Sequence[str]"
        assert _type_name(written[row.client_name]) == expected, row.field


def _type_name(annotation: Any) -> str:
    return (
        annotation.__name__
        if isinstance(annotation, type)
        else str(annotation).replace("collections.abc.", "")
    )


def test_the_engine_has_every_parameter_of_sampling_with_its_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for row in parameters_of("sampling"):
        assert row.leaf in defaults
        if row.kind in ("float", "int32"):
            assert defaults[row.leaf] == row.default, row.field


def test_the_page_has_the_names_in_each_http_api() -> None:
    lines = markdown().splitlines()
    head, _, *rows = (
        [cell.strip("` ") for cell in line.split("|")] for line in lines if "|" in line
    )
    cells = {row[1]: dict(zip(head, row, strict=True)) for row in rows}
    assert cells["stopping.max_tokens"]["responses"] == "max_output_tokens"
    assert cells["stopping.stop"]["messages"] == "stop_sequences"
    assert cells["stopping.min_tokens"]["responses"] == cells["echo"]["chat"] == ""


def test_the_page_is_fresh() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "parameters.md"
    assert page.read_text() == markdown(), (
        "run `python -m tandem.proto.parameters > docs/parameters.md`"
    )
