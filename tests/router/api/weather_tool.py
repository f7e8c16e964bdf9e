"""Defines a tool, its template and its call for tests of every HTTP API."""

from typing import Any

from tandem.tests.router.conftest import Service

HERMES = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}] {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor "
    "%}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def last_prompt(service: Service) -> str:
    """Returns the prompt of the last request that reached the workers."""
    return bytes(service.source.requests[-1].submit.token_ids).decode()
