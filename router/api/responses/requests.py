"""Translates bodies of OpenAI's Responses API to the messages of tandem.v1."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument
from ....proto.limits import MAX_CACHE_BREAKPOINTS
from ...frontend.chat import must_call
from ...frontend.json_schemas import close_objects
from ..openai.bodies import PART_BREAK, OtherPart
from ..openai.parsing import json_text
from ..openai.requests import ParsedRequest, set_parameters, set_prompt_cache
from .bodies import (
    PARAMETER_NAMES,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    NamedFunctionTool,
    Part,
    ReasoningItem,
    ResponsesFields,
    TextPart,
)

_MODES: Final = {
    None: inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "auto": inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


def translate_responses(
    parsed: ResponsesFields, request_id: str, earlier: Sequence[object] = ()
) -> ParsedRequest[ResponsesFields]:
    """Translates the body of POST /v1/responses; its input comes after the `earlier` items.

    Raises InvalidArgument that names the field.
    """
    names = {"stopping.max_tokens": "max_output_tokens", "prompt.chat.template_kwargs": "reasoning"}
    marks: list[inference_pb2.CacheBreakpoint] = []
    chat = _chat(parsed, names, earlier, marks)
    names["prompt.chat.messages"] = "input"  # after the single messages: the first match counts
    constraint = _constraint(parsed)
    names["constraint"] = "tools" if must_call(chat) else "text.format"
    # The format binds only text, and a required call has none.
    common = inference_pb2.GenerateRequest(
        model=parsed.model or "", constraint=None if must_call(chat) else constraint
    )
    set_parameters(common, parsed, PARAMETER_NAMES)
    common.cache_breakpoints.extend(marks[-MAX_CACHE_BREAKPOINTS:])
    set_prompt_cache(common, parsed.prompt_cache_options)
    return ParsedRequest(
        body=parsed,
        common=common,
        prompts=[inference_pb2.Prompt(chat=chat)],
        request_id=request_id,
        names=names,
        is_streamed=bool(parsed.stream),
        last_event_id=parsed.last_event_id,
    )


def _chat(
    body: ResponsesFields,
    names: dict[str, str],
    earlier: Sequence[object],
    marks: list[inference_pb2.CacheBreakpoint],
) -> inference_pb2.Chat:
    """Returns the chat; adds the fields of its messages and tools to `names`, and its `marks`."""
    chat = inference_pb2.Chat()

    def add(path: str, **fields: Any) -> None:
        names[f"prompt.chat.messages[{len(chat.messages)}]"] = path
        chat.messages.add(**fields)

    if body.instructions:
        add("instructions", role="system", content=body.instructions)
    for item in earlier:
        marks += _add_item(chat, add, item, "previous_response_id")
    if isinstance(body.input, str):
        add("input", role="user", content=body.input)
    else:
        for i, item in enumerate(body.input):
            marks += _add_item(chat, add, item, f"input[{i}]")
    if not chat.messages:
        raise InvalidArgument("has no message", "input")
    for i, tool in enumerate(body.tools or ()):
        parameters = json_text(tool.parameters, f"tools[{i}].parameters") if tool.parameters else ""
        chat.tools.add(name=tool.name, description=tool.description or "", parameters=parameters)
        names[f"prompt.chat.tools[{i}].parameters"] = f"tools[{i}].parameters"
        names[f"prompt.chat.tools[{i}].name"] = f"tools[{i}].name"
    if isinstance(body.tool_choice, NamedFunctionTool):
        chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_NAMED
        chat.tool_choice.name = body.tool_choice.name
    else:
        chat.tool_choice.mode = _MODES[body.tool_choice]
    chat.tool_choice.single_call = body.parallel_tool_calls is False
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat.template_kwargs = json.dumps({"reasoning_effort": body.reasoning.effort})
    return chat


def _add_item(
    chat: inference_pb2.Chat, add: Callable[..., None], item: object, path: str
) -> list[inference_pb2.CacheBreakpoint]:
    """Adds an item and returns its marks for the prefix cache.

    Reasoning, texts and calls in a row become one message of the assistant.
    """
    match item:
        case FunctionOutputItem():
            add(path, role="tool", tool_call_id=item.call_id, **_fields(item.output))
            return _marks(item.output, chat)
        case MessageItem() if item.role != "assistant":
            add(path, role=item.role, **_fields(item.content))
            return _marks(item.content, chat)
        case MessageItem() | FunctionCallItem() | ReasoningItem():
            is_call = isinstance(item, FunctionCallItem)
            last = chat.messages[-1] if chat.messages else None
            if last is None or last.role != "assistant" or (last.tool_calls and not is_call):
                add(path, role="assistant")
                last = chat.messages[-1]
            if isinstance(item, FunctionCallItem):
                last.tool_calls.add(id=item.call_id, name=item.name, arguments=item.arguments)
            else:
                found = _fields(item.content or (), between="")
                last.other_parts.extend(found["other_parts"])
                if isinstance(item, ReasoningItem):
                    last.reasoning += found["content"]
                else:
                    last.content += found["content"]
                    return _marks(item.content, chat, between="")
    return []


def _marks(
    content: str | Sequence[Part], chat: inference_pb2.Chat, between: str = PART_BREAK
) -> list[inference_pb2.CacheBreakpoint]:
    """Returns the marks in a content that was added to the end of the last message of a chat."""
    if isinstance(content, str):
        return []
    found: list[inference_pb2.CacheBreakpoint] = []
    end = len(chat.messages[-1].content)
    for part in reversed(content):
        if isinstance(part, TextPart) and part.prompt_cache_breakpoint is not None:
            mark = inference_pb2.CacheBreakpoint(
                num_messages=len(chat.messages) - 1,
                num_characters=end,
                retention=part.prompt_cache_breakpoint.retention,
            )
            found.insert(0, mark)
        end -= 0 if isinstance(part, OtherPart) else len(between + part.text)
    return found


def _constraint(body: ResponsesFields) -> inference_pb2.Constraint | None:
    form = body.text and body.text.format
    if not form:
        return None
    if (form.type == "json_schema") != (form.schema_ is not None):
        raise InvalidArgument(
            "must be set if and only if type is json_schema", "text.format.schema"
        )
    if form.schema_ is not None:
        return inference_pb2.Constraint(
            json_schema=json_text(close_objects(form.schema_), "text.format.schema")
        )
    return inference_pb2.Constraint(json_object=True) if form.type == "json_object" else None


def _fields(content: str | Sequence[Part], between: str = PART_BREAK) -> dict[str, Any]:
    """Returns the fields of a ChatMessage for a content.

    `between` its parts: nothing in an answer, whose parts are as the model wrote them.
    """
    if isinstance(content, str):
        return {"content": content, "other_parts": []}
    others = [part.type for part in content if isinstance(part, OtherPart)]
    texts = [part.text for part in content if not isinstance(part, OtherPart)]
    return {"content": between.join(texts), "other_parts": others}
