"""Translates bodies of OpenAI's Responses API to the messages of tandem.v1."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....proto import inference_pb2
from ....proto.errors import InvalidArgument
from ....proto.limits import MAX_CACHE_BREAKPOINTS
from ...frontend.chat import must_call
from ...frontend.schemas.json_schemas import close_objects
from ..openai.bodies import PART_BREAK, OtherPart
from ..openai.parsing import json_text
from ..openai.requests import ParsedRequest, set_parameters, set_prompt_cache
from ..tool_choice import MODES
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ParsedRequest[ResponsesFields]):
    """Holds the translation of a body of POST /v1/responses."""

    tools: OfferedTools


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Holds an item and the field of the body that it comes from."""

    path: str
    item: object


class _Messages:
    """Adds messages to a chat, and the fields of the body that they come from to `names`.

    Reasoning, texts and calls in a row become one message of the assistant. Its texts are joined at
    its end: a text that grows within the message would be copied for each item.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self.chat = inference_pb2.Chat()
        self.num_characters = 0  # of the last message's content
        self._names = names
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}

    def add(self, path: str, **fields: Any) -> None:
        """Adds a whole message, or begins one of the assistant."""
        self.end()
        self._names[f"prompt.chat.messages[{len(self.chat.messages)}]"] = path
        self.chat.messages.add(**fields)
        self.num_characters = len(fields.get("content", ""))

    def end(self) -> None:
        """Ends the last message."""
        for name, texts in self._texts.items():
            if texts:
                setattr(self.chat.messages[-1], name, "".join(texts))
                texts.clear()

    def add_text(self, path: str, name: str, content: str, other_parts: Sequence[str]) -> None:
        """Adds to the content or the reasoning of the assistant."""
        self._assistant(path).other_parts.extend(other_parts)
        self._texts[name].append(content)
        if name == "content":
            self.num_characters += len(content)

    def add_call(self, path: str, call: inference_pb2.ToolCall) -> None:
        """Adds a call of the assistant."""
        self._assistant(path, is_call=True).tool_calls.append(call)

    def _assistant(self, path: str, *, is_call: bool = False) -> inference_pb2.ChatMessage:
        """Returns the assistant's message that an item belongs to, which may be a new one."""
        last = self.chat.messages[-1] if self.chat.messages else None
        if last is None or last.role != "assistant" or (last.tool_calls and not is_call):
            self.add(path, role="assistant")
        return self.chat.messages[-1]


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
    common = inference_pb2.GenerateRequest(constraint=None if must_call(chat) else constraint)
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
    messages = _Messages(names)
    if body.instructions:
        messages.add("instructions", role="system", content=body.instructions)
    for place in places:
        marks += _add_item(messages, place, tools)
    messages.end()
    chat = messages.chat
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
        chat.tool_choice.mode = MODES[mode]
    chat.tool_choice.single_call = body.parallel_tool_calls is False
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat.template_kwargs = json.dumps({"reasoning_effort": body.reasoning.effort})
    return chat


def _add_item(
    messages: _Messages, place: _Place, tools: OfferedTools
) -> list[inference_pb2.CacheBreakpoint]:
    """Adds an item and returns its marks for the prefix cache."""
    path = place.path
    match place.item:
        case ToolOutputItem() | LocalShellOutputItem() as output:
            call_id = output.call_id or output.id or ""
            messages.add(path, role="tool", tool_call_id=call_id, **_fields(output.output))
            return _marks(output.output, messages)
        case MessageItem() as message if message.role != "assistant":
            messages.add(path, role=message.role, **_fields(message.content))
            return _marks(message.content, messages)
        case MessageItem() as message:
            messages.add_text(path, "content", **_fields(message.content, between=""))
            return _marks(message.content, messages, between="")
        case ReasoningItem() as reasoning:
            encoded = decode_reasoning(reasoning.encrypted_content or "")
            found = _fields(reasoning.content or reasoning.summary or encoded, between="")
            if found["content"] or found["other_parts"]:
                messages.add_text(path, "reasoning", **found)
        case FunctionCallItem() | CustomCallItem() | LocalShellCallItem() as call:
            messages.add_call(path, _call(call, path, tools))
    return []


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
    content: str | Sequence[Part], messages: _Messages, between: str = PART_BREAK
) -> list[inference_pb2.CacheBreakpoint]:
    """Returns the marks in a content that was added to the end of the last message."""
    if isinstance(content, str):
        return []
    found: list[inference_pb2.CacheBreakpoint] = []
    end = messages.num_characters
    for part in reversed(content):
        if isinstance(part, TextPart) and part.prompt_cache_breakpoint is not None:
            mark = inference_pb2.CacheBreakpoint(
                num_messages=len(messages.chat.messages) - 1,
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
