"""Admits requests to the HTTP API before their bodies are read: by their host, origin and key."""

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....proto.errors import TandemError
from ...auth.authenticator import Authenticator, Caller
from ..browsers import BrowserRules
from ..canonical import canonical
from ..console.routes import DATA_PATH, STATIC_PATHS
from ..openai.openapi import LEFT_OUT, MAX_TOKENS, REQUEST_ID
from .audit import AuditLog, is_refusal
from .connection import CONNECTION_STATE

_OPEN_PATHS: Final = STATIC_PATHS | {"/health"}  # for probes, and for pages that ask for a key

ErrorResponse = Callable[[str, TandemError], Response]
"""Makes the response of a path to an error."""


def browser_gate(
    app: ASGIApp, browsers: BrowserRules, audit: AuditLog, error_response: ErrorResponse
) -> ASGIApp:
    """Refuses requests of pages that may not use the service, and reports all refused requests."""
    inner = app
    if browsers.cors_origins:
        inner = CORSMiddleware(
            app,
            allow_origins=browsers.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=(REQUEST_ID, MAX_TOKENS, LEFT_OUT, "Retry-After"),
        )

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        async def report(message: Message) -> None:
            status = message["status"] if message["type"] == "http.response.start" else 200
            if status >= 400:
                audit.failed("http", str(status))
            if is_refusal(status):
                caller = scope.get("state", {}).get("caller", Caller())  # set once a key is valid
                host = (scope["client"] or ("",))[0]
                audit.refused("http", host, str(status), caller.key_name)
            await send(message)

        scope = canonical(scope)
        try:
            browsers.check(Headers(scope=scope))
        except TandemError as error:
            response = error_response(scope["path"], error)
            response.headers["Connection"] = "close"  # the body is not read
            await response(scope, receive, report)
        else:
            await inner(scope, receive, report)

    return gate


def key_gate(app: ASGIApp, authenticator: Authenticator, error_response: ErrorResponse) -> ASGIApp:
    """Admits calls with a valid key, within the limits of the key.

    The app finds the Caller as `request.state.caller`.
    """

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await app(scope, receive, send)
            return
        limits: dict[str, str] = {}
        with ExitStack() as call:
            try:
                caller = _authenticate(scope, authenticator)
                if scope["path"] == DATA_PATH:  # a poll does not count against the limits
                    caller.quota.poll()
                else:
                    limits = caller.quota.headers()
                    call.enter_context(caller.quota.call())
            except TandemError as error:
                response = error_response(scope["path"], error)
                response.headers.update(limits)
                await response(scope, receive, send)
                return

            async def send_with_limits(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(caller.quota.headers())
                await send(message)

            await app(scope, receive, send_with_limits if limits else send)

    return gate


def _authenticate(scope: Scope, authenticator: Authenticator) -> Caller:
    """Returns the caller and keeps it in the request's state. Raises Unauthenticated."""
    state = scope.setdefault("state", {})
    connection = state.get(CONNECTION_STATE) or secrets.token_hex(16)
    host, port = scope.get("client") or ("", 0)
    caller = authenticator.caller(
        _authorization(Headers(scope=scope)), connection, f"{host}:{port}"
    )
    state["caller"] = caller
    return caller


def _authorization(headers: Headers) -> str | None:
    """Returns the Authorization header; Anthropic's clients send the key as `x-api-key` instead."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")
