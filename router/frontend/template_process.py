"""Renders chat templates by transformers, in a child process that template.py starts.

Some templates expect a message's content as a list of parts, and silently leave out a plain text.
So each template is first tried with both forms, for each role. Knows nothing of tokens.
"""

import json
import resource
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import psutil
from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from .template import REFUSAL

_MEMORY_BYTES: Final = 2**28  # of all renderings, beyond the memory of transformers
_MAX_REASON: Final = 200
_MAX_TRIED: Final = 64  # templates and roles whose form of content is remembered
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLE: Final = "other"
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_MARK: Final = "tandem-content-mark"  # no template writes this text by itself
_CALL: Final = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "look", "arguments": {}},
}


def make_answer() -> Callable[[bytes], bytes]:
    """Bounds the memory of this process; returns the function that renders in it."""
    most = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return lambda request: json.dumps(_render(*json.loads(request))).encode()


def _render(variables: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    """Returns the text, or the reason why there is none and the field at fault."""
    try:
        texts: Any = render_jinja_template(**_with_parts(variables))[0]
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


def _with_parts(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables, with contents as lists of one part where the template expects that."""
    source = str(variables["chat_template"])
    tokens = tuple((name, str(variables[name])) for name in _TOKENS if name in variables)
    takes_parts = {
        role: _takes_parts(source, tokens, role)
        for role in _known_roles(variables["conversations"])
    }
    conversations = [
        [_in_parts(each) if takes_parts[_known_role(each)] else each for each in messages]
        for messages in variables["conversations"]
    ]
    return {**variables, "conversations": conversations}


def _known_roles(conversations: list[list[dict[str, Any]]]) -> set[str]:
    return {_known_role(message) for messages in conversations for message in messages}


def _known_role(message: dict[str, Any]) -> str:
    """Returns the role under which a message's form is tried, one of few: clients invent roles."""
    role = message.get("role")
    return role if role in _ROLES else _OTHER_ROLE


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}] if content else []}


@lru_cache(_MAX_TRIED)
def _takes_parts(source: str, tokens: tuple[tuple[str, str], ...], role: str) -> bool:
    """Returns True if a template writes the content of a role's messages only as a list of parts.

    `tokens`: the template's variables for special tokens.
    """
    for as_parts in (False, True):
        message: dict[str, Any] = {
            "role": role,
            "content": _MARK,
            "tool_call_id": "call00000",
            "name": "look",
        }
        other: dict[str, Any] = {"role": "user", "content": "x"}
        if role != "user" and _takes_parts(source, tokens, "user"):
            other = _in_parts(other)
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        tried = [_in_parts(message) if as_parts else message]
        conversation = {
            "user": tried,
            "assistant": [other, *tried, other],
            "tool": [other, call, *tried],
        }.get(role, [*tried, other])
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
            texts = [""]
        if _MARK in texts[0]:
            return as_parts
    return False
