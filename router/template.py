"""Chat templates: Jinja programs that come with models, run within bounds of time and size.

The environment is the one that transformers gives to templates (huggingface.co/docs/transformers, "Chat templates"),
but every turn of a loop and every call looks at the clock, and no operator makes a value that is too large. So a
template that never ends is stopped, in whichever thread it runs. Knows nothing of tokens or messages.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_INTEGER_BITS: Final = 4_096

_deadline: ContextVar[float] = ContextVar("_deadline", default=float("inf"))  # of the rendering in this thread
_max_characters: ContextVar[int] = ContextVar("_max_characters", default=0)


class TemplateTooLong(Exception):
    """What the template makes has more characters than allowed."""


class TemplateTooSlow(Exception):
    """The template did not end in time."""


def render(source: str, variables: Mapping[str, Any], *, max_characters: int, seconds: float) -> str:
    """Renders the template `source`. `variables` are plain JSON values.

    Raises TemplateTooLong, TemplateTooSlow, jinja2.TemplateError with the words of the template itself where it calls
    raise_exception(), and, for a template is a program, any other exception."""
    template = _compiled(source)
    deadline, limit = _deadline.set(time.monotonic() + seconds), _max_characters.set(max_characters)
    parts, size = [], 0
    try:
        for part in template.generate(**variables):
            size += len(part)
            _check_size(size)
            _check_time()
            parts.append(part)
    finally:
        _deadline.reset(deadline)
        _max_characters.reset(limit)
    return "".join(parts)


def global_names() -> frozenset[str]:
    """The names that every template can use."""
    return frozenset(_environment().globals)


class _Environment(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with an eye on time and sizes."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names are Jinja's: templates may pass an argument called `self`.
        _check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_size(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Watch().visit(tree)
        return tree


class _Watch(NodeTransformer):
    """Puts the iterable of each loop through the filter `watched`, the parts of each `~` through `concatenated`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "watched", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "concatenated", [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks for training what the assistant says; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: "jinja2.parser.Parser") -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters |= {"tojson": _tojson, "watched": _watched, "concatenated": _concatenated}
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment


@jinja2.pass_context  # keeps Jinja from folding it into a constant
def _watched(_context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _check_time()
        yield item


@jinja2.pass_context
def _concatenated(_context: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateTooSlow


def _check_size(size: int) -> None:
    if size > _max_characters.get():
        raise TemplateTooLong


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters or items of what the operator makes; 0 if it is small."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        return bits if bits > _MAX_INTEGER_BITS else 0
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    if operator == "+":
        return sum(sizes)
    times = [side for side in (left, right) if isinstance(side, int)]
    return sizes[0] * times[0] if sizes and times else 0


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
