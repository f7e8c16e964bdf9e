"""Closes the objects of JSON schemas that do not say whether other properties than theirs may come.

By the standard they may. A model that is held to such a schema may then write properties of its own, also ones that it
has written, until its tokens end; who makes schemas from classes, as pydantic does, means none of them.
"""

from typing import Any, Final

_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS: Final = ("items", "additionalProperties", "contains")
_REFERENCES: Final = ("$ref", "$dynamicRef", "anyOf", "oneOf", "if", "dependentSchemas")
_SAYS_MORE: Final = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "not")
"""Keywords beside which `properties` are not all that an object may have."""


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with `additionalProperties: false` in each object that has properties and says nothing more.

    A schema that is put together of several, which would exclude each other's properties, is returned as it is, and so
    is one that is nested too deeply."""
    try:
        return schema if _joins(schema) else _closed(schema)
    except RecursionError:
        return schema


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _MAPS:
        if isinstance(found.get(name), dict):
            found[name] = {key: _closed(value) for key, value in found[name].items()}
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [_closed(value) for value in found[name]]
    for name in _SCHEMAS:
        if name in found:
            found[name] = _closed(found[name])
    if isinstance(found.get("properties"), dict) and not any(name in found for name in _SAYS_MORE):
        found["additionalProperties"] = False
    return found


def _joins(schema: Any) -> bool:
    """Returns whether an object is described in several places at once."""
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    branches = schema.get("allOf")
    num_parts = len(branches) if isinstance(branches, list) else 0
    num_parts += ("properties" in schema) + sum(name in schema for name in _REFERENCES)
    return num_parts > 1 or any(map(_joins, schema.values()))
