"""Serves status pages as the HTTP proxy of Ray Serve does, for tests of commands."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tandem.tests.waits import WAIT


class Proxy(ThreadingHTTPServer):
    """Answers as the HTTP proxy of Ray Serve does: each application under its route, and the list
    of routes.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.routes: dict[str, str] = {}
        self.pages: dict[str, object] = {}
        self.redirects: dict[str, str] = {}
        self.keys: dict[str, str | None] = {}  # the last Authorization of each path
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
        self.server.keys[self.path] = self.headers.get("Authorization")
        if self.path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        found = self.server.routes if self.path == "/-/routes" else self.server.pages.get(self.path)
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serving_proxy() -> Iterator[Proxy]:
    """Runs a Proxy on a free port of this machine."""
    with Proxy() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join(WAIT)
