"""Clients where the environment names a proxy."""

import socket
from collections.abc import Iterator

import pytest

from tandem.router.client.client import AsyncClient, Client
from tandem.tests.router.conftest import Service
from tandem.tests.waits import WAIT

NAMES = ("grpc_proxy", "https_proxy", "http_proxy")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Listens as the proxy that the environment names for every host."""
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT)
        for name in NAMES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


async def test_loopback_is_reached_directly(grpc_service: Service, proxy: socket.socket) -> None:
    port = grpc_service.grpc.rpartition(":")[2]
    for address in (grpc_service.grpc, f"grpc://127.0.0.1:{port}", f"localhost:{port}"):
        async with AsyncClient(address, max_retries=0) as client:
            assert await client.health(timeout=WAIT)
    proxy.setblocking(False)
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_other_hosts_are_reached_by_the_proxy(proxy: socket.socket) -> None:
    """It connects by the host's name, which need not resolve here."""
    with Client("service.example:50051", max_retries=0) as client:
        stream = client.stream("hi", timeout=WAIT)
        with stream:
            connection, _ = proxy.accept()
            with connection:
                connection.settimeout(WAIT)
                assert connection.recv(4096).startswith(
                    b"CONNECT service.example:50051 HTTP/1.1\r\n"
                )


def test_a_service_of_ones_own_is_never_reached_by_the_proxy(proxy: socket.socket) -> None:
    with Client("0.0.0.0:1", max_retries=0, use_proxy=False) as client:
        assert not client.health(timeout=WAIT)
    proxy.setblocking(False)
    with pytest.raises(BlockingIOError):
        proxy.accept()
