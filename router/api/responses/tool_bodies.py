"""Defines the tools and the tool_choice of OpenAI's Responses API."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Discriminator, Field, Tag

from ....proto import limits
from ..openai.bodies import Name, NestedModel, member


class FunctionTool(NestedModel):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="The schema binds the model when tool_choice asks for a call."
    )


class CustomFormat(NestedModel):
    """Declares the form of the input of a custom tool.

    A grammar does not bind the model: it becomes a part of the tool's description.
    """

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(NestedModel):
    """Declares a tool whose input is a text; the model sees a function with the argument input."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: CustomFormat | None = None


ClientTool = FunctionTool | CustomTool
"""A tool that the client runs."""


class HostedTool(NestedModel):
    """Declares a tool that only OpenAI or its models have; the prompt leaves it out."""

    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


def _client_tool_tag(value: object) -> str:
    return "[CustomTool]" if member(value, "type") == "custom" else "[FunctionTool]"


class NamespaceTool(NestedModel):
    """Declares a group of tools, such as the tools of one MCP server."""

    type: Literal["namespace"]
    name: Name
    description: str | None = Field(None, description="Accepted, without effect.")
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("[FunctionTool]")]
                | Annotated[CustomTool, Tag("[CustomTool]")],
                Discriminator(_client_tool_tag),
            ]
        ],
        Field(max_length=limits.MAX_TOOLS, fail_fast=True),
    ]


def tags_by_type(*classes: type[NestedModel]) -> Mapping[str, str]:
    """Maps each `type` of the classes to the class's tag in a union."""
    return {
        kind: f"[{each.__name__}]"
        for each in classes
        for kind in get_args(each.model_fields["type"].annotation)
    }


_TAGS: Final = tags_by_type(FunctionTool, CustomTool, NamespaceTool, HostedTool)


def _tool_tag(value: object) -> str | None:
    kind = member(value, "type")
    return _TAGS.get(kind) if isinstance(kind, str) else None


Tool = Annotated[
    Annotated[FunctionTool, Tag("[FunctionTool]")]
    | Annotated[CustomTool, Tag("[CustomTool]")]
    | Annotated[NamespaceTool, Tag("[NamespaceTool]")]
    | Annotated[HostedTool, Tag("[HostedTool]")],
    Discriminator(
        _tool_tag,
        custom_error_type="tool",
        custom_error_message=(
            "must be a tool of type function, custom or namespace, or a tool of OpenAI's own, "
            "which is left out"
        ),
    ),
]
Tools = Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS, fail_fast=True)]


class NamedToolChoice(NestedModel):
    """Declares a tool_choice that demands a call of one tool."""

    type: Literal["function", "custom"]
    name: Name
    namespace: str | None = None


class AllowedTool(NestedModel):
    """Names a tool that may be called; with type namespace, all its tools."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(NestedModel):
    """Declares a tool_choice of some of the tools; the prompt lists only these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True)]


def _choice_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "[mode]"
    kind = member(value, "type")
    if kind == "allowed_tools":
        return "[AllowedTools]"
    return "[NamedToolChoice]" if kind in ("function", "custom") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[mode]")]
    | Annotated[NamedToolChoice, Tag("[NamedToolChoice]")]
    | Annotated[AllowedTools, Tag("[AllowedTools]")],
    Discriminator(
        _choice_tag,
        custom_error_type="tool_choice",
        custom_error_message=(
            "must be none, auto, required, or an object of type function, custom or "
            "allowed_tools: the service has none of OpenAI's own tools; offer a function instead"
        ),
    ),
]
