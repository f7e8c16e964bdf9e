"""`tandem status` and `tandem drain` of a service that has been replaced: its old URL goes on to
do.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.client import fetch_status
from tandem.cluster.cli.main import app
from tandem.cluster.serve.identity_file import kept_identity
from tandem.proto.errors import NotFound, Unavailable
from tandem.tests.peers import IDENTITY


class Proxy(ThreadingHTTPServer):
    """Answers as the HTTP proxy of Ray Serve does: each application under its route, and the list
    of routes.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.routes: dict[str, str] = {}
        self.pages: dict[str, object] = {}
        self.root = f"http://127.0.0.1:{self.server_port}"

    def deploy(self, *names: str) -> None:
        """Has these applications, and no others."""
        self.routes = {f"/{name}": name for name in names}
        self.pages = {
            f"/{name}": {"service": name, "model": "m", "routers": [], "workers": []}
            for name in names
        }


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        found = self.server.routes if self.path == "/-/routes" else self.server.pages.get(self.path)
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("asked", ["a", "a/", "a.2", "a.9"])
@pytest.mark.parametrize("deployed", [("a.10",), ("a.11", "a.10"), ("ab.2", "a.10", "a-b", "b")])
def test_the_page_of_a_replaced_service_is_that_of_its_successor(
    proxy: Proxy, asked: str, deployed: tuple[str, ...]
) -> None:
    proxy.deploy(*deployed)
    url, page = fetch_status(f"{proxy.root}/{asked}")
    assert (url, page["service"]) == (f"{proxy.root}/a.10", "a.10")


def test_the_named_page_is_taken_while_it_is_there(proxy: Proxy) -> None:
    proxy.deploy("a", "a.2")
    assert [fetch_status(f"{proxy.root}/{name}")[1]["service"] for name in ("a", "a.2")] == [
        "a",
        "a.2",
    ]


def test_a_deployment_that_has_just_gone_is_passed_over(proxy: Proxy) -> None:
    proxy.deploy("a.2", "a.3")
    del proxy.pages["/a.2"]
    assert fetch_status(f"{proxy.root}/a")[0] == f"{proxy.root}/a.3"


@pytest.mark.parametrize("routes", [None, 7, [], ["/b"], {"/b": "b"}])
def test_a_service_that_is_not_there_is_one_line(proxy: Proxy, routes: object) -> None:
    proxy.pages["/-/routes"] = routes
    proxy.routes = routes  # type: ignore[assignment]
    with pytest.raises(Unavailable, match=f"^no service answers at {proxy.root}/a: Not Found$"):
        fetch_status(f"{proxy.root}/a")


def test_status_and_drain_take_the_old_url(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity that `tandem drain` needs is that of the deployment which is there."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    proxy.deploy("a.2")
    old = f"{proxy.root}/a"
    assert CliRunner().invoke(app, ["status", "--url", old]).stdout.startswith("a.2: m")
    worker = {"id": "w", "address": "127.0.0.1:1"}
    proxy.pages["/a.2"] = {"workers": [worker]}
    missing = CliRunner().invoke(app, ["drain", "all", "--url", old])
    assert isinstance(missing.exception, NotFound)
    with kept_identity(IDENTITY, f"{proxy.root}/a.2"):
        drained = CliRunner().invoke(app, ["drain", "all", "--url", old, "--timeout", "0"])
    assert drained.stdout == "w: no answer\n"
