"""Tests that a conversation goes on after calls that the model invents, in every API."""

import json
from typing import Any

import httpx
import pytest

from tandem.proto import limits
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.weather_tool import CALL, HERMES, SCHEMA, last_prompt
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, byte_tokenizer

LONGEST = "f" * limits.MAX_TOOL_NAME_CHARACTERS
NAMES = ["get weather", "天气", 'f"\n', "%j%s", LONGEST]
FUNCTION = {"name": "weather", "parameters": SCHEMA}
USER: Any = {"role": "user", "content": "hello?"}
APIS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


@pytest.fixture
def model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(name="tiny", tokenizer=tokenizer, context_tokens=32_768)


def called(name: str) -> str:
    call = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    return f"<tool_call>{call}</tool_call>"


async def answer_of(http: httpx.AsyncClient, path: str, messages: list[Any]) -> list[Any]:
    """Returns the messages or items of an answer, as a client sends them back."""
    body: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", "function": FUNCTION}]}
    if path == "/v1/messages":
        body |= {"max_tokens": 16_384, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    elif path == "/v1/responses":
        body["tools"] = [{"type": "function", **FUNCTION}]
    key = "input" if path == "/v1/responses" else "messages"
    answer = await http.post(path, json=body | {key: messages})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if path == "/v1/chat/completions":
        return [said["choices"][0]["message"]]
    if path == "/v1/messages":
        return [{"role": "assistant", "content": said["content"]}]
    return list(said["output"])


def calls_of(path: str, said: list[Any]) -> list[str]:
    """Returns the names of the calls of an answer."""
    if path == "/v1/chat/completions":
        return [call["function"]["name"] for call in said[0].get("tool_calls") or ()]
    blocks = said[0]["content"] if path == "/v1/messages" else said
    return [block["name"] for block in blocks if block["type"] in ("tool_use", "function_call")]


@pytest.mark.parametrize("path", APIS)
async def test_a_call_of_any_name_comes_back(
    service: Service, http: httpx.AsyncClient, path: str
) -> None:
    for name in NAMES:
        service.source.answer = [*called(name).encode(), EOS_ID]
        said = await answer_of(http, path, [USER])
        assert calls_of(path, said) == [name]
        service.source.answer = [*b"So.", EOS_ID]
        await answer_of(http, path, [USER, *said, USER])
        assert f"assistant: {called(name)}\n" in last_prompt(service)


@pytest.mark.parametrize("path", APIS)
async def test_a_call_whose_name_is_too_long_to_come_back_is_text(
    service: Service, http: httpx.AsyncClient, path: str
) -> None:
    service.source.answer = [*called(f"{LONGEST}f").encode(), EOS_ID]
    said = await answer_of(http, path, [USER])
    assert calls_of(path, said) == []
    await answer_of(http, path, [USER, *said, USER])
    assert f"assistant: {called(f'{LONGEST}f')}\n" in last_prompt(service)


@pytest.mark.parametrize("path", APIS)
async def test_an_answer_ends_with_the_last_call_that_can_come_back(
    service: Service, http: httpx.AsyncClient, path: str
) -> None:
    service.source.answer = [*(CALL * (limits.MAX_TOOL_CALLS + 1)).encode(), EOS_ID]
    said = await answer_of(http, path, [USER])
    assert calls_of(path, said) == ["weather"] * limits.MAX_TOOL_CALLS
    service.source.answer = [*b"So.", EOS_ID]
    await answer_of(http, path, [USER, *said, USER])
