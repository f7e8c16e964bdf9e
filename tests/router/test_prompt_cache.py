"""Tests which prefixes of a prompt a request retains in the prefix cache, and for how long."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.prompt_cache import check_prompt_cache, find_retentions

TURNS = (("system", "Be brief."), ("user", "Read: a book."), ("assistant", "Yes."), ("user", "So?"))
MARKS = st.lists(
    st.builds(
        inference_pb2.CacheBreakpoint,
        num_messages=st.integers(0, len(TURNS)),
        num_characters=st.integers(0, 15),
        retention=st.sampled_from(["", "5m", "30m", "1h"]),
    ),
    max_size=4,
)


def render(chat: inference_pb2.Chat) -> str:
    tools = "".join(f"[{tool.name}]" for tool in chat.tools)
    return tools + "".join(f"<{each.role}>{each.content}</>" for each in chat.messages)


async def encode(chat: inference_pb2.Chat) -> list[int]:
    """Returns a token for each character; refuses chats that do not begin with the system."""
    if chat.messages[0].role != "system":
        raise InvalidArgument("the system speaks first", "prompt")
    return [*render(chat).encode(), *b"<assistant>"]


def chat_request(*marks: inference_pb2.CacheBreakpoint, **fields: Any) -> Any:
    request = inference_pb2.GenerateRequest(cache_breakpoints=marks, **fields)
    request.prompt.chat.tools.add(name="weather")
    for role, content in TURNS:
        request.prompt.chat.messages.add(role=role, content=content)
    return request


def mark(num_messages: int, num_characters: int = 0, retention: str = "5m") -> Any:
    return inference_pb2.CacheBreakpoint(
        num_messages=num_messages, num_characters=num_characters, retention=retention
    )


async def retained(request: Any) -> list[tuple[str, int]]:
    """Returns the text of each retained prefix and its seconds."""
    check_prompt_cache(request)
    prompt = await encode(request.prompt.chat)
    found = await find_retentions(request, prompt, encode)
    return [(bytes(prompt[: each.num_tokens]).decode(), each.seconds) for each in found]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ((0, 0), "[weather]<system>"),
        ((1, 0), "[weather]<system>Be brief.</><user>"),
        ((1, 5), "[weather]<system>Be brief.</><user>Read:"),
        ((1, 99), "[weather]<system>Be brief.</><user>Read: a book.</><assistant>"),
        ((3, 0), "[weather]<system>Be brief.</><user>Read: a book.</><assistant>Yes.</><user>"),
    ],
)
async def test_a_mark_retains_the_prompt_before_it(place: tuple[int, int], text: str) -> None:
    assert await retained(chat_request(mark(*place))) == [(text, 300)]


async def test_each_retention_keeps_its_longest_prefix() -> None:
    marks = [mark(1, retention="1h"), mark(0, retention="1h"), mark(2), mark(1, 5, ""), mark(1)]
    assert [(len(text), seconds) for text, seconds in await retained(chat_request(*marks[:4]))] == [
        (len("[weather]<system>Be brief.</><user>Read: a book.</><assistant>"), 300),
        (len("[weather]<system>Be brief.</><user>"), 3_600),
    ]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_key": "k"}, 300),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "1h"}, 3_600),
    ],
)
async def test_the_whole_prompt_makes_shorter_prefixes_needless(
    fields: dict[str, str], seconds: int
) -> None:
    request = chat_request(mark(1), **fields)
    whole = bytes(await encode(request.prompt.chat)).decode()
    if "prompt_cache_retention" in fields:
        assert await retained(request) == [(whole, seconds)]
    del request.cache_breakpoints[:]
    assert await retained(request) == [(whole, seconds)]


@pytest.mark.parametrize("field", ["prompt_cache_key", "prompt_cache_retention"])
async def test_a_request_may_retain_only_its_marks(field: str) -> None:
    fields = {field: "1h", "only_cache_breakpoints": True}
    assert await retained(chat_request(**fields)) == []
    assert await retained(chat_request(mark(0), **fields)) == [("[weather]<system>", 300)]


async def test_a_request_without_hints_retains_nothing_and_renders_nothing() -> None:
    async def never(chat: inference_pb2.Chat) -> list[int]:
        raise AssertionError("rendered")

    assert await find_retentions(chat_request(), [1, 2], never) == []
    text = inference_pb2.GenerateRequest(prompt={"text": "hi"}, prompt_cache_retention="5m")
    ((one,)) = await find_retentions(text, [1, 2], never)
    assert (one.num_tokens, one.seconds) == (2, 300)


async def test_a_template_that_refuses_the_chat_up_to_the_mark_retains_the_whole_prompt() -> None:
    request = chat_request(mark(1))

    async def refuse(chat: inference_pb2.Chat) -> list[int]:
        raise InvalidArgument("roles must alternate", "prompt")

    ((one,)) = await find_retentions(request, [1, 2, 3], refuse)
    assert one.num_tokens == 3


@given(MARKS)
async def test_a_retained_prefix_is_one_of_the_prompt_and_longer_ones_end_earlier(
    marks: list[Any],
) -> None:
    request = chat_request(*marks)
    before = request.SerializeToString()
    whole = bytes(await encode(request.prompt.chat)).decode()
    found = await retained(request)
    assert request.SerializeToString() == before
    assert all(whole.startswith(text) for text, _ in found)
    lengths = [len(text) for text, _ in found]
    assert lengths == sorted(lengths, reverse=True)
    assert [seconds for _, seconds in found] == sorted({seconds for _, seconds in found})
    assert bool(found) == bool(marks)


@pytest.mark.parametrize(
    ("request_", "field", "reason"),
    [
        (chat_request(prompt_cache_retention="2h"), "prompt_cache_retention", "must be one of"),
        (chat_request(mark(1, retention="x")), "cache_breakpoints[0].retention", "must be one of"),
        (chat_request(mark(1), mark(5)), "cache_breakpoints[1].num_messages", "must be at most 4"),
        (chat_request(*[mark(1)] * 5), "cache_breakpoints", "has 5 marks; the maximum is 4"),
        (
            inference_pb2.GenerateRequest(prompt={"text": "a"}, cache_breakpoints=[mark(0)]),
            "cache_breakpoints",
            "only allowed with a chat",
        ),
    ],
)
def test_bad_hints_are_refused(request_: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason) as caught:
        check_prompt_cache(request_)
    assert caught.value.field == field
