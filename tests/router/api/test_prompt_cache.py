"""Prompt caching hints in every API, with the official clients: what workers get, and the usage."""

from typing import Any

import anthropic
import grpc.aio
import httpx
import openai
import pytest

from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.router.client.client import AsyncClient
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.weather_tool import HERMES, SCHEMA, last_prompt
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, byte_tokenizer

ANSWER = [*b"hello", EOS_ID]
ASK: Any = [{"role": "user", "content": "hello?"}]
EPHEMERAL: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
EXPLICIT: Any = {"mode": "explicit"}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


def retained(service: Service) -> list[tuple[str, int]]:
    """Returns the text and the seconds of each prefix that the last request retains."""
    retentions = service.source.requests[-1].submit.retentions
    return [(last_prompt(service)[: each.num_tokens], each.seconds) for each in retentions]


@pytest.mark.parametrize("stream", [False, True])
async def test_marks_of_anthropic(service: Service, stream: bool) -> None:
    """The three counts of input tokens add up to the prompt."""
    service.source.answer = ANSWER
    service.source.cached_tokens = 4
    asked: Any = {
        "model": "tiny",
        "max_tokens": 9,
        "tools": [{"name": "weather", "input_schema": SCHEMA, "cache_control": HOUR}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look:"},
                    {"type": "text", "text": "A book.", "cache_control": EPHEMERAL},
                    {"type": "text", "text": "So?"},
                ],
            }
        ],
    }
    url = f"http://{service.http}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                usages = [e.message.usage async for e in events if e.type == "message_start"]
                usages.append((await events.get_final_message()).usage)
        else:
            usages = [(await client.messages.create(**asked)).usage]
    marked = "[weather] system: Be brief.\nuser: Look:\nA book.\n"
    assert retained(service) == [(marked, 300), ("[weather] system: ", 3_600)]
    rest = len(last_prompt(service)) - len(marked)
    for usage in usages:
        assert usage.cache_read_input_tokens == 4
        assert usage.cache_creation_input_tokens == len(marked) - 4
        assert usage.input_tokens == rest


async def test_marks_of_calls_and_results_and_the_whole_prompt(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.source.answer = ANSWER
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bonn"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
    turns = [
        *ASK,
        {"role": "assistant", "content": [use | {"cache_control": HOUR}]},
        {"role": "user", "content": [result | {"cache_control": EPHEMERAL}]},
    ]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": turns}
    assert (await http.post("/v1/messages", json=body)).status_code == 200
    (whole, _), (call, seconds) = retained(service)
    assert whole == last_prompt(service)
    assert call.endswith("</tool_call>\ntool: ")
    assert seconds == 3_600
    body |= {"messages": ASK, "cache_control": HOUR}
    assert (await http.post("/v1/messages", json=body)).status_code == 200
    assert retained(service) == [(last_prompt(service), 3_600)]
    await http.post("/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": ASK})
    assert retained(service) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_kept_without_an_answer(service: Service, stream: bool) -> None:
    """Clients of Anthropic fill the cache with max_tokens 0."""
    service.source.answer = ANSWER
    part = {"type": "text", "text": "hello?", "cache_control": HOUR}
    hints: list[dict[str, Any]] = [
        {"messages": ASK, "cache_control": HOUR},
        {"messages": [{"role": "user", "content": [part]}]},
    ]
    url = f"http://{service.http}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as client:
        for asked in hints:
            if stream:
                async with client.messages.stream(model="tiny", max_tokens=0, **asked) as events:
                    made = await events.get_final_message()
            else:
                made = await client.messages.create(model="tiny", max_tokens=0, **asked)
            assert (made.content, made.stop_reason) == ([], "max_tokens")
            assert made.usage.output_tokens == 0
            assert [seconds for _, seconds in retained(service)] == [3_600]
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(model="tiny", max_tokens=0, messages=ASK)


async def test_hints_of_openai(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = ANSWER
    service.source.cached_tokens = 4
    create = client.chat.completions.create
    said = await create(
        model="tiny", messages=ASK, prompt_cache_key="k", prompt_cache_retention="24h"
    )
    assert retained(service) == [(last_prompt(service), 86_400)]
    assert said.usage is not None
    details = said.usage.prompt_tokens_details
    assert details is not None
    num_prompt = len(last_prompt(service))
    assert (details.cached_tokens, details.cache_write_tokens) == (4, num_prompt - 4)
    affinity = service.source.requests[-1].affinity
    await create(model="tiny", messages=ASK, prompt_cache_key="k")
    assert retained(service) == [(last_prompt(service), 300)]
    assert service.source.requests[-1].affinity == affinity != ""
    await create(model="tiny", messages=ASK, prompt_cache_options={"ttl": "30m"})
    assert retained(service) == [(last_prompt(service), 1_800)]
    assert service.source.requests[-1].affinity == ""
    content: Any = [
        {"type": "text", "text": "A book.", "prompt_cache_breakpoint": EXPLICIT},
        {"type": "text", "text": "So?", "cache_control": HOUR},
    ]
    await create(model="tiny", messages=[{"role": "user", "content": content}])
    assert retained(service) == [(last_prompt(service), 3_600)]
    tool: Any = {"type": "function", "function": {"name": "weather"}, "cache_control": HOUR}
    messages: Any = [{"role": "system", "content": "Hi.", "cache_control": EPHEMERAL}, *ASK]
    await create(model="tiny", messages=messages, tools=[tool])
    assert retained(service) == [
        ("[weather] system: Hi.\nuser: ", 300),
        ("[weather] system: ", 3_600),
    ]


async def test_only_the_last_four_marks_of_openai_count(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = ANSWER
    content: Any = [{"type": "text", "text": "a", "cache_control": HOUR}] + [
        {"type": "text", "text": text, "prompt_cache_breakpoint": EXPLICIT} for text in "bcde"
    ]
    await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}]
    )
    assert retained(service) == [("user: a\nb\nc\nd\ne\nassistant: ", 1_800)]


async def test_hints_of_responses(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = ANSWER
    content: Any = [
        {"type": "input_text", "text": "A book.", "prompt_cache_breakpoint": EXPLICIT},
        {"type": "input_text", "text": "So?"},
    ]
    made = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], prompt_cache_key="k"
    )
    assert retained(service) == [("user: A book.\n", 1_800)]
    assert service.source.requests[-1].affinity
    assert made.usage is not None
    assert made.usage.input_tokens_details.cache_write_tokens == len("user: A book.\n")
    more = await client.responses.create(
        model="tiny",
        input="Go on.",
        previous_response_id=made.id,
        prompt_cache_retention="in_memory",
    )
    assert retained(service) == [
        (last_prompt(service), 300),
        ("user: A book.\n", 1_800),
    ], "the marks of earlier turns count"
    assert more.usage is not None
    details = more.usage.input_tokens_details
    assert details.cache_write_tokens == len(last_prompt(service))


async def test_marks_inherit_the_ttl_of_the_request(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = ANSWER
    marked: Any = {"type": "input_text", "text": "A book.", "prompt_cache_breakpoint": EXPLICIT}
    rest: Any = {"role": "user", "content": "So?"}
    options: Any = {"mode": "explicit", "ttl": "12h"}
    create = client.responses.create
    said: Any = [{"role": "user", "content": [marked]}, rest]
    await create(model="tiny", input=said, prompt_cache_options=options)
    (inherited,) = retained(service)
    assert inherited[1] == 43_200
    said = [{"role": "user", "content": [marked | {"type": "text"}]}, rest]
    await client.chat.completions.create(model="tiny", messages=said, prompt_cache_options=options)
    assert retained(service) == [inherited]
    own = marked | {"prompt_cache_breakpoint": EXPLICIT | {"ttl": "30m"}}
    said = [{"role": "user", "content": [own]}, rest]
    await create(model="tiny", input=said, prompt_cache_options=options)
    assert retained(service) == [(inherited[0], 1_800)]


@pytest.mark.parametrize(
    ("retention", "seconds"), [("in_memory", 1_800), ("30m", 1_800), ("24h", 86_400)]
)
async def test_of_two_times_of_openai_the_longer_one_counts(
    service: Service, client: openai.AsyncOpenAI, retention: Any, seconds: int
) -> None:
    service.source.answer = ANSWER
    both: Any = {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": retention}
    await client.chat.completions.create(model="tiny", messages=ASK, **both)
    assert retained(service) == [(last_prompt(service), seconds)]
    await client.responses.create(model="tiny", input="hello?", **both)
    assert retained(service) == [(last_prompt(service), seconds)]


@pytest.mark.parametrize("fields", [{}, {"prompt_cache_retention": "24h"}])
async def test_the_explicit_mode_of_openai_keeps_only_what_is_marked(
    service: Service, client: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    """The key still chooses the worker."""
    service.source.answer = ANSWER
    asked: Any = fields | {"prompt_cache_key": "k", "prompt_cache_options": EXPLICIT}
    await client.chat.completions.create(model="tiny", messages=ASK, **asked)
    assert retained(service) == []
    assert service.source.requests[-1].affinity
    await client.responses.create(model="tiny", input="hello?", **asked)
    assert retained(service) == []
    assert service.source.requests[-1].affinity
    marked = {"type": "text", "text": "A book.", "prompt_cache_breakpoint": EXPLICIT}
    content: Any = [marked, {"type": "text", "text": "So?"}]
    said: Any = [{"role": "user", "content": content}]
    await client.chat.completions.create(model="tiny", messages=said, **asked)
    assert retained(service) == [("user: A book.\n", 1_800)]


async def test_hints_of_grpc_and_of_the_python_client(grpc_service: Service) -> None:
    grpc_service.source.answer = ANSWER
    async with AsyncClient(grpc_service.grpc) as client:
        done = await client.generate("hi", prompt_cache_key="k", prompt_cache_retention="1h")
        assert retained(grpc_service) == [("hi", 3_600)]
    assert done.usage.prompt_tokens == 2
    request = inference_pb2.GenerateRequest(
        cache_breakpoints=[{"num_messages": 1, "retention": "12h"}]
    )
    request.prompt.chat.messages.add(role="system", content="Be brief.")
    request.prompt.chat.messages.add(role="user", content="hello?")
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        messages = [message async for message in stub.Generate(request)]
    assert retained(grpc_service) == [("system: Be brief.\nuser: ", 43_200)]
    assert messages[0].cache_write_tokens == messages[-1].usage.cache_write_tokens == 24


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ("/v1/messages", {"cache_control": {"type": "forever"}}, "cache_control.type"),
    (
        "/v1/messages",
        {"system": [{"type": "text", "text": "x", "cache_control": EPHEMERAL}] * 5},
        "cache_control: has 5 marks; the maximum is 4",
    ),
    ("/v1/chat/completions", {"prompt_cache_retention": "1y"}, "prompt_cache_retention: must be"),
    ("/v1/chat/completions", {"prompt_cache_key": "k" * 257}, "prompt_cache_key: must have"),
    ("/v1/chat/completions", {"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
    (
        "/v1/chat/completions",
        {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "1y"},
        "prompt_cache_retention: must be one of",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}
            ]
        },
        'cache_control must have the form {"type": "ephemeral"}',
    ),
    ("/v1/responses", {"prompt_cache_retention": "1y"}, "prompt_cache_retention: must be one of"),
    ("/v1/responses", {"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
]


@pytest.mark.parametrize(("path", "fields", "reason"), BAD)
async def test_bad_hints_are_refused(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], reason: str
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 9}
    if path == "/v1/responses":
        asked = {"model": "tiny", "input": "hi"}
    answer = await http.post(path, json=asked | fields)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
