"""Makes random JSON schemas with short documents, so that a model with random weights reaches their
end.
"""

import random
from typing import Any

_NAMES = ("name", "age", "city", "tags", "is open", "größe", "x", "y")
_PATTERNS = ("^[a-f]{3}$", "^[0-9]{2}-[0-9]{2}$", "^(red|green|blue)$")


def random_schema(seed: int, depth: int = 2) -> dict[str, Any]:
    """Returns the schema of an object with up to `depth` levels below it. Equal seeds give equal
    schemas.
    """
    return _object(random.Random(seed), depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _pattern, _integer, _enum, _boolean]
    if depth > 0:
        kinds += [_object_below, _array, _either]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "grün", 1, 2.5, None, True, "a\nb"], rng.randint(1, 4))}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _object_below(rng: random.Random, depth: int) -> dict[str, Any]:
    return _object(rng, depth)


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _value(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(2)]}
