"""Serves the pages /metrics, /live and /ready of a router, for operators, on a port of their own.

The pages need no key and show nothing of a request.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ....proto.errors import TandemError
from ....proto.shared_result import SharedResult
from ..browsers import BrowserRules
from ..canonical import canonical
from .connection import ConnectionBounds
from .listener import HttpListener

_MAX_CONNECTIONS: Final = 64
_REQUEST_SECONDS: Final = 10.0  # for a whole request
_SHARE: Final = 0.25  # of the event loop's time that rendering of the metrics may take

_Page: TypeAlias = Callable[[Request], Awaitable[Response]]


class OpsServer:
    """Serves from `start` to `stop`.

    `reason` says why the router is not ready, "" if it is ready. `failure` says why the router is
    neither ready nor live for good, "" if it is live. `http_port` is the port of the router's HTTP
    API on this host, 0 if there is none; /live tells it to commands.
    """

    def __init__(
        self,
        metrics: Callable[[], bytes] | None,
        content_type: str,
        browsers: BrowserRules = BrowserRules(),
    ) -> None:
        """`metrics` renders the page /metrics; None: there is no such page.

        `browsers` keeps pages in browsers from reading the server by DNS rebinding.
        """
        self.reason = "starting"
        self.failure = ""
        self.http_port = 0
        self._has_started = False
        self._browsers = browsers
        pages: dict[str, _Page] = {"/live": self._live, "/ready": self._ready}
        if metrics is not None:
            pages["/metrics"] = _metrics_page(metrics, content_type)
        self._app = Starlette(routes=[Route(path, page) for path, page in pages.items()])
        self._app.router.redirect_slashes = False
        # A probe must get its answer even if strangers hold all connections: a router that does not
        # seem live is killed. So a new connection always ends an older one.
        bounds = ConnectionBounds(
            request_seconds=_REQUEST_SECONDS,
            max_connections=_MAX_CONNECTIONS,
            max_per_address=_MAX_CONNECTIONS,
            answers_give_way=True,
        )
        self._listener = HttpListener(self._checked, bounds)

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """Listens on HOST:PORT as HttpListener.start does."""
        bound = await self._listener.start(address, shares_port=shares_port)
        self._has_started = True
        return bound

    def yield_port(self) -> None:
        """Leaves new connections to the router that replaces this one, if it shares the port."""
        self._listener.yield_port()

    async def stop(self) -> None:
        """Stops at once, if it has started."""
        if self._has_started:
            await self._listener.stop(0)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._browsers.check(Headers(scope=scope))
        except TandemError as error:
            await JSONResponse({"error": error.message}, error.http_status)(scope, receive, send)
        else:
            await self._app(canonical(scope), receive, send)

    async def _live(self, _request: Request) -> Response:
        return _state(self.failure, http_port=self.http_port)

    async def _ready(self, _request: Request) -> Response:
        return _state(self.failure or self.reason)


def _metrics_page(metrics: Callable[[], bytes], content_type: str) -> _Page:
    async def render() -> bytes:
        return metrics()

    shared = SharedResult(render, share=_SHARE)

    async def answer(_request: Request) -> Response:
        return Response(await shared.get(), headers={"content-type": content_type})

    return answer


def _state(reason: str, **details: int) -> Response:
    return JSONResponse({"status": reason or "ok", **details}, 503 if reason else 200)
