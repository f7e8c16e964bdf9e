"""Renders chat templates, which are Jinja programs of models, within bounds of time and size.

The environment is that of transformers (huggingface.co/docs/transformers, "Chat templates"), but every iteration and
every call checks the deadline, and the result sizes of operators, filters and string methods are computed before they
run (template_bounds.py). So a template that never ends or renders too much is stopped, in any thread and for any
messages. The bounds do not hold against a template written to break them: one step in C, such as a comparison of lists
that share their entries, can run without end. Knows nothing of tokens or messages.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .template_bounds import (
    bounded,
    bounded_filters,
    check_operation,
    check_time,
    checked_arguments,
    concatenated,
    joined,
    text_size,
    watched,
)


def render(source: str, variables: Mapping[str, Any], *, max_characters: int, seconds: float) -> str:
    """Renders the template `source`. `variables` are plain JSON values.

    Raises TemplateBoundExceeded, jinja2.TemplateError with the text of the template where it calls raise_exception(),
    and, for a template is a program, any other exception."""
    template = _compiled(source)
    with bounded(max_characters, seconds):
        return joined(template.generate(**variables))


def global_names() -> frozenset[str]:
    """Returns the names that every template can use."""
    return frozenset(_environment().globals)


class _Environment(ImmutableSandboxedEnvironment):
    """Checks time and sizes in the immutable sandbox."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(concatenated)  # of what macros and blocks with a name have written

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names are Jinja's: templates may pass an argument called `self`.
        check_time()
        return super().call(__context, __obj, *checked_arguments(__obj, args, kwargs), **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr != "to_bytes" and super().is_safe_attribute(obj, attr, value)  # of an integer: as many as one likes

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Watch().visit(tree)
        return tree


class _Watch(NodeTransformer):
    """Applies the filter `watched` to the iterable of each loop, `concatenated` to the parts of each `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "watched", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "concatenated", [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """Accepts the tag {% generation %}, which marks answers for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: "jinja2.parser.Parser") -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=_at_run_time(_checked),
    )
    own = {"watched": _at_run_time(watched), "concatenated": _at_run_time(concatenated)}
    environment.filters = bounded_filters() | own
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    del environment.globals["lipsum"]
    return environment


def _at_run_time(function: Callable[[Any], Any]) -> Callable[[Context, Any], Any]:
    """Returns a filter of the same effect, which Jinja does not fold into a constant."""
    return jinja2.pass_context(lambda _context, value: function(value))


def _checked(value: Any) -> Any:
    """Returns a value that is to be written, after a check of its size."""
    text_size(value)
    return value


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
