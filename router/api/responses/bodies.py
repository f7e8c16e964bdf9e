"""Defines the body of OpenAI's Responses API, in the manner of openai/bodies.py."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from ....proto import limits
from ....proto.parameters import PARAMETERS
from ..openai.bodies import (
    Ignored,
    LastEventId,
    NestedModel,
    Only,
    OpenModel,
    PromptCacheOptions,
    TextOrItems,
    refusing,
    with_named_parameters,
)
from .items import Item
from .tool_bodies import ToolChoice, Tools

_MAX_INCLUDED: Final = 64

NoConversation = Annotated[
    None,
    refusing("is not supported: continue with previous_response_id, or send the whole input"),
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
    context: Ignored[str] = None
    mode: Ignored[str] = None


class ResponseStreamOptions(NestedModel):
    include_obfuscation: Ignored[bool] = None


class ResponsesFields(OpenModel):
    """Declares the fields of POST /v1/responses, without the request parameters."""

    input: TextOrItems[Item]
    instructions: str | None = None
    tools: Tools | None = None
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
    include: Annotated[list[str] | None, Field(max_length=_MAX_INCLUDED)] = Field(
        None,
        description="Only reasoning.encrypted_content has an effect: reasoning items have it, for "
        "clients that send nothing else of them back.",
    )
    max_tool_calls: Ignored[int] = None
    top_logprobs: Only[Literal[0]] = None
    metadata: Ignored[dict[str, str]] = None
    client_metadata: Ignored[dict[str, Any]] = None
    user: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    prompt_cache_options: PromptCacheOptions | None = None


PARAMETER_NAMES: Final = {row.responses: row.field for row in PARAMETERS if row.responses}
"""The request parameters of POST /v1/responses; some are additions to OpenAI's."""

ResponsesBody = with_named_parameters(ResponsesFields, "ResponsesBody", PARAMETER_NAMES)
