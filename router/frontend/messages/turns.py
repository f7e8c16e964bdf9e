"""Merges messages that a chat template refuses or leaves out at their places.

Some templates know no system message after the first one, no two messages of a role in a row, or no
message of the user after the result of a call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

BETWEEN: Final = "\n\n"
"""The text between merged messages."""

Message = dict[str, Any]
"""A message of a chat, as templates get it."""

_MessageTexts = tuple[Message, list[str]]
"""A message, and the texts that its content is to have."""

_SYSTEM_ROLES: Final = ("system", "developer")
_INPUT_ROLES: Final = ("user", "tool")

_ROWS: Final[Mapping[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]]] = {
    ("user", "user"): (("user",), ("user", "user")),
    ("assistant", "assistant"): (
        ("user", "assistant", "user"),
        ("user", "assistant", "assistant", "user"),
    ),
    ("tool", "user"): (("user", "assistant", "tool"), ("user", "assistant", "tool", "user")),
}
"""By the roles of two messages in a row: the roles of chats with them merged, and apart."""


def arrange(messages: Sequence[Message], shows: Callable[[tuple[str, ...]], bool]) -> list[Message]:
    """Returns the messages of a chat in a form that a template writes completely.

    `shows` returns True if the template writes every message of a chat with the given roles.

    - System messages at the beginning become one.
    - A later one is added to the user message or tool result before it, else to the next one. So
      the prompt keeps its order, and no text comes between a call and its result.
    - Messages of a role in a row become one.
    - A message of the user after the result of a call is added to the result.
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
    found: list[_MessageTexts] = []
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
    """Merges a message with the one before it if the template does not write their roles in a row.

    Calls end a message: their results follow.
    """
    found: list[_MessageTexts] = []
    for message in messages:
        role, content = message["role"], message["content"]
        last, texts = found[-1] if found else ({}, [])
        together, apart = _ROWS.get((last.get("role", ""), role), ((), ()))
        if apart and "tool_calls" not in last and not shows(apart) and shows(together):
            found[-1] = (last | message if last["role"] == role else last, texts)
            texts.append(content)
        else:
            found.append((message, [content]))
    return _joined(found)


def _joined(found: Sequence[_MessageTexts]) -> list[Message]:
    return [
        message | {"content": BETWEEN.join(filter(None, texts))} if len(texts) > 1 else message
        for message, texts in found
    ]
