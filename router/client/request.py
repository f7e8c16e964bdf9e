"""Converts the arguments of the clients to messages of the service.

Does no I/O; the service checks the bounds. Raises InvalidArgument, which names the option, for
values that no message can hold: of a wrong type, beyond the range of a field, or of options that
exclude each other. None means absent.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument
from ...proto.parameters import PARAMETERS, RequestParameter, parameters_of, set_value
from .types import ChatOptions, Message, Options, TemplateOptions, Tool, ToolCall

_NAMES: Final = frozenset(row.client_name for row in PARAMETERS)
_TEMPLATE_NAMES: Final = frozenset(TemplateOptions.__annotations__)
_MODES: Final = {
    "auto": inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


def text_prompt(prompt: str | Sequence[int]) -> inference_pb2.Prompt:
    """Returns a prompt of text or token ids."""
    with _refusing("prompt", "must be text or token ids from 0 to 2**32 - 1"):
        if isinstance(prompt, str):
            return inference_pb2.Prompt(text=prompt)
        return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))


def chat_prompt(messages: Sequence[Message], options: TemplateOptions) -> inference_pb2.Prompt:
    """Returns a prompt of messages, with the options of the template."""
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
    with _refusing("parse_special", "must be True or False"):
        chat.parse_special = options.get("parse_special") or False
    return inference_pb2.Prompt(chat=chat)


def generate_request(
    prompt: inference_pb2.Prompt, given: Options | ChatOptions
) -> inference_pb2.GenerateRequest:
    """Returns the message for a prompt and these options; template options are in the prompt."""
    _check_names(given, _NAMES | _TEMPLATE_NAMES if prompt.HasField("chat") else _NAMES)
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    request = inference_pb2.GenerateRequest(prompt=prompt)
    constraints = [
        row.leaf for row in parameters_of("constraint") if options.get(row.leaf, False) is not False
    ]
    if len(constraints) > 1:
        raise InvalidArgument(
            f"excludes {constraints[0]}; a completion has one constraint", constraints[1]
        )
    for row in PARAMETERS:
        name = row.client_name
        if name not in options or (options[name] is False and row.kind == "bool"):
            continue
        if row.field.startswith("beam_search.") and "beam_width" not in options:
            raise InvalidArgument("needs beam_width", name)
        with _refusing(name, f"{options[name]!r} does not fit the field"):
            set_value(request, row, _field_value(row, options[name]))
    return request


def _field_value(row: RequestParameter, value: Any) -> Any:
    if row.kind == "json" and not isinstance(value, str):
        return _as_json(row.leaf, value)
    if row.kind == "strings" and isinstance(value, str):
        value = (value,)
    return inference_pb2.StringChoices(texts=value) if row.leaf == "choice" else value


def tokenize_request(
    prompt: str | Sequence[Message], model: str, options: TemplateOptions
) -> inference_pb2.TokenizeRequest:
    """Returns the message for a text, or for messages, which alone have options."""
    for name in options if isinstance(prompt, str) else ():
        if name not in _TEMPLATE_NAMES or options[name] is not None:  # type: ignore[literal-required]
            raise InvalidArgument("there is no such option for a text", name)
    _check_names(options, _TEMPLATE_NAMES)
    kind = text_prompt(prompt) if isinstance(prompt, str) else chat_prompt(prompt, options)
    return inference_pb2.TokenizeRequest(model=model, prompt=kind)


def detokenize_request(token_ids: Sequence[int], model: str) -> inference_pb2.DetokenizeRequest:
    with _refusing("token_ids", "must be token ids from 0 to 2**32 - 1"):
        return inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)


def watermark_request(
    prompt: str | Sequence[int], model: str
) -> inference_pb2.DetectWatermarkRequest:
    return inference_pb2.DetectWatermarkRequest(model=model, prompt=text_prompt(prompt))


def _check_names(given: Mapping[str, object], known: Set[str]) -> None:
    for name in given:
        if name not in known:
            raise InvalidArgument("there is no such option here", name)


@contextmanager
def _refusing(name: str, message: str) -> Iterator[None]:
    """Raises InvalidArgument, which names `name`, for a value of a wrong type or range.

    A text with a lone surrogate is such a value.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(message, name) from error


def _message(index: int, given: Message) -> inference_pb2.ChatMessage:
    values: Mapping[str, Any] = given
    with _refusing(f"messages[{index}]", "must have a role and a content, both text"):
        calls = [_call(call) for call in values.get("tool_calls") or ()]
        content = (values.get("content") or "") if calls else values["content"]
        return inference_pb2.ChatMessage(
            role=values["role"],
            content=_text(content),
            other_parts=_other_parts(content),
            tool_calls=calls,
            tool_call_id=values.get("tool_call_id"),
            name=values.get("name"),
            reasoning=values.get("reasoning") or values.get("reasoning_content"),
        )


def _text(content: object) -> str:
    """Returns the text of a content, which may have OpenAI's content parts: one line for each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise TypeError("content")
    return "\n".join(part["text"] for part in content if not _is_other(part))


def _other_parts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the types of the parts that are not text."""
    if isinstance(content, str):
        return []
    return [part["type"] for part in content if _is_other(part)]


def _is_other(part: Mapping[str, Any]) -> bool:
    return bool(part.get("type", "text") != "text")


def _call(given: ToolCall | Mapping[str, Any]) -> inference_pb2.ToolCall:
    if isinstance(given, ToolCall):
        return inference_pb2.ToolCall(id=given.id, name=given.name, arguments=given.arguments)
    function = given["function"]
    return inference_pb2.ToolCall(
        id=given["id"], name=function["name"], arguments=function["arguments"]
    )


def _tool(given: Tool | Mapping[str, Any]) -> inference_pb2.Tool:
    if isinstance(given, Tool):
        name = given.name
        description = given.description
        parameters = given.parameters
    else:
        function = given["function"]
        name = function["name"]
        description = function.get("description")
        parameters = function.get("parameters")
    schema = json.dumps(parameters) if parameters else None
    return inference_pb2.Tool(name=name, description=description, parameters=schema)


def _tool_choice(choice: str) -> inference_pb2.ToolChoice:
    if choice in _MODES:
        return inference_pb2.ToolChoice(mode=_MODES[choice])
    return inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_NAMED, name=choice)


def _as_json(name: str, value: object) -> str:
    with _refusing(name, "must be a value that JSON can hold"):
        return json.dumps(value)
