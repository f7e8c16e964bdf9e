"""Renders chat templates by transformers, in a child process that template.py starts.

Some templates expect a message's content as a list of parts, and silently leave out a plain text.
Others refuse or leave out a system message after the first one, or two messages of a role in a row.
Others refuse calls as this service makes them: with long ids, several in a message, or beside both
text and reasoning. So each template is first tried with such chats, and messages that it does not
write are merged with their neighbours, or their calls written in another form. Knows nothing of
tokens.
"""

import json
import re
import resource
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

import psutil
from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from .template import REFUSAL

_MEMORY_BYTES: Final = 2**28  # of all renderings, beyond the memory of transformers
_MAX_REASON: Final = 200
_MAX_TRIED: Final = 64  # templates and roles for which a result is remembered
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLE: Final = "other"
_SYSTEM_ROLES: Final = ("system", "developer")
_INPUT_ROLES: Final = ("user", "tool")
_BETWEEN: Final = "\n\n"  # merged messages
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_MARK: Final = "tandem-content-mark"  # no template writes this text by itself
_SHORT_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")  # of a call, as Mistral's templates demand it
_CALLED: Final = "call00000"
_LONG_ID: Final = "call_0123456789abcdef01234567"  # as this service makes ids


Message = dict[str, Any]
"""A message of a chat, as templates get it."""

MessageTexts = tuple[Message, list[str]]
"""A message, and the texts that its content is to have."""

Tokens = tuple[tuple[str, str], ...]
"""The names and texts of special tokens that templates get."""


def make_answer() -> Callable[[bytes], bytes]:
    """Bounds the memory of this process; returns the function that renders in it."""
    most = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return lambda request: json.dumps(_render(*json.loads(request))).encode()


def _render(variables: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    """Returns the text, or the reason why there is none and the field at fault."""
    try:
        texts: Any = render_jinja_template(**_fitting(variables))[0]
        if len(texts[0]) <= max_characters:
            return {"text": texts[0]}
    except MemoryError:
        pass
    except Exception as error:  # a template can raise anything
        if str(error).startswith("continue_final_message"):  # by transformers
            return {
                "reason": "does not repeat the last message",
                "field": "prompt.chat.continue_final_message",
            }
        if type(error) is TemplateError:  # by raise_exception, with a reason
            return {"reason": REFUSAL + str(error)[:_MAX_REASON]}
        if isinstance(error, TemplateSyntaxError):
            fault = " ".join(str(error.message).split())[:_MAX_REASON]
            return {"reason": f"is not valid Jinja in line {error.lineno} ({fault})"}
        return {"reason": "refuses these messages"}
    return {"reason": f"renders more than {max_characters} characters for these messages"}


def _fitting(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables, with messages in a form that the template writes completely."""
    source = str(variables["chat_template"])
    tokens = tuple((name, str(variables[name])) for name in _TOKENS if name in variables)

    def shows(roles: tuple[str, ...]) -> bool:
        # A template that refuses any chat here may need variables of the client.
        return _shows(source, tokens, roles) or not _shows(source, tokens, ("user",))

    conversations = [
        _in_form(source, tokens, arrange(_with_fitting_calls(source, tokens, messages), shows))
        for messages in variables["conversations"]
    ]
    return {**variables, "conversations": conversations}


def _with_fitting_calls(
    source: str, tokens: Tokens, messages: Sequence[Message]
) -> Sequence[Message]:
    """Returns the messages of a chat with calls in a form that a template writes."""
    if any("tool_calls" in message for message in messages):
        for change in _CALL_FORMS:
            if _needs(source, tokens, change):
                messages = change(messages)
    return messages


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls have ids of nine characters, the same for the same id."""

    def short(long: str) -> str:
        return long if _SHORT_ID.fullmatch(long) else sha256(long.encode()).hexdigest()[:9]

    found = []
    for message in messages:
        changed = dict(message)
        if "tool_call_id" in message:
            changed["tool_call_id"] = short(message["tool_call_id"])
        if "tool_calls" in message:
            calls = [call | {"id": short(call["id"])} for call in message["tool_calls"]]
            changed["tool_calls"] = calls
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
            thought = _BETWEEN.join((message["thinking"], message["content"]))
            told = {"content": "", "thinking": thought, "reasoning_content": thought}
            found.append(message | told)
        else:
            found.append(message)
    return found


def _calling(*ids: str, **fields: str) -> list[Message]:
    """Returns a chat whose assistant calls tools with these ids, and the results."""
    calls = [
        {"id": each, "type": "function", "function": {"name": f"look{i}", "arguments": {}}}
        for i, each in enumerate(ids)
    ]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls} | fields,
        *(
            {"role": "tool", "tool_call_id": each, "name": f"look{i}", "content": f"{_MARK}-{i};"}
            for i, each in enumerate(ids)
        ),
    ]


_CallForm = Callable[[Sequence[Message]], list[Message]]

_CALL_FORMS: Final[Mapping[_CallForm, list[Message]]] = {
    _with_short_ids: _calling(_LONG_ID),
    _with_single_calls: _calling(_CALLED, "call00001"),
    _with_text_in_reasoning: _calling(
        _CALLED, content=f"{_MARK}-text;", thinking="x", reasoning_content="x"
    ),
}
"""By change of a chat's calls: the chat that a template writes only after this change.

Mistral's templates demand short ids, Llama's single calls, and gpt-oss's no text beside reasoning.
"""


@lru_cache(_MAX_TRIED)
def _needs(source: str, tokens: Tokens, change: _CallForm) -> bool:
    """Returns True if a template writes calls only after a change of their form."""
    chat = _CALL_FORMS[change]
    contents = [each["content"] for each in chat if _MARK in each["content"]]
    names = [call["function"]["name"] for each in chat for call in each.get("tool_calls", ())]

    def shows(messages: Sequence[Message]) -> bool:
        text = _try(source, tokens, _in_form(source, tokens, messages))
        return all(each in text for each in (*contents, *names))

    return not shows(chat) and shows(change(chat))


def arrange(messages: Sequence[Message], shows: Callable[[tuple[str, ...]], bool]) -> list[Message]:
    """Returns the messages of a chat in a form that a template writes completely.

    `shows` returns True if the template writes every message of a chat with the given roles.

    - System messages at the beginning become one.
    - A later one is added to the user message or tool result before it, else to the next one. So
      the prompt keeps its order, and no text comes between a call and its result.
    - Messages of a role in a row become one.
    """
    num_first = 0
    while num_first < len(messages) and messages[num_first]["role"] in _SYSTEM_ROLES:
        num_first += 1
    first = list(messages[:num_first])
    if num_first > 1 and not shows((first[0]["role"], first[-1]["role"], "user")):
        first = _joined([(first[0], [each["content"] for each in first])])
    rest = list(messages[num_first:])
    if first and not shows((first[0]["role"], "user")):  # the template knows no system messages
        first, rest = [], first + rest
    return first + _without_repeats(_fold(rest, shows), shows)


def _fold(messages: Sequence[Message], shows: Callable[[tuple[str, ...]], bool]) -> list[Message]:
    """Adds each system message to a neighbour, unless the template writes it at its place."""
    found: list[MessageTexts] = []
    waiting: list[str] = []  # for the next message of the user or a tool
    last_input = max(
        (i for i, each in enumerate(messages) if each["role"] in _INPUT_ROLES), default=-1
    )
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role in _SYSTEM_ROLES and not shows(("user", "assistant", role, "user")):
            if found and found[-1][0]["role"] in _INPUT_ROLES:
                found[-1][1].append(content)
            elif i < last_input:
                waiting.append(content)
            else:
                found.append((message | {"role": "user"}, [content]))
        elif role in _INPUT_ROLES:
            found.append((message, [*waiting, content]))
            waiting.clear()
        else:
            found.append((message, [content]))
    return _joined(found)


def _without_repeats(
    messages: Sequence[Message], shows: Callable[[tuple[str, ...]], bool]
) -> list[Message]:
    """Merges messages of the user, and of the assistant, that the template does not repeat.

    Calls end a message: their results follow.
    """
    tried = {"user": ("user", "user"), "assistant": ("user", "assistant", "assistant", "user")}
    found: list[MessageTexts] = []
    for message in messages:
        role, content = message["role"], message["content"]
        last, texts = found[-1] if found else ({}, [])
        may_merge = last.get("role") == role and "tool_calls" not in last
        if may_merge and role in tried and not shows(tried[role]):
            found[-1] = (last | message, texts)
            texts.append(content)
        else:
            found.append((message, [content]))
    return _joined(found)


def _joined(found: Sequence[MessageTexts]) -> list[Message]:
    return [message | {"content": _BETWEEN.join(filter(None, texts))} for message, texts in found]


def _in_form(source: str, tokens: Tokens, messages: Sequence[Message]) -> list[Message]:
    """Returns messages with contents as lists of one part where the template expects that."""
    takes_parts = {
        role: _takes_parts(source, tokens, role) for role in set(map(_known_role, messages))
    }
    return [_in_parts(each) if takes_parts[_known_role(each)] else each for each in messages]


def _known_role(message: dict[str, Any]) -> str:
    """Returns the role under which a message's form is tried, one of few: clients invent roles."""
    role = message.get("role")
    return role if role in _ROLES else _OTHER_ROLE


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}] if content else []}


@lru_cache(_MAX_TRIED)
def _shows(source: str, tokens: Tokens, roles: tuple[str, ...]) -> bool:
    """Returns True if a template writes each message of a chat with these roles."""
    messages = [{"role": role, "content": f"{_MARK}-{i};"} for i, role in enumerate(roles)]
    text = _try(source, tokens, _in_form(source, tokens, messages))
    return all(each["content"] in text for each in messages)


@lru_cache(_MAX_TRIED)
def _takes_parts(source: str, tokens: Tokens, role: str) -> bool:
    """Returns True if a template writes the content of a role's messages only as a list of parts.

    `tokens`: the template's variables for special tokens.
    """
    for as_parts in (False, True):
        message: Message = {
            "role": role,
            "content": _MARK,
            "tool_call_id": _CALLED,
            "name": "look0",
        }
        other: Message = {"role": "user", "content": "x"}
        if role != "user" and _takes_parts(source, tokens, "user"):
            other = _in_parts(other)
        _, call, _ = _calling(_CALLED)
        tried = [_in_parts(message) if as_parts else message]
        conversation = {
            "user": tried,
            "assistant": [other, *tried, other],
            "tool": [other, call, *tried],
        }.get(role, [*tried, other])
        if _MARK in _try(source, tokens, conversation):
            return as_parts
    return False


def _try(source: str, tokens: Tokens, conversation: list[Message]) -> str:
    """Returns the text that a template writes for a chat; "" if it refuses the chat."""
    variables: dict[str, Any] = {
        **dict(tokens),
        "conversations": [conversation],
        "chat_template": source,
    }
    try:
        texts: Any = render_jinja_template(**variables, add_generation_prompt=True)[0]
    except MemoryError:
        raise
    except Exception:  # a template can raise anything
        return ""
    return str(texts[0])
