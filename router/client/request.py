"""From what a caller gives a client to the messages of the service. Does no I/O; the service checks the bounds.

Raises InvalidArgument, which names the option, for what no message can say: values of a wrong type, numbers that no
field holds, options that exclude each other.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument
from .types import ChatOptions, Message, Options, TemplateOptions, Tool, ToolCall

_SAMPLING: Final = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
)
_STOPPING: Final = ("max_tokens", "stop_token_ids", "ignore_eos", "min_tokens")
_TOP: Final = (
    *("model", "truncate_prompt", "request_id", "n", "best_of"),
    *("logprobs", "prompt_logprobs", "echo", "priority"),
)
_CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")
_MODES: Final = {
    "auto": inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


def text_prompt(prompt: str | Sequence[int]) -> inference_pb2.Prompt:
    """A prompt of text or token ids."""
    with _refusing("prompt", "must be text or token ids from 0 to 2**32 - 1"):
        if isinstance(prompt, str):
            return inference_pb2.Prompt(text=prompt)
        return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))


def chat_prompt(messages: Sequence[Message], options: TemplateOptions) -> inference_pb2.Prompt:
    """A prompt of messages, with the options that concern the template. None is as good as absent."""
    chat = inference_pb2.Chat(messages=[_message(i, each) for i, each in enumerate(messages)])
    for i, tool in enumerate(options.get("tools") or ()):
        with _refusing(f"tools[{i}]", "must be a Tool, or a function in OpenAI's form"):
            chat.tools.append(_tool(tool))
    if choice := options.get("tool_choice"):
        with _refusing("tool_choice", 'must be "auto", "none", "required" or the name of a tool'):
            chat.tool_choice.CopyFrom(_tool_choice(choice))
    if kwargs := options.get("template_kwargs"):
        chat.template_kwargs = _as_json("template_kwargs", kwargs)
    with _refusing("continue_final_message", "must be True or False"):
        chat.continue_final_message = options.get("continue_final_message") or False
    return inference_pb2.Prompt(chat=chat)


def generate_request(prompt: inference_pb2.Prompt, given: Options | ChatOptions) -> inference_pb2.GenerateRequest:
    """The message for a prompt and these options; those that concern the template are in the prompt already. None is
    as good as absent."""
    _check_names(given, ChatOptions if prompt.HasField("chat") else Options)
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    request = inference_pb2.GenerateRequest(prompt=prompt)
    _fill(request, _TOP, options)
    _fill(request.sampling, _SAMPLING, options)
    _fill(request.stopping, _STOPPING, options)
    if stop := options.get("stop"):
        with _refusing("stop", "must be a text or several"):
            request.stopping.stop.extend((stop,) if isinstance(stop, str) else stop)
    _set_beam_search(request, options)
    _set_constraint(request, options)
    return request


def tokenize_request(
    prompt: str | Sequence[Message], model: str, options: TemplateOptions
) -> inference_pb2.TokenizeRequest:
    """The message for a text or for messages, which alone have options."""
    for name in options if isinstance(prompt, str) else ():
        if name not in TemplateOptions.__annotations__ or options[name] is not None:  # type: ignore[literal-required]
            raise InvalidArgument("there is no such option for a text", name)
    _check_names(options, TemplateOptions)
    kind = text_prompt(prompt) if isinstance(prompt, str) else chat_prompt(prompt, options)
    return inference_pb2.TokenizeRequest(model=model, prompt=kind)


def detokenize_request(token_ids: Sequence[int], model: str) -> inference_pb2.DetokenizeRequest:
    with _refusing("token_ids", "must be token ids from 0 to 2**32 - 1"):
        return inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)


def _check_names(given: Mapping[str, object], known: type) -> None:
    for name in given:
        if name not in known.__annotations__:
            raise InvalidArgument("there is no such option here", name)


@contextmanager
def _refusing(name: str, message: str) -> Iterator[None]:
    """Blames `name` for what does not fit. A lone surrogate in a text is a ValueError, too."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(message, name) from error


def _fill(message: Any, names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Sets the fields of a protobuf message that are named as the options are."""
    for name in names:
        value = options.get(name)
        if value is None:
            continue
        with _refusing(name, f"{value!r} does not fit the field"):
            message.MergeFrom(type(message)(**{name: value}))


def _message(index: int, given: Message) -> inference_pb2.ChatMessage:
    values: Mapping[str, Any] = given
    with _refusing(f"messages[{index}]", "must have a role and a content, both text"):
        calls = [_call(call) for call in values.get("tool_calls") or ()]
        content = (values.get("content") or "") if calls else values["content"]
        return inference_pb2.ChatMessage(
            role=values["role"],
            content=_text(content),
            tool_calls=calls,
            tool_call_id=values.get("tool_call_id"),
            name=values.get("name"),
        )


def _text(content: object) -> str:
    """A content, or the texts of OpenAI's content parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise TypeError("content")
    return "".join(part["text"] for part in content)


def _call(given: ToolCall | Mapping[str, Any]) -> inference_pb2.ToolCall:
    if isinstance(given, ToolCall):
        return inference_pb2.ToolCall(id=given.id, name=given.name, arguments=given.arguments)
    function = given["function"]
    return inference_pb2.ToolCall(id=given["id"], name=function["name"], arguments=function["arguments"])


def _tool(given: Tool | Mapping[str, Any]) -> inference_pb2.Tool:
    if isinstance(given, Tool):
        name, description, parameters = given.name, given.description, given.parameters
    else:
        function = given["function"]
        name, description, parameters = function["name"], function.get("description"), function.get("parameters")
    schema = json.dumps(parameters) if parameters else None
    return inference_pb2.Tool(name=name, description=description, parameters=schema)


def _tool_choice(choice: str) -> inference_pb2.ToolChoice:
    if choice in _MODES:
        return inference_pb2.ToolChoice(mode=_MODES[choice])
    return inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_NAMED, name=choice)


def _set_beam_search(request: inference_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    further = ("length_penalty", "early_stopping")
    if "beam_width" in options:
        with _refusing("beam_width", "must be a number of hypotheses"):
            request.beam_search.width = options["beam_width"]
        _fill(request.beam_search, further, options)
        return
    for name in further:
        if options.get(name, False) is not False:
            raise InvalidArgument("goes with beam_width only", name)


def _set_constraint(request: inference_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    given = [name for name in _CONSTRAINTS if name in options and options[name] is not False]
    if len(given) > 1:
        raise InvalidArgument(f"does not go with {given[0]}; a completion has one constraint", given[1])
    for name in given:
        value = options[name]
        if name == "json_schema" and not isinstance(value, str):
            value = _as_json(name, value)
        with _refusing(name, f"{value!r} does not fit the field"):
            if name == "choice":
                value = inference_pb2.Choices(texts=value)
            request.constraint.CopyFrom(inference_pb2.Constraint(**{name: value}))


def _as_json(name: str, value: object) -> str:
    with _refusing(name, "must be what JSON can say"):
        return json.dumps(value)
