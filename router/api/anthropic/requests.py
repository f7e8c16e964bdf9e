"""Translates bodies of Anthropic's Messages API to the messages of tandem.v1."""

import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument
from ...frontend.chat import must_call
from ...frontend.schemas.json_schemas import close_objects
from ..openai.bodies import PART_BREAK, CacheControl, OtherPart, part_ends
from ..openai.parsing import json_text, parse
from ..openai.requests import ParsedRequest, set_parameters
from .bodies import (
    PARAMETER_NAMES,
    STANDARD_TIER,
    CountTokensBody,
    InputMessage,
    MessagesBody,
    MessagesFields,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

_MODES: Final = {
    "auto": inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "any": inference_pb2.ToolChoice.MODE_REQUIRED,
    "tool": inference_pb2.ToolChoice.MODE_NAMED,
}


_Block = TypeVar("_Block", bound=BaseModel)
_ReadBlock = TextBlock | SearchResultBlock

_BILLING: Final = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt.

It differs in each request, so no prefix cache would have the prompt. It tells the model nothing.
"""


def parse_messages(
    body: bytes, request_id: str, *, ignores_unknown: bool = False
) -> ParsedRequest[MessagesFields]:
    """Translates the body of POST /v1/messages. Raises InvalidArgument that names the field."""
    parsed = parse(MessagesBody, body, ignores_unknown=ignores_unknown)
    translated = _translate(parsed)
    common = translated["common"]
    set_parameters(common, parsed, PARAMETER_NAMES)
    if common.service_tier == STANDARD_TIER:
        common.ClearField("service_tier")
    if not common.stopping.HasField("max_tokens"):
        raise InvalidArgument("field required", "max_tokens")
    return ParsedRequest(
        **translated,
        body=parsed,
        request_id=request_id,
        is_streamed=bool(parsed.stream),
        last_event_id=parsed.last_event_id,
    )


def parse_count_tokens(
    body: bytes, *, ignores_unknown: bool = False
) -> ParsedRequest[CountTokensBody]:
    """Translates the body of POST /v1/messages/count_tokens. Raises InvalidArgument."""
    parsed = parse(CountTokensBody, body, ignores_unknown=ignores_unknown)
    return ParsedRequest(**_translate(parsed), body=parsed, request_id="", is_streamed=False)


def _translate(body: CountTokensBody) -> dict[str, Any]:
    """Returns the fields of a ParsedRequest that depend on the body."""
    chat = inference_pb2.Chat()
    names = {
        "stopping.stop": "stop_sequences",
        "prompt.chat.template_kwargs": "thinking",
        "cache_breakpoints": "cache_control",
    }
    marks = [_mark(tool.cache_control) for tool in body.tools or () if tool.cache_control]
    if body.system and (system := _without_billing(body.system)):
        marks += _text_marks(system, 0)
        _add(chat, names, "system", role="system", content=_text(system))
    for i, message in enumerate(body.messages):
        add = _add_assistant if message.role == "assistant" else _add_user
        marks += add(chat, names, message, f"messages[{i}]")
    _add_tools(chat, names, body)
    if body.thinking is not None:
        chat.template_kwargs = json.dumps({"enable_thinking": body.thinking.type != "disabled"})
    if body.messages and body.messages[-1].role == "assistant":  # the begin of the answer
        chat.continue_final_message = not chat.messages[-1].tool_calls
        names["prompt.chat.continue_final_message"] = f"messages[{len(body.messages) - 1}]"
    constraint, constraint_name = _constraint(body)
    names["constraint"] = "tools" if must_call(chat) else constraint_name
    # The format binds only text, and a required call has none.
    common = inference_pb2.GenerateRequest(
        model=body.model or "",
        constraint=None if must_call(chat) else constraint,
        prompt_cache_retention=body.cache_control.retention if body.cache_control else "",
        cache_breakpoints=marks,
    )
    return {"common": common, "prompts": [inference_pb2.Prompt(chat=chat)], "names": names}


def _constraint(body: CountTokensBody) -> tuple[inference_pb2.Constraint | None, str]:
    """Returns the constraint and its field. Raises InvalidArgument if there are two."""
    name = "output_config.format"
    form = None if body.output_config is None else body.output_config.format
    if body.output_format is not None:
        if form is not None:
            raise InvalidArgument(f"cannot be combined with {name}", "output_format")
        name = "output_format"
        form = body.output_format
    if form is None:
        return None, name
    schema = json_text(close_objects(form.schema_), f"{name}.schema")
    return inference_pb2.Constraint(json_schema=schema), name


def _add(chat: inference_pb2.Chat, names: dict[str, str], path: str, **fields: Any) -> None:
    """Adds a message of the field `path`."""
    names[f"prompt.chat.messages[{len(chat.messages)}]"] = path
    chat.messages.add(**fields)


def _add_user(
    chat: inference_pb2.Chat, names: dict[str, str], message: InputMessage, path: str
) -> list[inference_pb2.CacheBreakpoint]:
    """Adds a message of role user or system: each tool result becomes a separate message.

    Returns the marks for the prefix cache.
    """
    marks: list[inference_pb2.CacheBreakpoint] = []
    content = message.content
    if message.role == "system":
        content = _without_billing(content)
    if isinstance(content, str):
        _add(chat, names, path, role=message.role, content=content)
        return marks
    texts: list[str] = []

    def add_texts() -> None:
        if texts:
            _add(chat, names, path, role=message.role, content=PART_BREAK.join(texts))
            texts.clear()

    for i, block in enumerate(content):
        if isinstance(block, TextBlock | SearchResultBlock):
            texts.append(block.text)
            if block.cache_control:
                marks.append(_mark(block.cache_control, len(chat.messages), part_ends(texts)[-1]))
        elif isinstance(block, ToolResultBlock):
            add_texts()
            marks += _text_marks(block.content or "", len(chat.messages))
            if block.cache_control:
                marks.append(_mark(block.cache_control, len(chat.messages) + 1))
            text = _text(block.content or "")
            others = _other_parts(block.content or "")
            fields = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            _add(chat, names, f"{path}.content[{i}]", **fields, other_parts=others)
        elif isinstance(block, OtherPart):
            add_texts()
            place = f"{path}.content[{i}]"
            _add(chat, names, place, role=message.role, other_parts=[block.type])
        else:
            raise InvalidArgument(
                f"a block of type {block.type} requires role assistant",
                f"{path}.content[{i}]",
            )
    add_texts()
    return marks


def _add_assistant(
    chat: inference_pb2.Chat, names: dict[str, str], message: InputMessage, path: str
) -> list[inference_pb2.CacheBreakpoint]:
    """Adds a message of the assistant; returns the marks for the prefix cache."""
    if isinstance(message.content, str):
        _add(chat, names, path, role="assistant", content=message.content)
        return []
    number = len(chat.messages)
    marks = _text_marks(message.content, number, between="")
    texts = []
    reasoning = []
    calls = []
    for i, block in enumerate(message.content):
        place = f"{path}.content[{i}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            if block.cache_control:
                marks.append(_mark(block.cache_control, number + 1))
            arguments = json_text(block.input, f"{place}.input")
            calls.append(inference_pb2.ToolCall(id=block.id, name=block.name, arguments=arguments))
        elif isinstance(block, ToolResultBlock | SearchResultBlock | OtherPart):
            raise InvalidArgument(f"a block of type {block.type} requires role user", place)
    fields = {
        "content": "".join(texts),  # as the model wrote them
        "reasoning": "".join(reasoning),
        "tool_calls": calls,
    }
    _add(chat, names, path, role="assistant", **fields)
    return marks


def _add_tools(chat: inference_pb2.Chat, names: dict[str, str], body: CountTokensBody) -> None:
    for i, tool in enumerate(body.tools or ()):
        names[f"prompt.chat.tools[{i}].parameters"] = f"tools[{i}].input_schema"
        names[f"prompt.chat.tools[{i}].name"] = f"tools[{i}].name"
        parameters = json_text(tool.input_schema, f"tools[{i}].input_schema")
        chat.tools.add(name=tool.name, description=tool.description or "", parameters=parameters)
    if (choice := body.tool_choice) is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidArgument("must be set if and only if type is tool", "tool_choice.name")
        chat.tool_choice.mode = _MODES[choice.type]
        chat.tool_choice.name = choice.name or ""
        chat.tool_choice.single_call = bool(choice.disable_parallel_tool_use)


def _mark(
    given: CacheControl, num_messages: int = 0, num_characters: int = 0
) -> inference_pb2.CacheBreakpoint:
    return inference_pb2.CacheBreakpoint(
        num_messages=num_messages, num_characters=num_characters, retention=given.retention
    )


def _text_marks(
    content: str | Sequence[BaseModel], num_messages: int, between: str = PART_BREAK
) -> list[inference_pb2.CacheBreakpoint]:
    """Returns the marks of the text blocks of a message, which has `num_messages` before it."""
    blocks = () if isinstance(content, str) else content
    texts = [block for block in blocks if isinstance(block, TextBlock | SearchResultBlock)]
    ends = part_ends([block.text for block in texts], between)
    return [
        _mark(block.cache_control, num_messages, end)
        for block, end in zip(texts, ends, strict=True)
        if block.cache_control
    ]


def _text(content: str | Sequence[_ReadBlock | OtherPart]) -> str:
    if isinstance(content, str):
        return content
    return PART_BREAK.join(block.text for block in content if not isinstance(block, OtherPart))


def _without_billing(content: str | Sequence[_Block]) -> str | list[_Block]:
    """Returns a content without blocks that begin as `_BILLING`; of a string, the first line."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(_BILLING) else content
    return [
        block
        for block in content
        if not (isinstance(block, TextBlock) and block.text.startswith(_BILLING))
    ]


def _other_parts(content: str | Sequence[_ReadBlock | OtherPart]) -> list[str]:
    return [block.type for block in content if isinstance(block, OtherPart)]
