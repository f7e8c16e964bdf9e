"""Defines the body of OpenAI's Responses API, in the manner of openai/bodies.py."""

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Discriminator, FailFast, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from ....proto import limits
from ..openai.bodies import (
    STOPPING_NAMES,
    Ignored,
    Items,
    LastEventId,
    Name,
    NamedFunction,
    NestedModel,
    Only,
    OpenModel,
    OtherPart,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    TextOrItems,
    member,
    refusing,
    with_named_parameters,
)

NoConversation = Annotated[
    None,
    refusing("is not supported: continue with previous_response_id, or send the whole input"),
]


def _item_tag(value: object) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else member(value, "type")
    return f"[{kind}]" if isinstance(kind, str) else None


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
    name: Name
    arguments: str = Field(description="A JSON object.")
    id: Ignored[str] = None
    status: Ignored[str] = None


class FunctionOutputItem(NestedModel):
    type: Literal["function_call_output"]
    call_id: str
    output: TextOrItems[Part]
    id: Ignored[str] = None
    status: Ignored[str] = None


class ReasoningItem(NestedModel):
    """Declares the reasoning of an earlier answer; only its text is read."""

    type: Literal["reasoning"]
    content: Items[Part] | None = None
    id: Ignored[str] = None
    summary: Ignored[list[Any]] = None
    encrypted_content: Ignored[str] = None
    status: Ignored[str] = None


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(
        _item_tag,
        custom_error_type="item",
        custom_error_message=(
            "must be an item of type message, function_call, function_call_output or reasoning"
        ),
    ),
]


class FunctionTool(NestedModel):
    """Declares a function. OpenAI's own tools are not supported."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="The schema binds the model when tool_choice asks for a call."
    )


class NamedFunctionTool(NamedFunction):
    type: Literal["function"]


def _choice_tag(value: object) -> str:
    return "[mode]" if isinstance(value, str) else "[function]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[mode]")]
    | Annotated[NamedFunctionTool, Tag("[function]")],
    Discriminator(_choice_tag),
]


class TextFormat(NestedModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Ignored[str] = None
    description: Ignored[str] = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Ignored[bool] = None


class TextConfig(NestedModel):
    format: TextFormat | None = None
    verbosity: Ignored[str] = None


class ReasoningConfig(NestedModel):
    """Declares the effort, which sets the variable reasoning_effort of the chat template."""

    effort: str | None = None
    summary: Ignored[str] = None
    generate_summary: Ignored[str] = None


class ResponseStreamOptions(NestedModel):
    include_obfuscation: Only[Literal[False]] = None


class ResponsesFields(OpenModel):
    """Declares the fields of POST /v1/responses, without the request parameters."""

    model: str | None = None
    input: TextOrItems[Item]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool] | None, Field(max_length=limits.MAX_TOOLS), FailFast()] = (
        None
    )
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="If false, the answer ends after its first call."
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    last_event_id: LastEventId = None
    store: bool | None = Field(
        None, description="If not false, the response can be continued and retrieved by its id."
    )
    previous_response_id: str | None = Field(
        None,
        max_length=limits.MAX_REQUEST_ID_CHARACTERS + 8,
        description="The id of a stored response, whose conversation comes before the input.",
    )
    conversation: NoConversation = None
    background: Only[Literal[False]] = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]] | None, Field(max_length=1)] = (
        Field(None, description="Accepted, without effect: reasoning comes as text.")
    )
    top_logprobs: Only[Literal[0]] = None
    metadata: Ignored[dict[str, str]] = None
    user: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    prompt_cache_options: PromptCacheOptions | None = None


PARAMETER_NAMES: Final = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "max_output_tokens": "stopping.max_tokens",
    "truncation": "truncation",
    "service_tier": "service_tier",
    "stop": "stopping.stop",
    "prompt_cache_key": "prompt_cache_key",
    "prompt_cache_retention": "prompt_cache_retention",
    **STOPPING_NAMES,
}
"""The request parameters of POST /v1/responses; some are additions to OpenAI's."""

ResponsesBody = with_named_parameters(ResponsesFields, "ResponsesBody", PARAMETER_NAMES)
