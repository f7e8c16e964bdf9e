"""Serves what operators and their machines ask a router: /metrics, /live and /ready, on a port of
its own.

No key is needed, and nothing of a request is told. Knows nothing of what it serves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import uvicorn
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
from .connection import ConnectionBounds, HttpConnection
from .listener import HttpListener

_MAX_IDLE_SECONDS: Final = 60
_MAX_CONNECTIONS: Final = 64  # at a time; for a further one, one is ended, of whoever has the most
_REQUEST_SECONDS: Final = 10.0  # for a whole request
_SHARE: Final = 0.25  # of the event loop's time, that the figures may take, for whoever asks


class OpsServer:
    """Serves from `start` to `stop`. `reason` says why the router is not ready; "" when it is."""

    def __init__(
        self,
        metrics: Callable[[], bytes] | None,
        content_type: str,
        browsers: BrowserRules = BrowserRules(),
    ) -> None:
        """`metrics` renders the page /metrics; None: there is none. `browsers`: a page in one must
        not read it by DNS rebinding.
        """
        self.reason = "starting"
        self._has_started = False
        self.failure = ""  # for good: neither ready nor live
        self._metrics = SharedResult(partial(_render, metrics), share=_SHARE) if metrics else None
        self._content_type = content_type
        self._browsers = browsers
        pages = {"/live": self._live, "/ready": self._ready}
        if metrics is not None:
            pages["/metrics"] = self._scrape
        self._app = Starlette(
            routes=[Route(path, page, methods=["GET"]) for path, page in pages.items()]
        )
        self._app.router.redirect_slashes = False
        # Probes are answered whatever strangers open: who finds a router not live ends it.
        bounds = ConnectionBounds(
            request_seconds=_REQUEST_SECONDS,
            max_connections=_MAX_CONNECTIONS,
            max_per_address=_MAX_CONNECTIONS,
            answers_give_way=True,
        )
        config = uvicorn.Config(
            self._checked,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_MAX_IDLE_SECONDS,
            http=cast(Any, partial(HttpConnection, bounds=bounds)),
            ws="none",
        )
        self._listener = HttpListener(config)

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """See HttpListener.start."""
        bound = await self._listener.start(address, shares_port=shares_port)
        self._has_started = True
        return bound

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

    async def _scrape(self, _request: Request) -> Response:
        assert self._metrics is not None  # else there is no route
        return Response(await self._metrics.get(), headers={"content-type": self._content_type})

    async def _live(self, _request: Request) -> Response:
        """Answers as long as this process works."""
        return _state(self.failure)

    async def _ready(self, _request: Request) -> Response:
        """Answers 200 while the router takes requests."""
        return _state(self.failure or self.reason)


async def _render(metrics: Callable[[], bytes]) -> bytes:
    return metrics()


def _state(reason: str) -> Response:
    return JSONResponse({"status": reason or "ok"}, 503 if reason else 200)
