"""The bodies of OpenAI's completion requests, translated to the messages of tandem.v1.

A field that Tandem cannot honour is refused by name unless its value asks for nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from ..proto import inference_pb2, limits
from ..proto.errors import InvalidArgument

_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's, for /v1/completions only

_HARMLESS: Final[dict[str, tuple[Any, ...] | None]] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "parallel_tool_calls": None,
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Fields without support and the values, besides null, that change nothing; None where no value does."""

_MAX_NAME: Final = 64  # characters of an unknown name that an error repeats

_B = TypeVar("_B", bound="_Body")


def _strings(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> object:
    """A list of prompts from any of the four forms; each prompt is a string or a list of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if isinstance(prompts, list) and all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        if 1 <= len(prompts) <= limits.MAX_PROMPTS:
            return prompts
        raise PydanticCustomError("prompt", f"has {len(prompts)} prompts; 1 to {limits.MAX_PROMPTS} are taken")
    raise PydanticCustomError("prompt", "must be a string, a list of token ids, or a list of these")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and 0 <= i < 2**32 for i in value)


def _content(value: object) -> object:
    """The text of a message, given as a string or as parts of text."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", 'takes parts of the form {{"type": "text", "text": ...}} only')
    return "".join(part["text"] for part in value)


_Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = None


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Annotated[str, BeforeValidator(_content)] = ""


class _Body(BaseModel):
    """What both endpoints take. null is as good as absent."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    max_tokens: _Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int32 | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=limits.MAX_SEED)] | None = None
    stop: Annotated[list[str], BeforeValidator(_strings)] = []
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    truncate_prompt: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _CompletionBody(_Body):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]


class _ChatBody(_Body):
    messages: list[_Message]
    max_completion_tokens: _Int32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one body asks for."""

    chat: bool
    requests: tuple[inference_pb2.GenerateRequest, ...]  # one per prompt
    default_max_tokens: int | None  # where the body names no number; None: any
    stream: bool
    include_usage: bool


def completion_job(body: bytes, request_id: str) -> Job:
    """Translates the body of POST /v1/completions. Raises InvalidArgument that names the field."""
    parsed = _parse(_CompletionBody, body)
    prompts = [
        inference_pb2.Prompt(text=prompt)
        if isinstance(prompt, str)
        else inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))
        for prompt in parsed.prompt
    ]
    return _job(parsed, prompts, parsed.max_tokens, request_id, default_max_tokens=_DEFAULT_COMPLETION_TOKENS)


def chat_job(body: bytes, request_id: str) -> Job:
    """Translates the body of POST /v1/chat/completions. Raises InvalidArgument that names the field."""
    parsed = _parse(_ChatBody, body)
    for i, message in enumerate(parsed.messages):
        _refuse_extras(message, {"name": None}, f"messages[{i}].")
    messages = [inference_pb2.ChatMessage(role=m.role, content=m.content) for m in parsed.messages]
    prompt = inference_pb2.Prompt(chat=inference_pb2.Chat(messages=messages))
    limit = parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens
    return _job(parsed, [prompt], limit, request_id, default_max_tokens=None)


def http_field(field: str) -> str:
    """The name in a body of a field of GenerateRequest: `stopping.stop[3]` is `stop[3]`."""
    if field == "prompt.chat":
        return "messages"
    for prefix in ("prompt.chat.", "sampling.", "stopping."):
        if field.startswith(prefix):
            return field.removeprefix(prefix)
    return field.partition(".")[0] if field.startswith("prompt.") else field


def _job(
    body: _Body,
    prompts: list[inference_pb2.Prompt],
    max_tokens: int | None,
    request_id: str,
    *,
    default_max_tokens: int | None,
) -> Job:
    _refuse_extras(body, _HARMLESS, "")
    options = body.stream_options
    if options is not None:
        _refuse_extras(
            options, {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}, "stream_options."
        )
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
    return Job(
        chat=isinstance(body, _ChatBody),
        requests=tuple(_request(body, *each, max_tokens) for each in zip(prompts, ids, strict=True)),
        default_max_tokens=default_max_tokens,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
    )


def _request(
    body: _Body, prompt: inference_pb2.Prompt, request_id: str, max_tokens: int | None
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=body.model or "",
        prompt=prompt,
        sampling=inference_pb2.SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=None if body.seed is None else body.seed % (limits.MAX_SEED + 1),
        ),
        stopping=inference_pb2.StoppingParams(
            max_tokens=max_tokens, stop=body.stop, stop_token_ids=body.stop_token_ids, ignore_eos=bool(body.ignore_eos)
        ),
        truncate_prompt=bool(body.truncate_prompt),
        request_id=request_id,
    )


def _parse(kind: type[_B], body: bytes) -> _B:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise InvalidArgument("the body is not valid JSON")
    raise InvalidArgument(_sentence(first["msg"]), _path(first["loc"]))


def _sentence(message: str) -> str:
    return message[:1].lower() + message[1:]


def _path(loc: tuple[int | str, ...]) -> str:
    return re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, loc)))


def _refuse_extras(model: BaseModel, accepted: Mapping[str, tuple[Any, ...] | None], prefix: str) -> None:
    """Raises InvalidArgument for a field that is unknown, or known and asks for something (None accepts any value)."""
    for name, value in (model.model_extra or {}).items():
        if value is None:
            continue
        if name not in accepted:
            raise InvalidArgument("is not a field that is known here", f"{prefix}{name[:_MAX_NAME]}")
        harmless = accepted[name]
        if harmless is not None and value not in harmless:
            raise InvalidArgument("is not supported with this value", f"{prefix}{name}")
