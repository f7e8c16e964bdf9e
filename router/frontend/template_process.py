"""Renders chat templates in a process of its own, which template.py starts.

The environment is that of transformers (huggingface.co/docs/transformers, "Chat templates") in Jinja's sandbox. Knows
nothing of tokens or messages.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY_BYTES: Final = 2**28
_MAX_REASON: Final = 200


def global_names() -> frozenset[str]:
    """Returns the names that every template can use."""
    return frozenset(_environment().globals)


class _Generation(jinja2.ext.Extension):
    """Accepts the tag {% generation %}, which marks answers for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: "jinja2.parser.Parser") -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _render(source: str, variables: Mapping[str, Any], max_characters: int) -> str:
    """Returns the text. Raises MemoryError for more characters, and, for a template is a program, anything else."""
    parts, size = [], 0
    for part in _compiled(source).generate(**variables):
        size += len(part)
        if size > max_characters:
            raise MemoryError
        parts.append(part)
    return "".join(parts)


def _answer(source: str, variables: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    """Returns the text, or the reason why there is none."""
    try:
        return {"text": _render(source, variables, max_characters)}
    except MemoryError:
        return {"reason": f"renders more than {max_characters} characters for these messages"}
    except Exception as error:
        said = f": {str(error)[:_MAX_REASON]}" if type(error) is jinja2.TemplateError else ""  # by raise_exception
        return {"reason": f"refuses these messages{said}"}


def main() -> None:
    """Answers one request after the other until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the service's to handle
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(json.dumps(_answer(*json.loads(request))).encode())


if __name__ == "__main__":
    main()
