"""Renders chat templates by transformers, in a child process that template.py starts.

Some templates expect a message's content as a list of parts, and silently leave out a plain text.
Others refuse or leave out messages that others take. So each template is first tried with such
chats, and messages that it does not write are changed (messages/). Knows nothing of tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from .child_process import limit_memory
from .formats.calls import CALL_FORMATS, call_format
from .messages.calls import (
    CALL_FORMS,
    MARK,
    SOME_ID,
    CallForm,
    calling,
    with_calls_in_content,
    with_results_in_order,
    with_tools_in_system,
)
from .messages.turns import Message, arrange
from .template import REFUSAL, TOO_LONG

_MEMORY_BYTES: Final = 2**28  # of all renderings, beyond the memory of transformers
_MAX_REASON: Final = 200
_MAX_TRIED: Final = 64  # templates and roles for which a result is remembered
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLE: Final = "other"
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")

_TOOL: Final = {
    "type": "function",
    "function": {"name": MARK, "description": "x", "parameters": {"type": "object"}},
}

Tokens = tuple[tuple[str, str], ...]
"""The names and texts of special tokens that templates get."""


def make_answer() -> Callable[[bytes], bytes]:
    """Bounds the memory of this process; returns the function that renders in it."""
    limit_memory(_MEMORY_BYTES)
    return lambda request: json.dumps(_render(*json.loads(request))).encode()


def _render(variables: Mapping[str, Any], max_characters: int, now: float) -> dict[str, str]:
    """Returns the text, or the reason why there is none and the field at fault.

    `now`: the time that the template sees, in seconds of time.time().
    """
    try:
        fitting = _fitting(variables)
        # Rendering takes the compiled template from a cache; a plain variable cannot be a function.
        compiled: Any = _compile_jinja_template(variables["chat_template"])
        compiled.globals["strftime_now"] = datetime.fromtimestamp(now).strftime
        texts: Any = render_jinja_template(**fitting)[0]
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
    return {"reason": f"{TOO_LONG}{max_characters} characters for these messages"}


def _fitting(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables, with messages in a form that the template writes completely."""
    source = str(variables["chat_template"])
    tokens = tuple((name, str(variables[name])) for name in _TOKENS if name in variables)

    def shows(roles: tuple[str, ...]) -> bool:
        # A template that refuses any chat here may need variables of the client.
        return _shows(source, tokens, roles) or not _shows(source, tokens, ("user",))

    def fitting(messages: Sequence[Message]) -> list[Message]:
        messages = _with_fitting_calls(source, tokens, messages)
        if variables.get("tools") and _needs_tools_in_system(source, tokens):
            messages = with_tools_in_system(messages, variables["tools"])
        return _in_form(source, tokens, arrange(messages, shows))

    return {**variables, "conversations": [fitting(each) for each in variables["conversations"]]}


@lru_cache(_MAX_TRIED)
def _needs_tools_in_system(source: str, tokens: Tokens) -> bool:
    """Returns True if a template writes tools only as a text of the system message."""
    messages: list[Message] = [{"role": "user", "content": "x"}]
    changed = with_tools_in_system(messages, [_TOOL])
    written = _try(source, tokens, _in_form(source, tokens, messages), tools=[_TOOL])
    return MARK not in written and MARK in _try(source, tokens, _in_form(source, tokens, changed))


def _with_fitting_calls(
    source: str, tokens: Tokens, messages: Sequence[Message]
) -> Sequence[Message]:
    """Returns the messages of a chat with calls in a form that a template writes."""
    if any("tool_calls" in message for message in messages):
        messages = with_results_in_order(messages)
        for change in _needed_changes(source, tokens):
            messages = change(messages)
    return messages


@lru_cache(_MAX_TRIED)
def _needed_changes(source: str, tokens: Tokens) -> tuple[CallForm, ...]:
    """Returns the changes of their form without which a template does not write calls."""

    def shows(messages: Sequence[Message], texts: Sequence[str]) -> bool:
        text = _try(source, tokens, _in_form(source, tokens, messages))
        return all(each in text for each in texts)

    forms = dict(CALL_FORMS)
    if grammar := CALL_FORMATS[call_format(source)].grammar:
        forms[partial(with_calls_in_content, grammar)] = calling(SOME_ID)
    needed: list[CallForm] = []
    for change, chat in forms.items():
        texts = [each["content"] for each in chat if MARK in each["content"]]
        texts += [call["function"]["name"] for each in chat for call in each.get("tool_calls", ())]
        for earlier in needed:
            chat = earlier(chat)
        if not shows(chat, texts) and shows(change(chat), texts):
            needed.append(change)
    return tuple(needed)


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
    """Returns True if a template writes each message of a chat with these roles.

    A message before the result of a call has the call.
    """
    messages: list[Message] = [
        {"role": role, "content": f"{MARK}-{i};"} for i, role in enumerate(roles)
    ]
    for message, result in pairwise(messages):
        if result["role"] == "tool":
            _, call, _ = calling(SOME_ID)
            message.update(call)
            result["tool_call_id"] = SOME_ID
    contents = [each["content"] for each in messages]
    changed = _with_fitting_calls(source, tokens, messages)
    text = _try(source, tokens, _in_form(source, tokens, changed))
    return all(content in text for content in contents)


@lru_cache(_MAX_TRIED)
def _takes_parts(source: str, tokens: Tokens, role: str) -> bool:
    """Returns True if a template writes the content of a role's messages only as a list of parts.

    `tokens`: the template's variables for special tokens.
    """
    for as_parts in (False, True):
        message: Message = {
            "role": role,
            "content": MARK,
            "tool_call_id": SOME_ID,
            "name": "look0",
        }
        other: Message = {"role": "user", "content": "x"}
        if role != "user" and _takes_parts(source, tokens, "user"):
            other = _in_parts(other)
        _, call, _ = calling(SOME_ID)
        tried = [_in_parts(message) if as_parts else message]
        conversation = {
            "user": tried,
            "assistant": [other, *tried, other],
            "tool": [other, call, *tried],
        }.get(role, [*tried, other])
        if MARK in _try(source, tokens, conversation):
            return as_parts
    return False


def _try(source: str, tokens: Tokens, conversation: list[Message], **variables: Any) -> str:
    """Returns the text that a template writes for a chat; "" if it refuses the chat."""
    variables |= {
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
