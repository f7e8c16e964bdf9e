"""Changes the calls and the tools of a chat to forms that chat templates take.

Some templates refuse calls as this service makes them: with long ids, several in a message, beside
both text and reasoning, with arguments that are no text, or with results that have no names.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import count, groupby
from typing import Any, Final

from ..formats.chat_format import CallGrammar, grammar_texts
from .turns import BETWEEN, Message

MARK: Final = "tandem-content-mark"
"""The begin of contents of chats that try templates; no template writes this text by itself."""

SOME_ID: Final = "call00000"
"""The id of a call that every template takes."""

REASONING_NAMES: Final = ("reasoning", "reasoning_content", "thinking")
"""The fields under which templates look for the reasoning of a message."""

_UNKNOWN_NAME: Final = "unknown"  # of the result of a call that the chat does not have
_SHORT_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")  # of a call, as Mistral's templates demand it
_LONG_ID: Final = "call_0123456789abcdef01234567"  # as this service makes ids


def with_results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the results of calls in the order of the calls.

    Many templates write neither the id nor the name of a result: the model knows it by its place.
    """
    found: list[Message] = []
    places: dict[str, int] = {}  # of the last calls, by id
    for is_result, group in groupby(messages, lambda each: bool(each["role"] == "tool")):
        together = list(group)
        if is_result:
            together.sort(key=lambda each: places.get(each.get("tool_call_id", ""), len(places)))
        for calls in (each["tool_calls"] for each in together if "tool_calls" in each):
            places = {call["id"]: i for i, call in enumerate(calls)}
        found += together
    return found


def with_tools_in_system(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Returns messages whose first one is of the system and has the tools as a text of JSON."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls have arguments as a text of JSON."""

    def changed(call: Message) -> Message:
        function = call["function"]
        return call | {"function": function | {"arguments": _arguments_text(call)}}

    return [
        message | {"tool_calls": [changed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _arguments_text(call: Message) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments_alone(messages: Sequence[Message]) -> list[Message]:
    """Returns messages as `_with_text_arguments`, and None for an empty content beside calls."""
    return [
        message | {"content": message["content"] or None} if "tool_calls" in message else message
        for message in _with_text_arguments(messages)
    ]


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose results have the names of their calls, unless they have a name."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""), _UNKNOWN_NAME)
        found.append({"name": name} | message if message["role"] == "tool" else message)
    return found


def _with_names_in_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls have ids of their name and their number in the chat."""
    new: dict[str, str] = {}
    numbers = count()

    def of_calls(calls: Sequence[Message]) -> list[str]:
        for call in calls:
            new[call["id"]] = f"functions.{call['function']['name']}:{next(numbers)}"
        return [new[call["id"]] for call in calls]

    return _with_ids(messages, of_calls, lambda old: new.get(old, old))


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls have ids of nine characters, the same for the same id."""

    def short(long: str) -> str:
        return long if _SHORT_ID.fullmatch(long) else sha256(long.encode()).hexdigest()[:9]

    return _with_ids(messages, lambda calls: [short(call["id"]) for call in calls], short)


def _with_ids(
    messages: Sequence[Message],
    of_calls: Callable[[Sequence[Message]], list[str]],
    of_result: Callable[[str], str],
) -> list[Message]:
    """Returns messages with other ids, by the calls of a message and by the id of a result."""
    found = []
    for message in messages:
        changed = dict(message)
        if "tool_call_id" in message:
            changed["tool_call_id"] = of_result(message["tool_call_id"])
        if "tool_calls" in message:
            calls = message["tool_calls"]
            ids = of_calls(calls)
            changed["tool_calls"] = [
                call | {"id": each} for call, each in zip(calls, ids, strict=True)
            ]
        found.append(changed)
    return found


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with at most one call; the results of a call follow it."""
    found: list[Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for number, call in enumerate(calls):
            first = {"role": message["role"], "content": ""} if number else message
            found.append(first | {"tool_calls": [call]})
            found += [each for each in results if each.get("tool_call_id") == call["id"]]
            results = [each for each in results if each.get("tool_call_id") != call["id"]]
        found += results
    return found


def _with_text_in_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls have no text beside reasoning; the text ends the reasoning."""
    found = []
    for message in messages:
        if {"tool_calls", "thinking"} <= message.keys() and message["content"]:
            thought = BETWEEN.join((message["thinking"], message["content"]))
            found.append(message | {"content": ""} | dict.fromkeys(REASONING_NAMES, thought))
        else:
            found.append(message)
    return found


def with_calls_in_content(grammar: CallGrammar, messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose content ends with their calls, as a grammar writes them."""

    def text_of(call: Message) -> str:
        name = call["function"]["name"]
        before = grammar_texts((*grammar.open, *grammar.head), name)
        after = grammar_texts((*grammar.tail, *grammar.close), name)
        return "".join((*before, _arguments_text(call), *after))

    found = []
    for message in messages:
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        if calls := message.get("tool_calls", ()):
            written = "".join(grammar.between or ()).join(map(text_of, calls))
            text = "".join((*grammar.begin, written, *grammar.end))
            rest["content"] = "\n".join(filter(None, (message["content"], text)))
        found.append(rest)
    return found


def calling(*ids: str, **fields: str) -> list[Message]:
    """Returns a chat whose assistant calls tools with these ids, and the results."""
    calls = [
        {"id": each, "type": "function", "function": {"name": f"look{i}", "arguments": {}}}
        for i, each in enumerate(ids)
    ]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls} | fields,
        *(
            {"role": "tool", "tool_call_id": each, "content": f"{MARK}-{i};"}
            for i, each in enumerate(ids)
        ),
    ]


CallForm = Callable[[Sequence[Message]], list[Message]]

CALL_FORMS: Final[Mapping[CallForm, list[Message]]] = {
    _with_text_arguments: calling(SOME_ID),
    _with_arguments_alone: calling(SOME_ID),
    _with_names_in_ids: calling(SOME_ID),
    _with_names: calling(SOME_ID),
    _with_short_ids: calling(_LONG_ID),
    _with_single_calls: calling(SOME_ID, "call00001"),
    _with_text_in_reasoning: calling(
        SOME_ID, content=f"{MARK}-text;", **dict.fromkeys(REASONING_NAMES, "x")
    ),
}
"""By change of a chat's calls: the chat that a template writes only after this change.

DeepSeek's and Apertus's templates demand arguments as text; those of DeepSeek's distilled models
write calls only without a content. Kimi K2's template writes ids and no names of calls.
FunctionGemma's template demands names of results, Mistral's templates short ids, Llama's single
calls, and gpt-oss's no text beside reasoning. A change is tried after those before it. No change is
made without need: Kimi K2's template writes the name of a result in place of its role.
"""
