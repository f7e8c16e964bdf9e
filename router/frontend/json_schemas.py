"""Prepares JSON schemas for llguidance: closes their objects, and rewrites what it does not read.

Closing: by the standard an object may have other properties than its schema's. A model may then
write properties of its own, also ones that it has written, until its tokens end; schemas made of
classes, as by pydantic, mean none of them.

Rewriting: `readable` leaves out what asks for nothing (formats that are only annotations,
`uniqueItems: false`), expresses some keywords and look-arounds of patterns by others that mean the
same, and refuses the rest by name. Nothing that a schema asks for is dropped.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ...proto import limits

_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS: Final = (
    *("items", "additionalItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)
"""Keywords whose values are schemas by name, lists of schemas, and schemas; `items` may be either
of the last two.
"""

_REFERENCES: Final = ("$ref", "$dynamicRef", "anyOf", "oneOf", "if", "dependentSchemas")
_SAYS_MORE: Final = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "not",
)
"""Keywords beside which `properties` are not all that an object may have."""

_APPLICATORS: Final = (*_REFERENCES, "allOf", "then", "else", "not")
"""Keywords whose schemas may evaluate properties or items, too."""

_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats that llguidance reads."""

_UNREADABLE: Final = (
    *("if", "then", "else", "not", "dependentRequired", "dependentSchemas", "dependencies"),
    *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    *("propertyNames", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
"""Keywords that llguidance does not read; it ignores annotations and keywords that no standard
knows.
"""

_ANNOTATIONS: Final = frozenset(
    (
        *("title", "description", "default", "deprecated", "examples", "readOnly", "writeOnly"),
        *("$comment", "$id", "$anchor", "id"),
    )
)
_MAX_REFERENCES: Final = 8  # of one to another, until a name's schema


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with `additionalProperties: false` in each object that has properties and
    says nothing more.

    A schema that is put together of several, which would exclude each other's properties, is
    returned as it is, and so is one that is nested too deeply.
    """
    try:
        return schema if _joins(schema) else _closed(schema)
    except RecursionError:
        return schema


def readable(schema: Any) -> Any:
    """Returns an equal schema that llguidance reads; one that is nested too deeply as it is. Raises
    ValueError, which names the keyword, for one that cannot be expressed.
    """
    try:
        return _readable(schema, schema, "")
    except RecursionError:
        return schema


def _with_subschemas(
    schema: Mapping[str, Any], change: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """Returns a copy with `change` applied to each schema right below this one, and its property's
    name or "".
    """
    found = dict(schema)
    for name in _MAPS:
        if isinstance(found.get(name), dict):
            found[name] = {key: change(value, key) for key, value in found[name].items()}
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [change(value, "") for value in found[name]]
    for name in _SCHEMAS:
        if isinstance(found.get(name), dict):
            found[name] = change(found[name], "")
    return found


def _closed(schema: Any, _name: str = "") -> Any:
    if not isinstance(schema, dict):
        return schema
    found = _with_subschemas(schema, _closed)
    if isinstance(found.get("properties"), dict) and not any(name in found for name in _SAYS_MORE):
        found["additionalProperties"] = False
    return found


def _joins(schema: Any) -> bool:
    """Returns whether an object is described in several places at once."""
    if not isinstance(schema, dict):
        return False
    branches = schema.get("allOf")
    num_parts = len(branches) if isinstance(branches, list) else 0
    num_parts += ("properties" in schema) + sum(name in schema for name in _REFERENCES)
    return num_parts > 1 or any(map(_joins, _subschemas(schema)))


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    found: list[Any] = []
    _with_subschemas(schema, lambda value, _name: found.append(value))
    yield from found


def _readable(schema: Any, root: Any, place: str) -> Any:
    """`place`: the property that the schema is of, for errors."""
    if not isinstance(schema, dict):
        return schema
    found = _with_subschemas(schema, lambda value, name: _readable(value, root, name or place))
    _drop_without_effect(found)
    _express_objects(found, root)
    if isinstance(found.get("items"), bool | dict):  # then no item is unevaluated
        found.pop("unevaluatedItems", None)
    if isinstance(found.get("pattern"), str):
        _express_pattern(found, place)
    if unreadable := next((name for name in _UNREADABLE if name in found), ""):
        raise ValueError(
            f"{_at(place)}the keyword {unreadable!r} is not supported in this form; leave it out"
        )
    return found


def _at(place: str) -> str:
    return f"property {place[:64]!r}: " if place else ""


def _drop_without_effect(found: dict[str, Any]) -> None:
    """Leaves out keywords whose values ask for nothing."""
    if (
        isinstance(found.get("format"), str) and found["format"] not in _FORMATS
    ):  # an annotation by the standard
        del found["format"]
    if "contains" not in found or (found.get("minContains") == 0 and "maxContains" not in found):
        unused = ["contains", "minContains", "maxContains"]
    else:
        unused = []
    if "if" not in found:
        unused += ["then", "else"]
    elif "then" not in found and "else" not in found:
        unused.append("if")
    unused += ["$dynamicAnchor", "$recursiveAnchor"]  # names of places
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


def _express_objects(found: dict[str, Any], root: Any) -> None:
    """Expresses what the names of an object's properties must be by keywords that llguidance reads."""
    if "unevaluatedProperties" in found and not any(name in found for name in _APPLICATORS):
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
        _express_names(found, _resolved(found["propertyNames"], root))


def _resolved(schema: Any, root: Any) -> Any:
    """Follows references within the document."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        target = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, dict) else None
        schema = target
    return schema


def _express_names(found: dict[str, Any], names: Any) -> None:
    """Expresses `propertyNames`, if it is a list of names, a pattern or a length."""
    asked = (
        {name: value for name, value in names.items() if name not in _ANNOTATIONS}
        if isinstance(names, dict)
        else {}
    )
    if asked.get("type") == "string":
        del asked["type"]
    if isinstance(asked.get("format"), str) and asked["format"] not in _FORMATS:
        del asked["format"]
    rest = found.get("additionalProperties", True)
    known = found.get("properties") or {}
    if names is True or (isinstance(names, dict) and not asked):
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


def _is_short(value: Any, most: int) -> bool:
    """Returns whether a value has at most so many characters as JSON."""
    lengths = itertools.accumulate(map(len, json.JSONEncoder().iterencode(value)))
    return all(length <= most for length in lengths)


def _name_pattern(asked: Mapping[str, Any]) -> str:
    """Returns the pattern of names, "" if there is none for it."""
    least, most = asked.get("minLength", 0), asked.get("maxLength", "")
    if asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        return "" if _has_lookaround(asked["pattern"]) else asked["pattern"]
    if (
        asked.keys() <= {"minLength", "maxLength"}
        and isinstance(least, int)
        and isinstance(most, int | str)
    ):
        return rf"^(?s:.){{{least},{most}}}$"
    return ""


# Patterns: JSON schemas have those of ECMA-262, of which llguidance lacks what looks ahead or
# behind.

_SKIPPED: Final = (
    r"\\.|\[(?:\\.|[^\]\\])*+(?:\]|\Z)"  # what is escaped, and classes; in linear time
)
_LOOKAROUND: Final = re.compile(rf"{_SKIPPED}|(?P<look>\(\?<?[=!])", re.DOTALL)
_PARTS: Final = re.compile(rf"{_SKIPPED}|(?P<special>[()|])", re.DOTALL)
_CLASS: Final = r"\[\^?(?:\\.|[^\]\\])+\]"
_ONE_CLASS: Final = re.compile(rf"({_CLASS})|\\([dDwWsS])")
_ONLY_CLASS: Final = re.compile(rf"\^?({_CLASS})([*+])\$")
_LITERAL: Final = re.compile(r"(?:[\w \-@#%&=!<>:;,'\"~`/]|\\[^\w\s])+")
_MAX_LITERAL: Final = 64
_MAX_LOOKAHEADS: Final = 16  # of one pattern
_DECIMAL_WIDTH: Final = re.compile(
    r"\(\?=\[\\d\.\]\{1,(\d{1,2})\}0\*\$\)\\d(?:\*|\{0,(\d+)\})\\\.\\d(?:\*|\{0,(\d+)\})0\*\$"
)
"""What pydantic writes for decimals with at most so many digits: the lookahead counts them and the
point.
"""


def _express_pattern(found: dict[str, Any], place: str) -> None:
    """Expresses the look-arounds of a pattern by further patterns that must match, too."""
    if not _has_lookaround(found["pattern"]) or not isinstance(found.get("allOf", []), list):
        return
    pattern, *others = _without_lookaheads(_DECIMAL_WIDTH.sub(_decimal, found["pattern"])) or [""]
    if pattern:
        found["pattern"] = pattern
        found["allOf"] = [*found.get("allOf", ()), *({"pattern": other} for other in others)]
    elif (
        found.get("format") in _FORMATS
    ):  # of which generators write such patterns: the format says as much
        del found["pattern"]
    else:
        raise ValueError(
            f"{_at(place)}the pattern {found['pattern'][:64]!r} has a look-around that is not "
            "supported; leave it out"
        )


def _has_lookaround(pattern: str) -> bool:
    return any(match["look"] for match in _LOOKAROUND.finditer(pattern))


def _decimal(match: re.Match[str]) -> str:
    """Returns the same without the lookahead: with each number of digits before the point, so many
    after it.
    """
    most, before, after = int(match[1]) - 1, match[2], match[3]
    if before is not None and after is not None:
        return rf"\d{{0,{before}}}\.\d{{0,{min(int(after), max(most - int(before), 0))}}}0*$"
    shares = "|".join(rf"\d{{{count}}}\.\d{{0,{most - count}}}" for count in range(most + 1))
    return rf"(?:{shares})0*$" if before is after is None else match[0]


def _without_lookaheads(pattern: str) -> list[str]:
    """Returns patterns that together match what one with lookaheads at its beginning does; [] if
    there are none.
    """
    if not pattern.startswith("^"):
        return []
    rest = pattern[1:]
    others: list[str] = []
    while rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        body = rest[3:end]
        if end < 0 or _has_lookaround(body):
            return []
        excluded = [f"^(?:{body})"] if rest[2] == "=" else _complement(body)
        if not excluded or len(others) > _MAX_LOOKAHEADS:
            return []
        others += excluded
        rest = rest[end + 1 :]
    if _has_lookaround(rest) or len(_alternatives(rest)) > 1:
        return []
    return [f"^{rest}", *others]


def _closing(pattern: str) -> int:
    """Returns the position of the parenthesis that closes the first one; -1 if none does."""
    depth = 0
    for match in _PARTS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match["special"] or "", 0)
        if match["special"] == ")" and not depth:
            return match.start()
    return -1


def _alternatives(pattern: str) -> list[str]:
    depth, begin, found = 0, 0, []
    for match in _PARTS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match["special"] or "", 0)
        if match["special"] == "|" and not depth:
            found.append(pattern[begin : match.start()])
            begin = match.end()
    return [*found, pattern[begin:]]


def _complement(body: str) -> list[str]:
    """Returns patterns of all texts that do not begin with what `body` matches; [] for one that is
    too general.
    """
    end = "$" if body.endswith(")$") else ""
    if (
        body.startswith("(") and _closing(body) == len(body) - len(end) - 1
    ):  # one group of alternatives
        group = body[: len(body) - len(end) - 1].removeprefix("(").removeprefix("?:")
        return (
            []
            if group.startswith("?")
            else _complement("|".join(each + end for each in _alternatives(group)))
        )
    patterns = [_complement_of_one(each) for each in _alternatives(body)]
    return patterns if all(patterns) else []


def _complement_of_one(body: str) -> str:
    if match := _ONLY_CLASS.fullmatch(body):
        other = _other_class(match[1])
        return other if match[2] == "*" else f"^$|{other}"
    if _ONE_CLASS.fullmatch(body):
        return f"^(?:$|{_other_class(body)})"
    if body == "$":
        return r"^(?s:.)"
    body = body.removeprefix("^")
    if body.startswith(".*"):
        return _without(_characters(body[2:]))
    characters = _characters(body.removesuffix("$"))
    if not characters or len(characters) > _MAX_LITERAL:
        return ""
    found = "(?s:.)" if body.endswith("$") else ""
    for number, character in enumerate(reversed(characters)):
        goes_on = f"|{_one(character)}(?:{found})" if found or number else ""
        found = f"$|{_none_of(character)}{goes_on}"
    return f"^(?:{found})"


def _without(characters: list[str]) -> str:
    """Returns the pattern of texts that have a text of one or two characters nowhere; "" for
    another.
    """
    if len(characters) == 1:
        return f"^{_none_of(*characters)}*$"
    if len(characters) != 2:
        return ""
    first, second = characters
    if first == second:
        return f"^(?:{_none_of(first)}|{_one(first)}{_none_of(first)})*{_one(first)}?$"
    return f"^(?:{_none_of(first)}|{_one(first)}+{_none_of(first, second)})*{_one(first)}*$"


def _characters(body: str) -> list[str]:
    """Returns the characters of a pattern that is a text; [] for another."""
    return re.findall(r"\\?(.)", body) if _LITERAL.fullmatch(body) else []


def _one(character: str) -> str:
    return character if character.isalnum() or character in " _" else f"\\{character}"


def _none_of(*characters: str) -> str:
    return f"[^{''.join(map(_one, characters))}]"


def _other_class(one: str) -> str:
    if one.startswith("\\"):
        return "\\" + one[1].swapcase()
    return f"[{one[2:]}" if one.startswith("[^") else f"[^{one[1:]}"
