"""Tests that reasoning is separate from the text in every API, streamed or not."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.api.dialect import Dialect, ReasoningField
from tandem.router.api.responses.items import decode_reasoning, encode_reasoning
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.client.client import AsyncClient
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.http_bodies import events_of
from tandem.tests.router.api.weather_tool import CALL, HERMES, SCHEMA, last_prompt
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT

THOUGHT = "Köln?\n\nA < B."
SAID = "I look."
NUM_REASONING = len(f"{THOUGHT}\n</think>\n\n".encode())  # bytes are tokens
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALL}"
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TEMPLATE = HERMES.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content "
    "}}",
)
USER: Any = {"role": "user", "content": "hello?"}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=TEMPLATE)


@pytest.fixture(params=[1, 7, 1_000])
def answering(service: Service, request: pytest.FixtureRequest) -> Service:
    """Returns a service that streams its answer in pieces of 1, 7 or 1,000 tokens."""
    service.source.answer = [*ANSWER.encode(), EOS_ID]
    service.source.tokens_per_delta = request.param
    return service


async def test_chat_completions(answering: Service) -> None:
    fields: Any = {
        "model": "tiny",
        "max_tokens": 400,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    async with openai.AsyncOpenAI(
        base_url=f"http://{answering.http}/v1", api_key="key", max_retries=0
    ) as client:
        made = await client.chat.completions.create(messages=[USER], **fields)
        message: Any = made.choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, SAID)
        assert [call.function.name for call in message.tool_calls] == ["weather"]
        assert made.choices[0].finish_reason == "tool_calls"
        assert made.usage is not None
        assert made.usage.completion_tokens_details is not None
        assert made.usage.completion_tokens_details.reasoning_tokens == NUM_REASONING
        chunks = await client.chat.completions.create(messages=[USER], stream=True, **fields)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in chunks]
        assert (
            "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
        )
        assert "".join(delta.content or "" for delta in deltas) == SAID
        assert [call.function.name for delta in deltas for call in delta.tool_calls or []] == [
            "weather"
        ]
        back = message.model_dump(include={"role", "content", "reasoning_content"})
        await client.chat.completions.create(messages=[USER, back, USER], **fields)
    assert f"assistant: <think>{THOUGHT}</think>{SAID}\n" in last_prompt(answering)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning_content", {"reasoning_content"}),
    ],
)
async def test_the_fields_of_a_chat_that_have_the_reasoning(
    generation: GenerationService,
    source: FakeTokenSource,
    field: ReasoningField,
    names: set[str],
) -> None:
    generation.dialect = Dialect(reasoning_field=field)
    source.answer = [*ANSWER.encode(), EOS_ID]
    server = HttpServer(generation)
    try:
        url = f"http://{await server.start('127.0.0.1:0')}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT) as http:
            body = {"messages": [USER], "max_tokens": 400}
            whole = (await http.post("/v1/chat/completions", json=body)).json()
            message = whole["choices"][0]["message"]
            streamed = await http.post("/v1/chat/completions", json=body | {"stream": True})
        deltas = [each["choices"][0]["delta"] for each in events_of(streamed)]
        for name in ("reasoning", "reasoning_content"):
            expected = THOUGHT if name in names else ""
            assert message.get(name, "") == expected
            assert "".join(delta.get(name, "") for delta in deltas) == expected
    finally:
        await server.stop(0)


async def test_a_stop_string_or_a_limit_in_a_thought(answering: Service) -> None:
    async with httpx.AsyncClient(base_url=f"http://{answering.http}", timeout=WAIT) as http:
        for fields, thought, reason in (
            ({"stop": [" <"]}, "Köln?\n\nA", "stop"),
            ({"max_tokens": len("<think>\nK")}, "K", "length"),
            ({"max_tokens": len(b"<think>\nK\xc3")}, "K\ufffd", "length"),
            ({"max_tokens": len("<thi")}, "", "length"),
        ):
            answer = await http.post("/v1/chat/completions", json={"messages": [USER], **fields})
            (choice,) = answer.json()["choices"]
            assert choice["message"].get("reasoning_content", "") == thought
            assert choice["message"]["content"] == ("" if thought else "<thi")
            assert choice["finish_reason"] == reason


async def test_messages(answering: Service) -> None:
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    fields: Any = {"model": "tiny", "max_tokens": 400, "tools": tools}
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{answering.http}", api_key="key", max_retries=0
    ) as client:
        whole = await client.messages.create(messages=[USER], **fields)
        async with client.messages.stream(messages=[USER], **fields) as stream:
            streamed = await stream.get_final_message()
        for made in (whole, streamed):
            thinking, text, call = (block.model_dump() for block in made.content)
            assert (thinking["type"], thinking["thinking"]) == ("thinking", THOUGHT)
            assert thinking["signature"] == "tandem"  # some clients look for a signature
            assert (text["type"], text["text"]) == ("text", SAID)
            assert (call["type"], call["input"]) == ("tool_use", {"city": "Köln"})
            assert made.usage.output_tokens_details is not None
            assert made.usage.output_tokens_details.thinking_tokens == NUM_REASONING
        back: Any = [USER, {"role": "assistant", "content": whole.content[:2]}, USER]
        await client.messages.create(messages=back, **fields)
    assert f"assistant: <think>{THOUGHT}</think>{SAID}\n" in last_prompt(answering)


async def test_responses(answering: Service) -> None:
    fields: Any = {
        "model": "tiny",
        "max_output_tokens": 400,
        "tools": [{"type": "function", "strict": True, **FUNCTION}],
    }
    async with openai.AsyncOpenAI(
        base_url=f"http://{answering.http}/v1", api_key="key", max_retries=0
    ) as client:
        whole = await client.responses.create(input=[USER], **fields)
        async with client.responses.stream(input=[USER], **fields) as stream:
            thought = "".join(
                [
                    event.delta
                    async for event in stream
                    if event.type == "response.reasoning_text.delta"
                ]
            )
            streamed = await stream.get_final_response()
        assert thought == THOUGHT
        for made in (whole, streamed):
            reasoning, message, call = (item.model_dump() for item in made.output)
            assert [part["text"] for part in reasoning["content"]] == [THOUGHT]
            assert [part["text"] for part in message["content"]] == [SAID]
            assert json.loads(call["arguments"]) == {"city": "Köln"}
            assert made.usage is not None
            assert made.usage.output_tokens_details.reasoning_tokens == NUM_REASONING
        await client.responses.create(
            input=[USER, *(item.model_dump() for item in whole.output[:2]), USER], **fields
        )
        assert f"assistant: <think>{THOUGHT}</think>{SAID}\n" in last_prompt(answering)
        # As Codex asks for reasoning and sends it back.
        encoded = await client.responses.create(
            input=[USER], include=["reasoning.encrypted_content"], store=False, **fields
        )
        reasoning, message = (item.model_dump() for item in encoded.output[:2])
        item: Any = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": reasoning["encrypted_content"],
        }
        await client.responses.create(input=[USER, item, message, USER], **fields)
        assert f"assistant: <think>{THOUGHT}</think>{SAID}\n" in last_prompt(answering)
        assert "encrypted_content" not in whole.output[0].model_dump(exclude_none=True)


@given(st.text())
def test_encoded_reasoning_can_be_read(text: str) -> None:
    assert decode_reasoning(encode_reasoning(text)) == text


@pytest.mark.parametrize("encoded", ["", "gAAAAABo", "tandem:!", "tandem:/w==", "tandem:a"])
def test_what_another_service_has_encoded_is_no_text(encoded: str) -> None:
    assert decode_reasoning(encoded) == ""


async def test_grpc(answering: Service) -> None:
    async with AsyncClient(answering.grpc) as client:
        answer = await client.chat([USER], max_tokens=400)
        assert (answer.choices[0].reasoning, answer.text) == (THOUGHT, f"{SAID}\n{CALL}")
        assert answer.usage.reasoning_tokens == NUM_REASONING
        await client.chat([USER, answer.choices[0].message, USER], max_tokens=1)
    assert f"assistant: <think>{THOUGHT}</think>{SAID}\n{CALL}\n" in last_prompt(answering)
