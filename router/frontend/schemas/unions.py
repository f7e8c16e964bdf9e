"""Decides whether a value can match two JSON schemas at the same time."""

from collections.abc import Callable
from typing import Any, Final

_KINDS: Final = frozenset(("null", "boolean", "number", "string", "array", "object"))


def exclude(first: dict[str, Any], second: dict[str, Any], resolve: Callable[[Any], Any]) -> bool:
    """Returns True if no value can match both schemas, by their types, values or properties.

    `resolve`: follows the reference of a schema.
    """
    if _differ(first, second):
        return True
    if "object" not in (first.get("type"), second.get("type")):
        return False
    names = [
        name
        for schema in (first, second)
        if isinstance(schema.get("required"), list)
        for name in schema["required"]
        if isinstance(name, str)
    ]
    return any(
        _differ(resolve(_property(first, name)), resolve(_property(second, name))) for name in names
    )


def _property(schema: dict[str, Any], name: str) -> Any:
    """Returns the schema of a property; True or False if it may have any value or none."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _differ(first: Any, second: Any) -> bool:
    """Returns True if two schemas have no type or no value in common."""
    if first is False or second is False:
        return True
    values = _values(first)
    others = _values(second)
    if values is not None and others is not None:
        return not values & others
    return not _kinds(first) & _kinds(second)


def _values(schema: Any) -> frozenset[tuple[str, Any]] | None:
    """Returns the kinds and values of `const` or `enum`, without the contents of lists and objects.

    Returns None without these keywords.
    """
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return frozenset(
        (_kind(value), None if isinstance(value, list | dict) else value) for value in values
    )


def _kinds(schema: Any) -> frozenset[str]:
    """Returns the types of the values that a schema allows; integers are numbers."""
    values = _values(schema)
    if values is not None:
        return frozenset(kind for kind, _ in values)
    types = schema.get("type") if isinstance(schema, dict) else None
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        return _KINDS
    return frozenset("number" if each == "integer" else each for each in types)


def _kind(value: Any) -> str:
    """Returns the type of a JSON value, as `type` names it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
