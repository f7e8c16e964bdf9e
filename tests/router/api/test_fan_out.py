"""Tests that the total work of one body is checked before any of it runs."""

import tracemalloc
from typing import Any

import httpx
import pytest

from tandem.proto import limits
from tandem.proto.limits import MAX_ANSWER_SEQUENCES
from tandem.tests.router.api.http_bodies import TEXT
from tandem.tests.router.conftest import Service
from tandem.tests.waits import WAIT


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ["hi"] * 128, "n": 32}, "n"),
        ({"prompt": ["hi"] * 128, "best_of": 3}, "best_of"),
        ({"prompt": ["hi"] * 17, "use_beam_search": True, "n": 16}, "n"),
        ({"prompt": ["hi"] * 128, "n": 32, "echo": True, "max_tokens": 0}, "n"),
        ({"prompt": ["hi"] * 64, "n": 4, "logprobs": 20, "max_tokens": 500}, "logprobs"),
        ({"prompt": ["hi" * 200] * 128, "prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_that_asks_for_too_much_is_refused(
    service: Service, fields: dict[str, Any], field: str, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        tracemalloc.start()
        try:
            answer = await http.post(TEXT, json=fields | {"stream": stream})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert "the maximum is" in error["message"]
    assert not service.source.requests
    assert peak < 50_000_000


async def test_as_many_completions_as_are_allowed_are_answered(service: Service) -> None:
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=60) as http:
        answer = await http.post(
            TEXT, json={"prompt": ["hi"] * 8, "n": MAX_ANSWER_SEQUENCES // 8, "max_tokens": 1}
        )
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == MAX_ANSWER_SEQUENCES


@pytest.mark.parametrize("prompt", ["x" * 30, [120] * 30], ids=["text", "token ids"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_that_echo_repeats_is_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch, prompt: object, stream: bool
) -> None:
    """One of the prompts alone repeats little: the bound is that of all of them."""
    monkeypatch.setattr(limits, "MAX_RETURNED_CHARACTERS", 100)
    fields = {"prompt": [prompt] * 2, "echo": True, "max_tokens": 0, "stream": stream}
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        for each in ({"n": 2}, {"best_of": 2, "max_tokens": 1}):
            error = (await http.post(TEXT, json=fields | each)).json()["error"]
            assert error["param"] == "echo"
            assert "repeats 120 characters" in error["message"]
            assert "the maximum is 100" in error["message"]
        assert not service.source.requests
        assert (await http.post(TEXT, json=fields)).status_code == 200
