"""Translates bodies of OpenAI's Responses API to the messages of tandem.v1."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument
from ....proto.limits import MAX_CACHE_BREAKPOINTS
from ...frontend.chat import must_call
from ...frontend.json_schemas import close_objects
from ..openai.bodies import PART_BREAK, OtherPart
from ..openai.parsing import json_text
from ..openai.requests import ParsedRequest, set_parameters, set_prompt_cache
from .bodies import PARAMETER_NAMES, ResponsesFields
from .items import (
    AdditionalToolsItem,
    CustomCallItem,
    FunctionCallItem,
    LeftOutItem,
    LocalShellCallItem,
    LocalShellOutputItem,
    MessageItem,
    Part,
    ReasoningItem,
    TextPart,
    ToolOutputItem,
    decode_reasoning,
)
from .tool_bodies import AllowedTools, NamedToolChoice, Tool
from .tools import OfferedTools, custom_arguments

_MODES: Final = {
    None: inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "auto": inference_pb2.ToolChoice.MODE_UNSPECIFIED,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ParsedRequest[ResponsesFields]):
    """Holds the translation of a body of POST /v1/responses."""

    tools: OfferedTools
    left_out: Sequence[str]  # types of tools and items that the prompt does not contain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Holds an item and the field of the body that it comes from."""

    path: str
    item: object


def translate_responses(
    parsed: ResponsesFields, request_id: str, earlier: Sequence[object] = ()
) -> ResponsesRequest:
    """Translates the body of POST /v1/responses; its input comes after the `earlier` items.

    Raises InvalidArgument that names the field.
    """
    names = {"stopping.max_tokens": "max_output_tokens", "prompt.chat.template_kwargs": "reasoning"}
    marks: list[inference_pb2.CacheBreakpoint] = []
    places = _places(parsed, earlier)
    tools = OfferedTools(_tools(parsed, places))
    chat = _chat(parsed, names, places, tools, marks)
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
    items = (place.item.type for place in places if isinstance(place.item, LeftOutItem))
    return ResponsesRequest(
        body=parsed,
        common=common,
        prompts=[inference_pb2.Prompt(chat=chat)],
        request_id=request_id,
        names=names,
        is_streamed=bool(parsed.stream),
        last_event_id=parsed.last_event_id,
        tools=tools,
        left_out=list(dict.fromkeys([*tools.left_out, *items])),
    )


def _places(body: ResponsesFields, earlier: Sequence[object]) -> list[_Place]:
    places = [_Place(path="previous_response_id", item=item) for item in earlier]
    if isinstance(body.input, str):
        message = MessageItem(role="user", content=body.input)
        return [*places, _Place(path="input", item=message)]
    return places + [_Place(path=f"input[{i}]", item=item) for i, item in enumerate(body.input)]


def _tools(body: ResponsesFields, places: Sequence[_Place]) -> Iterator[tuple[str, Tool]]:
    """Yields the tools, each with its path in the body."""
    for i, tool in enumerate(body.tools or ()):
        yield f"tools[{i}]", tool
    for place in places:
        if isinstance(place.item, AdditionalToolsItem):
            for i, tool in enumerate(place.item.tools):
                yield f"{place.path}.tools[{i}]", tool


def _chat(
    body: ResponsesFields,
    names: dict[str, str],
    places: Sequence[_Place],
    tools: OfferedTools,
    marks: list[inference_pb2.CacheBreakpoint],
) -> inference_pb2.Chat:
    """Returns the chat; adds the fields of its messages and tools to `names`, and its `marks`."""
    chat = inference_pb2.Chat()

    def add(path: str, **fields: Any) -> None:
        names[f"prompt.chat.messages[{len(chat.messages)}]"] = path
        chat.messages.add(**fields)

    if body.instructions:
        add("instructions", role="system", content=body.instructions)
    for place in places:
        marks += _add_item(chat, add, place, tools)
    if not chat.messages:
        raise InvalidArgument("has no message", "input")
    choice = body.tool_choice
    allowed = tools.allowed(choice) if isinstance(choice, AllowedTools) else tools
    for i, offered in enumerate(allowed):
        chat.tools.append(offered.function())
        for name in ("parameters", "name"):
            names[f"prompt.chat.tools[{i}].{name}"] = f"{offered.path}.{name}"
    if isinstance(choice, NamedToolChoice):
        chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_NAMED
        chat.tool_choice.name = tools.model_name(choice.namespace, choice.name)
    else:
        mode = choice.mode if isinstance(choice, AllowedTools) else choice
        chat.tool_choice.mode = _MODES[mode]
    chat.tool_choice.single_call = body.parallel_tool_calls is False
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat.template_kwargs = json.dumps({"reasoning_effort": body.reasoning.effort})
    return chat


def _add_item(
    chat: inference_pb2.Chat, add: Callable[..., None], place: _Place, tools: OfferedTools
) -> list[inference_pb2.CacheBreakpoint]:
    """Adds an item and returns its marks for the prefix cache.

    Reasoning, texts and calls in a row become one message of the assistant.
    """
    match place.item:
        case ToolOutputItem() | LocalShellOutputItem() as output:
            call_id = output.call_id or output.id or ""
            add(place.path, role="tool", tool_call_id=call_id, **_fields(output.output))
            return _marks(output.output, chat)
        case MessageItem() as message if message.role != "assistant":
            add(place.path, role=message.role, **_fields(message.content))
            return _marks(message.content, chat)
        case MessageItem() as message:
            last = _assistant(chat, add, place)
            found = _fields(message.content, between="")
            last.other_parts.extend(found["other_parts"])
            last.content += found["content"]
            return _marks(message.content, chat, between="")
        case ReasoningItem() as reasoning:
            encoded = decode_reasoning(reasoning.encrypted_content or "")
            found = _fields(reasoning.content or reasoning.summary or encoded, between="")
            if found["content"] or found["other_parts"]:
                last = _assistant(chat, add, place)
                last.other_parts.extend(found["other_parts"])
                last.reasoning += found["content"]
        case FunctionCallItem() | CustomCallItem() | LocalShellCallItem() as call:
            last = _assistant(chat, add, place, is_call=True)
            last.tool_calls.append(_call(call, place.path, tools))
    return []


def _assistant(
    chat: inference_pb2.Chat, add: Callable[..., None], place: _Place, *, is_call: bool = False
) -> inference_pb2.ChatMessage:
    """Returns the assistant's message that an item belongs to, which may be a new one."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "assistant" or (last.tool_calls and not is_call):
        add(place.path, role="assistant")
    return chat.messages[-1]


def _call(
    item: FunctionCallItem | CustomCallItem | LocalShellCallItem, path: str, tools: OfferedTools
) -> inference_pb2.ToolCall:
    """Returns a call as the model wrote it, or would have written it."""
    if isinstance(item, LocalShellCallItem):
        return inference_pb2.ToolCall(
            id=item.call_id or item.id or "",
            name="local_shell",
            arguments=json_text(item.action, f"{path}.action"),
        )
    arguments = custom_arguments(item.input) if isinstance(item, CustomCallItem) else item.arguments
    return inference_pb2.ToolCall(
        id=item.call_id, name=tools.model_name(item.namespace, item.name), arguments=arguments
    )


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
