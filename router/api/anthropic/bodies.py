"""Defines the bodies of Anthropic's Messages API, in the manner of openai/bodies.py."""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from ....proto import limits
from ....proto.parameters import PARAMETERS
from ..openai.bodies import (
    PART_BREAK,
    CacheControl,
    CalledName,
    Ignored,
    Int32,
    Items,
    LastEventId,
    Name,
    NestedModel,
    Only,
    OpenModel,
    OtherPart,
    TextOrItems,
    member,
    refusing,
    with_named_parameters,
)

_OTHER_TYPES: Final = ("image", "document", "audio", "video", "file", "container_upload")
"""The types of blocks that are not text."""


def _block_tag(value: object) -> str | None:
    kind = member(value, "type")
    if kind in _OTHER_TYPES:
        return "[other]"
    return f"[{kind}]" if isinstance(kind, str) else None


def _result_tag(value: object) -> str:
    kind = member(value, "type")
    if kind == "search_result":
        return "[search_result]"
    return "[other]" if isinstance(kind, str) and kind != "text" else "[text]"


class TextBlock(NestedModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Ignored[list[Any]] = None


class SearchResultBlock(NestedModel):
    """Declares a result of the caller's search; the model reads its title, source and texts."""

    type: Literal["search_result"]
    title: str
    source: str
    content: Items[TextBlock]
    cache_control: CacheControl | None = None
    citations: Ignored[dict[str, Any]] = None

    @property
    def text(self) -> str:
        return PART_BREAK.join((self.title, self.source, *(block.text for block in self.content)))


class ThinkingBlock(NestedModel):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored[str] = None


class RedactedThinkingBlock(NestedModel):
    type: Literal["redacted_thinking"]
    data: Ignored[str] = None


class ToolUseBlock(NestedModel):
    type: Literal["tool_use"]
    id: str
    name: CalledName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Ignored[dict[str, Any]] = None


_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[SearchResultBlock, Tag("[search_result]")]
    | Annotated[SkipJsonSchema[OtherPart], Tag("[other]")],
    Discriminator(_result_tag),
]


class ToolResultBlock(NestedModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrItems[_ResultBlock] | None = None
    is_error: Ignored[bool] = None
    cache_control: CacheControl | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[SearchResultBlock, Tag("[search_result]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[SkipJsonSchema[OtherPart], Tag("[other]")],
    Discriminator(
        _block_tag,
        custom_error_type="block",
        custom_error_message=(
            "must be a block of type text, search_result, thinking, tool_use or tool_result"
        ),
    ),
]


class InputMessage(NestedModel):
    role: Literal["user", "assistant", "system"]
    content: TextOrItems[Block]


class InputTool(NestedModel):
    """Declares a function. Anthropic's own tools are not supported."""

    type: Only[Literal["custom"]] = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="The JSON schema of the arguments.")
    cache_control: CacheControl | None = None
    strict: Ignored[bool] = None
    eager_input_streaming: Ignored[bool] = None
    input_examples: Ignored[list[Any]] = None
    defer_loading: Only[Literal[False]] = None


class ToolChoiceBody(NestedModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(
        None, description="The tool to call, set if and only if type is tool."
    )
    disable_parallel_tool_use: bool | None = Field(
        None, description="If true, the answer ends after its first call."
    )


class Thinking(NestedModel):
    """Declares the reasoning mode, which sets the variable enable_thinking of the chat template."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored[Int32] = None
    display: Ignored[str] = None


class OutputFormat(NestedModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(NestedModel):
    format: OutputFormat | None = None
    effort: Ignored[str] = None


class CountTokensBody(OpenModel):
    """Declares the body of POST /v1/messages/count_tokens.

    These are the fields that become the prompt, and fields of Anthropic's service that have no
    effect here or that are refused.
    """

    model: str | None = None
    messages: Annotated[list[InputMessage], FailFast()] = Field(
        max_length=limits.MAX_CHAT_MESSAGES, json_schema_extra={"minItems": 1}
    )
    system: TextOrItems[TextBlock] | None = None
    tools: Annotated[list[InputTool] | None, Field(max_length=limits.MAX_TOOLS), FailFast()] = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="The older name of output_config.format."
    )
    cache_control: CacheControl | None = None
    betas: Ignored[Any] = None
    billing_policy: Ignored[Any] = None
    context_management: Ignored[Any] = None
    diagnostics: Ignored[Any] = None
    fallback_credit_token: Ignored[Any] = None
    fallbacks: Ignored[Any] = None
    inference_geo: Ignored[Any] = None
    speed: Ignored[Any] = None
    compaction: Annotated[None, refusing("is not supported: ask for a summary in a message")] = None
    container: Annotated[None, refusing("is not supported: the service runs no code")] = None
    mcp_servers: Annotated[
        None, refusing("is not supported: connect to the servers and send their tools in tools")
    ] = None
    thread: Annotated[None, refusing("is not supported: send the whole conversation")] = None


class MessagesFields(CountTokensBody):
    """Declares the fields of POST /v1/messages, without the request parameters."""

    stream: bool | None = None
    last_event_id: LastEventId = None
    metadata: Ignored[dict[str, Any]] = None


PARAMETER_NAMES: Final = {row.messages: row.field for row in PARAMETERS if row.messages}
"""The request parameters of POST /v1/messages; some are additions to Anthropic's."""

STANDARD_TIER: Final = "standard_only"
"""Anthropic's name of the tier that a request has if it sets none, as `auto` here."""

MessagesBody = with_named_parameters(MessagesFields, "MessagesBody", PARAMETER_NAMES)
