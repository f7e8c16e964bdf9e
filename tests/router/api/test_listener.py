"""Tests listeners that share a port, like those of a router and of its successor."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tandem.router.api.server.listener import HttpListener
from tandem.tests.waits import WAIT


def listener(name: bytes) -> HttpListener:
    """Returns a listener whose app answers with its name."""

    async def app(
        scope: Any, receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        headers = [(b"connection", b"close"), (b"content-length", b"%d" % len(name))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": name})

    return HttpListener(app)


async def ask(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(WAIT):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        reply = await reader.read()
    writer.close()
    return reply.splitlines()[-1]


@pytest.mark.parametrize("num_earlier", [0, 1])
async def test_new_connections_go_to_the_listener_that_stays(num_earlier: int) -> None:
    first = listener(b"first")
    address = await first.start("127.0.0.1:0", shares_port=True)
    for _ in range(num_earlier):  # a redeployment before
        second = listener(b"second")
        await second.start(address, shares_port=True)
        await first.stop(0)
        first = second
    last = listener(b"last")
    await last.start(address, shares_port=True)
    stopping = asyncio.create_task(first.stop(0.2))
    await asyncio.sleep(0)  # it begins
    answers = [await ask(address) for _ in range(50)]
    await stopping
    assert {*answers, await ask(address)} == {b"last"}
    await last.stop(0)


async def test_a_listener_that_yields_its_port_has_it_while_it_is_alone() -> None:
    first, last = listener(b"first"), listener(b"last")
    address = await first.start("127.0.0.1:0", shares_port=True)
    assert first.yield_port()
    assert await ask(address) == b"first"
    await last.start(address, shares_port=True)
    assert {await ask(address) for _ in range(50)} == {b"last"}
    await last.stop(0)
    assert await ask(address) == b"first"
    await first.stop(0)


async def test_a_listener_that_is_alone_answers_until_it_is_closed() -> None:
    only = listener(b"only")
    address = await only.start("127.0.0.1:0", shares_port=True)
    stopping = asyncio.create_task(only.stop(0.2))
    await asyncio.sleep(0)
    assert await ask(address) == b"only"
    await stopping
    with pytest.raises(ConnectionRefusedError):
        await ask(address)
