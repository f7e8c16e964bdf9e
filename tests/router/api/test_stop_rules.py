"""Stopping rules and truncation in every API, with the official clients, streamed and not."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anthropic
import openai
import pytest

from tandem.proto.errors import InvalidArgument
from tandem.router.client.client import AsyncClient
from tandem.tests.router.conftest import CONTEXT_TOKENS, Service

ASK: Any = [{"role": "user", "content": "hello?"}]
Found = tuple[str, str | None, str | int | None]
"""The text, the API's finish reason and its stop reason."""

Ask = Callable[..., Coroutine[Any, Any, Found]]


@pytest.fixture
async def anthropic_client(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{service.http}", api_key="key", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def ask(client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic) -> dict[str, Ask]:
    """Returns a function for each HTTP API that sends a request with further parameters."""

    async def openai_choice(create: Any, stream: bool, **fields: Any) -> Found:
        made = await create(model="tiny", stream=stream, max_tokens=50, **fields)
        chunks = [chunk async for chunk in made] if stream else [made]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text = ""
        for choice in choices:
            message = getattr(choice, "delta" if stream else "message", None)
            text += choice.text if message is None else (message.content or "")
        return text, choices[-1].finish_reason, choices[-1].stop_reason

    async def completion(stream: bool, rules: dict[str, Any]) -> Found:
        create = client.completions.create
        return await openai_choice(create, stream, prompt="hi", extra_body=rules)

    async def chat(stream: bool, rules: dict[str, Any]) -> Found:
        create = client.chat.completions.create
        return await openai_choice(create, stream, messages=ASK, extra_body=rules)

    async def response(stream: bool, rules: dict[str, Any]) -> Found:
        made: Any = await client.responses.create(
            model="tiny", input="hello?", max_output_tokens=50, stream=stream, extra_body=rules
        )
        text = ""
        if stream:
            events = [event async for event in made]
            text = "".join(each.delta for each in events if each.type.endswith("text.delta"))
            made = events[-1].response
            assert text == made.output_text
        assert (made.status == "incomplete") == (made.incomplete_details is not None)
        reason = made.incomplete_details.reason if made.incomplete_details else made.status
        return made.output_text, reason, made.stop_reason

    async def message(stream: bool, rules: dict[str, Any]) -> Found:
        asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 50, "extra_body": rules}
        if stream:
            async with anthropic_client.messages.stream(**asked) as events:
                made = await events.get_final_message()
        else:
            made = await anthropic_client.messages.create(**asked)
        text = "".join(block.text for block in made.content if block.type == "text")
        return text, made.stop_reason, made.stop_sequence

    return {"completion": completion, "chat": chat, "response": response, "message": message}


RULES: list[tuple[dict[str, Any], bytes, str, dict[str, str], str | int | None]] = [
    (
        {"stop_regex": "[c-e]{2}"},
        b"ab cxcde",
        "ab cx",
        {"response": "completed", "message": "stop_sequence"},
        "cd",
    ),
    (
        {"repetition_stop_ngram": 2, "repetition_stop_count": 3},
        b"xabababab",
        "xababab",
        {"response": "completed", "message": "stop_sequence"},
        "repetition_stop",
    ),
    (
        {"max_time_ms": 50},
        b"abcde",
        "ab",
        {"response": "max_output_tokens", "message": "max_tokens", "chat": "length"},
        "max_time_ms",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("rules", "answer", "text", "reasons", "stopped"), RULES)
async def test_a_rule_ends_the_answer_in_each_api(
    service: Service,
    ask: dict[str, Ask],
    stream: bool,
    rules: dict[str, Any],
    answer: bytes,
    text: str,
    reasons: dict[str, str],
    stopped: str,
) -> None:
    """The finish reasons are values that the packages know."""
    service.source.answer = answer
    service.source.stall_after = 2 if "max_time_ms" in rules else None
    for api, asked in ask.items():
        reason = reasons.get(api, reasons.get("chat", "stop"))
        assert await asked(stream, rules) == (text, reason, stopped), api


@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        ({"stop_regex": "c."}, "ab", "stop"),
        ({"repetition_stop_ngram": 1, "repetition_stop_count": 2}, "abcdd", "repetition"),
        ({"max_time_ms": 50}, "abcdd", "time"),
    ],
)
async def test_the_python_client(
    service: Service, rules: dict[str, Any], text: str, reason: str
) -> None:
    service.source.answer = b"abcddxy"
    service.source.stall_after = 5 if "max_time_ms" in rules else None
    async with AsyncClient(service.grpc) as client:
        done = await client.generate("hi", **rules)
        assert (done.text, done.finish_reason) == (text, reason)
        assert done.choices[0].stop_reason == ("cd" if "stop_regex" in rules else None)
        async with client.stream("hi", **rules) as stream:
            pieces = [piece async for piece in stream]
        assert "".join(piece.text for piece in pieces) == text
        assert pieces[-1].finish_reason == reason


async def test_a_wrong_pattern_is_refused_by_name(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="matches the empty text") as caught:
        await client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"stop_regex": "a*"}
        )
    assert caught.value.param == "stop_regex"
    async with AsyncClient(service.grpc) as grpc_client:
        with pytest.raises(InvalidArgument, match="the anchor"):
            await grpc_client.generate("hi", stop_regex="^a")


LONG: Any = [
    {"role": "system", "content": "s" * 40},
    *(
        {"role": role, "content": f"{number}" * 80}
        for number in range(1, 5)
        for role in ("user", "assistant")
    ),
    {"role": "user", "content": "last"},
]


def prompt(service: Service) -> str:
    return bytes(service.source.requests[-1].submit.token_ids).decode()


async def test_the_oldest_turns_are_dropped_until_the_rest_fits(
    service: Service, client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic
) -> None:
    kept = "".join(f"[{each['role']}] {each['content']}\n" for each in (LONG[0], *LONG[5:]))
    kept += "[assistant] "
    assert len(kept) <= CONTEXT_TOKENS - 20 < len(kept) + 2 * 90
    service.source.answer = b"ok"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        await client.chat.completions.create(model="tiny", messages=LONG, max_tokens=20)
    auto = {"truncation": "auto"}
    said = await client.chat.completions.create(
        model="tiny", messages=LONG, max_tokens=20, extra_body=auto
    )
    assert prompt(service) == kept
    assert said.usage is not None
    assert said.usage.prompt_tokens == len(kept)
    assert said.usage.to_dict()["dropped_messages"] == 4
    made = await client.responses.create(
        model="tiny",
        input=LONG[1:],
        instructions=LONG[0]["content"],
        max_output_tokens=20,
        truncation="auto",
    )
    assert prompt(service) == kept
    assert made.usage is not None
    assert (made.truncation, made.usage.to_dict()["dropped_messages"]) == ("auto", 4)
    asked: Any = {"messages": LONG[1:], "system": LONG[0]["content"], "extra_body": auto}
    message = await anthropic_client.messages.create(model="tiny", max_tokens=20, **asked)
    assert prompt(service) == kept
    assert message.usage.to_dict()["dropped_messages"] == 4
    async with anthropic_client.messages.stream(model="tiny", max_tokens=20, **asked) as events:
        usages = [each.usage.to_dict() async for each in events if each.type == "message_delta"]
    assert [each["dropped_messages"] for each in usages] == [4]
    short = await client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=20, extra_body=auto
    )
    assert short.usage is not None
    assert "dropped_messages" not in short.usage.to_dict()
    async with AsyncClient(service.grpc) as grpc_client:
        done = await grpc_client.chat(LONG, max_tokens=20, truncation="auto")
        assert (prompt(service), done.usage.dropped_messages) == (kept, 4)
        huge = [{"role": "user", "content": "x" * 600}]
        with pytest.raises(InvalidArgument, match="do not fit the context"):
            await grpc_client.chat(huge, max_tokens=20, truncation="auto")


@pytest.mark.parametrize("max_tokens", [None, CONTEXT_TOKENS - 1])
async def test_turns_are_dropped_for_an_answer_of_a_quarter_of_the_context(
    service: Service, client: openai.AsyncOpenAI, max_tokens: int | None
) -> None:
    """Agents ask for more than the context has left, and an answer of a token is of no use."""
    service.source.answer = b"ok"

    async def num_dropped(messages: Any) -> object:
        said = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=max_tokens,
            extra_body={"truncation": "auto"},
        )
        assert said.usage is not None
        return said.usage.to_dict().get("dropped_messages")

    assert await num_dropped(LONG) == 6
    assert len(prompt(service)) <= CONTEXT_TOKENS * 3 // 4
    if max_tokens is None:
        async with AsyncClient(service.grpc) as grpc_client:
            assert (await grpc_client.chat(LONG, truncation="auto")).usage.dropped_messages == 6
    # The last turn leaves less than a quarter, whatever goes.
    assert await num_dropped([*LONG[:-1], {"role": "user", "content": "x" * 400}]) == 8


async def test_the_end_of_a_prompt_is_kept_in_each_api(
    service: Service, client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic
) -> None:
    kept = {"truncate_prompt_tokens": 9}
    service.source.answer = b"ok"
    await client.completions.create(model="tiny", prompt="0123456789", extra_body=kept)
    assert prompt(service) == "123456789"
    await client.chat.completions.create(model="tiny", messages=ASK, extra_body=kept)
    assert prompt(service) == "sistant] "
    await client.responses.create(model="tiny", input="hello?", extra_body=kept)
    assert prompt(service) == "sistant] "
    await anthropic_client.messages.create(
        model="tiny", messages=ASK, max_tokens=5, extra_body=kept
    )
    assert prompt(service) == "sistant] "
