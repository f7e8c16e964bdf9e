"""Tests the start and the stop of the HTTP server, and the work for clients that have gone."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tandem.router.api.server import listener
from tandem.router.api.server.connection import ConnectionBounds
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.http_bodies import TEXT, body, events
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT


async def test_a_taken_port_fails(service: Service, model: ServedModel) -> None:
    with pytest.raises(OSError, match="in use"):
        await HttpServer(GenerationService([model], FakeTokenSource())).start(service.http)


async def test_stop_lets_streams_end(model: ServedModel) -> None:
    server = HttpServer(GenerationService([model], FakeTokenSource(answer=b"hello")))
    async with httpx.AsyncClient(
        base_url=f"http://{await server.start('127.0.0.1:0')}", timeout=WAIT
    ) as http:
        async with http.stream("POST", TEXT, json=body(TEXT, stream=True)) as answer:
            stopping = asyncio.create_task(server.stop(WAIT))
            await answer.aread()
        assert events(answer)[-1] == "[DONE]"
        await asyncio.wait_for(stopping, WAIT)


async def test_connections_from_before_the_stop_are_still_answered(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server closed the connection at once, it would reset a request that is on its way."""
    monkeypatch.setattr(listener, "_FIRST_REQUEST_SECONDS", 6.0)
    server = HttpServer(GenerationService([model], FakeTokenSource(answer=b"hello")))
    host, _, port = (await server.start("127.0.0.1:0")).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stopping = asyncio.create_task(server.stop(WAIT))
    with suppress(ConnectionRefusedError):
        while True:
            (await asyncio.open_connection(host, int(port)))[1].close()
    await asyncio.sleep(0.5)  # the client's, in which the server would have ended
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), WAIT)).startswith(b"HTTP/1.1 ")
    writer.close()
    await asyncio.wait_for(stopping, 2 * WAIT)


async def test_stop_cancels_after_the_grace(model: ServedModel) -> None:
    source, stalled = FakeTokenSource(stall_after=1), body(TEXT, stream=True)
    server = HttpServer(GenerationService([model], source))
    address = await server.start("127.0.0.1:0")
    async with (
        httpx.AsyncClient(timeout=WAIT) as http,
        http.stream("POST", f"http://{address}{TEXT}", json=stalled) as answer,
    ):
        await asyncio.wait_for(server.stop(0.1), WAIT)
        assert source.running == 0
        with pytest.raises(httpx.RemoteProtocolError):  # cut, never a clean end
            await answer.aread()


@pytest.mark.parametrize(
    ("path", "said", "owner", "method"),
    [
        ("/score", {"text_1": "a", "text_2": "b"}, Tokenizer, "encode_all"),
        ("/rerank", {"query": "a", "documents": ["b"]}, Tokenizer, "encode_chat"),
        ("/tokenize", {"prompt": "a"}, Tokenizer, "encode"),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}, GenerationService, "unload_adapter"),
    ],
)
async def test_only_work_that_changes_something_goes_on_when_its_client_has_gone(
    model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    said: dict[str, Any],
    owner: type,
    method: str,
) -> None:
    began, goes_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    done = list[str]()
    original = getattr(owner, method)

    async def work(*args: Any, **options: Any) -> Any:
        if args[1] == ("yes", "no"):  # the answers, before the documents
            return await original(*args, **options)
        began.set()
        try:
            await goes_on.wait()
            done.append(method)
        finally:
            ended.set()

    monkeypatch.setattr(owner, method, work)
    bounds = ConnectionBounds()
    server = HttpServer(GenerationService([model], FakeTokenSource()), bounds=bounds)
    host, _, port = (await server.start("127.0.0.1:0")).rpartition(":")
    async with asyncio.timeout(WAIT):
        _, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(said).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        await began.wait()
        writer.close()
        if owner is Tokenizer:
            await ended.wait()
        while bounds.num_connections:
            await asyncio.sleep(0.01)
        for _ in range(10):  # what would be cancelled ends now
            await asyncio.sleep(0)
        goes_on.set()
        await ended.wait()
        await server.stop(0)
    assert done == ([] if owner is Tokenizer else [method])
