"""Malformed requests through both doors: each gets the code of the status table, and the next good one its answer."""

import json
import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from tandem.proto import inference_pb2
from tandem.tests.router.conftest import Service

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
EXHAUSTED, UNIMPLEMENTED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED
GENERATE = "/tandem.v1.Inference/Generate"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "tiny", "prompt": {"text": "hi"}, "stopping": {"max_tokens": 4}}


def message(**fields: Any) -> bytes:
    return inference_pb2.GenerateRequest(**(GOOD | fields)).SerializeToString()


def messages(count: int, **fields: str) -> dict[str, Any]:
    return {"prompt": {"chat": {"messages": [fields] * count}}}


# (body, code, what the message must name)
GRPC_CASES: list[tuple[bytes, grpc.StatusCode, str]] = [
    (b"\xff\xff\xff\xff", INVALID, "tandem.v1.GenerateRequest"),
    (b'{"prompt": "hi"}', INVALID, "tandem.v1.GenerateRequest"),
    (b"\x0a\x02\xff\xfe", INVALID, "tandem.v1.GenerateRequest"),  # a model name that is not UTF-8
    (b"", INVALID, "prompt"),
    (message(prompt={}), INVALID, "prompt"),
    (message(prompt={"text": ""}), INVALID, "prompt"),
    (message(prompt={"token_ids": {}}), INVALID, "prompt"),
    (message(prompt={"token_ids": {"ids": [258]}}), INVALID, "prompt.token_ids"),
    (message(prompt={"token_ids": {"ids": [2**32 - 1]}}), INVALID, "prompt.token_ids"),
    (message(prompt={"text": "x" * 512}), INVALID, "512 prompt tokens"),
    (message(prompt={"text": "x" * 1_000_001}), INVALID, "prompt.text"),
    (message(prompt={"text": "x" * 10_000_000}), EXHAUSTED, "larger than max"),
    (message(prompt={"chat": {}}), INVALID, "prompt.chat.messages"),
    (message(**messages(1_025, role="user")), INVALID, "prompt.chat.messages"),
    (message(**messages(1, content="x")), INVALID, "prompt.chat.messages[0].role"),
    (message(**messages(1, role="r" * 65)), INVALID, "prompt.chat.messages[0].role"),
    (message(**messages(1, role="robot", content="x")), INVALID, "prompt.chat: the model's chat template"),
    (message(model="nope"), NOT_FOUND, "'nope'"),
    (message(model="x" * 257), INVALID, "model"),
    (message(request_id="x" * 129), INVALID, "request_id"),
    (message(request_id="line\nbreak"), INVALID, "request_id"),
    (message(sampling={"temperature": math.nan}), INVALID, "sampling.temperature"),
    (message(sampling={"temperature": -math.inf}), INVALID, "sampling.temperature"),
    (message(sampling={"temperature": 100}), INVALID, "sampling.temperature"),
    (message(sampling={"top_p": 0}), INVALID, "sampling.top_p"),
    (message(sampling={"top_p": math.nan}), INVALID, "sampling.top_p"),
    (message(sampling={"top_k": -2}), INVALID, "sampling.top_k"),
    (message(sampling={"top_k": 2**31 - 1}), INVALID, "sampling.top_k"),
    (message(sampling={"min_p": -1}), INVALID, "sampling.min_p"),
    (message(sampling={"min_p": math.nan}), INVALID, "sampling.min_p"),
    (message(stopping={"max_tokens": -5}), INVALID, "stopping.max_tokens"),
    (message(stopping={"max_tokens": 0}), INVALID, "stopping.max_tokens"),
    (message(stopping={"max_tokens": 512}), INVALID, "stopping.max_tokens"),
    (message(stopping={"max_tokens": 511}), INVALID, "2 prompt tokens and 511 to generate"),
    (message(stopping={"stop": ["x"] * 10_000}), INVALID, "stopping.stop"),
    (message(stopping={"stop": ["x" * 1_025]}), INVALID, "stopping.stop[0]"),
    (message(stopping={"stop": ["a", ""]}), INVALID, "stopping.stop[1]"),
    (message(stopping={"stop_token_ids": [1] * 65}), INVALID, "stopping.stop_token_ids"),
    (message(stopping={"stop_token_ids": [9_999_999]}), INVALID, "stopping.stop_token_ids"),
]


async def test_over_grpc(grpc_service: Service) -> None:
    assert len(GRPC_CASES) >= 30
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        generate: Any = channel.unary_stream(GENERATE, None, inference_pb2.GenerateResponse.FromString)
        for body, code, named in GRPC_CASES:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(body).read()
            error = caught.value
            assert (error.code(), named in (error.details() or "")) == (code, True), (body[:80], error)
            assert [len(m.token_ids) async for m in generate(message())] == [1, 1, 1, 1], body[:80]
    assert len(grpc_service.source.requests) == len(GRPC_CASES)  # the good ones only


def text(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 4} | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | fields).encode()


# (path, body, status, param, what the message must say)
HTTP_CASES: list[tuple[str, bytes, int, str | None, str]] = [
    (TEXT, b"", 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "hi"', 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "\xff"}', 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "\\ud800"}', 400, None, "not valid JSON"),
    (TEXT, b"[" * 100_000, 400, None, "not valid JSON"),
    (TEXT, b"[1]", 400, None, "should be an object"),
    (TEXT, b'{"model": "tiny"}', 400, "prompt", "required"),
    (TEXT, text(prompt=None), 400, "prompt", "must be a string"),
    (TEXT, text(prompt=""), 400, "prompt", "at least 1"),
    (TEXT, text(prompt=[]), 400, "prompt", "1 to 128"),
    (TEXT, text(prompt=["x"] * 129), 400, "prompt", "1 to 128"),
    (TEXT, text(prompt=[1, "x"]), 400, "prompt", "must be a string"),
    (TEXT, text(prompt=[-1]), 400, "prompt", "must be a string"),
    (TEXT, text(prompt=[2**32]), 400, "prompt", "must be a string"),
    (TEXT, text(prompt=[258]), 400, "prompt", "258 tokens"),
    (TEXT, text(prompt=["good", ""]), 400, "prompt", "at least 1"),
    (TEXT, text(prompt="x" * 512), 400, "prompt", "512 prompt tokens"),
    (TEXT, text(prompt="x" * 1_000_001), 400, "prompt", "at most 1000000"),
    (TEXT, text(prompt="x" * 10_000_000), 413, None, "4194304 bytes"),
    (TEXT, text(model="nope"), 404, None, "'nope'"),
    (TEXT, text(model=7), 400, "model", "string"),
    (TEXT, text(max_tokens=-5), 400, "max_tokens", "1 to 1048576"),
    (TEXT, text(max_tokens=10**30), 400, "max_tokens", "less than"),
    (TEXT, text(max_tokens="4"), 400, "max_tokens", "integer"),
    (TEXT, text(max_tokens=4.5), 400, "max_tokens", "integer"),
    (TEXT, text(max_tokens=511), 400, "prompt", "511 to generate"),
    (TEXT, text(temperature=math.nan), 400, "temperature", "0 to 2"),
    (TEXT, text(temperature=1e300), 400, "temperature", "0 to 2"),
    (TEXT, text(temperature="hot"), 400, "temperature", "number"),
    (TEXT, text(top_p=0), 400, "top_p", "greater than 0"),
    (TEXT, text(top_k=-2), 400, "top_k", "-1 to 1000000"),
    (TEXT, text(min_p=2), 400, "min_p", "0 to 1"),
    (TEXT, text(seed=2**64), 400, "seed", "less than"),
    (TEXT, text(stop=["x"] * 10_000), 400, "stop", "at most 16"),
    (TEXT, text(stop="x" * 1_025), 400, "stop[0]", "1 to 1024"),
    (TEXT, text(stop=""), 400, "stop[0]", "1 to 1024"),
    (TEXT, text(stop=[1]), 400, "stop[0]", "string"),
    (TEXT, text(stop_token_ids=[-1]), 400, "stop_token_ids[0]", "greater than"),
    (TEXT, text(stop_token_ids=[999]), 400, "stop_token_ids", "258 tokens"),
    (TEXT, text(n=2), 400, "n", "not supported"),
    (TEXT, text(echo=True), 400, "echo", "not supported"),
    (TEXT, text(logprobs=5), 400, "logprobs", "not supported"),
    (TEXT, text(repetition_penalty=1.1), 400, "repetition_penalty", "not supported"),
    (TEXT, text(temprature=1), 400, "temprature", "not a field"),
    (TEXT, text(stream="yes"), 400, "stream", "boolean"),
    (TEXT, text(stream_options={"include_usages": True}), 400, "stream_options.include_usages", "not a field"),
    (CHAT, text(), 400, "messages", "required"),
    (CHAT, chat(messages=[]), 400, "messages", "1 to 1024"),
    (CHAT, chat(messages="hi"), 400, "messages", "array"),
    (CHAT, chat(messages=[{"content": "x"}]), 400, "messages[0].role", "required"),
    (CHAT, chat(messages=[{"role": "", "content": "x"}]), 400, "messages[0].role", "1 to 64"),
    (CHAT, chat(messages=[{"role": "user", "content": 7}]), 400, "messages[0].content", "string"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0].content", "parts"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "x", "tool_calls": [1]}]),
        400,
        "messages[0].tool_calls",
        "not a",
    ),
    (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages", "unknown role"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_tokens", "1 to 1048576"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools", "not supported"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format", "not supported"),
]


def _plain(body: bytes) -> bytes:
    return body


def _streamed(body: bytes) -> bytes:
    """The same, asking for a stream; the status must not depend on it."""
    return body.replace(b'{"model"', b'{"stream": true, "model"', 1)


@pytest.mark.parametrize("form", [_plain, _streamed])
async def test_over_http(service: Service, form: Callable[[bytes], bytes]) -> None:
    assert len(HTTP_CASES) >= 30
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=10) as http:
        for path, body, status, param, said in HTTP_CASES:
            answer = await http.post(path, content=form(body))
            error = answer.json()["error"]
            assert answer.status_code == status, (body[:80], answer.text)
            assert (error["param"], said in error["message"]) == (param, True), (body[:80], error)
            good = await http.post(TEXT, content=form(text()))
            assert good.status_code == 200, body[:80]
    assert len(service.source.requests) == len(HTTP_CASES)
