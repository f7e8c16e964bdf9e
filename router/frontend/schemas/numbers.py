"""Finds the numbers of JSON schemas that llguidance cannot enforce."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

_MAX_FACTOR: Final = 10_000
"""Bound of the part of `multipleOf` without factors 2 and 5.

llguidance has a lexer state for each remainder. 9,973 takes 30 ms and 1 MB, 999,983 takes 6 s and
340 MB. Large powers of 2 and 5 have no bound here; the limits of the check refuse them.
"""

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARGEST_INTEGER: Final = 2**63 - 1


def refused_number(schema: Mapping[str, Any]) -> str:
    """Returns the reason why llguidance cannot enforce a number of the schema; "" if it can.

    llguidance keeps numbers as float64, and integers within 64 bits. It would round others.
    """
    if _factor(schema.get("multipleOf")) > _MAX_FACTOR:
        return (
            f"'multipleOf' without its factors 2 and 5 must be at most {_MAX_FACTOR}; use a "
            "smaller number or leave it out"
        )
    for name in ("const", "enum", *_BOUNDS):
        for number in _integers(schema.get(name)):
            if name in ("maximum", "exclusiveMaximum") and number >= _LARGEST_INTEGER:
                continue  # 2**63 - 1 is enforced, so each value is still within the bound
            if abs(number) > _LARGEST_INTEGER or int(float(number)) != number:
                return (
                    f"{name!r} has the integer {str(number)[:32]}, which cannot be enforced "
                    "exactly; use one from -(2**53) to 2**53, or a string"
                )
    return ""


def _factor(multiple: Any) -> int:
    """Returns the digits of `multipleOf` as a whole number without its factors 2 and 5."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return 0
    number = int("".join(map(str, Decimal(str(multiple)).as_tuple().digits)) or 0)
    for prime in (2, 5):
        while number and number % prime == 0:
            number //= prime
    return number


def _integers(value: Any) -> Iterator[int]:
    """Yields the integers in a value, also in its lists and objects."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _integers(each)
