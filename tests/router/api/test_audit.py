import asyncio
import json
import logging
from typing import Any

import grpc.aio
import httpx
import pytest

from tandem.proto import inference_pb2
from tandem.router.api.server.audit import MAX_BURST, AuditLog
from tandem.tests.router.api.http_bodies import TEXT, body
from tandem.tests.router.api.test_connections import connected
from tandem.tests.router.conftest import Service
from tandem.tests.waits import WAIT

CANARY = "canary-3fd1c2"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    return [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "tandem.audit"
    ]


async def test_each_refused_call_over_http_is_a_line(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        assert (await http.post(TEXT, json=body(TEXT))).status_code == 200
        assert (await http.post(TEXT, json=body(TEXT, **{CANARY: CANARY}))).status_code == 400
        assert (await http.get(f"/{CANARY}")).status_code == 404
        assert (await http.post(TEXT, json=body(TEXT), headers={"host": CANARY})).status_code == 403
        forwarded = {"x-forwarded-for": "10.9.8.7"}
        assert (
            await http.post(TEXT, json=body(TEXT, model="nope"), headers=forwarded)
        ).status_code == 404
    found = lines(caplog)
    assert [line["reason"] for line in found] == ["400", "404", "403", "404"]
    assert {(line["event"], line["api"], line["peer"]) for line in found} == {
        ("refused", "http", "127.0.0.1")
    }
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (f"{CANARY} {CANARY}\r\n\r\n", "400"),
        (f"GET /{CANARY} HTTP/1.1\r\nHost: localhost\r\nX: {CANARY * 10_000}\r\n\r\n", "400"),
        (
            "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: "
            "websocket\r\n\r\n",
            "404",
        ),
    ],
    ids=["no HTTP", "a long head", "an upgrade"],
)
async def test_invalid_requests_get_one_line_each_and_no_line_in_other_logs(
    service: Service, caplog: pytest.LogCaptureFixture, said: str, status: str
) -> None:
    """uvicorn would write one line for each of them, without a limit."""
    async with asyncio.timeout(WAIT), connected(service.http) as (reader, writer):
        writer.write(said.encode())
        assert (await reader.readline()).split()[1] == status.encode()
    assert [line["reason"] for line in lines(caplog)] == [status]
    assert {record.name for record in caplog.records if record.levelno > logging.INFO} == {
        "tandem.audit"
    }
    assert CANARY not in caplog.text


async def test_each_refused_call_over_grpc_is_a_line(
    grpc_service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = {"text": CANARY}
    bad = inference_pb2.GenerateRequest(
        prompt=prompt, sampling={"temperature": 9}
    ).SerializeToString()
    unknown = inference_pb2.TokenizeRequest(model=CANARY, prompt=prompt).SerializeToString()
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        generate: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
        tokenize: Any = channel.unary_unary("/tandem.v1.Inference/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(bad).read()
        with pytest.raises(grpc.aio.AioRpcError):
            await tokenize(unknown)
    found = lines(caplog)
    assert [(line["api"], line["peer"], line["reason"]) for line in found] == [
        ("grpc", "127.0.0.1", "INVALID_ARGUMENT"),
        ("grpc", "127.0.0.1", "NOT_FOUND"),
    ]
    assert CANARY not in caplog.text


def test_a_flood_leaves_few_lines_and_says_how_many_are_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    audit = AuditLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(10_000):
            audit.refused("http", "10.0.0.1", "401", "one")
        assert len(lines(caplog)) == MAX_BURST
        now = 1.0
        audit.refused("http", "10.0.0.1", "401", "one")
    assert lines(caplog)[-1]["left_out"] == str(10_000 - int(MAX_BURST))
    assert lines(caplog)[-1]["key"] == "one"
