"""OpenAI's requests, translated to the messages of tandem.v1.

A field that Tandem cannot honour is refused by name unless its value asks for nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from ....proto import inference_pb2, limits
from ....proto.errors import InvalidArgument
from ...frontend.chat import must_call
from .bodies import (
    Body,
    ChatBody,
    ChatParts,
    ChatTokenizeBody,
    CompletionBody,
    DetokenizeBody,
    MessageBody,
    NamedTool,
    TextTokenizeBody,
    TokenizeKind,
    ToolBody,
)
from .parsing import MAX_NAME, http_field, json_text, parse

_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's, for /v1/completions only


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """What one body asks for."""

    chat: bool
    common: inference_pb2.GenerateRequest  # what all prompts have; without prompt and id
    prompts: Sequence[inference_pb2.Prompt]
    request_id: str
    default_max_tokens: int | None = None  # where the body names no number; None: any
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    parallel_tool_calls: bool = True
    prompt_logprobs: bool = False  # asked for by themselves, not by echo
    names: Mapping[str, str] = field(default_factory=dict)  # of fields that this body names otherwise than most

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return max(self.common.n, 1)

    def requests(self) -> Iterator[inference_pb2.GenerateRequest]:
        """One for each prompt, made when it is asked for: where the first is refused, no other is made."""
        for i, prompt in enumerate(self.prompts):
            request = inference_pb2.GenerateRequest()
            request.CopyFrom(self.common)
            request.prompt.CopyFrom(prompt)
            suffix = f"-{i}" if len(self.prompts) > 1 else ""
            request.request_id = self.request_id[: limits.MAX_REQUEST_ID_CHARACTERS - len(suffix)] + suffix
            yield request

    def field(self, path: str) -> str:
        """The name in this body of a field of GenerateRequest."""
        if self.chat and path == "prompt":
            return "messages"
        found = next((name for start, name in self.names.items() if path.startswith(start)), None)
        return http_field(path) if found is None else found


def completion_job(body: bytes, request_id: str) -> ParsedBody:
    """Translates the body of POST /v1/completions. Raises InvalidArgument that names the field."""
    parsed = parse(CompletionBody, body)
    prompts = [
        inference_pb2.Prompt(text=prompt)
        if isinstance(prompt, str)
        else inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))
        for prompt in parsed.prompt
    ]
    common, names = _common(parsed)
    if parsed.logprobs is not None:
        common.logprobs = parsed.logprobs
    common.echo = bool(parsed.echo)
    if parsed.echo and parsed.logprobs is not None and parsed.prompt_logprobs is None:
        common.prompt_logprobs = parsed.logprobs
    if parsed.max_tokens is not None:
        common.stopping.max_tokens = parsed.max_tokens
    return _job(parsed, common, prompts, request_id, names, default_max_tokens=_DEFAULT_COMPLETION_TOKENS)


def chat_job(body: bytes, request_id: str) -> ParsedBody:
    """Translates the body of POST /v1/chat/completions. Raises InvalidArgument that names the field."""
    parsed = parse(ChatBody, body)
    common, names = _common(parsed)
    if parsed.logprobs:
        common.logprobs = parsed.top_logprobs or 0
        names["logprobs"] = "top_logprobs"
    elif parsed.top_logprobs:
        raise InvalidArgument("goes with logprobs only", "top_logprobs")
    if parsed.max_completion_tokens is not None:
        common.stopping.max_tokens = parsed.max_completion_tokens
        names["stopping.max_tokens"] = "max_completion_tokens"
    elif parsed.max_tokens is not None:
        common.stopping.max_tokens = parsed.max_tokens
    chat = _chat(parsed)
    chat.tool_choice.CopyFrom(_tool_choice(parsed.tool_choice))
    if must_call(chat) and not common.HasField("constraint"):
        names["constraint"] = "tools"
    return _job(parsed, common, [inference_pb2.Prompt(chat=chat)], request_id, names)


def tokenize_request(body: bytes) -> tuple[inference_pb2.TokenizeRequest, TextTokenizeBody | ChatTokenizeBody]:
    """Translates the body of POST /tokenize, and returns it, too. Raises InvalidArgument."""
    try:
        is_chat = "messages" in TokenizeKind.model_validate_json(body).model_fields_set
    except ValidationError:
        is_chat = False  # whatever it is, the parser below says what is wrong
    if is_chat:
        chat = parse(ChatTokenizeBody, body)
        prompt = inference_pb2.Prompt(chat=_chat(chat))
        return inference_pb2.TokenizeRequest(model=chat.model or "", prompt=prompt), chat
    text = parse(TextTokenizeBody, body)
    return inference_pb2.TokenizeRequest(model=text.model or "", prompt=inference_pb2.Prompt(text=text.prompt)), text


def detokenize_request(body: bytes) -> inference_pb2.DetokenizeRequest:
    """Translates the body of POST /detokenize. Raises InvalidArgument."""
    parsed = parse(DetokenizeBody, body)
    return inference_pb2.DetokenizeRequest(model=parsed.model or "", token_ids=parsed.tokens)


def _common(body: Body) -> tuple[inference_pb2.GenerateRequest, dict[str, str]]:
    """What both endpoints have, and the names of fields that depend on the body."""
    constraint, name = _constraint(body)
    names = {"constraint": name}
    request = inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=_sampling(body),
        stopping=inference_pb2.StoppingParams(
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=bool(body.ignore_eos),
            min_tokens=body.min_tokens or 0,
        ),
        truncate_prompt=bool(body.truncate_prompt),
        n=body.n or 0,
        best_of=body.best_of or 0,
        prompt_logprobs=body.prompt_logprobs,
        constraint=constraint,
        priority=-(body.priority or 0),  # as in vLLM, the lower number goes first
    )
    if _searches(body):
        if body.beam_width is None:
            names["beam_search.width"] = "n"
        request.beam_search.CopyFrom(
            inference_pb2.BeamSearch(
                width=body.beam_width or body.n or 1,
                length_penalty=body.length_penalty,
                early_stopping=bool(body.early_stopping),
            )
        )
    elif body.length_penalty not in (None, 1) or body.early_stopping:
        name = "early_stopping" if body.early_stopping else "length_penalty"
        raise InvalidArgument("goes with use_beam_search only", name)
    return request, names


def _searches(body: Body) -> bool:
    return bool(body.use_beam_search) or body.beam_width is not None


def _sampling(body: Body) -> inference_pb2.SamplingParams:
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": None if body.seed is None else body.seed % (limits.MAX_SEED + 1),
        "typical_p": body.typical_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _logit_bias(body.logit_bias or {}),
        "bad_words": body.bad_words,
    }
    if _searches(body):  # a search takes none of these; values that ask for nothing are common in clients
        nothing: dict[str, tuple[float, ...]] = {"temperature": (0, 1), "top_k": (0, -1), "seed": (given["seed"] or 0,)}
        nothing |= dict.fromkeys(("top_p", "typical_p", "repetition_penalty"), (1,))
        nothing |= dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), (0,))
        given = {name: value for name, value in given.items() if value not in nothing.get(name, ())}
    return inference_pb2.SamplingParams(**given)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise InvalidArgument(f"{key[:MAX_NAME]!r} is not a token id", "logit_bias")
    return {int(key): value for key, value in given.items()}


def _constraint(body: Body) -> tuple[inference_pb2.Constraint | None, str]:
    """What the completion must look like, and the field that says so."""
    found = [*_format(body), *_structured(body)]
    found += [
        (inference_pb2.Constraint(**value), f"guided_{name}")
        for name, value in _kinds(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    ]
    if len(found) > 1:
        raise InvalidArgument(f"does not go together with {found[0][1]}", found[1][1])
    return found[0] if found else (None, "response_format")


def _format(body: Body) -> Iterator[tuple[inference_pb2.Constraint, str]]:
    form = body.response_format
    if form is None:
        return
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise InvalidArgument("goes together with type json_schema, and only with it", "response_format.json_schema")
    if form.json_schema is not None:
        schema = json_text(form.json_schema.schema_, "response_format.json_schema.schema")
        yield inference_pb2.Constraint(json_schema=schema), "response_format"
    elif form.type == "json_object":
        yield inference_pb2.Constraint(json_object=True), "response_format"


def _structured(body: Body) -> Iterator[tuple[inference_pb2.Constraint, str]]:
    wanted = body.structured_outputs
    if wanted is None:
        return
    for name, value in _kinds(wanted.json_, wanted.regex, wanted.choice, wanted.grammar):
        yield inference_pb2.Constraint(**value), f"structured_outputs.{name}"
    if wanted.json_object:
        yield inference_pb2.Constraint(json_object=True), "structured_outputs.json_object"


def _kinds(
    schema: str | dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    if schema is not None:
        yield "json", {"json_schema": schema if isinstance(schema, str) else json_text(schema, "guided_json")}
    if regex is not None:
        yield "regex", {"regex": regex}
    if choice is not None:
        yield "choice", {"choice": inference_pb2.Choices(texts=choice)}
    if grammar is not None:
        yield "grammar", {"grammar": grammar}


def _chat(body: ChatParts) -> inference_pb2.Chat:
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise InvalidArgument("false goes with continue_final_message only", "add_generation_prompt")
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidArgument("true does not go with continue_final_message", "add_generation_prompt")
    kwargs = body.chat_template_kwargs
    return inference_pb2.Chat(
        messages=[_message(message) for message in body.messages],
        tools=[_tool(tool, f"tools[{i}].function.parameters") for i, tool in enumerate(body.tools or ())],
        template_kwargs=json_text(kwargs, "chat_template_kwargs") if kwargs else "",
        continue_final_message=bool(body.continue_final_message),
    )


def _message(message: MessageBody) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls=[
            inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ],
    )


def _tool(tool: ToolBody, path: str) -> inference_pb2.Tool:
    function = tool.function
    parameters = json_text(function.parameters, path) if function.parameters else ""
    return inference_pb2.Tool(name=function.name, description=function.description or "", parameters=parameters)


def _tool_choice(choice: str | NamedTool | None) -> inference_pb2.ToolChoice:
    modes = inference_pb2.ToolChoice
    if isinstance(choice, NamedTool):
        return modes(mode=modes.MODE_NAMED, name=choice.function.name)
    return modes(mode={"none": modes.MODE_NONE, "required": modes.MODE_REQUIRED}.get(choice or "auto"))


def _job(
    body: Body,
    common: inference_pb2.GenerateRequest,
    prompts: Sequence[inference_pb2.Prompt],
    request_id: str,
    names: Mapping[str, str],
    default_max_tokens: int | None = None,
) -> ParsedBody:
    options = body.stream_options
    return ParsedBody(
        chat=isinstance(body, ChatBody),
        common=common,
        prompts=prompts,
        request_id=request_id,
        default_max_tokens=default_max_tokens,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        parallel_tool_calls=not isinstance(body, ChatBody) or body.parallel_tool_calls is not False,
        prompt_logprobs=body.prompt_logprobs is not None,
        names=names,
    )
