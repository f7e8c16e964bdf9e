"""Lets a call with a valid key through to the HTTP API, within the limits of the key, before its
body is read.
"""

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....proto.errors import TandemError
from ...auth.authenticator import Authenticator
from ..console.routes import DATA_PATH, STATIC_PATHS
from .connection import CONNECTION_STATE

_OPEN_PATHS: Final = STATIC_PATHS | {"/health"}  # for probes, and for pages that ask for a key
_POLLED_PATHS: Final = (DATA_PATH,)  # need a key, but do not count against its limits


class KeyGate:
    """Is an ASGI application around another, which finds the Caller as `request.state.caller`."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        error_response: Callable[[str, TandemError], Response],
    ) -> None:
        """`error_response`: of a path and an error."""
        self._app = app
        self._authenticator = authenticator
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        limits: dict[str, str] = {}
        with ExitStack() as call:
            try:
                state = scope.setdefault("state", {})
                connection = state.get(CONNECTION_STATE) or secrets.token_hex(16)
                host, port = scope.get("client") or ("", 0)
                authorization = _authorization(Headers(scope=scope))
                caller = self._authenticator.caller(authorization, connection, f"{host}:{port}")
                state["caller"] = caller
                if scope["path"] in _POLLED_PATHS:
                    caller.quota.poll()
                else:
                    limits = caller.quota.headers()
                    call.enter_context(caller.quota.call())
            except TandemError as error:
                response = self._error_response(scope["path"], error)
                response.headers.update(limits)
                await response(scope, receive, send)
                return

            async def send_with_limits(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(caller.quota.headers())
                await send(message)

            await self._app(scope, receive, send_with_limits if limits else send)


def _authorization(headers: Headers) -> str | None:
    """Returns what the call brings to be let in; Anthropic's clients send the key alone."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")
