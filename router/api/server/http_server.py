"""Serves the HTTP APIs, the console, and the OpenAPI document that describes the APIs."""

import json
import time
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ....proto.errors import NotFound, TandemError, Unavailable
from ....proto.limits import KEEPALIVE_SECONDS
from ....proto.parameters import ROWS
from ...auth.authenticator import Authenticator
from ...auth.tls import ServerTls
from ...frontend.served_model import ServedModel
from ..anthropic.answers import ANTHROPIC_FORM, anthropic_plain_error
from ..browsers import BrowserRules
from ..console.feed import ConsoleFeed
from ..console.routes import console_endpoints
from ..openai.answers import OPENAI_FORM, error_response, plain_error
from ..openai.openapi import MODEL_NAME, Operation, document, ok
from ..openai.parsing import http_field
from ..openai.respond import respond, respond_without_body
from ..openai.writers import AnswerForm
from ..service import GenerationService
from .audit import AuditLog
from .connection import ConnectionBounds
from .gate import browser_gate, key_gate
from .http_operations import ANTHROPIC_PATH, POSTS, STORING_PATHS
from .listener import HttpListener
from .stored_operations import STORED

_VERSION: Final = version("tandem-llm")
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
        keepalive_seconds: float | None = KEEPALIVE_SECONDS,
    ) -> None:
        """`bounds`: of its connections; None: the default ones.

        A stream that has sent no bytes for `keepalive_seconds` sends a keep-alive; None: never.

        Without an `authenticator`, the server needs no key; without `tls`, it serves plaintext;
        without a `console`, its page shows no workers.
        """
        self._service = service
        self._keepalive_seconds = keepalive_seconds
        self._console = console or ConsoleFeed(service.telemetry)
        self._serving = False
        self._has_served = False  # was ready at least once
        self._started_at = int(time.time())
        audit = audit or AuditLog()
        app = key_gate(self._app(), authenticator or Authenticator(), _refusal)
        app = browser_gate(app, browsers, audit, _refusal)
        self._listener = HttpListener(app, bounds, audit, tls.http_context if tls else None)

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """Listens on HOST:PORT as HttpListener.start does."""
        return await self._listener.start(address, shares_port=shares_port)

    def set_serving(self, serving: bool) -> None:
        """Sets the answer of /health.

        Some clients wait for /v1/models instead, which answers once `serving` has been True.
        """
        self._serving = serving
        self._has_served |= serving

    async def stop(self, grace: float) -> None:
        """Accepts no more requests; cancels requests that still run after `grace` seconds."""
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
            Route(
                path.replace("}", ":path}"),  # a name may have slashes
                partial(respond_without_body, answer=endpoint),
            )
            for path, (_, endpoint) in gets.items()
        ]
        for path, (_, answer) in POSTS.items():
            endpoint = partial(
                respond,
                answer=partial(answer, self._service),
                form=_form(path),
                outlives_client=path in STORING_PATHS,
                keepalive_seconds=self._keepalive_seconds,
            )
            routes.append(Route(path, endpoint, methods=["POST"]))
        for path, operation, stored in STORED:
            routes.append(Route(path, partial(stored, self._service), methods=[operation.method]))
        for path, page in console_endpoints(self._console).items():
            routes.append(Route(path, page))

        @cache
        def content() -> bytes:
            operations = [(path, operation) for path, (operation, _) in (gets | POSTS).items()]
            operations += [(path, operation) for path, operation, _ in STORED]
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
        return {
            "id": model.name,
            "object": "model",
            "owned_by": "tandem",
            "root": self._service.model(base or model.name).name,
            "created": self._started_at,
            "max_model_len": model.context_tokens,
            "parent": base,
            "default_sampling_params": {
                ROWS[field].client_name: value for field, value in model.defaults.items()
            },
            "default_chat_template_kwargs": model.tokenizer.chat_template_kwargs,
        }


def _not_ready() -> JSONResponse:
    return error_response(Unavailable("the service is not ready"))


def _refusal(path: str, error: TandemError) -> JSONResponse:
    """Returns the response to a request that is refused before its body is parsed."""
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
