"""Tests that strangers cannot misuse the ops port, which needs no key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from tandem.router.api.server.ops_server import OpsServer
from tandem.tests.router.api.test_connections import connected
from tandem.tests.waits import WAIT


class Figures:
    num_rendered = 0

    def render(self) -> bytes:
        self.num_rendered += 1
        return b"tandem_ready 1\n"


@pytest.fixture
def figures() -> Figures:
    return Figures()


@pytest.fixture
async def address(figures: Figures) -> AsyncIterator[str]:
    server = OpsServer(figures.render, "text/plain")
    bound = await server.start("127.0.0.1:0")
    async with asyncio.timeout(WAIT):
        yield bound
    await server.stop()


@pytest.mark.parametrize(
    "said", [b"", b"GET /live HTTP/1.1\r\n", b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
async def test_connections_of_a_stranger_keep_no_probe_out(address: str, said: bytes) -> None:
    """Kubernetes ends a router whose /live does not answer."""
    async with AsyncExitStack() as scope:
        for _ in range(100):
            _, writer = await scope.enter_async_context(connected(address))
            writer.write(said)
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
            for path, status in (("/live", 200), ("/ready", 503), ("/metrics", 200)):
                assert (await http.get(path)).status_code == status


async def test_requests_that_are_not_answered_yet_keep_no_probe_out(address: str) -> None:
    """All of 64 connections may wait for the metrics at the same time."""
    async with AsyncExitStack() as scope:
        for _ in range(100):
            _, writer = await scope.enter_async_context(connected(address))
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        for _ in range(8):
            async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
                assert (await http.get("/live")).status_code == 200


@pytest.mark.parametrize("path", ["/live", "/ready", "/metrics"])
async def test_head_and_a_slash_at_the_end_of_a_path(address: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
        answer = await http.get(path)
        assert ((await http.get(f"{path}/")).status_code, answer.text) == (
            answer.status_code,
            answer.text,
        )
        head = await http.head(path)
        assert (head.status_code, head.content) == (answer.status_code, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]


async def test_concurrent_scrapes_share_one_rendering(address: str, figures: Figures) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
        await asyncio.gather(*(http.get("/live") for _ in range(32)))  # has the connections open
        answers = await asyncio.gather(*(http.get("/metrics") for _ in range(32)))
    assert {answer.text for answer in answers} == {"tandem_ready 1\n"}
    assert figures.num_rendered < 32
