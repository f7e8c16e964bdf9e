"""Which objects of a JSON schema are closed."""

import copy
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tandem.router.frontend.open_schemas import close_objects


class Street(BaseModel):
    name: str
    number: int | None = None


class Person(BaseModel):
    """As pydantic describes it: references, a union, a list, and a map, which stays open."""

    name: str
    home: Street = Field(description="where")
    others: list[Street] | None = None
    tags: dict[str, int] = {}


def test_every_object_of_pydantic_is_closed_but_maps() -> None:
    schema = Person.model_json_schema()
    before = copy.deepcopy(schema)
    closed = close_objects(schema)
    assert schema == before
    assert closed["additionalProperties"] is False
    assert closed["$defs"]["Street"]["additionalProperties"] is False
    assert closed["properties"]["tags"]["additionalProperties"] == {"type": "integer"}
    assert closed == {
        **before,
        "additionalProperties": False,
        "$defs": {"Street": before["$defs"]["Street"] | {"additionalProperties": False}},
    }


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"b": {}}}},
        {"$defs": {"A": {"properties": {"a": {}}}}, "$ref": "#/$defs/A", "properties": {"b": {}}},
        {"enum": [{"properties": {"a": 1}}]},
    ],
)
def test_what_says_more_or_is_put_together_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"properties": {"additionalProperties": {"type": "string"}, "items": {"properties": {"a": {}}}}}
    closed = close_objects(schema)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["items"]["additionalProperties"] is False


def test_a_schema_that_is_too_deep_stays_as_it_is() -> None:
    schema: dict[str, Any] = {}
    for _ in range(50_000):
        schema = {"items": schema}
    assert close_objects(schema) is schema
    while schema:  # or else Python's own destructor would recurse
        schema = schema["items"]
