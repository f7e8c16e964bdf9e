"""Converts the tools of a Responses request to functions with unique names, and calls back."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument
from ....proto.limits import MAX_TOOL_NAME_CHARACTERS, MAX_TOOLS
from ...frontend.chat import json_object
from ..openai.parsing import json_text
from ..tool_choice import numbers_of_allowed
from .tool_bodies import (
    AllowedTool,
    AllowedTools,
    ClientTool,
    CustomTool,
    HostedTool,
    NamespaceTool,
    Tool,
)

_INPUT_SCHEMA: Final = json.dumps(
    {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
)
"""The schema of the arguments of a custom tool."""

_SYNTAXES: Final = {"lark": "Lark grammar", "regex": "regular expression"}
_DIGEST_CHARACTERS: Final = 8
_ALLOWED_TYPES: Final = ("function", "custom", "namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """Holds a tool that the client runs."""

    tool: ClientTool
    path: str  # in the body
    namespace: str  # "": none
    model_name: str  # the name that the model sees

    @property
    def is_custom(self) -> bool:
        return isinstance(self.tool, CustomTool)

    def function(self) -> inference_pb2.Tool:
        """Returns the tool as the model sees it. Raises InvalidArgument."""
        tool = self.tool
        if isinstance(tool, CustomTool):
            description, parameters = _custom_description(tool), _INPUT_SCHEMA
        else:
            path = f"{self.path}.parameters"
            description = tool.description or ""
            parameters = json_text(tool.parameters, path) if tool.parameters else ""
        return inference_pb2.Tool(
            name=self.model_name, description=description, parameters=parameters
        )


class OfferedTools:
    """Holds the tools of one request. The names that the model sees are unique.

    A tool without a namespace keeps its name. A tool of a namespace has the name of both, so that
    an earlier call has the same name in the prompt as a later one.
    """

    def __init__(self, tools: Iterable[tuple[str, Tool]]) -> None:
        """`tools`: each with its path in the body. Raises InvalidArgument if there are too many."""
        self.left_out: list[str] = []  # types of tools
        self._tools: list[OfferedTool] = []
        self._by_model_name: dict[str, OfferedTool] = {}
        namespaces: list[tuple[str, NamespaceTool]] = []
        for path, tool in tools:
            if isinstance(tool, HostedTool):
                self.left_out.append(tool.type)
            elif isinstance(tool, NamespaceTool):
                namespaces.append((path, tool))
            else:
                self._add(tool, path, "", tool.name)
        for path, group in namespaces:  # after all names that cannot change
            for i, inner in enumerate(group.tools):
                name = self.model_name(group.name, inner.name)
                self._add(inner, f"{path}.tools[{i}]", group.name, name)
        if len(self._tools) > MAX_TOOLS:
            raise InvalidArgument(
                f"has {len(self._tools)} tools, with the tools of namespaces; the maximum is "
                f"{MAX_TOOLS}",
                "tools",
            )

    def __iter__(self) -> Iterator[OfferedTool]:
        return iter(self._tools)

    def _add(self, tool: ClientTool, path: str, namespace: str, model_name: str) -> None:
        offered = OfferedTool(tool=tool, path=path, namespace=namespace, model_name=model_name)
        self._tools.append(offered)
        self._by_model_name.setdefault(model_name, offered)

    def model_name(self, namespace: str | None, name: str) -> str:
        """Returns the name that the model sees, of a tool that may be absent."""
        if not namespace:
            return name
        # The usual names of MCP tools: `mcp__files__read` of the namespace `mcp__files__`.
        joined = f"{namespace.rstrip('_')}__{name}"
        taken = self._by_model_name.get(joined)
        is_free = taken is None or (taken.namespace, taken.tool.name) == (namespace, name)
        if is_free and len(joined) <= MAX_TOOL_NAME_CHARACTERS:
            return joined
        digest = hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()[:_DIGEST_CHARACTERS]
        return f"{joined[: MAX_TOOL_NAME_CHARACTERS - 1 - len(digest)]}_{digest}"

    def called(self, model_name: str) -> OfferedTool | None:
        """Returns the tool that the model calls by this name."""
        return self._by_model_name.get(model_name)

    def allowed(self, choice: AllowedTools) -> Sequence[OfferedTool]:
        """Returns the tools that a tool_choice allows. Raises InvalidArgument for unknown names."""
        found = {
            f"tool_choice.tools[{i}].name": [
                number for number, tool in enumerate(self._tools) if _is_allowed(tool, allowed)
            ]
            for i, allowed in enumerate(choice.tools)
            if allowed.type in _ALLOWED_TYPES  # the service has none of OpenAI's own tools
        }
        return [self._tools[number] for number in numbers_of_allowed(found)]


def _is_allowed(offered: OfferedTool, allowed: AllowedTool) -> bool:
    if allowed.type == "namespace":
        return offered.namespace == allowed.name
    return (offered.namespace, offered.tool.name) == (allowed.namespace or "", allowed.name)


def custom_arguments(text: str) -> str:
    """Returns the arguments of a call of a custom tool, as the model writes them."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Returns the input of a custom tool: the arguments themselves if the model wrote others."""
    text = (json_object(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


def _custom_description(tool: CustomTool) -> str:
    described = [tool.description] if tool.description else []
    if tool.format is not None and tool.format.definition:
        kind = _SYNTAXES.get(tool.format.syntax or "", "grammar")
        described.append(f"The input must match this {kind}:\n{tool.format.definition}")
    return "\n\n".join(described)
