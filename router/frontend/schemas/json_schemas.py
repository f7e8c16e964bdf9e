"""Prepares JSON schemas for llguidance: closes their objects and rewrites unsupported keywords.

Closing: by the standard an object may have more properties than its schema names. A model may then
write further properties, even repeated ones, until its tokens end. Schemas that are made from
classes, as by pydantic, allow no further properties.

Rewriting: `readable` leaves out keywords without effect (formats that are only annotations,
`uniqueItems: false`), expresses some keywords and patterns by others with the same meaning, and
refuses the rest by name. It drops no condition of a schema.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any, Final

from ....proto import limits
from .keywords import (
    ANNOTATIONS,
    APPLICATORS,
    FORMATS,
    IN_PLACE,
    KNOWN,
    LISTS,
    MAPS,
    READ,
    REFERENCES,
    SAYS_MORE,
    SCHEMAS,
    UNREADABLE,
)
from .numbers import refused_number
from .patterns import has_lookaround, with_rust_classes, without_lookarounds
from .unions import exclude

_NULL: Final = {"type": "null"}
_MAX_REFERENCES: Final = 8  # that are followed one after the other
_MAX_OPTIONS: Final = 100  # of a `oneOf` whose pairs are compared, in 0.2 s at most

JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance: the separators of Python's json.

With free white space a model could write white space for ever.
"""


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with `additionalProperties: false` in each object that lists properties.

    Objects that say more about further properties stay unchanged. So does a schema that combines
    several schemas, which would exclude each other's properties, and a schema that is nested too
    deeply.
    """
    try:
        named = _named_by_references(schema)
        return schema if _joins(schema, named) else _closed(schema, named)
    except RecursionError:
        return schema


def readable(schema: Any) -> Any:
    """Returns an equivalent schema that llguidance reads.

    A schema that is nested too deeply stays unchanged. Raises ValueError, which names the keyword,
    if the schema cannot be expressed.
    """
    try:
        named = _named_by_references(schema)
        root = _with_null(schema, named)
        return _readable(root, root, "", named)
    except RecursionError:
        return schema


def resolved(schema: Any, root: Any, *, alone: bool = False) -> Any:
    """Returns the schema that a reference within the document `root` leads to; None if missing.

    `alone`: follows no reference that has keywords beside it, except annotations. Otherwise it
    ignores these keywords.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        if alone and schema.keys() - ANNOTATIONS != {"$ref"}:
            break
        schema = _target(schema["$ref"], root)
    return schema


def _target(reference: str, root: Any) -> Any:
    """Returns the schema at a JSON pointer like `#/$defs/a`; None if it is missing."""
    if not re.match(r"#(?:/|\Z)", reference):
        return None
    target = root
    for part in reference.split("/")[1:]:
        part = _unescaped(part)
        target = target.get(part) if isinstance(target, dict) else None
    return target


def _named_by_references(root: Any) -> frozenset[str]:
    """Returns the parts of all references in a document, such as `$defs` and `a` of `#/$defs/a`."""
    found: set[str] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
            if isinstance(value.get("$ref"), str):
                found.update(map(_unescaped, value["$ref"].split("/")[1:]))
        elif isinstance(value, list):
            waiting += value
    return frozenset(found)


def _unescaped(part: str) -> str:
    """Returns the name that a part of a JSON pointer stands for."""
    return part.replace("~1", "/").replace("~0", "~")


def _with_subschemas(
    schema: Mapping[str, Any], change: Callable[[Any, str], Any], named: Set[str]
) -> dict[str, Any]:
    """Returns a copy with `change` applied to each schema directly below and its name or "".

    Unknown keywords hold schemas only if a reference leads through them: if they are `named`.
    """
    found = dict(schema)
    for name in MAPS:
        if isinstance(found.get(name), dict):
            found[name] = {key: change(value, key) for key, value in found[name].items()}
    for name in LISTS:
        if isinstance(found.get(name), list):
            found[name] = [change(value, "") for value in found[name]]
    for name in SCHEMAS:
        if isinstance(found.get(name), dict):
            found[name] = change(found[name], "")
    for name in (found.keys() & named) - KNOWN:
        if isinstance(found[name], dict):
            found[name] = change(found[name], name)
        elif isinstance(found[name], list):
            found[name] = [change(value, name) for value in found[name]]
    return found


def _closed(schema: Any, named: Set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = _with_subschemas(schema, lambda value, _name: _closed(value, named), named)
    properties = found.get("properties")
    if isinstance(properties, dict) and not any(name in found for name in SAYS_MORE):
        required = found.get("required")
        names = required if isinstance(required, list) else []
        missing = [name for name in names if isinstance(name, str) and name not in properties]
        # A required property without a schema may have any value. Without it, nothing would match.
        found["properties"] = properties | dict.fromkeys(missing, True)
        found["additionalProperties"] = False
    return found


def _joins(schema: Any, named: Set[str]) -> bool:
    """Returns True if several schemas together describe an object."""
    if not isinstance(schema, dict):
        return False
    branches = schema.get("allOf")
    num_parts = len(branches) if isinstance(branches, list) else 0
    num_parts += ("properties" in schema) + sum(name in schema for name in REFERENCES)
    return num_parts > 1 or any(_joins(each, named) for each in _subschemas(schema, named))


def _subschemas(schema: Mapping[str, Any], named: Set[str]) -> Iterator[Any]:
    found: list[Any] = []
    _with_subschemas(schema, lambda value, _name: found.append(value), named)
    yield from found


def _with_null(schema: Any, named: Set[str]) -> Any:
    """Expresses `nullable: true` of OpenAPI 3.0, also beside `$ref`, where generators write it."""
    if not isinstance(schema, dict):
        return schema
    found = _with_subschemas(schema, lambda value, _name: _with_null(value, named), named)
    if found.get("nullable") is not True:
        return found
    del found["nullable"]
    parts = [name for name in (*IN_PLACE, "const") if name in found]
    if parts == ["anyOf"] and isinstance(found["anyOf"], list):
        found["anyOf"] = [*found["anyOf"], _NULL]
    elif parts:
        kept = (named - KNOWN) | {"$defs", "definitions", "$schema", *ANNOTATIONS}
        other = {name: found.pop(name) for name in list(found) if name not in kept}
        return found | {"anyOf": [other, _NULL]}
    types = found.get("type")
    types = [types] if isinstance(types, str) else types
    if isinstance(types, list) and "null" not in types:
        found["type"] = [*types, "null"]
    if isinstance(found.get("enum"), list) and None not in found["enum"]:
        found["enum"] = [*found["enum"], None]
    return found


def _readable(schema: Any, root: Any, place: str, named: Set[str]) -> Any:
    """Rewrites a schema and those below it; `place`: its property's name, for errors."""
    if not isinstance(schema, dict):
        return schema
    found = _with_subschemas(
        schema, lambda value, name: _readable(value, root, name or place, named), named
    )
    _drop_without_effect(found)
    _express_objects(found, root)
    _express_one_of(found, root)
    if isinstance(found.get("items"), bool | dict):  # then no item is unevaluated
        found.pop("unevaluatedItems", None)
    if not isinstance(found.get("items"), list):
        found.pop("additionalItems", None)  # beside it, llguidance does not read `prefixItems`
    _express_patterns(found, place)
    if reason := refused_number(found):
        raise ValueError(f"{_at(place)}{reason}")
    if unreadable := next((name for name in UNREADABLE if name in found), ""):
        raise ValueError(
            f"{_at(place)}the keyword {unreadable!r} is not supported in this form; leave it out"
        )
    if any(name in found for name in IN_PLACE):
        # llguidance takes unknown names for conditions, and a recursive schema must have none here.
        for name in found.keys() - READ - named:
            del found[name]
    return found


def _at(place: str) -> str:
    return f"property {place[:64]!r}: " if place else ""


def _drop_without_effect(found: dict[str, Any]) -> None:
    """Leaves out keywords whose values have no effect."""
    unused = ["$dynamicAnchor", "$recursiveAnchor"]  # names of places
    if _has_unread_format(found):
        unused.append("format")
    if "contains" not in found or (found.get("minContains") == 0 and "maxContains" not in found):
        unused += ["contains", "minContains", "maxContains"]
    if "if" not in found:
        unused += ["then", "else"]
    elif "then" not in found and "else" not in found:
        unused.append("if")
    unused += [name for name in ("uniqueItems", "not") if found.get(name) is False]
    unused += [
        name
        for name in ("unevaluatedProperties", "unevaluatedItems")
        if found.get(name) in (True, {})
    ]
    unused += [
        name
        for name in ("dependentRequired", "dependentSchemas", "dependencies")
        if found.get(name) == {}
    ]
    for name in unused:
        found.pop(name, None)


def _has_unread_format(schema: Mapping[str, Any]) -> bool:
    """Returns True for a format that llguidance does not read: by the standard an annotation."""
    return isinstance(schema.get("format"), str) and schema["format"] not in FORMATS


def _express_objects(found: dict[str, Any], root: Any) -> None:
    """Expresses conditions on the names of properties by keywords that llguidance reads."""
    if "unevaluatedProperties" in found and not any(name in found for name in APPLICATORS):
        rest = found.pop("unevaluatedProperties")
        found.setdefault("additionalProperties", rest)
    if "additionalProperties" in found:  # then no property is unevaluated
        found.pop("unevaluatedProperties", None)
    required = found.get("required", [])
    if isinstance(found.get("dependentRequired"), dict) and isinstance(required, list):
        found["dependentRequired"] = {
            name: others
            for name, others in found["dependentRequired"].items()
            if not isinstance(others, list) or not set(map(str, others)) <= set(map(str, required))
        }
        if not found["dependentRequired"]:
            del found["dependentRequired"]
    if "propertyNames" in found:
        _express_names(found, resolved(found["propertyNames"], root, alone=True))


def _express_names(found: dict[str, Any], names: Any) -> None:
    """Expresses `propertyNames`, if it is a list of names, a pattern or a length."""
    if names is True:
        names = {}
    if not isinstance(names, dict):  # no name matches, or the reference leads nowhere
        return
    asked = {name: value for name, value in names.items() if name not in ANNOTATIONS}
    if asked.get("type") == "string":
        del asked["type"]
    if _has_unread_format(asked):
        del asked["format"]
    rest = found.get("additionalProperties", True)
    known = found.get("properties") or {}
    if not asked:
        del found["propertyNames"]
        return
    if not isinstance(known, dict) or "patternProperties" in found:
        return
    match asked:
        case {"enum": list(texts), **more} if not more:
            allowed = [text for text in texts if isinstance(text, str)]
        case {"const": str(text), **more} if not more:
            allowed = [text]
        case _ if pattern := "" if known else _name_pattern(asked):
            del found["propertyNames"]
            found["patternProperties"] = {pattern: rest}
            found["additionalProperties"] = False
            return
        case _:
            return
    required = found.get("required", [])
    if not isinstance(required, list) or any(name not in allowed for name in required):
        return  # nothing matches
    if len(allowed) > 1 and not _is_short(rest, limits.MAX_GRAMMAR_CHARACTERS // len(allowed)):
        return
    del found["propertyNames"]
    others = {} if rest is False else {name: rest for name in allowed if name not in known}
    found["properties"] = {name: value for name, value in known.items() if name in allowed} | others
    found["additionalProperties"] = False


def _express_one_of(found: dict[str, Any], root: Any) -> None:
    """Replaces `oneOf` by `anyOf` if no value can match two of its schemas.

    llguidance itself compares neither references nor numbers.
    """
    options = found.get("oneOf")
    others = found.get("allOf", [])
    if not isinstance(options, list) or not isinstance(others, list):
        return
    if not 1 <= len(options) <= _MAX_OPTIONS:
        return
    common = {"type": found["type"]} if "type" in found else {}
    resolve = partial(resolved, root=root, alone=True)
    targets = map(resolve, options)
    schemas = [common | target if isinstance(target, dict) else {} for target in targets]
    if not all(exclude(*pair, resolve) for pair in itertools.combinations(schemas, 2)):
        return
    del found["oneOf"]
    if "anyOf" in found:
        found["allOf"] = [*others, {"anyOf": options}]
    else:
        found["anyOf"] = options


def _is_short(value: Any, most: int) -> bool:
    """Returns True if a value has at most `most` characters as JSON."""
    lengths = itertools.accumulate(map(len, json.JSONEncoder().iterencode(value)))
    return all(length <= most for length in lengths)


def _name_pattern(asked: Mapping[str, Any]) -> str:
    """Returns the pattern of names; "" if it cannot be expressed."""
    least = asked.get("minLength", 0)
    most = asked.get("maxLength", "")
    if asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        return "" if has_lookaround(asked["pattern"]) else asked["pattern"]
    if (
        asked.keys() <= {"minLength", "maxLength"}
        and isinstance(least, int)
        and isinstance(most, int | str)
    ):
        return rf"^(?s:.){{{least},{most}}}$"
    return ""


def _express_patterns(found: dict[str, Any], place: str) -> None:
    """Expresses patterns as llguidance reads them.

    Expresses the look-arounds of `pattern` by further patterns that must match.
    """
    by_pattern = found.get("patternProperties")
    if isinstance(by_pattern, dict):
        rewritten = {with_rust_classes(pattern): value for pattern, value in by_pattern.items()}
        if len(rewritten) == len(by_pattern):  # else llguidance refuses them: they are the same
            found["patternProperties"] = rewritten
    pattern = found.get("pattern")
    if not isinstance(pattern, str):
        return
    patterns = [pattern]
    if has_lookaround(pattern) and isinstance(found.get("allOf", []), list):
        patterns = without_lookarounds(pattern)
        if not patterns and str(found.get("format")) not in FORMATS:
            raise ValueError(
                f"{_at(place)}the pattern {pattern[:64]!r} has a look-around that is not "
                "supported; leave it out"
            )
    if not patterns:  # generators write the pattern of a format beside it
        del found["pattern"]
        return
    found["pattern"], *others = map(with_rust_classes, patterns)
    if others:
        found["allOf"] = [*found.get("allOf", ()), *({"pattern": each} for each in others)]
