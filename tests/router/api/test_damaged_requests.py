"""Sends 500 damaged messages to every method of both APIs.

Each gets a documented code, no answer shows internals of the service, and the next good request
is answered.
"""

import json
from contextlib import suppress
from typing import Any

import grpc.aio
import httpx
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.api.console.feed import ConsoleFeed
from tandem.router.auth.authenticator import Caller
from tandem.router.telemetry.requests import RequestTelemetry
from tandem.tests.damaged import LEAK, NUM_INPUTS, damaged
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body
from tandem.tests.router.conftest import Service
from tandem.tests.waits import WAIT

DOCUMENTED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
DOCUMENTED |= {grpc.StatusCode.RESOURCE_EXHAUSTED}

PROMPT: dict[str, Any] = {"text": "hi"}
TOOL = {"name": "f", "parameters": '{"type": "object"}'}
SPOKEN: dict[str, Any] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
}
SAMPLED = {"temperature": 0.5, "top_k": 3, "seed": 7, "logit_bias": {1: 0.5}, "bad_words": ["x"]}
GENERATE = [
    inference_pb2.GenerateRequest(
        prompt=prompt, sampling=SAMPLED, stopping={"max_tokens": 3, "stop": ["zz"]}, n=2
    )
    for prompt in (PROMPT, SPOKEN, {"token_ids": {"ids": [1, 2, 3]}})
]
UNARY: dict[str, list[Message]] = {
    "Tokenize": [inference_pb2.TokenizeRequest(prompt=prompt) for prompt in (PROMPT, SPOKEN)],
    "Detokenize": [inference_pb2.DetokenizeRequest(model="tiny", token_ids=[1, 2, 3])],
    "ListModels": [inference_pb2.ListModelsRequest()],
}
BODIES = {
    TEXT: body(TEXT, max_tokens=3, n=2, stop=["zz"], logit_bias={"1": 0.5}, seed=7, top_k=3),
    CHAT: body(
        CHAT,
        max_tokens=3,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    ),
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}}],
            },
            {"role": "user", "content": "so"},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/responses": {
        "model": "tiny",
        "max_output_tokens": 3,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "i", "name": "f", "arguments": "{}"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"model": "tiny", "prompt": "hi", "add_special_tokens": True},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
    "/v1/watermark/detect": {"model": "tiny", "prompt": "a text"},
}


async def test_generate_over_grpc(grpc_service: Service) -> None:
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        generate: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
        expected = [each async for each in generate(GENERATE[0].SerializeToString())]
        num_refused = 0
        for data in damaged([each.SerializeToString() for each in GENERATE]):
            call = generate(data)
            with suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            code = await call.code()
            assert code in DOCUMENTED, (data, code, await call.details())
            assert not LEAK.search(await call.details()), (data, await call.details())
            num_refused += code != grpc.StatusCode.OK
        again = [each async for each in generate(GENERATE[0].SerializeToString())]
        assert NUM_INPUTS // 4 < num_refused < NUM_INPUTS
    assert [without_id(each) for each in again] == [without_id(each) for each in expected]


def without_id(message: bytes) -> inference_pb2.GenerateResponse:
    parsed = inference_pb2.GenerateResponse.FromString(message)
    for name in ("request_id", "resume_token"):
        parsed.ClearField(name)
    return parsed


@pytest.mark.parametrize("method", UNARY)
async def test_unary_calls_over_grpc(grpc_service: Service, method: str) -> None:
    seeds = [each.SerializeToString() for each in UNARY[method]]
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        ask: Any = channel.unary_unary(f"/tandem.v1.Inference/{method}")
        expected = await ask(seeds[0])
        for data in damaged(seeds):
            call = ask(data)
            assert await call.code() in DOCUMENTED, (data, await call.details())
            assert not LEAK.search(await call.details()), (data, await call.details())
        assert await ask(seeds[0]) == expected


async def test_health_checks(grpc_service: Service) -> None:
    """Health checks need no key."""
    request = health_pb2.HealthCheckRequest(service="tandem.v1.Inference").SerializeToString()
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        expected = await check(request)
        for data in damaged([request]):
            call = check(data)
            assert await call.code() in DOCUMENTED, (data, await call.details())
            assert not LEAK.search(await call.details()), (data, await call.details())
        assert await check(request) == expected


async def test_cursors_of_the_console() -> None:
    feed = ConsoleFeed(RequestTelemetry())
    cursor = json.loads(await feed.answer("", Caller()))["cursor"]
    for data in damaged([cursor.encode()]):
        with suppress(InvalidArgument):
            assert (
                json.loads(await feed.answer(data.decode("latin-1"), Caller()))["cursor"] == cursor
            )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_over_http(service: Service, path: str, stream: bool) -> None:
    if stream and path not in (TEXT, CHAT, "/v1/messages", "/v1/responses"):
        return
    good = BODIES[path] | ({"stream": True} if stream else {})
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(
        base_url=f"http://{service.http}", timeout=WAIT, headers=headers
    ) as http:
        num_refused = 0
        for data in damaged([json.dumps(good).encode()]):
            answer = await http.post(path, content=data)
            assert answer.status_code in (200, 400, 404, 413), (data, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
                assert not LEAK.search(answer.text), (data, answer.text)
                num_refused += 1
        assert num_refused > NUM_INPUTS // 2
        assert (await http.post(path, json=good)).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/models/x", "/nothing", "/v1/completions/../../etc/passwd", "/%00", "/console/%2e%2e"],
)
@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "DELETE", "TRACE", "PATCH", "HEAD", "OPTIONS"]
)
async def test_unknown_paths_and_methods(service: Service, path: str, method: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = await http.request(method, path)
    assert answer.status_code in (400, 404, 405)
    assert not LEAK.search(answer.text)
