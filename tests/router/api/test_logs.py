"""Tests that no log has a key, a prompt or the text of a token, even at the lowest level."""

import json
import logging
from contextlib import suppress
from typing import Any

import grpc.aio
import httpx
import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import InternalError, Overloaded, Unavailable
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body
from tandem.tests.router.conftest import Service
from tandem.tests.waits import WAIT

CANARY = "canary-7e1b44"
KEY = f"sk-{CANARY}"
OURS = ("tandem", "uvicorn", "asyncio", "grpc", "starlette", "root", "concurrent")
MESSAGES = [{"role": "user", "content": CANARY, "name": CANARY}]
TOOL = {"type": "function", "function": {"name": CANARY, "description": CANARY}}
ANSWER = CANARY.encode()


def http_bodies(path: str) -> list[dict[str, Any]]:
    said: dict[str, Any] = (
        {"prompt": CANARY} if path == TEXT else {"messages": MESSAGES, "tools": [TOOL]}
    )
    return [
        *(
            body(path, **said, stream=stream, max_tokens=20, stop=[CANARY[::-1]])
            for stream in (False, True)
        ),
        body(path, **said, guided_regex=CANARY),
        *(
            body(path, **said, **{name: CANARY})
            for name in (CANARY, "model", "temperature", "guided_grammar")
        ),
        *(body(path, **said, max_tokens=length) for length in (10**6, -1)),
        body(path, **{name: [CANARY] * 2 for name in said}),
        {CANARY: CANARY},
    ]


@pytest.mark.parametrize(
    "error", [None, RuntimeError(CANARY), InternalError("x"), Overloaded("x"), Unavailable("x")]
)
async def test_the_logs_have_nothing_that_a_caller_sent(
    service: Service, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    caplog.set_level(logging.DEBUG)
    service.source.error, service.source.answer = error, ANSWER
    headers = {
        "authorization": f"Bearer {KEY}",
        "x-request-id": "id",
        "user-agent": CANARY,
        "cookie": CANARY,
    }
    async with httpx.AsyncClient(
        base_url=f"http://{service.http}", timeout=WAIT, headers=headers
    ) as http:
        for path in (TEXT, CHAT):
            for sent in http_bodies(path):
                await http.post(path, json=sent)
            await http.post(path, content=CANARY, headers={"content-type": "application/json"})
        for stream in (False, True):
            await http.post(
                "/v1/messages", json={"messages": MESSAGES, "max_tokens": 20, "stream": stream}
            )
            await http.post(
                "/v1/responses", json={"input": CANARY, "instructions": CANARY, "stream": stream}
            )
        await http.post("/tokenize", json={"prompt": CANARY})
        await http.post("/tokenize", json={"prompt": CANARY}, headers={"x-api-key": KEY})
        await http.get(f"/v1/models/{CANARY}?key={KEY}")
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        generate: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
        for fields in (
            {"prompt": {"text": CANARY}},
            {"prompt": {"text": CANARY}, "model": CANARY},
            {},
        ):
            request = inference_pb2.GenerateRequest(**fields).SerializeToString()
            call = generate(request, metadata=(("authorization", f"Bearer {KEY}"),))
            with suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            assert await call.code() != grpc.StatusCode.UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(CANARY.encode()).read()
    records = [record for record in caplog.records if record.name.split(".")[0] in OURS]
    texts = [logging.Formatter().format(record) for record in records]
    assert [text for text in texts if CANARY in text or KEY in text] == []
    refused = [
        json.loads(record.getMessage()) for record in records if record.name == "tandem.audit"
    ]
    assert len(refused) >= 10
    if isinstance(error, RuntimeError):
        assert any(
            "RuntimeError at" in text for text in texts
        )  # a defect is still found by its place
