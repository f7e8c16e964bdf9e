"""The bodies of the HTTP requests: OpenAI's fields, and those that vLLM has besides.

null is as good as absent everywhere. The bounds are those of proto/limits.py. Those of numbers and texts are
documentation here, they are enforced where all requests are; those of lists and objects are enforced here, too, before
anything is made of their entries. Fields with one value only are there because clients send it.
"""

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from ....proto import limits

_T = TypeVar("_T")

_MAX_PARTS: Final = limits.MAX_CHAT_MESSAGES
"""Of the content of one message."""


def _bounds(minimum: float, maximum: float, description: str = "", *, above: bool = False) -> Any:
    """`above`: the minimum itself is no good value."""
    extra = {"exclusiveMinimum" if above else "minimum": minimum, "maximum": maximum}
    return Field(None, description=description or None, json_schema_extra=lambda schema: _bound(schema, extra))


def _bound(schema: dict[str, Any], extra: dict[str, float]) -> None:
    for kind in schema["anyOf"]:
        if kind["type"] in ("integer", "number"):
            kind.update(extra)


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> object:
    """A list of prompts from any of the four forms; each prompt is a string or a list of token ids."""
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])) else value
    if isinstance(prompts, list):
        if not 1 <= len(prompts) <= limits.MAX_PROMPTS:
            raise PydanticCustomError("prompt", f"has {len(prompts)} prompts; 1 to {limits.MAX_PROMPTS} are taken")
        if all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
            return prompts
    raise PydanticCustomError("prompt", "must be a string, a list of token ids, or a list of these")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= limits.MAX_TOKENS and all(map(_is_id, value))


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _content(value: object) -> object:
    """The text of a message, given as a string or as parts of text."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    if len(value) > _MAX_PARTS:
        raise PydanticCustomError("content", f"has {len(value)} parts; at most {_MAX_PARTS} are taken")
    for part in value:
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            kind = part["type"][:64]
            raise PydanticCustomError("content", f"parts of type {kind!r} are not supported; the model reads text only")
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", 'takes parts of the form {"type": "text", "text": ...} only')
    return "".join(part["text"] for part in value)


_ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string", "minLength": 1}, _IDS]},
            "minItems": 1,
            "maxItems": limits.MAX_PROMPTS,
        },
    ]
}
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_STRING_CHARACTERS}
_STOP_SCHEMA = {
    "anyOf": [
        _STOP_STRING,
        {"type": "array", "items": _STOP_STRING, "maxItems": limits.MAX_STOP_STRINGS},
        {"type": "null"},
    ]
}

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=1, lt=2**32)]
BadWord = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": limits.MAX_BAD_WORD_CHARACTERS})]
Name = Annotated[str, Field(json_schema_extra={"pattern": rf"^[a-zA-Z0-9_.:/-]{{1,{limits.MAX_NAME_CHARACTERS}}}$"})]
Texts = Annotated[list[str] | None, Field(max_length=limits.MAX_CONSTRAINT_CHOICES), FailFast()]
Only = Annotated[_T | None, Field(description="No other value is supported.")]
Ignored = Annotated[_T | None, Field(description="Accepted, and of no effect.")]


class _Given:
    """Validates to True, and null to None; never makes an object of what is there."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> core_schema.CoreSchema:
        return core_schema.with_default_schema(core_schema.none_schema(), default=True, on_error="default")


Given = Annotated[Literal[True] | None, _Given]


class OpenModel(BaseModel):
    """Keeps the names of what it does not know, so that it can be refused by name where it is not null."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": False})
    __pydantic_extra__: dict[str, Given] = Field(init=False)


class TokenizeKind(BaseModel):
    """Tells the two bodies of POST /tokenize apart."""

    messages: Given = None


class StreamOptions(OpenModel):
    include_usage: bool | None = Field(None, description="Sends the usage in an event of its own at the end.")
    continuous_usage_stats: bool | None = Field(None, description="Sends the usage so far in each event.")
    include_obfuscation: Only[Literal[False]] = None


class JsonSchema(OpenModel):
    """What OpenAI calls a JSON schema format."""

    name: Ignored[str] = None
    description: Ignored[str] = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Ignored[bool] = None


class ResponseFormat(OpenModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(OpenModel):
    """Exactly one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts = None
    grammar: str | None = Field(None, description="A context-free grammar in the Lark format of llguidance.")


class Body(OpenModel):
    """What both endpoints take."""

    model: str | None = Field(None, description="May be absent if only one model is served.")
    n: Count | None = _bounds(1, limits.MAX_CHOICES, "Independent completions of each prompt.")
    best_of: Count | None = _bounds(1, limits.MAX_CHOICES, "Completions to generate; the n likeliest are answered.")
    max_tokens: Int32 | None = _bounds(0, limits.MAX_TOKENS)
    temperature: float | None = _bounds(0, limits.MAX_TEMPERATURE)
    top_p: float | None = _bounds(0, 1, above=True)
    top_k: Int32 | None = _bounds(-1, limits.MAX_TOP_K)
    min_p: float | None = _bounds(0, 1)
    typical_p: float | None = _bounds(0, 1, above=True)
    repetition_penalty: float | None = _bounds(limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY)
    presence_penalty: float | None = _bounds(-limits.MAX_PENALTY, limits.MAX_PENALTY)
    frequency_penalty: float | None = _bounds(-limits.MAX_PENALTY, limits.MAX_PENALTY)
    logit_bias: dict[str, float] | None = Field(
        None, max_length=limits.MAX_LOGIT_BIASES, description="By token id, as text."
    )
    bad_words: Annotated[list[BadWord] | None, Field(max_length=limits.MAX_BAD_WORDS), FailFast()] = None
    seed: Annotated[int, Field(ge=-(2**63), le=limits.MAX_SEED)] | None = None
    stop: Annotated[
        list[str] | None,
        Field(max_length=limits.MAX_STOP_STRINGS),
        FailFast(),
        BeforeValidator(_strings),
        WithJsonSchema(_STOP_SCHEMA),
    ] = None
    stop_token_ids: Annotated[list[UInt32] | None, Field(max_length=limits.MAX_STOP_TOKEN_IDS), FailFast()] = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = _bounds(0, limits.MAX_TOKENS)
    use_beam_search: bool | None = Field(None, description="Searches beam_width wide, or else n wide.")
    beam_width: Count | None = _bounds(1, limits.MAX_BEAM_WIDTH, "Implies use_beam_search.")
    length_penalty: float | None = _bounds(-limits.MAX_LENGTH_PENALTY, limits.MAX_LENGTH_PENALTY)
    early_stopping: bool | None = None
    prompt_logprobs: UInt32 | None = _bounds(0, limits.MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts = None
    guided_grammar: str | None = None
    truncate_prompt: bool | None = Field(None, description="Keeps the end of a prompt that does not fit the context.")
    priority: Int32 | None = _bounds(-limits.MAX_PRIORITY, limits.MAX_PRIORITY, "As in vLLM, lower goes first.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored[str] = None
    metadata: Ignored[dict[str, Any]] = None
    safety_identifier: Ignored[str] = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_retention: Ignored[str] = None
    service_tier: Only[Literal["auto", "default"]] = None
    store: Only[Literal[False]] = None
    skip_special_tokens: Only[Literal[True]] = None
    spaces_between_special_tokens: Only[Literal[True]] = None
    include_stop_str_in_output: Only[Literal[False]] = None
    return_token_ids: Only[Literal[False]] = None
    guided_decoding_backend: Ignored[str] = None


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: UInt32 | None = _bounds(0, limits.MAX_LOGPROBS)
    echo: bool | None = Field(None, description="Repeats the prompt; with logprobs, these are of the prompt, too.")
    suffix: Only[Literal[""]] = None
    add_special_tokens: Only[Literal[True]] = None


class CalledFunction(OpenModel):
    name: Name
    arguments: str = Field(description="A JSON object.")


class ToolCallBody(OpenModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageBody(OpenModel):
    role: str = Field(json_schema_extra={"minLength": 1, "maxLength": limits.MAX_ROLE_CHARACTERS})
    content: Annotated[
        str,
        BeforeValidator(_content),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "maxItems": _MAX_PARTS}, {"type": "null"}]}
        ),
    ] = ""
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody] | None, Field(max_length=limits.MAX_TOOL_CALLS), FailFast()] = None
    tool_call_id: str | None = None
    refusal: Only[Literal[""]] = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None


class FunctionBody(OpenModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool | None = Field(None, description="The schema binds the model when tool_choice asks for a call.")


class ToolBody(OpenModel):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(OpenModel):
    name: Name


class NamedTool(OpenModel):
    type: Literal["function"]
    function: NamedFunction


class ChatParts(OpenModel):
    """What becomes the prompt of a chat."""

    messages: Annotated[list[MessageBody], FailFast()] = Field(
        max_length=limits.MAX_CHAT_MESSAGES, json_schema_extra={"minItems": 1}
    )
    tools: Annotated[list[ToolBody] | None, Field(max_length=limits.MAX_TOOLS), FailFast()] = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    continue_final_message: bool | None = Field(None, description="Goes on with the last message, the assistant's.")
    add_generation_prompt: bool | None = Field(None, description="False goes with continue_final_message only.")


class ChatBody(Body, ChatParts):
    """The body of POST /v1/chat/completions."""

    max_completion_tokens: Int32 | None = _bounds(0, limits.MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = _bounds(0, limits.MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="If false, calls after the first are dropped.")
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1)] = None
    echo: Only[Literal[False]] = None
    add_special_tokens: Only[Literal[False]] = None


class TextTokenizeBody(OpenModel):
    """The body of POST /tokenize for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class ChatTokenizeBody(ChatParts):
    """The body of POST /tokenize for a chat."""

    model: str | None = None
    add_special_tokens: Only[Literal[False]] = None
    return_token_strs: bool | None = None


class DetokenizeBody(OpenModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[UInt32], Field(max_length=limits.MAX_TOKENS), FailFast()]
