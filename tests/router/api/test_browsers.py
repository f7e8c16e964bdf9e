"""Tests the requests that a web page can send to a service on its machine or in its network."""

import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from tandem.proto.errors import PermissionDenied
from tandem.router.api.browsers import BrowserRules, own_names
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT

PAGE = "https://chat.example.com"
FOREIGN = "https://evil.example"


@pytest.fixture
async def opened(model: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    """Serves under one host name and accepts one origin."""
    rules = BrowserRules(host_names=("models.example.com",), cors_origins=(PAGE,))
    server = HttpServer(GenerationService([model], FakeTokenSource()), rules)
    async with httpx.AsyncClient(
        base_url=f"http://{await server.start('127.0.0.1:0')}", timeout=WAIT
    ) as client:
        yield client
    await server.stop(0)


def check(host: str | None, origin: str | None = None, **rules: Any) -> None:
    given = {"host": host, "origin": origin}
    BrowserRules(**rules).check(
        Headers({name: value for name, value in given.items() if value is not None})
    )


@pytest.mark.parametrize("name", ["box", "box.corp.example"])
@pytest.mark.parametrize("bound", ["0.0.0.0", "10.1.2.3", "[::]", "models.example.com"])
def test_a_server_on_a_network_has_the_names_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, name: str, bound: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    for host in (bound, name, "box", "Box.local:8080"):
        check(host, host_names=own_names(bound))
    for host in ("box.evil.example", "other", "other.local", "corp.example"):
        with pytest.raises(PermissionDenied, match="--host-name"):
            check(host, host_names=own_names(bound))


@pytest.mark.parametrize("bound", ["127.0.0.1", "[::1]", "localhost"])
def test_a_server_on_loopback_has_only_the_name_that_it_binds(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    assert own_names(bound) == (bound,)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "127.0.0.1:8080",
            "localhost",
            "LOCALHOST:8080",
            "[::1]",
            "[::1]:8080",
            "10.1.2.3:80",
        ),
        *("0.0.0.0:8080", "models.example.com", "Models.Example.com:8080", "[fe80::1]:1", None),
    ],
)
def test_hosts_that_are_taken(host: str | None) -> None:
    check(host, host_names=("models.example.com",))


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            ":8080",
            "*",
        ),
        *(
            "models.example.com.evil.example",
            "xmodels.example.com",
            "localhost:8080:8080",
            "evil@localhost",
            "[::1",
        ),
    ],
)
def test_hosts_that_are_refused(host: str) -> None:
    with pytest.raises(PermissionDenied, match="Host"):
        check(host, host_names=("models.example.com",))
    check(host, host_names=("*",))


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8080", "https://127.0.0.1:8080", PAGE, None])
def test_origins_that_are_taken(origin: str | None) -> None:
    check("127.0.0.1:8080", origin, cors_origins=(PAGE,))


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "null",
            "",
            FOREIGN,
            "http://127.0.0.1",
            "http://127.0.0.1:3000",
            "http://localhost:8080",
            f"{PAGE}:444",
        ),
        *(f"{PAGE}.evil.example", "http://chat.example.com", "file://", "*"),
    ],
)
def test_origins_that_are_refused(origin: str) -> None:
    with pytest.raises(PermissionDenied, match="Origin"):
        check("127.0.0.1:8080", origin, cors_origins=(PAGE,))
    check("127.0.0.1:8080", origin, cors_origins=("*",))


def test_a_second_host_cannot_hide_the_first() -> None:
    with pytest.raises(PermissionDenied):
        BrowserRules().check(Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")]))


@pytest.mark.parametrize(
    "path", [TEXT, CHAT, "/tokenize", "/v1/models", "/openapi.json", "/nothing"]
)
async def test_dns_rebinding_reads_and_runs_nothing(
    service: Service, http: httpx.AsyncClient, path: str
) -> None:
    host = {"host": f"evil.example:{service.http.rpartition(':')[2]}"}
    for answer in (
        await http.get(path, headers=host),
        await http.post(path, headers=host, json=body(path)),
    ):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "permission_denied"
    assert service.source.requests == []


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_csrf_without_preflight_runs_nothing(
    service: Service, http: httpx.AsyncClient, path: str, content_type: str
) -> None:
    """Uses a form or a Blob, also of a browser that sends no Origin."""
    content = json.dumps(body(path))
    declared = {"content-type": content_type} if content_type else {}
    answer = await http.post(path, content=content, headers=declared)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Type")
    answer = await http.post(path, content=content, headers=declared | {"origin": FOREIGN})
    assert answer.status_code == 403
    assert service.source.requests == []


async def test_csrf_with_preflight_runs_nothing(service: Service, http: httpx.AsyncClient) -> None:
    wanted = {"origin": FOREIGN, "access-control-request-method": "POST"}
    answer = await http.options(
        TEXT, headers=wanted | {"access-control-request-headers": "content-type"}
    )
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]
    answer = await http.post(TEXT, json=body(TEXT), headers={"origin": FOREIGN})
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert service.source.requests == []


async def test_the_service_s_own_page_may_use_it(http: httpx.AsyncClient) -> None:
    answer = await http.post(TEXT, json=body(TEXT), headers={"origin": str(http.base_url)})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


async def test_a_page_that_is_allowed(opened: httpx.AsyncClient) -> None:
    wanted = {"origin": PAGE, "access-control-request-method": "POST"}
    names = "authorization, content-type, x-stainless-lang"
    preflight = await opened.options(
        CHAT, headers=wanted | {"access-control-request-headers": names}
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-headers"] == names
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert (
        "access-control-allow-credentials" not in preflight.headers
    )  # keys are in headers, never in cookies
    for name in ("models.example.com", "127.0.0.1"):
        answer = await opened.post(CHAT, json=body(CHAT), headers={"origin": PAGE, "host": name})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    refused = await opened.post(CHAT, json={}, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, PAGE)


async def test_other_pages_stay_refused(opened: httpx.AsyncClient) -> None:
    wanted = {"origin": FOREIGN, "access-control-request-method": "POST"}
    assert (await opened.options(CHAT, headers=wanted)).status_code == 403
    assert (
        await opened.post(CHAT, json=body(CHAT), headers={"origin": FOREIGN})
    ).status_code == 403
