"""Tests the start and the stop of the HTTP server."""

import asyncio
from contextlib import suppress

import httpx
import pytest

from tandem.router.api.server import listener
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.prepare import ServedModel
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
