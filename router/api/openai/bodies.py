"""Defines the bodies of HTTP requests: OpenAI's fields, and vLLM's additions.

The fields of request parameters are generated from proto/parameters.py. null always means absent.
Bounds of numbers and strings only document the field: frontend/validation.py checks all requests.
Bounds of lists and objects are enforced here, before objects are made of their entries. A field
with only one possible value exists because clients send it. One file because all bodies consist of
the same kinds of fields and messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    GetPydanticSchema,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError, core_schema

from ....proto import limits
from ....proto.parameters import PARAMETERS, ROWS, RequestParameter

_T = TypeVar("_T")
_M = TypeVar("_M", bound=BaseModel)

_MAX_ITEMS: Final = limits.MAX_CHAT_MESSAGES
"""Bound on the parts in the content of one message, and on the items of an input."""

_PART_TEXTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Maps the type of a content part to the field with its text.

Like vLLM, it contains types of the Responses API.
"""


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def parse_prompts(value: object, most: int = limits.MAX_PROMPTS) -> object:
    """Returns a list of prompts, each a string or a list of token ids; one prompt may stand alone.

    Raises PydanticCustomError if there are no prompts, more than `most`, or other values.
    """
    is_ids = isinstance(value, list) and bool(value) and _is_id(value[0])
    prompts = [value] if isinstance(value, str) or is_ids else value
    if isinstance(prompts, list):
        if not 1 <= len(prompts) <= most:
            raise PydanticCustomError(
                "prompt", f"has {len(prompts)} prompts; 1 to {most} are allowed"
            )
        if all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
            return prompts
    raise PydanticCustomError("prompt", "must be a string, a list of token ids, or a list of these")


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list) and 1 <= len(value) <= limits.MAX_TOKENS and all(map(_is_id, value))
    )


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32


PART_BREAK: Final = "\n"
"""Separates the texts of a message's parts, as in vLLM: clients send separate texts as parts."""


@dataclass(frozen=True, slots=True)
class Content:
    """Holds the content of a message: the joined text of its parts, and the types of other parts.

    frontend/chat.py refuses other parts, except in results of tools.
    """

    text: str = ""
    other_parts: tuple[str, ...] = ()
    # (characters of the text, retention) of marks for the prefix cache.
    marks: tuple[tuple[int, str], ...] = ()


def _content(value: object) -> Content:
    """Returns the content of a message, given as a string or as parts."""
    if value is None:
        return Content()
    if isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    if len(value) > _MAX_ITEMS:
        raise PydanticCustomError("content", f"has {len(value)} parts; the maximum is {_MAX_ITEMS}")
    others = list(map(_other_type, value))
    other_parts = tuple(kind for kind in others if kind is not None)
    read = [part for part, kind in zip(value, others, strict=True) if kind is None]
    texts = list(map(_part_text, read))
    marks = ((end, _part_mark(part)) for end, part in zip(part_ends(texts), read, strict=True))
    return Content(
        PART_BREAK.join(texts), other_parts, tuple((end, mark) for end, mark in marks if mark)
    )


def _other_type(part: object) -> str | None:
    """Returns the type of a part that is not text; None for other values."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) and kind not in _PART_TEXTS else None


def part_ends(texts: Sequence[str], between: str = PART_BREAK) -> list[int]:
    """Returns where each text ends in `between.join(texts)`."""
    return [end + len(between) * i for i, end in enumerate(accumulate(map(len, texts)))]


def _part_text(part: object) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get(_PART_TEXTS[kind]) if isinstance(part, dict) and isinstance(kind, str) else None
    if not isinstance(text, str):
        raise PydanticCustomError(
            "content", 'must have parts of the form {"type": "text", "text": ...}'
        )
    return text


def _part_mark(part: Mapping[str, object]) -> str:
    """Returns how long the prefix up to a part stays in the prefix cache; "" without a mark."""
    for name, kind in _MARKS.items():
        if part.get(name) is None:
            continue
        try:
            return kind.validate_python(part[name]).retention
        except ValidationError as error:
            raise PydanticCustomError(
                "content", f"{name} must have the form {_MARK_FORMS[name]}"
            ) from error
    return ""


def _whole(value: object) -> object:
    """Returns a number without a fractional part, such as 16.0, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE: Final = BeforeValidator(_whole)
"""Makes an integer field accept 16.0, as JSON Schema does; some languages write 16 so."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
UInt32 = Annotated[int, Field(ge=0, lt=2**32), WHOLE]
Count = Annotated[int, Field(ge=1, lt=2**32), WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE]
# Lists may have a million ids; a call of Python for each would hold the interpreter's lock.
_TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[
    str,
    Field(
        json_schema_extra={"pattern": rf"^[a-zA-Z0-9_.:/-]{{1,{limits.MAX_TOOL_NAME_CHARACTERS}}}$"}
    ),
]
CalledName = Annotated[
    str,
    Field(json_schema_extra={"minLength": 1, "maxLength": limits.MAX_TOOL_NAME_CHARACTERS}),
]
"""The name in a call of an earlier answer. The model may have invented it."""

Texts = Annotated[list[str] | None, Field(max_length=limits.MAX_CONSTRAINT_CHOICES), FailFast()]
Only = Annotated[_T | None, Field(description="No other value is supported.")]
Ignored = Annotated[_T | None, Field(description="Accepted, without effect.")]
LastEventId = Annotated[
    str | None,
    Field(
        description="The id of the last event of a stream that broke: the stream continues after"
        ' it. "": a new stream whose events have ids.'
    ),
]
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1)]


def _text_or_list(value: object) -> str:
    return "[text]" if isinstance(value, str) else "[list]"


Items = Annotated[list[_T], Field(max_length=_MAX_ITEMS, fail_fast=True)]
TextOrItems = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Items[_T], Tag("[list]")],
    Discriminator(_text_or_list),
]
"""A string, or a list of at most _MAX_ITEMS items."""


def member(value: object, name: str) -> object:
    """Returns a member of a JSON object or a field of a parsed body; None if it is absent."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def by_role(value: object) -> str:
    """Returns the union tag of a message: "[assistant]", or "[other]"."""
    return "[assistant]" if member(value, "role") == "assistant" else "[other]"


def prompt_schema(most: int = limits.MAX_PROMPTS) -> dict[str, Any]:
    """Returns the JSON schema of the values that `parse_prompts` accepts."""
    prompts = Annotated[list[_Text | _TokenIds], Field(min_length=1, max_length=most)]
    return TypeAdapter(_Text | _TokenIds | prompts).json_schema()


_PART: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TYPES: Final = {
    "bool": bool,
    "int32": Int32,
    "uint32": UInt32,
    "uint64": Seed,
    "float": float,
    "string": str,
    "json": str | dict[str, Any],
    "token_ids": list[_TokenId],
    "logit_bias": dict[str, float],
}


REASONS: Final = {
    "reasoning_effort": "must be a string of at most 32 characters",
    "verbosity": "is not supported; ask for a short answer in a message, or set max_tokens",
    "functions": "is deprecated by OpenAI and not supported; send tools",
    "function_call": "is deprecated by OpenAI and not supported; send tool_choice",
    "web_search_options": "is not supported; offer a web search of your own in tools",
    "audio": "the model only writes text",
    "modalities": "the model only writes text",
    "moderation": "is not supported; moderate before and after the request",
    "chat_template": (
        "is not supported; set variables of the model's own template in chat_template_kwargs"
    ),
    "allowed_token_ids": (
        "is not supported; restrict the output by logit_bias, bad_words or structured_outputs"
    ),
    "include_reasoning": "is not supported; the reasoning is part of the answer",
    "prompt_embeds": "is not supported; send text or token ids",
    "kv_transfer_params": "is not supported; the service moves KV cache itself",
    "documents": "must be a list of objects",
    "request_id": "is not supported; send the header X-Request-Id",
    "cache_salt": "is not supported; each tenant has a prefix cache of its own",
    "return_tokens_as_token_ids": "is not supported; set return_token_ids",
    "vllm_xargs": "is not supported; the service runs no code of requests",
    "mm_processor_kwargs": "is not supported; messages have text only",
    "store": "must be true or false, and true only in /v1/responses",
}
"""By field of OpenAI or vLLM, the reason why a value is refused, and the remedy."""

_GIVEN: Final = core_schema.with_default_schema(
    core_schema.none_schema(), default=True, on_error="default"
)
Given = Annotated[Literal[True] | None, GetPydanticSchema(lambda _source, _handler: _GIVEN)]
"""Validates any value except null to True, without making objects of its content."""


def refusing(reason: str) -> GetPydanticSchema:
    """Returns the annotation of a field that must be null or an empty list."""

    def check(value: object) -> None:
        if value is not None and value != []:
            raise PydanticCustomError("refused", reason)

    schema = core_schema.no_info_plain_validator_function(check)
    return GetPydanticSchema(
        lambda _source, _handler: schema,
        lambda _schema, handler: handler(core_schema.none_schema()),
    )


_MARK_FORMS: Final = {
    "cache_control": '{"type": "ephemeral"}, with a ttl of "5m" or "1h"',
    "prompt_cache_breakpoint": '{"mode": "explicit"}, with a ttl of "30m" or "12h"',
}


class OpenModel(BaseModel):
    """Keeps the names of unknown fields, so that `parse` can refuse them by name.

    The base of bodies, and of nested objects whose members are parameters of Tandem or vLLM: an
    unknown name there is a typing error, which would silently change the answer.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", json_schema_extra={"additionalProperties": False}
    )
    __pydantic_extra__: dict[str, Given] = Field(init=False)


class NestedModel(BaseModel):
    """Ignores unknown members, as vLLM does.

    The base of messages, parts, tools and other nested objects of OpenAI and Anthropic. Clients add
    members of their own there, and send parts of answers back with members that a library added.
    """

    model_config = ConfigDict(strict=True, extra="ignore")


class OtherPart(NestedModel):
    """Declares a part or block that is not text; frontend/chat.py refuses it."""

    type: str


class CacheControl(NestedModel):
    """Declares Anthropic's mark of a prefix that stays in the prefix cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="5m by default.")

    @property
    def retention(self) -> str:
        return self.ttl or "5m"


REQUEST_TTL: Final = "request"
"""Stands for the ttl of the request, in marks that have none."""


class PromptCacheBreakpoint(NestedModel):
    """Declares OpenAI's mark of a prefix that stays in the prefix cache."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = Field(
        None, description="The ttl of prompt_cache_options by default, or else 30m."
    )

    @property
    def retention(self) -> str:
        return self.ttl or REQUEST_TTL


class PromptCacheOptions(NestedModel):
    mode: Literal["implicit", "explicit"] | None = Field(
        None, description="explicit: keeps only the prefixes with a prompt_cache_breakpoint."
    )
    ttl: Literal["30m", "12h"] | None = Field(
        None, description="Keeps the prompt in the prefix cache for this time."
    )


_MARKS: Final[Mapping[str, TypeAdapter[CacheControl] | TypeAdapter[PromptCacheBreakpoint]]] = {
    "cache_control": TypeAdapter(CacheControl),
    "prompt_cache_breakpoint": TypeAdapter(PromptCacheBreakpoint),
}
"""The types of the marks that a part of a message can have, by name."""


class StreamOptions(NestedModel):
    include_usage: bool | None = Field(
        None, description="Sends the usage in a separate event at the end."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Sends the usage so far in each event."
    )
    include_obfuscation: Only[Literal[False]] = None


class JsonSchema(NestedModel):
    """Declares OpenAI's JSON schema format."""

    name: Ignored[str] = None
    description: Ignored[str] = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="Any JSON object by default."
    )
    strict: Ignored[bool] = None


class ResponseFormat(NestedModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(OpenModel):
    """Declares vLLM's constraints, which exclude each other."""

    disable_additional_properties: bool | None = Field(
        None,
        description="Sets additionalProperties to false in objects of a JSON schema that do not set"
        " it. True by default for response_format.",
    )
    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts = None
    grammar: str | None = Field(
        None, description="A context-free grammar, in llguidance's Lark or in GBNF."
    )


class Body(OpenModel):
    """Declares the fields that completions and chats share, without the request parameters."""

    use_beam_search: bool | None = Field(
        None,
        description="True runs a beam search of width beam_width, or else n; false excludes "
        "beam_width, which alone also runs one.",
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    last_event_id: LastEventId = None
    user: Ignored[str] = None
    metadata: Ignored[dict[str, Any]] = None
    safety_identifier: Ignored[str] = None
    prompt_cache_options: PromptCacheOptions | None = None
    store: Only[Literal[False]] = None
    skip_special_tokens: Only[Literal[True]] = None
    spaces_between_special_tokens: Only[Literal[True]] = None
    include_stop_str_in_output: Only[Literal[False]] = None
    return_token_ids: bool | None = Field(
        None, description="Returns the token ids of the prompt and of the answer."
    )
    guided_decoding_backend: Ignored[str] = None


class CompletionFields(Body):
    """Declares the fields of POST /v1/completions, without the request parameters."""

    prompt: Annotated[
        list[str | list[int]], PlainValidator(parse_prompts), WithJsonSchema(prompt_schema())
    ]
    suffix: str | None = Field(
        None, description="The text after the completion; needs a fill-in-the-middle model."
    )
    add_special_tokens: Only[Literal[True]] = None


class CalledFunction(NestedModel):
    name: CalledName
    arguments: str | None = Field(description="A JSON object; null: no arguments.")


class ToolCallBody(NestedModel):
    id: str
    type: Literal["function"] | None = "function"
    function: CalledFunction


class MessageBody(NestedModel):
    role: str = Field(json_schema_extra={"minLength": 1, "maxLength": limits.MAX_ROLE_CHARACTERS})
    content: Annotated[
        Content,
        PlainValidator(_content),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": _PART, "maxItems": _MAX_ITEMS},
                    {"type": "null"},
                ],
                "default": "",
            }
        ),
    ] = Field(default_factory=Content)
    name: str | None = None
    tool_calls: Annotated[
        list[ToolCallBody] | None, Field(max_length=limits.MAX_TOOL_CALLS), FailFast()
    ] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="The reasoning of the assistant.")
    cache_control: CacheControl | None = None


class AssistantMessage(MessageBody):
    """Declares a message of the assistant, which may be an earlier answer."""

    role: Literal["assistant"]
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: str | None = Field(None, description="The content, if `content` is empty.")
    annotations: Ignored[list[Any]] = None
    audio: Annotated[None, refusing("the model only reads text")] = None
    function_call: Annotated[
        None, refusing("is deprecated by OpenAI and not supported; send tool_calls")
    ] = None


Message = Annotated[
    Annotated[AssistantMessage, Tag("[assistant]")] | Annotated[MessageBody, Tag("[other]")],
    Discriminator(by_role),
]


class FunctionBody(NestedModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="The schema binds the model when tool_choice asks for a call."
    )


class ToolBody(NestedModel):
    type: Literal["function"]
    function: FunctionBody
    cache_control: CacheControl | None = None


class NamedFunction(NestedModel):
    name: Name


class NamedTool(NestedModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(NestedModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True)]


class AllowedFunctionChoice(NestedModel):
    """Declares a tool_choice of some of the tools; the prompt lists only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _choice_tag(value: object) -> str:
    if isinstance(value, str):
        return "[mode]"
    return "[AllowedFunctionChoice]" if member(value, "type") == "allowed_tools" else "[NamedTool]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[mode]")]
    | Annotated[NamedTool, Tag("[NamedTool]")]
    | Annotated[AllowedFunctionChoice, Tag("[AllowedFunctionChoice]")],
    Discriminator(_choice_tag),
]


class ThinkingSwitch(NestedModel):
    type: Literal["enabled", "disabled"]


class TemplateFields(OpenModel):
    """Declares the fields that become the prompt of a chat, together with the messages."""

    tools: Annotated[list[ToolBody] | None, Field(max_length=limits.MAX_TOOLS), FailFast()] = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template."
    )
    chat_template_args: dict[str, Any] | None = Field(
        None, description="Another name of chat_template_kwargs."
    )
    enable_thinking: bool | None = Field(None, description="A variable of the chat template.")
    thinking: ThinkingSwitch | None = Field(
        None, description="Sets the variable enable_thinking of the chat template."
    )
    continue_final_message: bool | None = Field(
        None, description="Continues the last message, which is the assistant's."
    )
    parse_special: bool | None = Field(
        None, description="Parses special tokens in the text of messages."
    )
    add_generation_prompt: bool | None = Field(
        None, description="False requires continue_final_message."
    )
    documents: Annotated[list[dict[str, Any]] | None, FailFast()] = Field(
        None, description="A variable of the chat template."
    )
    reasoning_effort: Annotated[str | None, Field(max_length=32)] = Field(
        None, description="A variable of the chat template, which may ignore it."
    )


class ChatFields(Body, TemplateFields):
    """Declares the fields of POST /v1/chat/completions, without the request parameters."""

    messages: Annotated[list[Message], FailFast()] = Field(
        max_length=limits.MAX_CHAT_MESSAGES, json_schema_extra={"minItems": 1}
    )
    logprobs: bool | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="If false, the answer ends after its first call."
    )
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1)] = None
    echo: Only[Literal[False]] = None
    add_special_tokens: Only[Literal[False]] = None
    prediction: Ignored[dict[str, Any]] = None
    verbosity: Only[Literal["medium"]] = None
    functions: Annotated[list[Any] | None, Field(max_length=0)] = None
    function_call: Only[Literal["none", "auto"]] = None
    include_reasoning: Only[Literal[True]] = None


class TokenizeBody(TemplateFields):
    """Declares the body of POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = Field(None, description="A text; excludes messages.")
    messages: Annotated[
        list[Message] | None, Field(max_length=limits.MAX_CHAT_MESSAGES), FailFast()
    ] = None
    add_special_tokens: bool | None = Field(
        None, description="True by default for a prompt; not allowed with messages."
    )
    return_token_strs: bool | None = None


class DetokenizeBody(OpenModel):
    """Declares the body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[_TokenId], Field(max_length=limits.MAX_TOKENS), FailFast()]


class DetectWatermarkBody(OpenModel):
    """Declares the body of POST /v1/watermark/detect."""

    model: str | None = None
    # FailFast cannot be hashed, as a part of a union must be.
    prompt: str | Annotated[list[_TokenId], Field(fail_fast=True)] = Field(
        description="A text or token ids."
    )


class LoadLoraAdapterBody(OpenModel):
    """Declares the body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: Only[Literal[False]] = None


class UnloadLoraAdapterBody(OpenModel):
    """Declares the body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Ignored[Any] = None


def with_parameters(kind: type[_M], name: str, *, chat: bool = False) -> type[_M]:
    """Returns the class `name`: `kind` and a field for each request parameter of the endpoint."""
    fields = {field: _field(row) for row in PARAMETERS for field in row.body_names(chat=chat)}
    return create_model(name, __base__=kind, **fields)


def with_named_parameters(kind: type[_M], name: str, names: Mapping[str, str]) -> type[_M]:
    """Returns the class `name`: `kind` and a field for each key of `names`.

    `names` maps fields of the body to request parameters.
    """
    fields: dict[str, Any] = {field: _field(ROWS[row]) for field, row in names.items()}
    return create_model(name, __base__=kind, **fields)


def _field(row: RequestParameter) -> Any:
    description = Field(None, description=row.help)
    if row.kind == "strings":
        return _strings_type(row), description
    if row.max_items:
        bounded: Any = Annotated[_TYPES[row.kind] | None, Field(max_length=row.max_items)]
        if row.kind == "token_ids":  # older versions of pydantic take FailFast only for lists
            bounded = Annotated[bounded, FailFast()]
        return bounded, description
    kind = Count if row.zero_is_unset or row.name == "beam_width" else _TYPES[row.kind]
    return kind | None, Field(None, description=row.help, json_schema_extra=_bounds(row))


def _strings_type(row: RequestParameter) -> Any:
    item = {"type": "string", "minLength": 1, "maxLength": row.max_characters}
    schema = {
        "anyOf": [{"type": "array", "items": item, "maxItems": row.max_items}, {"type": "null"}]
    }
    length = Field(max_length=row.max_items)
    if row.leaf != "stop":
        return Annotated[list[str] | None, length, FailFast(), WithJsonSchema(schema)]
    schema["anyOf"].append(item)  # OpenAI's clients also send a single string
    return Annotated[
        list[str] | None, length, FailFast(), BeforeValidator(_strings), WithJsonSchema(schema)
    ]


def _bounds(row: RequestParameter) -> Callable[[dict[str, Any]], None]:
    least, most = row.bounds
    minimum = "exclusiveMinimum" if row.excludes_minimum else "minimum"
    found = {minimum: max(least, int(row.zero_is_unset)), "maximum": most}

    def add(schema: dict[str, Any]) -> None:
        for kind in schema["anyOf"]:
            if kind["type"] in ("integer", "number") and math.isfinite(most):
                kind.update(found)

    return add


CompletionBody = with_parameters(CompletionFields, "CompletionBody")
ChatBody = with_parameters(ChatFields, "ChatBody", chat=True)
