"""Turns of a chat are dropped whole; system messages, calls and their results stay together."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2
from tandem.router.turns import droppable_parts, without

ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def chat_of(roles: str) -> inference_pb2.Chat:
    """Returns a chat; each letter is a role."""
    messages = [
        inference_pb2.ChatMessage(role=ROLES[letter], content=str(i))
        for i, letter in enumerate(roles)
    ]
    return inference_pb2.Chat(messages=messages, tools=[inference_pb2.Tool(name="f")])


def test_the_oldest_turn_goes_first() -> None:
    chat = chat_of("suaatuau")
    assert droppable_parts(chat) == [[1, 2, 3, 4], [5, 6]]
    shorter = without(chat, droppable_parts(chat)[:1])
    assert [message.content for message in shorter.messages] == ["0", "5", "6", "7"]
    assert [tool.name for tool in shorter.tools] == ["f"]


def test_rounds_of_the_last_turn_go_after_the_earlier_turns() -> None:
    assert droppable_parts(chat_of("sua" + "uattatat")) == [[1, 2], [4, 5, 6], [7, 8]]


def test_a_chat_of_one_message_has_nothing_to_drop() -> None:
    assert droppable_parts(chat_of("u")) == []
    assert droppable_parts(chat_of("s")) == []


@given(st.text("sduat", max_size=20))
def test_nothing_is_separated(roles: str) -> None:
    chat = chat_of(roles)
    parts = droppable_parts(chat)
    dropped = [i for part in parts for i in part]
    assert len(dropped) == len(set(dropped))
    assert not any(roles[i] in "sd" for i in dropped)
    for part in parts:
        assert part == sorted(part)
        for i in part:  # a call goes with all its results
            following = i + 1
            while roles[i] == "a" and roles[following : following + 1] == "t":
                assert following in part
                following += 1
    kept = [roles[i] for i in range(len(roles)) if i not in dropped]
    if "u" in roles:
        assert kept.count("u") == 1
    if roles:
        assert len(roles) - 1 not in dropped
