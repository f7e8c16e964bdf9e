"""Which objects of a JSON schema are closed, and how it is rewritten for llguidance."""

import copy
import itertools
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from tandem.router.frontend.schemas.json_schemas import close_objects, readable
from tandem.router.frontend.schemas.patterns import with_rust_classes
from tandem.tests.examples import num_examples
from tandem.tests.waits import WAIT


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
        {
            "properties": {"a": {}},
            "if": {"properties": {"a": {"const": 1}}},
            "then": {"properties": {"b": {}}},
        },
        {"$defs": {"A": {"properties": {"a": {}}}}, "$ref": "#/$defs/A", "properties": {"b": {}}},
        {"enum": [{"properties": {"a": 1}}]},
    ],
)
def test_what_says_more_or_is_put_together_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


@pytest.mark.parametrize(
    ("place", "reference"),
    [
        (lambda pet: {"components": {"schemas": {"Pet": pet}}}, "#/components/schemas/Pet"),
        (lambda pet: {"$defs": {"Group": {"Pet": pet}}}, "#/$defs/Group/Pet"),
        (lambda pet: {"others": [pet]}, "#/others/0"),
    ],
)
def test_schemas_that_only_a_reference_leads_to(
    place: Callable[[Any], dict[str, Any]], reference: str
) -> None:
    schema = {"items": {"$ref": reference}}
    pet = {"properties": {"a": {"type": "string", "format": "phone"}}}
    assert close_objects(schema | place(pet)) == schema | place(
        pet | {"additionalProperties": False}
    )
    assert readable(schema | place(pet)) == schema | place(
        {"properties": {"a": {"type": "string"}}}
    )
    with pytest.raises(ValueError, match="'not'"):
        readable(schema | place({"not": {}}))
    joined = schema | place({"allOf": [pet, pet]})
    assert close_objects(joined) == joined


def test_names_outside_the_standards_are_annotations() -> None:
    schema = {
        "type": "string",
        "x-reactions": {"dependencies": ["a"]},
        "options": [{"not": {}, "if": {}, "properties": {}}],
    }
    assert close_objects(schema) == readable(schema) == schema


def test_a_required_property_without_a_schema_is_kept_by_closing() -> None:
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a", "b", {}]}
    assert close_objects(schema) == schema | {
        "properties": {"a": {"type": "string"}, "b": True},
        "additionalProperties": False,
    }
    assert close_objects({"properties": {}, "required": 3})["properties"] == {}


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {
        "properties": {
            "additionalProperties": {"type": "string"},
            "items": {"properties": {"a": {}}},
        }
    }
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


def test_properties_named_as_keywords_are_properties() -> None:
    """They are closed like others, and ask for nothing that a keyword asks for."""
    names = ("if", "properties", "anyOf", "$ref", "not", "uniqueItems", "format", "nullable")
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    assert close_objects(schema) == schema | {"additionalProperties": False}
    assert readable(schema) == schema
    values = {
        "enum": [{"if": 1, "properties": 2, "format": "phone"}],
        "default": {"not": {}},
        "example": {"if": 1},
    }
    assert readable(values) == values


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "string", "format": "phone"}, {"type": "string"}),
    ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
    ({"uniqueItems": False, "minContains": 2, "maxContains": 3}, {}),
    ({"contains": {"type": "string"}, "minContains": 0}, {}),
    ({"if": {"type": "string"}}, {}),
    ({"then": {}, "else": {}, "not": False, "$dynamicAnchor": "x"}, {}),
    (
        {
            "unevaluatedProperties": True,
            "unevaluatedItems": {},
            "dependentRequired": {},
            "dependencies": {},
        },
        {},
    ),
    ({"required": ["a", "b"], "dependentRequired": {"c": ["a"]}}, {"required": ["a", "b"]}),
    (
        {"properties": {}, "unevaluatedProperties": False},
        {"properties": {}, "additionalProperties": False},
    ),
    (
        {"allOf": [{}], "additionalProperties": True, "unevaluatedProperties": False},
        {"allOf": [{}], "additionalProperties": True},
    ),
    ({"items": False, "unevaluatedItems": False}, {"items": False}),
    ({"prefixItems": [True], "additionalItems": False}, {"prefixItems": [True]}),
    ({"items": True, "additionalItems": False}, {"items": True}),
    ({"items": [True], "additionalItems": False}, {"items": [True], "additionalItems": False}),
    ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
    ({"type": ["null"], "nullable": True}, {"type": ["null"]}),
    ({"enum": ["a"], "nullable": True}, {"enum": ["a", None]}),
    ({"const": 1, "nullable": True}, {"anyOf": [{"const": 1}, {"type": "null"}]}),
    (
        {"$ref": "#/$defs/Pet", "nullable": True, "title": "A"},
        {"anyOf": [{"$ref": "#/$defs/Pet"}, {"type": "null"}], "title": "A"},
    ),
    (
        {"type": "object", "allOf": [{}], "nullable": True},
        {"anyOf": [{"type": "object", "allOf": [{}]}, {"type": "null"}]},
    ),
    ({"anyOf": [{}], "nullable": True}, {"anyOf": [{}, {"type": "null"}]}),
    ({"type": "string", "nullable": False}, {"type": "string", "nullable": False}),
    (
        {"$ref": "#", "title": "A", "deprecated": True, "x-order": 1, "nullable": False},
        {"$ref": "#", "title": "A"},
    ),
    (
        {"anyOf": [{}], "discriminator": {"propertyName": "a"}, "example": 1, "type": "object"},
        {"anyOf": [{}], "type": "object"},
    ),
    (
        {"pattern": "^[[\\]a&&b]$", "patternProperties": {"[[~~]": {}}},
        {"pattern": r"^[\[\]a\&\&b]$", "patternProperties": {r"[\[\~\~]": {}}},
    ),
    ({"propertyNames": {"type": "string", "title": "Name"}}, {}),
    (
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"type": "string", "minLength": 2, "maxLength": 3}},
        {"patternProperties": {"^(?s:.){2,3}$": True}, "additionalProperties": False},
    ),
    (
        {
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
            "required": ["a"],
        },
        {
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "required": ["a"],
        },
    ),
    (
        {
            "propertyNames": {"const": "a"},
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        },
        {"properties": {"a": {"type": "null"}}, "additionalProperties": False},
    ),
]


@pytest.mark.parametrize(("schema", "expected"), SAME)
def test_what_asks_for_nothing_is_left_out_and_the_rest_expressed(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = copy.deepcopy(schema)
    assert readable(schema) == expected
    assert readable({"items": [schema], "anyOf": [schema]}) == {
        "items": [expected],
        "anyOf": [expected],
    }
    assert schema == before


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}}
PETS = {"Cat": CAT, "Dog": {"title": "A dog", "$ref": "#/$defs/Wolf"}, "Wolf": DOG}
REFERENCES = [{"$ref": "#/$defs/Cat", "title": "Cat"}, {"$ref": "#/$defs/Dog"}]


@pytest.mark.parametrize(
    "options",
    [
        REFERENCES,
        [CAT, {"type": "object", "additionalProperties": False}],
        [{"type": "integer"}, {"$ref": "#/$defs/Cat"}, {"enum": ["a", None]}],
        [{"const": 1}, {"const": 2.5}, {"const": True}],
    ],
)
def test_one_of_schemas_that_exclude_each_other_is_any_of_them(options: list[Any]) -> None:
    """As pydantic writes a union with a discriminator."""
    schema = {"oneOf": options, "$defs": PETS}
    assert readable(schema) == {"anyOf": options, "$defs": PETS}
    both = readable(schema | {"anyOf": [{}], "allOf": [{}]})
    assert both == {"anyOf": [{}], "allOf": [{}, {"anyOf": options}], "$defs": PETS}


@pytest.mark.parametrize(
    "options",
    [
        [CAT, {"type": "object", "additionalProperties": False, "patternProperties": {"k": {}}}],
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [CAT, {"$ref": "#/$defs/missing"}],
        [DOG, DOG | {"properties": {"kind": {"const": "cat"}}}],
        [{"const": number} for number in range(101)],
    ],
)
def test_one_of_schemas_that_may_match_the_same_value_stays(options: list[Any]) -> None:
    assert readable({"oneOf": options}) == {"oneOf": options}


_PROPERTY = st.sampled_from(
    [{"const": 1}, {"const": True}, {"enum": ["a", 1.0]}, {"type": "string"}, {}, True, False]
)
_OPTION = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "string", "integer", "number", ["null", "object"]]),
        "enum": st.sampled_from([["a"], [1, {}], [1.0], [True, "b"], [{"a": 1}]]),
        "properties": st.dictionaries(st.sampled_from("ab"), _PROPERTY),
        "required": st.sampled_from([["a"], ["a", "b"]]),
        "additionalProperties": st.booleans(),
        "patternProperties": st.just({"b": {}}),
    },
)
_MEMBERS: list[Any] = [None, "a", "b", 1, 1.5, True]
_VALUES = [
    *_MEMBERS,
    [],
    {},
    *({"a": value} for value in _MEMBERS),
    *({"a": first, "b": second} for first in _MEMBERS for second in _MEMBERS),
]


@given(
    schema=st.fixed_dictionaries(
        {"oneOf": st.lists(_OPTION, min_size=2, max_size=3)},
        optional={"type": st.sampled_from(["object", "string"])},
    )
)
@settings(max_examples=num_examples(100))
def test_one_of_is_rewritten_only_without_another_meaning(schema: dict[str, Any]) -> None:
    found = readable(schema)
    if found == schema:
        return
    before = Draft202012Validator(schema)
    after = Draft202012Validator(found)
    assert [each for each in _VALUES if before.is_valid(each) != after.is_valid(each)] == []


def test_names_may_be_a_reference() -> None:
    """As pydantic writes a dict whose keys are an enum."""
    colours = {"enum": ["red", "green"], "title": "Colour", "type": "string"}
    names = {
        "propertyNames": {"$ref": "#/$defs/Colour"},
        "additionalProperties": {"type": "integer"},
    }
    found = readable({"$defs": {"Colour": colours}, "properties": {"a": names}})["properties"]["a"]
    assert found["properties"].keys() == {"red", "green"}
    named = {"$ref": "#/$defs/other", "description": "A colour"}
    definitions = {"Colour": colours, "other": {"$ref": "#/$defs/Colour", "title": "Other"}}
    schema = {"$defs": definitions, "propertyNames": named}
    assert readable(schema)["properties"].keys() == {"red", "green"}


@pytest.mark.parametrize("multiple", [3, 0.01, 0, -7, 9_973, 86_400_000, 2**20, 2.5e-9, True])
def test_multiples_that_take_little_memory_stay(multiple: float) -> None:
    assert readable({"multipleOf": multiple}) == {"multipleOf": multiple}


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"if": {}, "then": {}}, "'if'"),
    ({"not": {"type": "null"}}, "'not'"),
    ({"uniqueItems": True}, "'uniqueItems'"),
    ({"contains": {}}, "'contains'"),
    ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "'unevaluatedProperties'"),
    ({"propertyNames": {"pattern": "a", "minLength": 2}}, "'propertyNames'"),
    ({"propertyNames": {"enum": ["a"]}, "required": ["b"]}, "'propertyNames'"),
    ({"propertyNames": {"enum": ["a"]}, "required": 3}, "'propertyNames'"),
    ({"propertyNames": {"pattern": "a"}, "properties": {"a": {}}}, "'propertyNames'"),
    (
        {
            "propertyNames": {"enum": ["a" * i for i in range(200)]},
            "additionalProperties": {"enum": ["x" * 999]},
        },
        "Names",
    ),
    ({"propertyNames": False}, "'propertyNames'"),
    ({"propertyNames": {"$ref": "#/$defs/missing"}}, "'propertyNames'"),
    ({"propertyNames": {"$ref": "#missing"}}, "'propertyNames'"),
    ({"propertyNames": {"$ref": "#/$defs/name", "maxLength": 1}}, "'propertyNames'"),
    ({"propertyNames": {"$ref": "#/$defs/both"}}, "'propertyNames'"),
    ({"type": "integer", "multipleOf": 10_007}, "'multipleOf'.* at most 10000"),
    ({"multipleOf": 0.000_010_007}, "'multipleOf'"),
    ({"const": 2**53 + 1}, f"'const' has the integer {2**53 + 1}"),
    ({"const": {"a": [-(2**53) - 1]}}, "'const'"),
    ({"const": 2**64}, "'const'"),
    ({"const": 10**400}, "'const'"),
    ({"enum": ["a", [2**62 + 1]]}, "'enum'"),
    ({"minimum": 2**53 + 1}, "'minimum'"),
    ({"minimum": -(2**63)}, "'minimum'"),
    ({"maximum": 2**62 - 1}, "'maximum'"),
    ({"exclusiveMinimum": 2**53 + 1}, "'exclusiveMinimum'"),
    ({"exclusiveMaximum": 2**53 + 1}, "'exclusiveMaximum'"),
    ({"pattern": "a(?=b)"}, "look-around"),
    ({"pattern": "^(?<!a)b"}, "look-around"),
    ({"pattern": "^(?!a.*b)c"}, "look-around"),
    ({"pattern": "^(?!a)b|c"}, "look-around"),
    ({"pattern": "^" + "(?=a)" * 99}, "look-around"),
    ({"pattern": f"^(?!a){'b' * 2_000}"}, "look-around"),
    ({"pattern": f"^(?!{'(' * 21}a{')' * 21})"}, "look-around"),
]


DEFINITIONS = {
    "name": {"pattern": "^a"},
    "both": {"$ref": "#/$defs/name", "maxLength": 1},
}


@pytest.mark.parametrize(("schema", "named"), UNREADABLE)
def test_no_constraint_is_dropped(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        readable({"properties": {"place": schema}, "$defs": DEFINITIONS})
    assert "'place'" in str(caught.value)


PATTERNS = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",  # pydantic's decimals
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,1}|(?=[\d.]{1,4}0*$)\d{0,1}\.\d{0,2}0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,3}0*$)\d*\.\d*0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,5}0*$)",
    r"^(?!\.)(?!.*\.\.)([a-z.]*)@a$",  # as zod's addresses
    r"^(?=.*a)(?=.*0).{2,}$",
    r"^(?=.{1,3}$)[ab]+(\.[ab]+)*$",
    r"^(?!ab).*$",
    r"^(?!ab$).*$",
    r"^(?!(?:a|b0)$).*$",
    r"^(?!a|b0).*$",
    r"^(?!$).*$",
    r"^(?!.*ab).*$",
    r"^(?!.*0).*$",
    r"^(?!\d)[a0]+$",
    r"^(?![ab])..$",
    r"^(?![^a])ab",
    r"^(?![ab]+$)[ab0]*$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lookaheads_are_expressed_exactly(pattern: str) -> None:
    found = readable({"type": "string", "pattern": pattern})
    parts = [found["pattern"], *(each["pattern"] for each in found["allOf"])]
    assert not any("(?=" in part or "(?!" in part for part in parts)
    for length in range(5):
        for characters in itertools.product("ab.01-@", repeat=length):
            text = "".join(characters)
            assert all(re.search(part, text) for part in parts) == bool(re.search(pattern, text)), (
                text
            )


_MEMBERS_OF_CLASSES = ["\\w", "\\]", "\\\\", "\\-", *"ab019[-&~^,+./"]


@given(members=st.lists(st.sampled_from(_MEMBERS_OF_CLASSES), min_size=1, max_size=8))
@settings(max_examples=num_examples(300))
def test_classes_of_characters_keep_their_meaning(members: list[str]) -> None:
    """Python reads them as ECMAScript does, and refuses the ranges that Rust refuses."""
    pattern = f"^[{''.join(members)}]$"
    rewritten = with_rust_classes(pattern)
    assert with_rust_classes(rewritten) == rewritten
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about sets in sets
        try:
            before = re.compile(pattern)
        except re.error:
            return
    after = re.compile(rewritten)
    for character in map(chr, range(128)):
        assert bool(before.search(character)) == bool(after.search(character)), character


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[[a]]", r"[\[a]]"),
        ("[a&&b~~]", r"[a\&\&b\~\~]"),
        ("[--a][+--]", r"[\--a][+-\-]"),
        (r"[\w-.][.-\d]", r"[\w\-.][.\-\d]"),
        (r"[^[]\[[[]", r"[^\[]\[[\[]"),
        (r"[\u0041-\x5a\p{L}-]", r"[\u0041-\x5a\p{L}\-]"),
        ("[]a][^]b]", "[]a][^]b]"),
        ("[a[", "[a["),
    ],
)
def test_classes_are_written_as_rust_reads_them(pattern: str, expected: str) -> None:
    assert with_rust_classes(pattern) == expected


def test_a_format_stands_for_a_pattern_beside_it_that_cannot_be_read() -> None:
    """As zod writes durations."""
    found = readable(
        {
            "type": "string",
            "format": "duration",
            "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?)$",
        }
    )
    assert found == {"type": "string", "format": "duration"}


def test_a_long_pattern_takes_no_long_time() -> None:
    """Each `[` begins a class without an end; a search from each would take minutes."""
    for pattern in (
        "[" * 100_000,
        "^(?=a)" + "[" * 100_000,
        "(" * 100_000 + "(?=a)",
        "(?!" * 30_000,
        "[" * 100_000 + "\\",
        f"[{'a-' * 50_000}]",
        f"^(?!{'(' * 400}{'a' * 60_000}{')' * 400})",
    ):
        began = time.monotonic()
        with suppress(ValueError):
            readable({"pattern": pattern})
        assert time.monotonic() - began < WAIT / 4
