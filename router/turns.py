"""Finds the turns of a chat that may be dropped when it does not fit the context.

A turn begins with a message of the user and holds the answers and tool results up to the next one.
Messages of roles system and developer belong to no turn and stay. The last turn stays, except that
its earlier rounds may go: a round is a message of the assistant with the results of its tool calls.
So a call and its result are never separated, and the order of roles stays one that templates know.
"""

from collections.abc import Collection, Iterable

from ..proto import inference_pb2

_KEPT_ROLES = ("system", "developer")


def droppable_parts(chat: inference_pb2.Chat) -> list[list[int]]:
    """Returns the parts that may be dropped, the oldest first: the indices of their messages."""
    roles = [(i, message.role) for i, message in enumerate(chat.messages)]
    turns = _grouped((each for each in roles if each[1] not in _KEPT_ROLES), begin="user")
    if not turns:
        return []
    *earlier, last = turns
    answers = [(i, chat.messages[i].role) for i in last if chat.messages[i].role != "user"]
    return earlier + _grouped(answers, begin="assistant")[:-1]


def without(chat: inference_pb2.Chat, parts: Iterable[Collection[int]]) -> inference_pb2.Chat:
    """Returns a copy of the chat without the messages of these parts."""
    dropped = {i for part in parts for i in part}
    shorter = inference_pb2.Chat()
    shorter.CopyFrom(chat)
    del shorter.messages[:]
    shorter.messages.extend(each for i, each in enumerate(chat.messages) if i not in dropped)
    return shorter


def _grouped(messages: Iterable[tuple[int, str]], begin: str) -> list[list[int]]:
    """Groups the indices of messages; a message of the role `begin` begins a group."""
    groups: list[list[int]] = []
    for i, role in messages:
        if role == begin or not groups:
            groups.append([])
        groups[-1].append(i)
    return groups
