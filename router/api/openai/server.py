"""Serves OpenAI's completions and chats, models, tokenization, health, and the OpenAPI document over HTTP."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar, cast

import uvicorn
from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....proto import inference_pb2
from ....proto.errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, TandemError, TooLarge, Unavailable
from ....proto.limits import MAX_MESSAGE_BYTES
from ....proto.parameters import ROWS
from ...auth.authenticator import Authenticator, Caller
from ...auth.tls import ServerTls
from ...frontend.long_texts import in_thread
from ...frontend.prepare import RequestContext, ServedModel
from ...frontend.validation import check_request_id
from ...telemetry.trace import TRACEPARENT, parse_traceparent
from ..audit import AuditLog, is_refusal
from ..browsers import BrowserRules, check_json
from ..connection import ConnectionBounds, HttpConnection
from ..console.feed import ConsoleFeed
from ..console.routes import console_endpoints
from ..listener import HttpListener
from ..service import GenerationService, tandem_errors_only
from .bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadLoraAdapterBody,
    TokenizeBody,
    UnloadLoraAdapterBody,
)
from .gate import KeyGate
from .openapi import (
    MAX_TIMEOUT_SECONDS,
    REQUEST_ID,
    REQUEST_TIMEOUT,
    command,
    document,
    generation,
    request_body,
    responses,
)
from .parsing import parse
from .refused_body import RefusedBody
from .requests import OpenAIRequest, parse_chat, parse_completion, parse_tokenize
from .responses import error_response, plain_error
from .resume import parse_resume
from .streaming import GenerationResponse

_T = TypeVar("_T")

_VERSION = version("tandem-llm")
_MAX_IDLE_SECONDS = 60  # a connection without a request
_MAX_BODY_SECONDS = 60
_THREAD_FROM_BYTES = 65_536
_THREAD_FROM_TOKENS = 4_096
_MAX_PATH = 80  # characters that an error repeats


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
        """`bounds`: of its connections; None: the default ones. Without an `authenticator` everyone is let in, without
        `tls` all is in plaintext, without a `console` that knows nothing of workers."""
        self._service = service
        self._console = console or ConsoleFeed(service.telemetry)
        self._serving = False
        self._started_at = int(time.time())
        # uvicorn's own configuration of logging would close the handlers of the whole process, and with Ray Serve's a
        # replica cannot answer a controller that restarts, which then stops it.
        audit, bounds = audit or AuditLog(), bounds or ConnectionBounds()
        config = uvicorn.Config(
            _Gate(KeyGate(self._app(), authenticator or Authenticator()), browsers, audit),
            lifespan="off",
            log_config=None,
            log_level="error",  # its warnings are of what clients send, as often as they like
            access_log=False,
            proxy_headers=False,  # X-Forwarded-For, by which a local client could give itself any address
            timeout_keep_alive=_MAX_IDLE_SECONDS,
            http=cast(Any, partial(HttpConnection, bounds=bounds, audit=audit)),
            ws="none",
        )
        self._listener = HttpListener(config, bounds, None if tls is None else tls.http_context)

    async def start(self, address: str, *, shares_port: bool = False) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port. With `shares_port` others
        may listen there, too, who say the same.

        Raises OSError if the port is taken."""
        return await self._listener.start(address, shares_port=shares_port)

    def set_serving(self, serving: bool) -> None:
        """Sets what /health answers."""
        self._serving = serving

    async def stop(self, grace: float) -> None:
        """Accepts no more requests; cancels those that still run after `grace` seconds."""
        self._serving = False
        await self._listener.stop(grace)

    def _app(self) -> FastAPI:
        app = FastAPI(redoc_url=None)
        app.openapi = lambda: document(app, _VERSION)  # type: ignore[method-assign]
        generates, reads = (400, 401, 404, 413, 429, 500, 503, 504), (400, 401, 404, 413, 429)
        completion, chat = generation(CompletionBody, "completion"), generation(ChatBody, "chat completion")
        tokenize, detokenize = request_body(TokenizeBody), request_body(DetokenizeBody)

        def add(path: str, endpoint: Callable[..., Any], found: dict[int | str, Any], body: Any = None) -> None:
            methods = ["GET"] if body is None else ["POST"]
            app.add_api_route(path, endpoint, methods=methods, responses=found | responses("", 403), openapi_extra=body)

        add("/health", self._health, responses("", 503))
        add("/version", self._version, responses("", 401, 429))
        add("/v1/models", self._models, responses("ModelList", 401, 429))
        add("/v1/models/{name:path}", self._model, responses("Model", 401, 404, 429))
        add("/v1/completions", self._complete, responses("", *generates), completion)
        add("/v1/chat/completions", self._chat, responses("", *generates), chat)
        add("/tokenize", self._tokenize, responses("TokenizeResponse", *reads), tokenize)
        add("/detokenize", self._detokenize, responses("DetokenizeResponse", *reads), detokenize)
        load, unload = command(LoadLoraAdapterBody), command(UnloadLoraAdapterBody)
        add("/v1/load_lora_adapter", self._load_adapter, responses("", 400, 401, 413, 429, 503, 504), load)
        add("/v1/unload_lora_adapter", self._unload_adapter, responses("", 400, 401, 404, 413, 429, 504), unload)
        for path, answer in console_endpoints(self._console).items():
            app.add_route(path, answer, include_in_schema=False)
        app.add_exception_handler(HTTPException, _not_found)
        return app

    async def _health(self) -> Response:
        """Returns whether the service answers requests now."""
        if self._serving:
            return JSONResponse({"status": "ok"})
        return error_response(Unavailable("the service is not ready"))

    async def _version(self) -> Response:
        """Returns the version of Tandem."""
        return JSONResponse({"version": _VERSION})

    async def _models(self) -> Response:
        """Returns the models that are served."""
        return JSONResponse({"object": "list", "data": list(map(self._card, self._service.models))})

    async def _model(self, name: str) -> Response:
        """Returns one of the models that are served."""
        for model in self._service.models:
            if model.name == name:
                return JSONResponse(self._card(model))
        return error_response(NotFound("no model of this name is served here"))

    def _card(self, model: ServedModel) -> dict[str, Any]:
        base = self._service.base_name if model.adapter else None
        names: dict[str, Any] = {"id": model.name, "object": "model", "owned_by": "tandem", "root": base or model.name}
        defaults = {ROWS[field].client_name: value for field, value in model.defaults.items()}
        names |= {"created": self._started_at, "max_model_len": model.context_tokens, "parent": base}
        return names | {"default_sampling_params": defaults}

    async def _complete(self, request: Request) -> Response:
        """Completes prompts."""
        return await _respond(request, partial(self._generate, parse_completion))

    async def _chat(self, request: Request) -> Response:
        """Answers a chat."""
        return await _respond(request, partial(self._generate, parse_chat))

    async def _tokenize(self, request: Request) -> Response:
        """Returns the token ids of a text or a chat."""
        return await _respond(request, self._token_ids)

    async def _detokenize(self, request: Request) -> Response:
        """Returns the text of token ids."""
        return await _respond(request, self._text)

    async def _load_adapter(self, request: Request) -> Response:
        """Answers with a LoRA adapter, too."""

        async def load(body: bytes, _request_id: str, context: RequestContext) -> Response:
            parsed = parse(LoadLoraAdapterBody, body)
            message = inference_pb2.LoadLoraAdapterRequest(lora_name=parsed.lora_name, lora_path=parsed.lora_path)
            await self._service.load_adapter(message, context.caller)
            return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' added successfully.")

        return await _respond(request, load)

    async def _unload_adapter(self, request: Request) -> Response:
        """Answers with a LoRA adapter no more."""

        async def unload(body: bytes, _request_id: str, context: RequestContext) -> Response:
            parsed = parse(UnloadLoraAdapterBody, body)
            message = inference_pb2.UnloadLoraAdapterRequest(lora_name=parsed.lora_name)
            await self._service.unload_adapter(message, context.caller)
            return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' removed successfully.")

        return await _respond(request, unload)

    async def _generate(
        self, parse_body: Callable[[bytes, str], OpenAIRequest], body: bytes, request_id: str, context: RequestContext
    ) -> Response:
        return GenerationResponse(self._service, await _off_loop(body, parse_body, request_id), context)

    async def _token_ids(self, body: bytes, _request_id: str, _context: RequestContext) -> Response:
        request, parsed = await _off_loop(body, parse_tokenize)
        ids = list((await self._service.tokenize(request)).token_ids)  # raises what is wrong with the request
        model = self._service.model(request.model)
        if parsed.prompt is not None and parsed.add_special_tokens is False:
            ids = await model.tokenizer.encode(parsed.prompt, add_special_tokens=False)

        def answer() -> bytes:
            found: dict[str, Any] = {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids}
            if parsed.return_token_strs:
                found["token_strs"] = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
            return json.dumps(found).encode()

        found = await in_thread(len(ids), answer) if len(ids) >= _THREAD_FROM_TOKENS else answer()
        return Response(found, media_type="application/json")

    async def _text(self, body: bytes, _request_id: str, _context: RequestContext) -> Response:
        parsed = await _off_loop(body, partial(parse, DetokenizeBody))
        request = inference_pb2.DetokenizeRequest(model=parsed.model or "", token_ids=parsed.tokens)
        return JSONResponse({"prompt": (await self._service.detokenize(request)).text})


class _Gate:
    """Refuses requests of pages that may not use the service, before they reach the app, and reports all that are
    refused."""

    def __init__(self, app: ASGIApp, browsers: BrowserRules, audit: AuditLog) -> None:
        self._browsers = browsers
        self._audit = audit
        self._app = app
        if browsers.cors_origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=browsers.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=(REQUEST_ID, "Retry-After"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def report(message: Message) -> None:
            status = message["status"] if message["type"] == "http.response.start" else 200
            if status >= 400:
                self._audit.failed("http", str(status))
            if is_refusal(status):
                caller = scope.get("state", {}).get("caller", Caller())  # of a key, if one was shown
                self._audit.refused("http", (scope["client"] or ("",))[0], str(status), caller.key_name)
            await send(message)

        try:
            self._browsers.check(Headers(scope=scope))
        except TandemError as error:
            response = error_response(error)
            response.headers["Connection"] = "close"  # the body is not read
            await response(scope, receive, report)
        else:
            await self._app(scope, receive, report)


async def _respond(request: Request, answer: Callable[[bytes, str, RequestContext], Awaitable[Response]]) -> Response:
    """Answers the request's body. Turns errors into OpenAI's responses; each response has the request's id."""
    arrived = time.monotonic()
    request_id = uuid.uuid4().hex
    response: Response
    try:
        with tandem_errors_only():
            check_request_id(request.headers.get(REQUEST_ID, ""))
            request_id = request.headers.get(REQUEST_ID) or request_id
            timeout = _timeout(request.headers.get(REQUEST_TIMEOUT))
            resume = parse_resume(request.headers)
            context = RequestContext(
                arrived=arrived,
                deadline=None if timeout is None else arrived + timeout,
                caller=request.state.caller,
                is_resumable=resume is not None,
                resume=resume or (),
                trace=parse_traceparent(request.headers.get(TRACEPARENT)),
            )
            body = await _read(request)
            check_json(request.headers)
            response = await answer(body, request_id, context)
    except TooLarge as error:
        response = RefusedBody(error_response(error))
    except TandemError as error:
        response = error_response(error)
    response.headers[REQUEST_ID] = request_id
    return response


def _timeout(header: str | None) -> float | None:
    """Parses the header; returns seconds. Raises InvalidArgument."""
    if header is None:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(header)) <= MAX_TIMEOUT_SECONDS:
            return seconds
    raise InvalidArgument(f"must be a number of seconds from above 0 to {MAX_TIMEOUT_SECONDS}", REQUEST_TIMEOUT)


async def _read(request: Request) -> bytes:
    """Reads the body. Raises TooLarge, before anything is read if its length is announced, DeadlineExceeded, or
    Cancelled if the client has disconnected."""
    body, announced = bytearray(), request.headers.get("content-length", "")
    has_room = not announced.isdecimal() or int(announced[:20]) <= MAX_MESSAGE_BYTES
    try:
        async with asyncio.timeout(_MAX_BODY_SECONDS):
            while has_room:
                async for part in request.stream():
                    body += part
                    has_room = len(body) <= MAX_MESSAGE_BYTES
                    if not has_room:
                        break
                else:
                    return bytes(body)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {_MAX_BODY_SECONDS} seconds") from None
    except ClientDisconnect:
        raise Cancelled("the client has disconnected") from None
    raise TooLarge(f"the body has more than {MAX_MESSAGE_BYTES} bytes")


async def _off_loop(body: bytes, parse_body: Callable[..., _T], *args: Any) -> _T:
    """Parses a body; off the event loop where that takes more than some milliseconds."""
    if len(body) < _THREAD_FROM_BYTES:
        return parse_body(body, *args)
    return await asyncio.to_thread(parse_body, body, *args)


async def _not_found(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method in OpenAI's form."""
    if not isinstance(error, HTTPException):
        raise error
    path, text = repr(request.url.path)[1:-1][:_MAX_PATH], error.detail
    if error.status_code == 404:
        text = f"{path}: there is no such path here; OpenAI's begin with /v1, and /docs lists all"
    elif error.status_code == 405:
        text = f"{path}: does not take {request.method[:16]}"
    body = plain_error(error.status_code, text, None, error.detail.lower().replace(" ", "_"))
    return JSONResponse(body, error.status_code, error.headers)
