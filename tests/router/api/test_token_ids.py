"""Tests vLLM's `return_token_ids` and OpenAI's `suffix` over HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from tandem.proto import limits
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, byte_tokenizer

ANSWER = [*b"hello", EOS_ID]
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    service.source.answer = ANSWER
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=60) as client:
        yield client


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await http.post(path, json=body(path, max_tokens=9, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post(path, json=body(path, max_tokens=9, stream=True, **fields))
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


async def test_a_completion_has_the_ids_of_its_prompt_and_its_own(http: httpx.AsyncClient) -> None:
    answer = await ask(http, TEXT, prompt=["hi", "you"], n=2, return_token_ids=True)
    found = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answer["choices"]]
    assert found == [(list(prompt), ANSWER) for prompt in (b"hi", b"hi", b"you", b"you")]


async def test_each_choice_of_a_stream_begins_with_the_ids_of_its_prompt(
    http: httpx.AsyncClient,
) -> None:
    choices = [
        event["choices"][0]
        for event in await events(http, TEXT, prompt="hi", n=2, return_token_ids=True)
    ]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == [
            list(b"hi"),
            *[None] * (len(own) - 1),
        ]
        assert [token for choice in own for token in choice["token_ids"]] == ANSWER


async def test_a_chat_has_the_ids_of_the_prompt_beside_its_choices(http: httpx.AsyncClient) -> None:
    prompt = list(b"[user] hello?\n[assistant] ")
    answer = await ask(http, CHAT, n=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [ANSWER, ANSWER]
    first, *rest = await events(http, CHAT, return_token_ids=True)
    assert (first["prompt_token_ids"], "token_ids" in first["choices"][0]) == (prompt, False)
    assert [token for event in rest for token in event["choices"][0]["token_ids"]] == ANSWER
    assert not any("prompt_token_ids" in event for event in rest)


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_nobody_who_does_not_ask_gets_ids(http: httpx.AsyncClient, path: str) -> None:
    found = json.dumps(
        [
            await ask(http, path),
            await ask(http, path, return_token_ids=False),
            await events(http, path),
        ]
    )
    assert "token_ids" not in found


async def test_the_ids_of_one_answer_are_bounded(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_ANSWER_SIZE", 1_000)
    text: dict[str, Any] = {"prompt": ["x" * 300] * 2, "n": 2}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 400}], "n": 3}
    for path, fields, status in (
        (TEXT, text, 400),
        (TEXT, text | {"n": 1}, 200),
        (CHAT, chat | {"stream": True}, 400),  # each choice begins with them
        (CHAT, chat, 200),
    ):
        answer = await http.post(
            path, json=body(path, **fields, max_tokens=1, return_token_ids=True)
        )
        assert answer.status_code == status, fields
        assert status == 200 or answer.json()["error"]["param"] == "return_token_ids"


async def test_ids_go_with_log_probabilities_and_cut_answers(http: httpx.AsyncClient) -> None:
    for path, fields in ((TEXT, {"logprobs": 1}), (CHAT, {"logprobs": True, "top_logprobs": 1})):
        for stream in (False, True):
            asked: dict[str, Any] = {**fields, "stop": ["lo"], "n": 2, "return_token_ids": True}
            if stream:
                choices = [
                    choice
                    for event in await events(http, path, **asked)
                    for choice in event["choices"]
                ]
            else:
                choices = (await ask(http, path, **asked))["choices"]
            for index in range(2):
                own = [choice for choice in choices if choice["index"] == index]
                ids = [token for choice in own for token in choice.get("token_ids", ())]
                found = [choice["logprobs"] for choice in own if choice["logprobs"]]
                entries = [
                    entry for each in found for entry in each.get("content") or each["tokens"]
                ]
                assert ids == ANSWER[:5]
                assert len(entries) == len(ids)


async def test_a_suffix_is_refused_by_a_model_without_tokens_for_it(
    http: httpx.AsyncClient,
) -> None:
    for fields in ({"prompt": "a", "suffix": "b"}, {"prompt": "a", "suffix": "b", "stream": True}):
        error = (await http.post(TEXT, json=body(TEXT, **fields))).json()["error"]
        assert error["param"] == "suffix"
        assert "no tokens for filling in" in error["message"]


class TestInfill:
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        tokenizer = byte_tokenizer()
        tokenizer._template.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
        return Tokenizer(tokenizer._template)

    async def test_a_suffix_is_behind_the_prompt_and_before_what_is_generated(
        self, service: Service, http: httpx.AsyncClient, tokenizer: Tokenizer
    ) -> None:
        answer = await ask(
            http, TEXT, prompt=["a", "b"], suffix="zz", echo=True, return_token_ids=True
        )
        before, hole, middle = sorted(tokenizer.ids_of(MARKS))
        for choice, prompt in zip(answer["choices"], "ab", strict=True):
            expected = [before, ord(prompt), hole, *b"zz", middle]
            assert (choice["prompt_token_ids"], choice["text"]) == (expected, f"{prompt}hello")
        assert [list(request.submit.token_ids) for request in service.source.requests] == [
            choice["prompt_token_ids"] for choice in answer["choices"]
        ]

    async def test_the_first_token_of_a_prompt_with_a_suffix_is_not_cut_off(
        self, http: httpx.AsyncClient
    ) -> None:
        answer = await http.post(TEXT, json=body(TEXT, suffix="b", truncate_prompt=True))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt")

    async def test_a_suffix_goes_with_text(self, http: httpx.AsyncClient) -> None:
        answer = await http.post(TEXT, json=body(TEXT, prompt=[1, 2], suffix="b"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
