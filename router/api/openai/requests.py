"""Translates OpenAI's requests to the messages of tandem.v1.

A field that Tandem does not support is refused by name, unless its value has no effect.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ....proto import inference_pb2, limits
from ....proto.errors import InvalidArgument
from ....proto.limits import MAX_CACHE_BREAKPOINTS, RETENTION_SECONDS
from ....proto.parameters import PARAMETERS, ROWS, RequestParameter, parameters_of, set_value
from ...frontend.chat import json_object, must_call
from ...frontend.schemas.json_schemas import close_objects
from ..tool_choice import MODES, numbers_of_allowed
from .bodies import (
    REQUEST_TTL,
    AllowedFunctionChoice,
    AssistantMessage,
    Body,
    ChatBody,
    ChatFields,
    CompletionBody,
    MessageBody,
    NamedTool,
    OpenModel,
    PromptCacheOptions,
    TemplateFields,
    TokenizeBody,
    ToolBody,
)
from .openapi import LAST_EVENT_ID
from .parsing import MAX_NAME, http_field, json_text, parse

_BODY_NAMES: Final = [
    [
        (row, row.body_names(chat=chat))
        for row in PARAMETERS
        if not row.field.startswith("constraint.")
    ]
    for chat in (False, True)
]
_NO_EFFECT: Final = {"temperature": (0, 1), "top_k": (0, -1)}
"""Values without effect; for other parameters, this is the default."""

_ATTRIBUTES: Final = {"json": "json_"}
"""Fields of StructuredOutputs whose names pydantic itself uses."""


_B = TypeVar("_B", bound=OpenModel, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest(Generic[_B]):
    """Holds a body of any API and its translation, which may have several prompts."""

    body: _B
    common: inference_pb2.GenerateRequest  # of all prompts; without prompt and id
    prompts: Sequence[inference_pb2.Prompt]
    request_id: str
    names: Mapping[str, str]  # of fields of GenerateRequest in this body, if they are not the usual
    is_streamed: bool
    left_out: Sequence[str] = ()  # types of tools and items that the prompts do not contain
    last_event_id: str | None = None  # see RequestContext.event_id
    has_prompt_logprobs: bool = False  # requested separately, not by echo
    has_token_ids: bool = False  # of the prompts and of the answers
    is_charged: bool = False  # the caller has paid for the tokens of the prompts

    @property
    def is_chat(self) -> bool:
        return self.prompts[0].HasField("chat")

    @property
    def num_choices(self) -> int:
        """Returns the number of choices of each prompt."""
        return max(self.common.n, 1)

    def requests(self) -> Iterator[inference_pb2.GenerateRequest]:
        """Yields a request for each prompt; makes it only when the previous one was accepted."""
        for i, prompt in enumerate(self.prompts):
            request = inference_pb2.GenerateRequest()
            request.CopyFrom(self.common)
            request.prompt.CopyFrom(prompt)
            suffix = f"-{i}" if len(self.prompts) > 1 else ""
            kept = limits.MAX_REQUEST_ID_CHARACTERS - len(suffix)
            request.request_id = self.request_id[:kept] + suffix
            yield request

    def field(self, path: str) -> str:
        """Returns the name in this body of a field of GenerateRequest."""
        if self.is_chat and path in ("prompt", "prompt.chat"):
            path = "prompt.chat.messages"
        if path.startswith("resume"):
            return LAST_EVENT_ID if self.last_event_id is None else "last_event_id"
        for start, name in self.names.items():
            if path == start or path.startswith((f"{start}.", f"{start}[")):
                return name
        return http_field(path)


AnyRequest = ParsedRequest[OpenModel]
OpenAIRequest = ParsedRequest[Body]
"""A completion or a chat."""


def parse_completion(
    body: bytes, request_id: str, *, ignores_unknown: bool = False
) -> OpenAIRequest:
    """Translates the body of POST /v1/completions. Raises InvalidArgument that names the field."""
    parsed = parse(CompletionBody, body, ignores_unknown=ignores_unknown)
    prompts = prompt_messages(parsed.prompt)
    for prompt in prompts:
        prompt.suffix = parsed.suffix or ""
    common, names = _translate(parsed)
    set_prompt_cache(common, parsed.prompt_cache_options)
    has_prompt_logprobs = common.HasField("prompt_logprobs")
    if common.echo and common.HasField("logprobs") and not has_prompt_logprobs:
        common.prompt_logprobs = common.logprobs
    return ParsedRequest(
        body=parsed,
        common=common,
        prompts=prompts,
        request_id=request_id,
        names=names,
        is_streamed=bool(parsed.stream),
        last_event_id=parsed.last_event_id,
        has_prompt_logprobs=has_prompt_logprobs,
        has_token_ids=bool(parsed.return_token_ids),
    )


def prompt_messages(prompts: Iterable[str | list[int]]) -> list[inference_pb2.Prompt]:
    """Returns the prompts, each a text or a list of token ids, as messages."""
    return [
        inference_pb2.Prompt(text=prompt)
        if isinstance(prompt, str)
        else inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))
        for prompt in prompts
    ]


def parse_chat(body: bytes, request_id: str, *, ignores_unknown: bool = False) -> OpenAIRequest:
    """Translates the body of POST /v1/chat/completions.

    Raises InvalidArgument that names the field.
    """
    parsed = parse(ChatBody, body, ignores_unknown=ignores_unknown)
    common, names = _translate(parsed)
    if parsed.logprobs:
        common.logprobs = common.logprobs  # sets 0 alternatives, unless top_logprobs set more
    elif common.logprobs:
        raise InvalidArgument("requires logprobs", "top_logprobs")
    else:
        common.ClearField("logprobs")
    chat = _chat(parsed, parsed.messages)
    names["prompt.chat.template_kwargs"] = _kwargs_field(parsed)
    common.cache_breakpoints.extend(list(_marks(parsed))[-MAX_CACHE_BREAKPOINTS:])
    set_prompt_cache(common, parsed.prompt_cache_options)
    _set_tool_choice(chat, parsed.tool_choice, names)
    chat.tool_choice.single_call = parsed.parallel_tool_calls is False
    if must_call(chat) and names["constraint"] == "response_format":
        # The format binds only text, and a required call has none.
        common.ClearField("constraint")
        names["constraint"] = "tools"
    return ParsedRequest(
        body=parsed,
        common=common,
        prompts=[inference_pb2.Prompt(chat=chat)],
        request_id=request_id,
        names=names,
        is_streamed=bool(parsed.stream),
        last_event_id=parsed.last_event_id,
        has_prompt_logprobs=common.HasField("prompt_logprobs"),
        has_token_ids=bool(parsed.return_token_ids),
    )


def parse_tokenize(body: bytes) -> tuple[inference_pb2.TokenizeRequest, TokenizeBody]:
    """Translates the body of POST /tokenize; also returns the body. Raises InvalidArgument."""
    parsed = parse(TokenizeBody, body)
    if parsed.messages is None and parsed.prompt is None:
        raise InvalidArgument("prompt or messages required", "prompt")
    if parsed.messages is None:
        prompt = inference_pb2.Prompt(text=parsed.prompt)
    elif parsed.prompt is not None:
        raise InvalidArgument("cannot be combined with messages", "prompt")
    elif parsed.add_special_tokens:
        raise InvalidArgument("cannot be combined with messages", "add_special_tokens")
    else:
        prompt = inference_pb2.Prompt(chat=_chat(parsed, parsed.messages))
    return inference_pb2.TokenizeRequest(model=parsed.model or "", prompt=prompt), parsed


def set_parameters(
    request: inference_pb2.GenerateRequest, body: OpenModel, names: Mapping[str, str]
) -> None:
    """Sets the request parameters that a body made by with_named_parameters has."""
    for name, field in names.items():
        if (value := getattr(body, name)) is not None:
            set_value(request, ROWS[field], value)


def set_prompt_cache(
    request: inference_pb2.GenerateRequest, options: PromptCacheOptions | None
) -> None:
    """Sets how long the prompt and its marks stay in the prefix cache, from OpenAI's options.

    Of their `ttl` and prompt_cache_retention, the prompt gets the longer time. An unknown
    prompt_cache_retention stays, for the check of the request to refuse it.
    """
    ttl = None if options is None else options.ttl
    for mark in request.cache_breakpoints:
        if mark.retention == REQUEST_TTL:
            mark.retention = ttl or "30m"
    request.only_cache_breakpoints = options is not None and options.mode == "explicit"
    if ttl is None or request.only_cache_breakpoints:
        return
    given = RETENTION_SECONDS.get(request.prompt_cache_retention or ttl)
    if given is not None and given <= RETENTION_SECONDS[ttl]:
        request.prompt_cache_retention = ttl


def _translate(body: Body) -> tuple[inference_pb2.GenerateRequest, dict[str, str]]:
    """Returns the request without its prompt, and the names of fields that depend on the body."""
    constraint, constraint_name = _constraint(body)
    names = {"constraint": constraint_name}
    values: dict[str, dict[str, Any]] = {"": {}, "sampling": {}, "stopping": {}, "beam_search": {}}
    for row, name, value in _given_parameters(body):
        parent = row.field.rpartition(".")[0]
        values[parent][row.leaf] = value
        names |= {row.field: name} if name != row.leaf else {}
    if body.use_beam_search is False and "width" in values["beam_search"]:
        raise InvalidArgument(
            "not allowed with use_beam_search false; set use_beam_search to true, or leave out "
            "beam_width",
            "beam_width",
        )
    if body.use_beam_search or "width" in values["beam_search"]:
        names.setdefault("beam_search.width", "n")
        values["beam_search"].setdefault("width", values[""].get("n", 1))
        values["sampling"] = {
            leaf: value for leaf, value in values["sampling"].items() if _has_effect(leaf, value)
        }
    for leaf, value in list(values["beam_search"].items()):
        if "width" not in values["beam_search"] and value != ROWS[f"beam_search.{leaf}"].default:
            raise InvalidArgument("requires use_beam_search", leaf)
    request = inference_pb2.GenerateRequest(
        sampling=values["sampling"],
        stopping=values["stopping"],
        beam_search=values["beam_search"] if "width" in values["beam_search"] else None,
        constraint=constraint,
        **values[""],
    )
    request.priority = min(-request.priority, 2**31 - 1)  # in vLLM, a lower number is served first
    return request, names


def _given_parameters(body: Body) -> Iterator[tuple[RequestParameter, str, Any]]:
    """Yields the parameters of a body, without constraints: row, name in the body and value."""
    given = body.model_fields_set
    for row, names in _BODY_NAMES[isinstance(body, ChatFields)]:
        for name in names:
            if name in given and (value := getattr(body, name)) is not None:
                if row.kind == "uint64":
                    if value == -1:  # in vLLM, a random seed
                        break
                    value %= 2**64
                elif row.kind == "logit_bias":
                    value = _logit_bias(value)
                yield row, name, value
                break


def _has_effect(leaf: str, value: Any) -> bool:
    """Returns True if a sampling parameter has an effect; a beam search then refuses it."""
    return leaf != "seed" and value not in _NO_EFFECT.get(leaf, (ROWS[f"sampling.{leaf}"].default,))


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise InvalidArgument(f"{key[:MAX_NAME]!r} is not a token id", "logit_bias")
    return {int(key): value for key, value in given.items()}


def _constraint(body: Body) -> tuple[inference_pb2.Constraint | None, str]:
    """Returns the constraint and its field. Raises InvalidArgument if there are several."""
    found = [*_response_format(body), *_other_constraints(body)]
    if len(found) > 1:
        raise InvalidArgument(f"cannot be combined with {found[0][1]}", found[1][1])
    return found[0] if found else (None, "response_format")


def _response_format(body: Body) -> Iterator[tuple[inference_pb2.Constraint, str]]:
    form = body.response_format
    if form is None:
        return
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise InvalidArgument(
            "must be set if and only if type is json_schema", "response_format.json_schema"
        )
    if form.json_schema is not None and (schema := form.json_schema.schema_) is not None:
        schema = close_objects(schema) if _is_closed(body, True) else schema
        text = json_text(schema, "response_format.json_schema.schema")
        yield inference_pb2.Constraint(json_schema=text), "response_format"
    elif form.type != "text":
        yield inference_pb2.Constraint(json_object=True), "response_format"


def _other_constraints(body: Body) -> Iterator[tuple[inference_pb2.Constraint, str]]:
    for row in parameters_of("constraint"):
        name = row.leaf.removesuffix("_schema")
        structured = getattr(body.structured_outputs, _ATTRIBUTES.get(name, name), None)
        given = [(f"structured_outputs.{name}", structured)]
        given += [(guided, getattr(body, guided)) for guided in row.body_names(chat=False)]
        for field, value in given:
            if value is None or value is False:
                continue
            if row.kind == "json":
                value = _schema_text(value, field, is_closed=_is_closed(body, False))
            elif row.kind == "strings":
                value = inference_pb2.StringChoices(texts=value)
            found: dict[str, Any] = {row.leaf: value}
            yield inference_pb2.Constraint(**found), field


def _schema_text(value: Any, field: str, *, is_closed: bool) -> str:
    """Returns a schema, which may be a JSON string, as JSON; `is_closed`: with closed objects.

    A string that is not JSON stays unchanged: the validator reports its error.
    """
    if isinstance(value, str):
        schema = json_object(value) if is_closed else None
        if schema is None:
            return value
        value = schema
    return json_text(close_objects(value) if is_closed else value, field)


def _is_closed(body: Body, default: bool) -> bool:
    given = body.structured_outputs and body.structured_outputs.disable_additional_properties
    return default if given is None else bool(given)


def _chat(body: TemplateFields, messages: Sequence[MessageBody]) -> inference_pb2.Chat:
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise InvalidArgument("false requires continue_final_message", "add_generation_prompt")
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidArgument(
            "true cannot be combined with continue_final_message", "add_generation_prompt"
        )
    kwargs = _template_kwargs(body)
    return inference_pb2.Chat(
        messages=[_message(message) for message in messages],
        tools=[
            _tool(tool, f"tools[{i}].function.parameters")
            for i, tool in enumerate(body.tools or ())
        ],
        template_kwargs=json_text(kwargs, _kwargs_field(body)) if kwargs else "",
        continue_final_message=bool(body.continue_final_message),
        parse_special=bool(body.parse_special),
    )


def _template_kwargs(body: TemplateFields) -> dict[str, Any]:
    """Returns the variables of the chat template; its own override OpenAI's fields.

    Raises InvalidArgument if two of the other fields set a variable to different values.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    switches: dict[str, Mapping[str, Any]] = {"chat_template_args": body.chat_template_args or {}}
    if body.enable_thinking is not None:
        switches["enable_thinking"] = {"enable_thinking": body.enable_thinking}
    if body.thinking is not None:
        switches["thinking"] = {"enable_thinking": body.thinking.type == "enabled"}
    for field, variables in switches.items():
        for name, value in variables.items():
            if kwargs.setdefault(name, value) != value:
                raise InvalidArgument(
                    f"contradicts another value of {name[:MAX_NAME]} in this request; set it once",
                    field,
                )
    named = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
    return {name: value for name, value in named.items() if value is not None} | kwargs


def _kwargs_field(body: TemplateFields) -> str:
    """Returns the field by which errors name the variables of the chat template."""
    is_other = body.chat_template_args and not body.chat_template_kwargs
    return "chat_template_args" if is_other else "chat_template_kwargs"


def _marks(body: ChatFields) -> Iterator[inference_pb2.CacheBreakpoint]:
    for tool in body.tools or ():
        if tool.cache_control is not None:
            yield inference_pb2.CacheBreakpoint(retention=tool.cache_control.retention)
    for i, message in enumerate(body.messages):
        for end, retention in message.content.marks:
            yield inference_pb2.CacheBreakpoint(
                num_messages=i, num_characters=end, retention=retention
            )
        if message.cache_control is not None:
            yield inference_pb2.CacheBreakpoint(
                num_messages=i + 1, retention=message.cache_control.retention
            )


def _message(message: MessageBody) -> inference_pb2.ChatMessage:
    content = message.content.text
    reasoning = message.reasoning_content
    if isinstance(message, AssistantMessage):
        content = content or message.refusal or ""
        reasoning = reasoning or message.reasoning
    return inference_pb2.ChatMessage(
        role=message.role,
        content=content,
        other_parts=message.content.other_parts,
        reasoning=reasoning or "",
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls=[
            inference_pb2.ToolCall(
                id=call.id, name=call.function.name, arguments=call.function.arguments or ""
            )
            for call in message.tool_calls or ()
        ],
    )


def _tool(tool: ToolBody, path: str) -> inference_pb2.Tool:
    function = tool.function
    parameters = json_text(function.parameters, path) if function.parameters else ""
    return inference_pb2.Tool(
        name=function.name, description=function.description or "", parameters=parameters
    )


def _set_tool_choice(
    chat: inference_pb2.Chat,
    choice: str | NamedTool | AllowedFunctionChoice | None,
    names: dict[str, str],
) -> None:
    """Sets the tool choice of a chat; keeps only the allowed tools, with their fields in `names`.

    Raises InvalidArgument if an allowed tool is not one of the tools.
    """
    if isinstance(choice, NamedTool):
        chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_NAMED
        chat.tool_choice.name = choice.function.name
    elif isinstance(choice, AllowedFunctionChoice):
        chat.tool_choice.mode = MODES[choice.allowed_tools.mode]
        _keep_allowed(chat, choice, names)
    else:
        chat.tool_choice.mode = MODES[choice]


def _keep_allowed(
    chat: inference_pb2.Chat, choice: AllowedFunctionChoice, names: dict[str, str]
) -> None:
    by_name = defaultdict[str, list[int]](list)
    for number, tool in enumerate(chat.tools):
        by_name[tool.name].append(number)
    found = {
        f"tool_choice.allowed_tools.tools[{i}].function.name": by_name[allowed.function.name]
        for i, allowed in enumerate(choice.allowed_tools.tools)
    }
    numbers = numbers_of_allowed(found)
    kept = inference_pb2.Chat(tools=[chat.tools[number] for number in numbers])
    chat.ClearField("tools")
    chat.tools.extend(kept.tools)
    for i, number in enumerate(numbers):
        for name in ("parameters", "name"):
            names[f"prompt.chat.tools[{i}].{name}"] = f"tools[{number}].function.{name}"
