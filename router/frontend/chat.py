"""Checks a chat and converts its messages, tools and variables to the form of chat templates.

Knows nothing of tokens.
"""

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

from jinja2.defaults import DEFAULT_NAMESPACE

from ...proto import inference_pb2, limits
from ...proto.errors import InvalidArgument, PromptTooLong
from ...proto.parameters import check_count, check_length
from ..turns import droppable_parts, without
from .messages.calls import REASONING_NAMES

_PATH: Final = "prompt.chat"
_TOOL_ROLE: Final = "tool"
_TOOL_NAME: Final = re.compile(rf"[a-zA-Z0-9_.:/-]{{1,{limits.MAX_TOOL_NAME_CHARACTERS}}}")

_JSON_MARKS: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{}]', re.DOTALL)
"""A string, or a mark outside of strings where a list or an object begins or ends."""

_NAMES_DEVELOPER: Final = re.compile(r"""["']developer["']""")

_TEMPLATE_NAMES: Final = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
    )
)
_ARGUMENT_NAMES: Final = frozenset(
    ("conversations", "chat_template", "return_assistant_tokens_mask")
)
_RESERVED: Final = _TEMPLATE_NAMES | _ARGUMENT_NAMES | DEFAULT_NAMESPACE.keys()
"""Names that a client's variables must not have."""


def check_chat(
    chat: inference_pb2.Chat, text_model_of: str = "", *, drops_turns: bool = False
) -> None:
    """Checks every bound of a chat.

    `text_model_of`: see `ServedModel`. `drops_turns`: only what must stay of the chat has to be
    short enough. Raises InvalidArgument, which names the field by its path
    (`prompt.chat.tools[0].name`).
    """
    if not 1 <= len(chat.messages) <= limits.MAX_CHAT_MESSAGES:
        raise InvalidArgument(
            f"has {len(chat.messages)} messages; it must have 1 to {limits.MAX_CHAT_MESSAGES}",
            f"{_PATH}.messages",
        )
    for i, message in enumerate(chat.messages):
        _check_parts(message, f"{_PATH}.messages[{i}].content", text_model_of)
        _check_message(message, f"{_PATH}.messages[{i}]")
    _check_tools(chat)
    _check_tool_choice(chat)
    template_kwargs(chat)
    if chat.continue_final_message:
        _check_continuation(chat)
    kept = without(chat, droppable_parts(chat)) if drops_turns else chat
    num_characters = _num_characters(kept)
    check_count(num_characters, limits.MAX_PROMPT_CHARACTERS, "characters", _PATH, PromptTooLong)


def within_characters(chat: inference_pb2.Chat) -> inference_pb2.Chat:
    """Returns a chat, checked with `drops_turns`, of at most MAX_PROMPT_CHARACTERS.

    It lacks the oldest parts that may be dropped, as few as suffice.
    """
    excess = _num_characters(chat) - limits.MAX_PROMPT_CHARACTERS
    parts = droppable_parts(chat)
    sizes = (sum(_message_characters(chat.messages[i]) for i in part) for part in parts)
    dropped = enumerate(accumulate(sizes, initial=0))
    return without(chat, parts[: next(count for count, size in dropped if size >= excess)])


def active_tools(chat: inference_pb2.Chat) -> list[inference_pb2.Tool]:
    """Returns the tools that go into the prompt."""
    return [] if chat.tool_choice.mode == inference_pb2.ToolChoice.MODE_NONE else list(chat.tools)


def must_call(chat: inference_pb2.Chat) -> bool:
    """Returns True if the answer must be a tool call."""
    return chat.tool_choice.mode in (
        inference_pb2.ToolChoice.MODE_REQUIRED,
        inference_pb2.ToolChoice.MODE_NAMED,
    )


def template_kwargs(chat: inference_pb2.Chat) -> dict[str, Any]:
    """Returns the client's variables of the template. Raises InvalidArgument."""
    if not chat.template_kwargs:
        return {}
    return read_template_kwargs(chat.template_kwargs, f"{_PATH}.template_kwargs")


def read_template_kwargs(text: str, field: str) -> dict[str, Any]:
    """Returns variables of the template, a JSON object. Raises InvalidArgument, naming `field`."""
    check_count(len(text), limits.MAX_TEMPLATE_KWARGS_CHARACTERS, "characters", field)
    _check_depth(text, field)
    given = json_object(text)
    if given is None:
        raise InvalidArgument("must be a JSON object", field)
    for name in given:
        if name in _RESERVED:
            raise InvalidArgument(f"{name!r} is reserved; the service sets it", field)
    return given


def template_variables(chat: inference_pb2.Chat) -> dict[str, Any]:
    """Returns the arguments of transformers' render_jinja_template for a checked chat."""
    return {
        **template_kwargs(chat),
        "conversations": [[_template_message(message) for message in chat.messages]],
        "tools": [tool_object(tool) for tool in active_tools(chat)] or None,
        "add_generation_prompt": not chat.continue_final_message,
        "continue_final_message": chat.continue_final_message,
    }


def with_developer_as_system(variables: dict[str, Any], template: str) -> dict[str, Any]:
    """Returns the variables with role system instead of developer if the template lacks developer.

    OpenAI renamed the role system to developer.
    """
    if _NAMES_DEVELOPER.search(template):
        return variables
    (messages,) = variables["conversations"]
    named = [
        each | {"role": "system"} if each["role"] == "developer" else each for each in messages
    ]
    return variables | {"conversations": [named]}


def tool_object(tool: inference_pb2.Tool) -> dict[str, Any]:
    """Returns a tool in the form of OpenAI and chat templates."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = parameters_schema(tool)
    return {"type": "function", "function": function}


def parameters_schema(tool: inference_pb2.Tool) -> dict[str, Any]:
    """Returns the JSON schema of the arguments of a checked tool."""
    schema = json_object(tool.parameters or "{}") or {
        "properties": {},
        "additionalProperties": False,
    }
    return schema if "type" in schema else {"type": "object", **schema}


def json_object(text: str) -> dict[str, Any] | None:
    """Parses a JSON object.

    Returns None if `text` is not one, is nested too deeply, or has no valid JSON form.
    """
    if _is_too_deep(text):
        return None
    try:
        value = json.loads(text)
        # Fails for NaN, infinities and lone surrogates.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # also JSONDecodeError and UnicodeEncodeError
        return None
    return value if isinstance(value, dict) else None


def _template_message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    # Agents send the pictures that their tools made again with each turn: a refusal would end the
    # conversation.
    notes = [f"[{kind} left out: the model only reads text]" for kind in message.other_parts]
    content = "\n".join([message.content, *notes] if message.content else notes)
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        found["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.name:
        found["name"] = message.name
    if message.reasoning:
        found |= dict.fromkeys(REASONING_NAMES, message.reasoning)
    return found


def _template_call(call: inference_pb2.ToolCall) -> Mapping[str, Any]:
    # Templates write the arguments by `tojson`, so they need an object. Invalid JSON stays text.
    arguments = json_object(call.arguments or "{}")
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _check_parts(message: inference_pb2.ChatMessage, path: str, text_model_of: str) -> None:
    if not message.other_parts or message.role == _TOOL_ROLE:
        return
    kind = message.other_parts[0][: limits.MAX_NAME_CHARACTERS]
    reads = "the model only reads text"
    if text_model_of:
        reads = f"this service has the text model of {text_model_of} only"
    raise InvalidArgument(f"parts of type {kind!r} are not supported; {reads}", path)


def _check_message(message: inference_pb2.ChatMessage, path: str) -> None:
    check_length(message.role, limits.MAX_ROLE_CHARACTERS, f"{path}.role")
    is_result = message.role == _TOOL_ROLE
    longest = limits.MAX_TOOL_NAME_CHARACTERS if is_result else limits.MAX_NAME_CHARACTERS
    check_count(len(message.name), longest, "characters", f"{path}.name")
    _check_call_id(message.tool_call_id, f"{path}.tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise InvalidArgument("only allowed with role assistant", f"{path}.tool_calls")
    check_count(len(message.tool_calls), limits.MAX_TOOL_CALLS, "calls", f"{path}.tool_calls")
    for i, call in enumerate(message.tool_calls):
        _check_call_id(call.id, f"{path}.tool_calls[{i}].id")
        # The model may have invented the name, so it has any characters.
        check_length(call.name, limits.MAX_TOOL_NAME_CHARACTERS, f"{path}.tool_calls[{i}].name")
        _check_depth(call.arguments, f"{path}.tool_calls[{i}].arguments")


def _check_tools(chat: inference_pb2.Chat) -> None:
    check_count(len(chat.tools), limits.MAX_TOOLS, "tools", f"{_PATH}.tools")
    names = set()
    for i, tool in enumerate(chat.tools):
        path = f"{_PATH}.tools[{i}]"
        _check_tool_name(tool.name, f"{path}.name")
        if tool.name in names:
            raise InvalidArgument(f"{tool.name!r} is already the name of a tool", f"{path}.name")
        names.add(tool.name)
        check_count(
            len(tool.parameters), limits.MAX_GRAMMAR_CHARACTERS, "characters", f"{path}.parameters"
        )
        _check_depth(tool.parameters, f"{path}.parameters")
        schema = json_object(tool.parameters or "{}")
        if schema is None or schema.get("type", "object") != "object":
            raise InvalidArgument("must be the JSON schema of an object", f"{path}.parameters")


def _check_tool_choice(chat: inference_pb2.Chat) -> None:
    choice = chat.tool_choice
    path = f"{_PATH}.tool_choice"
    if choice.mode not in inference_pb2.ToolChoice.Mode.values():
        raise InvalidArgument(f"{choice.mode} is not a mode", f"{path}.mode")
    if must_call(chat) and not chat.tools:
        raise InvalidArgument("demands a call, but the chat has no tools", path)
    named = choice.mode == inference_pb2.ToolChoice.MODE_NAMED
    if named and choice.name not in {tool.name for tool in chat.tools}:
        raise InvalidArgument("must be the name of one of the tools", f"{path}.name")
    if choice.name and not named:
        raise InvalidArgument("only allowed with MODE_NAMED", f"{path}.name")


def _check_continuation(chat: inference_pb2.Chat) -> None:
    path = f"{_PATH}.continue_final_message"
    last = chat.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise InvalidArgument("the last message must be a text of the assistant", path)
    if must_call(chat):
        raise InvalidArgument("not allowed with a tool_choice that demands a call", path)


def _check_tool_name(name: str, field: str) -> None:
    if not _TOOL_NAME.fullmatch(name):
        raise InvalidArgument(
            f"must have 1 to {limits.MAX_TOOL_NAME_CHARACTERS} characters: letters, digits and "
            "_.:/-",
            field,
        )


def _check_call_id(call_id: str, field: str) -> None:
    check_count(len(call_id), limits.MAX_TOOL_CALL_ID_CHARACTERS, "characters", field)


def _check_depth(text: str, field: str) -> None:
    if _is_too_deep(text):
        raise InvalidArgument(
            f"is nested too deeply; the maximum is {limits.MAX_JSON_DEPTH} levels", field
        )


def _is_too_deep(text: str) -> bool:
    """Returns True if a text of JSON has more than MAX_JSON_DEPTH levels.

    Functions that call themselves for each level have room for about 500 levels.
    """
    if text.count("{") + text.count("[") <= limits.MAX_JSON_DEPTH:
        return False
    marks = (match[0] for match in _JSON_MARKS.finditer(text))
    steps = ((mark in "[{") - (mark in "]}") for mark in marks if mark[0] != '"')
    return max(accumulate(steps), default=0) > limits.MAX_JSON_DEPTH


def _num_characters(chat: inference_pb2.Chat) -> int:
    """Counts the characters of all text that may go into the prompt."""
    tools = sum(len(tool.description) + len(tool.parameters) for tool in chat.tools)
    return sum(map(_message_characters, chat.messages)) + tools


def _message_characters(message: inference_pb2.ChatMessage) -> int:
    calls = sum(len(call.id) + len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning) + len(message.tool_call_id) + calls
