"""Defines the items of an input of OpenAI's Responses API."""

import base64
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from ....proto import limits
from ..openai.bodies import (
    CalledName,
    Ignored,
    Items,
    NestedModel,
    OtherPart,
    PromptCacheBreakpoint,
    TextOrItems,
    member,
)
from .tool_bodies import Tools, tags_by_type

_TextType = Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]


class TextPart(NestedModel):
    type: _TextType
    text: str
    annotations: Ignored[list[Any]] = None
    logprobs: Ignored[list[Any]] = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class RefusalPart(NestedModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_tag(value: object) -> str:
    kind = member(value, "type")
    if kind == "refusal":
        return "[refusal]"
    return "[other]" if isinstance(kind, str) and kind not in get_args(_TextType) else "[text]"


Part = Annotated[
    Annotated[TextPart, Tag("[text]")]
    | Annotated[RefusalPart, Tag("[refusal]")]
    | Annotated[SkipJsonSchema[OtherPart], Tag("[other]")],
    Discriminator(_part_tag),
]


class MessageItem(NestedModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrItems[Part]
    id: Ignored[str] = None
    status: Ignored[str] = None
    phase: Ignored[str] = None


class FunctionCallItem(NestedModel):
    type: Literal["function_call"]
    call_id: str
    name: CalledName
    namespace: str | None = None
    arguments: str = Field(description="A JSON object.")
    id: Ignored[str] = None
    status: Ignored[str] = None


class CustomCallItem(NestedModel):
    """Declares a call of a custom tool, whose input is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: CalledName
    namespace: str | None = None
    input: str
    id: Ignored[str] = None
    status: Ignored[str] = None


class ToolOutputItem(NestedModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextOrItems[Part]
    id: Ignored[str] = None
    status: Ignored[str] = None


class LocalShellCallItem(NestedModel):
    """Declares a command that another model of an agent ran on the client's machine."""

    type: Literal["local_shell_call"]
    action: dict[str, Any]
    call_id: str | None = None
    id: str | None = Field(None, description="Stands for call_id, if call_id is absent.")
    status: Ignored[str] = None


class LocalShellOutputItem(NestedModel):
    type: Literal["local_shell_call_output"]
    output: TextOrItems[Part]
    call_id: str | None = None
    id: str | None = Field(None, description="Stands for call_id, if call_id is absent.")
    status: Ignored[str] = None


class ReasoningItem(NestedModel):
    """Declares the reasoning of an earlier answer; only its text is read."""

    type: Literal["reasoning"]
    content: Items[Part] | None = None
    summary: Items[Part] | None = Field(None, description="Read if `content` is empty.")
    encrypted_content: str | None = Field(
        None, description="Read if the others are empty and this service has made it."
    )
    id: Ignored[str] = None
    status: Ignored[str] = None


_ENCODED_REASONING: Final = "tandem:"


def encode_reasoning(text: str) -> str:
    """Returns the `encrypted_content` of a reasoning item.

    Some clients send nothing else of the item back. The text is not secret: the item has it as
    well.
    """
    return _ENCODED_REASONING + base64.b64encode(text.encode()).decode()


def decode_reasoning(encoded: str) -> str:
    """Returns the text of an `encrypted_content`; "" if another service has made it."""
    if not encoded.startswith(_ENCODED_REASONING):
        return ""
    with suppress(ValueError):  # not base64 or not UTF-8
        return base64.b64decode(encoded.removeprefix(_ENCODED_REASONING), validate=True).decode()
    return ""


class AdditionalToolsItem(NestedModel):
    """Declares further tools, with the same effect as in `tools`."""

    type: Literal["additional_tools"]
    tools: Tools
    role: Ignored[str] = None
    id: Ignored[str] = None


class ItemReference(NestedModel):
    """Declares an item of a stored response by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str = Field(max_length=limits.MAX_REQUEST_ID_CHARACTERS + 32)


class LeftOutItem(NestedModel):
    """Declares an item that the prompt leaves out.

    Most describe work of tools that run at OpenAI, without text for the model.
    """

    type: Literal[
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "context_compaction",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    ]


_TAGS: Final = tags_by_type(
    MessageItem,
    FunctionCallItem,
    CustomCallItem,
    ToolOutputItem,
    LocalShellCallItem,
    LocalShellOutputItem,
    ReasoningItem,
    AdditionalToolsItem,
    ItemReference,
    LeftOutItem,
)


def _item_tag(value: object) -> str | None:
    kind = member(value, "type")
    if kind is None and member(value, "role") is None and member(value, "id") is not None:
        return _TAGS["item_reference"]  # OpenAI lets its type be absent
    kind = "message" if kind is None else kind
    return _TAGS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("[MessageItem]")]
    | Annotated[FunctionCallItem, Tag("[FunctionCallItem]")]
    | Annotated[CustomCallItem, Tag("[CustomCallItem]")]
    | Annotated[ToolOutputItem, Tag("[ToolOutputItem]")]
    | Annotated[LocalShellCallItem, Tag("[LocalShellCallItem]")]
    | Annotated[LocalShellOutputItem, Tag("[LocalShellOutputItem]")]
    | Annotated[ReasoningItem, Tag("[ReasoningItem]")]
    | Annotated[AdditionalToolsItem, Tag("[AdditionalToolsItem]")]
    | Annotated[ItemReference, Tag("[ItemReference]")]
    | Annotated[LeftOutItem, Tag("[LeftOutItem]")],
    Discriminator(
        _item_tag,
        custom_error_type="item",
        custom_error_message=(
            "must be an item of type message, function_call, function_call_output, "
            "custom_tool_call, custom_tool_call_output, reasoning, or another type of OpenAI's "
            "Responses API"
        ),
    ),
]
