"""Bounds the sizes of values in chat templates before they are computed, and the time of rendering.

Sizes are characters of texts and entries of lists. Knows Jinja's filters and Python's methods, no templates.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

import jinja2
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined

_MAX_INTEGER_BITS: Final = 4_096
_MAX_DIGITS: Final = 1_000
"""To round to."""

# Of the rendering in this thread: size, seconds, deadline.
_bounds: ContextVar[tuple[float, float, float]] = ContextVar("_bounds", default=(0, math.inf, math.inf))


class TemplateBoundExceeded(Exception):
    """Reports that a value of the template is too large, or that the template did not end in time; names the bound."""


@contextmanager
def bounded(max_size: int, seconds: float) -> Iterator[None]:
    """Sets the bounds of the rendering inside."""
    token = _bounds.set((max_size, seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _bounds.reset(token)


def check_time() -> None:
    """Raises TemplateBoundExceeded after the deadline."""
    _, seconds, deadline = _bounds.get()
    if time.monotonic() > deadline:
        raise TemplateBoundExceeded(f"takes more than {seconds:g} seconds")


def check_size(size: float) -> None:
    """Raises TemplateBoundExceeded if a value has more characters than allowed."""
    max_size, _, _ = _bounds.get()
    if size > max_size:
        raise TemplateBoundExceeded(f"renders more than {max_size} characters")


def text_size(*values: object) -> int:
    """Estimates the characters of all values as text: a list may have the same long text a thousand times.

    Raises TemplateBoundExceeded as soon as they are too many, so that the count itself is short."""
    size, waiting = 0, list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, list | tuple | set | frozenset):
            size += 2 * len(value) + 2
            check_size(size)
            waiting += value
        elif isinstance(value, Mapping):
            size += 4 * len(value) + 2
            check_size(size)
            waiting += value.keys()
            waiting += value.values()
        else:
            size += 4
        check_size(size)
    return size


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raises TemplateBoundExceeded if `left operator right` is too large."""
    if operator == "%" and isinstance(left, str | bytes):
        check_size(_format_size(left, (right,)))
    elif isinstance(left, int) and isinstance(right, int):
        if operator != "%":
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            check_size(bits if bits > _MAX_INTEGER_BITS else 0)
    else:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | bytes | list | tuple)]
        if operator == "+":
            check_size(sum(sizes))
        times = [side for side in (left, right) if isinstance(side, int)]
        check_size(sizes[0] * times[0] if sizes and times else 0)


def checked_arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments for a method of a text, iterators as lists. Raises TemplateBoundExceeded for a result that
    is too large."""
    method = getattr(function, "__wrapped__", function)  # Jinja wraps `format`
    text = getattr(method, "__self__", None)
    if not isinstance(text, str | bytes):
        return args
    if method.__name__ == "join" and args:
        args = (list(watched(args[0])),)
    growth = _METHODS.get(method.__name__)
    if growth is not None:
        check_size(growth(text, *args, **kwargs))
    return args


def concatenated(parts: Iterable[Any]) -> str:
    """Joins the texts of all parts. Raises TemplateBoundExceeded."""
    parts = list(parts)
    text_size(*parts)
    return "".join(map(str, parts))


def joined(parts: Iterable[str]) -> str:
    """Joins texts as they are made. Raises TemplateBoundExceeded."""
    found, size = [], 0
    for part in parts:
        size += len(part)
        check_size(size)
        check_time()
        found.append(part)
    return "".join(found)


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Returns Jinja's filters; those whose result can be larger than their arguments check it."""
    filters: dict[str, Callable[..., Any]] = dict(FILTERS)
    return {name: _bounded(name, function) for name, function in filters.items()} | {"join": _join, "tojson": _tojson}


def watched(iterable: Iterable[Any]) -> Iterator[Any]:
    """Yields the same items; raises TemplateBoundExceeded after the deadline."""
    for item in iterable:
        check_time()
        yield item


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    growth = _FILTERS.get(name)
    if growth is None:
        return function

    @wraps(function)
    def bounded_filter(*args: Any, **kwargs: Any) -> Any:
        check_time()
        given = args[isinstance(args[0], jinja2.Environment | Context | EvalContext) :]
        check_size(growth(*given, **kwargs))
        return function(*args, **kwargs)

    return bounded_filter


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    texts = list(watched(value))
    check_size(text_size(*texts) + len(d) * len(texts))
    return d.join(map(str, texts))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML."""
    text_size(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(value)
    if isinstance(indent, int):
        check_size(indent)
    return joined(encoder.iterencode(value))


def _format_size(form: str | bytes, values: Iterable[Any]) -> int:
    """Returns an upper bound of a formatted text: as if each field had the longest value and the greatest width."""
    values = list(values)
    text = form if isinstance(form, str) else form.decode("latin-1")
    widths = [int(digits[:10]) for digits in re.findall(r"[0-9]+", text)]
    if "*" in text or re.search(r"\{[^{}]*\{", text):  # widths that are values
        flat = [each for value in values for each in (value if isinstance(value, list | tuple) else (value,))]
        flat += [each for value in values if isinstance(value, Mapping) for each in value.values()]
        widths += [abs(each) for each in flat if isinstance(each, int)]
    num_fields = text.count("%") + text.count("{")
    return len(text) + num_fields * (text_size(*values) + max(widths, default=0))


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> int:
    texts: list[Any] = [each if isinstance(each, bytes) else _text(each) for each in (text, old, new)]
    length, least, most = map(len, texts)
    return length + int(texts[0].count(texts[1])) * max(most - least, 0)


def _text(value: object) -> str:
    """Returns `str(value)` after a check of its size."""
    text_size(value)
    return str(value)


def _indented(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> int:
    shown = _text(text)
    return len(shown) + (shown.count("\n") + len(shown.splitlines()) + 1) * _width(width)


def _width(width: Any) -> int:
    """Returns the width of an indentation, which may be a number or a text."""
    return len(width) if isinstance(width, str) else int(width)


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    items = [start, *values] if isinstance(values, list | tuple) else [start]
    return sum(len(item) for item in items if isinstance(item, list | tuple))


def _rounded(value: Any, precision: Any = 0, method: str = "common") -> float:
    return math.inf if isinstance(precision, int) and abs(precision) > _MAX_DIGITS else 0


def _same(*args: Any, **kwargs: Any) -> int:
    """Returns the size of filters whose result is not much larger than their arguments."""
    return text_size(*(arg for arg in args if not isinstance(arg, Undefined)))


def _filled(text: Any, width: Any = 80, *args: Any) -> int:
    return max(_same(text), _width(width))


_METHODS: Final[Mapping[str, Callable[..., int]]] = {
    "join": lambda text, parts: text_size(*parts) + len(text) * len(parts),
    "replace": _replaced,
    "format": lambda text, *args, **kwargs: _format_size(text, (*args, *kwargs.values())),
    "format_map": lambda text, values: _format_size(text, values.values()),
    "expandtabs": lambda text, tabsize=8: len(text) + text.count(b"\t" if isinstance(text, bytes) else "\t") * tabsize,
    "translate": lambda text, table, *_: len(text) * (1 + text_size(table)),
    **dict.fromkeys(("ljust", "rjust", "center", "zfill"), _filled),
}

_FILTERS: Final[Mapping[str, Callable[..., float]]] = {
    "batch": lambda items, linecount, fill_with=None: linecount,
    "slice": lambda items, slices, fill_with=None: slices,
    "center": _filled,
    "format": lambda text, *args, **kwargs: _format_size(_text(text), (*args, *kwargs.values())),
    "indent": _indented,
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "urlize": lambda text, *args, **kwargs: len(_text(text)) * (40 + text_size(*args, kwargs)),
    "wordwrap": lambda text, width=79, words=True, wrapstring=None, hyphens=True: (
        len(_text(text)) * (1 + len(wrapstring or "\n"))
    ),
    **dict.fromkeys(
        (
            *("capitalize", "e", "escape", "forceescape", "lower", "pprint", "string", "striptags", "title", "trim"),
            *("truncate", "upper", "urlencode", "wordcount", "xmlattr"),
        ),
        _same,
    ),
}
