"""Serves the HTTP APIs, the console, and the OpenAPI document that describes the APIs."""

import json
import time
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any, Final, cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....proto.errors import NotFound, TandemError, Unavailable
from ....proto.parameters import ROWS
from ...auth.authenticator import Authenticator, Caller
from ...auth.tls import ServerTls
from ...frontend.prepare import ServedModel
from ..anthropic.answers import ANTHROPIC_FORM, anthropic_plain_error
from ..browsers import BrowserRules
from ..canonical import canonical
from ..console.feed import ConsoleFeed
from ..console.routes import console_endpoints
from ..openai.answers import error_response, plain_error
from ..openai.openapi import MAX_TOKENS, MODEL_NAME, REQUEST_ID, Operation, document, ok
from ..openai.parsing import http_field
from ..openai.respond import respond
from ..openai.streaming import OPENAI_FORM, AnswerForm
from ..service import GenerationService
from .audit import AuditLog, is_refusal
from .connection import ConnectionBounds, HttpConnection
from .gate import KeyGate
from .http_operations import ANTHROPIC_PATH, POSTS
from .listener import HttpListener

_VERSION: Final = version("tandem-llm")
_MAX_IDLE_SECONDS: Final = 60  # a connection without a request
_MAX_PATH: Final = 80  # characters that an error repeats


class HttpServer:
    """Serves a GenerationService over HTTP from `start` to `stop`, in the running event loop."""

    def __init__(
        self,
        service: GenerationService,
        browsers: BrowserRules = BrowserRules(),
        audit: AuditLog | None = None,
        bounds: ConnectionBounds | None = None,
        authenticator: Authenticator | None = None,
        tls: ServerTls | None = None,
        console: ConsoleFeed | None = None,
    ) -> None:
        """`bounds`: of its connections; None: the default ones. Without an `authenticator` everyone
        is let in, without `tls` all is in plaintext, without a `console` that knows nothing of
        workers.
        """
        self._service = service
        self._console = console or ConsoleFeed(service.telemetry)
        self._serving = False
        self._has_served = False  # was ready at least once
        self._started_at = int(time.time())
        # uvicorn's own configuration of logging would close the handlers of the whole process, and
        # with Ray Serve's a replica cannot answer a controller that restarts, which then stops it.
        audit, bounds = audit or AuditLog(), bounds or ConnectionBounds()
        config = uvicorn.Config(
            _Gate(
                KeyGate(self._app(), authenticator or Authenticator(), _refusal), browsers, audit
            ),
            lifespan="off",
            log_config=None,
            log_level="error",  # its warnings are of what clients send, as often as they like
            access_log=False,
            # X-Forwarded-For, by which a local client could give itself any address
            proxy_headers=False,
            timeout_keep_alive=_MAX_IDLE_SECONDS,
            http=cast(Any, partial(HttpConnection, bounds=bounds, audit=audit)),
            ws="none",
        )
        self._listener = HttpListener(config, bounds, None if tls is None else tls.http_context)

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port. With
        `shares_port` others may listen there, too, who say the same.

        Raises OSError if the port is taken.
        """
        return await self._listener.start(address, shares_port=shares_port)

    def set_serving(self, serving: bool) -> None:
        """Sets what /health answers. /v1/models, which clients wait for as well, is answered from
        the first time on.
        """
        self._serving = serving
        self._has_served |= serving

    async def stop(self, grace: float) -> None:
        """Accepts no more requests; cancels those that still run after `grace` seconds."""
        self._serving = False
        await self._listener.stop(grace)

    def _app(self) -> Starlette:
        gets = {
            "/health": (
                Operation("Tells if the service is ready.", ok(), (403, 503)),
                self._health,
            ),
            "/version": (
                Operation("Returns the version of Tandem.", ok(), (401, 403, 429)),
                self._version,
            ),
            "/v1/models": (
                Operation("Lists the models.", ok("ModelList"), (401, 403, 429, 503)),
                self._models,
            ),
            "/v1/models/{name}": (
                Operation(
                    "Returns one model.",
                    ok("Model"),
                    (401, 403, 404, 429, 503),
                    parameters=[MODEL_NAME],
                ),
                self._model,
            ),
        }
        routes = [
            Route(path.replace("}", ":path}"), endpoint)  # a name may have slashes
            for path, (_, endpoint) in gets.items()
        ]
        for path, (_, answer) in POSTS.items():
            endpoint = partial(respond, answer=partial(answer, self._service), form=_form(path))
            routes.append(Route(path, endpoint, methods=["POST"]))
        for path, endpoint in console_endpoints(self._console).items():
            routes.append(Route(path, endpoint))

        @cache
        def content() -> bytes:
            operations = {path: operation for path, (operation, _) in (gets | POSTS).items()}
            return json.dumps(document(_VERSION, operations)).encode()

        async def describe(_request: Request) -> Response:
            return Response(content(), media_type="application/json")

        routes.append(Route("/openapi.json", describe))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
        app.router.redirect_slashes = False
        return app

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if self._serving else _not_ready()

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": _VERSION})

    async def _models(self, _request: Request) -> Response:
        if not self._has_served:
            return _not_ready()
        return JSONResponse({"object": "list", "data": list(map(self._card, self._service.models))})

    async def _model(self, request: Request) -> Response:
        if not self._has_served:
            return _not_ready()
        name = request.path_params["name"]
        try:
            return JSONResponse(self._card(replace(self._service.model(name), name=name)))
        except TandemError:
            return error_response(NotFound("no model of this name is served here"))

    def _card(self, model: ServedModel) -> dict[str, Any]:
        base = self._service.base_name if model.adapter else None
        root = self._service.model(base or model.name).name
        names: dict[str, Any] = {
            "id": model.name,
            "object": "model",
            "owned_by": "tandem",
            "root": root,
        }
        defaults = {ROWS[field].client_name: value for field, value in model.defaults.items()}
        names |= {
            "created": self._started_at,
            "max_model_len": model.context_tokens,
            "parent": base,
        }
        return names | {"default_sampling_params": defaults}


class _Gate:
    """Refuses requests of pages that may not use the service, before they reach the app, and
    reports all that are refused.
    """

    def __init__(self, app: ASGIApp, browsers: BrowserRules, audit: AuditLog) -> None:
        self._browsers = browsers
        self._audit = audit
        self._app = app
        if browsers.cors_origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=browsers.cors_origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=(REQUEST_ID, MAX_TOKENS, "Retry-After"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def report(message: Message) -> None:
            status = message["status"] if message["type"] == "http.response.start" else 200
            if status >= 400:
                self._audit.failed("http", str(status))
            if is_refusal(status):
                caller = scope.get("state", {}).get(
                    "caller", Caller()
                )  # of a key, if one was shown
                self._audit.refused(
                    "http", (scope["client"] or ("",))[0], str(status), caller.key_name
                )
            await send(message)

        scope = canonical(scope)
        try:
            self._browsers.check(Headers(scope=scope))
        except TandemError as error:
            response = _refusal(scope["path"], error)
            response.headers["Connection"] = "close"  # the body is not read
            await response(scope, receive, report)
        else:
            await self._app(scope, receive, report)


def _not_ready() -> JSONResponse:
    return error_response(Unavailable("the service is not ready"))


def _refusal(path: str, error: TandemError) -> JSONResponse:
    """Returns the response to a request that is refused before it is parsed."""
    return _form(path).error_response(error, http_field)


def _form(path: str) -> AnswerForm:
    return ANTHROPIC_FORM if path.startswith(ANTHROPIC_PATH) else OPENAI_FORM


async def _not_found(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method in the form of the API to which the path would belong."""
    assert isinstance(error, HTTPException)
    path = repr(request.url.path)[1:-1][:_MAX_PATH]
    text = error.detail
    headers = dict(error.headers or {})
    if error.status_code == 404:
        text = (
            f"{path}: there is no such path here; the paths of OpenAI's API begin with /v1, and "
            "/openapi.json lists all"
        )
    elif error.status_code == 405:
        text = f"{path}: does not take {request.method[:16]}"
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    if _form(request.url.path) is ANTHROPIC_FORM:
        body = anthropic_plain_error(error.status_code, text)
    else:
        body = plain_error(error.status_code, text, None, error.detail.lower().replace(" ", "_"))
    return JSONResponse(body, error.status_code, headers)
