"""Defines the bodies of Anthropic's Messages API, in the manner of openai/bodies.py."""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from ....proto import limits
from ..openai.bodies import (
    Ignored,
    Int32,
    LastEventId,
    Name,
    Only,
    OpenModel,
    ReturnedModel,
    with_named_parameters,
)

_MAX_BLOCKS: Final = limits.MAX_CHAT_MESSAGES
"""In the content of one message."""

CacheControl = Ignored[dict[str, Any]]  # every prefix is cached


def _form(value: object) -> str:
    return "[text]" if isinstance(value, str) else "[blocks]"


def _block_type(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind}]" if isinstance(kind, str) else None


class TextBlock(ReturnedModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Ignored[list[Any]] = None


class ThinkingBlock(ReturnedModel):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored[str] = None


class RedactedThinkingBlock(ReturnedModel):
    type: Literal["redacted_thinking"]
    data: Ignored[str] = None


class ToolUseBlock(ReturnedModel):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Ignored[dict[str, Any]] = None


_TextBlocks = TypeAliasType(
    "_TextBlocks", Annotated[list[TextBlock], Field(max_length=_MAX_BLOCKS), FailFast()]
)
TextOrBlocks = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[_TextBlocks, Tag("[blocks]")], Discriminator(_form)
]


class ToolResultBlock(ReturnedModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks | None = None
    is_error: Ignored[bool] = None
    cache_control: CacheControl = None


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    Discriminator(
        _block_type,
        custom_error_type="block",
        custom_error_message="must be a block of type text, thinking, tool_use or tool_result",
    ),
]


_Blocks = TypeAliasType(
    "_Blocks", Annotated[list[Block], Field(max_length=_MAX_BLOCKS), FailFast()]
)


class InputMessage(OpenModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[_Blocks, Tag("[blocks]")], Discriminator(_form)
    ]


class AssistantInput(InputMessage, ReturnedModel):
    """Declares what the assistant said, which may be an earlier answer."""

    role: Literal["assistant"]


def _role(value: object) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "[assistant]" if role == "assistant" else "[other]"


Message = Annotated[
    Annotated[AssistantInput, Tag("[assistant]")] | Annotated[InputMessage, Tag("[other]")],
    Discriminator(_role),
]


class InputTool(OpenModel):
    """Declares a function; Anthropic's own tools are not run here."""

    type: Only[Literal["custom"]] = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="The JSON schema of the arguments.")
    cache_control: CacheControl = None
    strict: Ignored[bool] = None
    eager_input_streaming: Ignored[bool] = None
    input_examples: Ignored[list[Any]] = None
    defer_loading: Only[Literal[False]] = None


class ToolChoiceBody(OpenModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(None, description="Goes with type tool, and only with it.")
    disable_parallel_tool_use: bool | None = Field(
        None, description="If true, the answer ends after its first call."
    )


class Thinking(OpenModel):
    """Declares whether the model thinks, as the variable enable_thinking of its chat template."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored[Int32] = None
    display: Ignored[str] = None


class OutputFormat(OpenModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenModel):
    format: OutputFormat | None = None
    effort: Ignored[str] = None


class CountTokensBody(OpenModel):
    """Declares what becomes the prompt: the body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field(
        max_length=limits.MAX_CHAT_MESSAGES, json_schema_extra={"minItems": 1}
    )
    system: TextOrBlocks | None = None
    tools: Annotated[list[InputTool] | None, Field(max_length=limits.MAX_TOOLS), FailFast()] = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    context_management: Ignored[dict[str, Any]] = None


class MessagesFields(CountTokensBody):
    """Declares the fields of POST /v1/messages that are no request parameters."""

    stream: bool | None = None
    last_event_id: LastEventId = None
    metadata: Ignored[dict[str, Any]] = None
    service_tier: Only[Literal["auto", "standard_only"]] = None


PARAMETER_NAMES: Final = {
    **{name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k")},
    "max_tokens": "stopping.max_tokens",
    "stop_sequences": "stopping.stop",
}
"""The request parameters of POST /v1/messages."""

MessagesBody = with_named_parameters(MessagesFields, "MessagesBody", PARAMETER_NAMES)
