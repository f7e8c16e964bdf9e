"""The HTTP front door: OpenAI's completions and chats, models, tokenization, health, and the OpenAPI document."""

import asyncio
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ....proto.errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, TandemError, TooLarge, Unavailable
from ....proto.limits import MAX_MESSAGE_BYTES
from ...frontend.prepare import ServedModel, check_request_id
from ...request import tenant_of
from ..service import GenerationService, tandem_errors_only
from .bodies import ChatBody, ChatTokenizeBody, CompletionBody, DetokenizeBody, TextTokenizeBody
from .openapi import (
    MAX_TIMEOUT_SECONDS,
    REQUEST_ID,
    REQUEST_TIMEOUT,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    document,
    error_responses,
    generation,
    request_body,
)
from .requests import ParsedBody, chat_job, completion_job, detokenize_request, tokenize_request
from .responses import error_response, plain_error
from .streaming import Caller, GenerationResponse

_T = TypeVar("_T")

_VERSION = version("tandem-llm")
_MAX_IDLE_SECONDS = 60  # a connection without a request
_MAX_BODY_SECONDS = 60
_THREAD_FROM_BYTES = 65_536
_MAX_DROPPED_BYTES = 16 * MAX_MESSAGE_BYTES


class HttpServer:
    """An HTTP server over Completions. Lives from `start` to `stop`, in the running event loop."""

    def __init__(self, completions: GenerationService) -> None:
        self._completions = completions
        self._serving = False
        self._started_at = int(time.time())
        config = uvicorn.Config(
            self._app(), lifespan="off", log_level="warning", access_log=False, timeout_keep_alive=_MAX_IDLE_SECONDS
        )
        self._server = _Server(config)

    async def start(self, address: str) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port.

        Raises OSError if the port is taken."""
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, int(port)), backlog=2_048)
        # asyncio does this for its own listeners only; without it each event of a stream waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]), name="http door")
        await self._server.ready.wait()
        return f"{host}:{listener.getsockname()[1]}"

    def set_serving(self, serving: bool) -> None:
        """What /health answers."""
        self._serving = serving

    async def stop(self, grace: float) -> None:
        """Takes no more requests; cancels those that still run after `grace` seconds."""
        self._serving = False
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._running
        cut = self._server.server_state.tasks
        if cut:
            await asyncio.wait(cut)

    def _app(self) -> FastAPI:
        app = FastAPI(redoc_url=None)
        app.openapi = lambda: document(app, _VERSION)  # type: ignore[method-assign]
        generates, reads = error_responses(400, 404, 413, 429, 500, 503, 504), error_responses(400, 404, 413)
        get: dict[str, Any] = {"methods": ["GET"]}
        post: dict[str, Any] = {"methods": ["POST"]}
        app.add_api_route("/health", self._health, **get, responses=error_responses(503))
        app.add_api_route("/version", self._version, **get)
        app.add_api_route("/v1/models", self._models, **get, response_model=ModelList)
        app.add_api_route(
            "/v1/models/{name:path}", self._model, **get, response_model=ModelCard, responses=error_responses(404)
        )
        app.add_api_route(
            "/v1/completions",
            self._complete,
            **post,
            responses=generates,
            openapi_extra=generation(CompletionBody, "completion"),
        )
        app.add_api_route(
            "/v1/chat/completions",
            self._chat,
            **post,
            responses=generates,
            openapi_extra=generation(ChatBody, "chat completion"),
        )
        app.add_api_route(
            "/tokenize",
            self._tokenize,
            **post,
            response_model=TokenizeResponse,
            responses=reads,
            openapi_extra=request_body(TextTokenizeBody, ChatTokenizeBody),
        )
        app.add_api_route(
            "/detokenize",
            self._detokenize,
            **post,
            response_model=DetokenizeResponse,
            responses=reads,
            openapi_extra=request_body(DetokenizeBody),
        )
        app.add_exception_handler(HTTPException, _no_such_path)
        return app

    async def _health(self) -> Response:
        """Whether the service answers requests now."""
        if self._serving:
            return JSONResponse({"status": "ok"})
        return error_response(Unavailable("the service is not ready"))

    async def _version(self) -> Response:
        """The version of Tandem."""
        return JSONResponse({"version": _VERSION})

    async def _models(self) -> Response:
        """The models that are served."""
        cards = [self._card(model) for model in self._completions.models]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, name: str) -> Response:
        """One of the models that are served."""
        for model in self._completions.models:
            if model.name == name:
                return JSONResponse(self._card(model))
        return error_response(NotFound("no model of this name is served here"))

    def _card(self, model: ServedModel) -> dict[str, Any]:
        card = ModelCard(
            id=model.name,
            created=self._started_at,
            owned_by="tandem",
            root=model.name,
            max_model_len=model.context_tokens,
        )
        return card.model_dump()

    async def _complete(self, request: Request) -> Response:
        """Completes prompts."""
        return await _guarded(request, lambda caller: self._generate(request, caller, completion_job))

    async def _chat(self, request: Request) -> Response:
        """Answers a chat."""
        return await _guarded(request, lambda caller: self._generate(request, caller, chat_job))

    async def _generate(self, request: Request, caller: Caller, job: Callable[[bytes, str], ParsedBody]) -> Response:
        body = await _read(request)
        return GenerationResponse(
            self._completions, await _translated(body, lambda: job(body, caller.request_id)), caller
        )

    async def _tokenize(self, request: Request) -> Response:
        """The token ids of a text or a chat."""

        async def answer(_: Caller) -> Response:
            content = await _read(request)
            wanted, body = await _translated(content, lambda: tokenize_request(content))
            ids = list((await self._completions.tokenize(wanted)).token_ids)  # finds what is wrong, too
            model = next(each for each in self._completions.models if wanted.model in ("", each.name))
            if isinstance(body, TextTokenizeBody) and not body.add_special_tokens:
                ids = await model.tokenizer.encode(body.prompt, add_special_tokens=False)
            found: dict[str, Any] = {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids}
            if body.return_token_strs:
                found["token_strs"] = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
            return JSONResponse(found)

        return await _guarded(request, answer)

    async def _detokenize(self, request: Request) -> Response:
        """The text of token ids."""

        async def answer(_: Caller) -> Response:
            content = await _read(request)
            wanted = await _translated(content, lambda: detokenize_request(content))
            return JSONResponse({"prompt": (await self._completions.detokenize(wanted)).text})

        return await _guarded(request, answer)


class _Server(uvicorn.Server):
    """Leaves the process's signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _guarded(request: Request, answer: Callable[[Caller], Awaitable[Response]]) -> Response:
    """Answers; an error becomes a response in OpenAI's form, and each response has the request's id."""
    arrived = time.monotonic()
    request_id = uuid.uuid4().hex
    response: Response
    try:
        with tandem_errors_only():
            check_request_id(request.headers.get(REQUEST_ID, ""))
            request_id = request.headers.get(REQUEST_ID) or request_id
            timeout = _timeout(request.headers.get(REQUEST_TIMEOUT))
            caller = Caller(
                request_id=request_id,
                arrived=arrived,
                deadline=None if timeout is None else arrived + timeout,
                tenant=tenant_of(request.headers.get("authorization")),
            )
            response = await answer(caller)
    except TandemError as error:
        response = error_response(error)
    response.headers[REQUEST_ID] = request_id
    return response


def _timeout(header: str | None) -> float | None:
    """Seconds. Raises InvalidArgument."""
    if header is None:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(header)) <= MAX_TIMEOUT_SECONDS:
            return seconds
    raise InvalidArgument(f"must be a number of seconds from above 0 to {MAX_TIMEOUT_SECONDS}", REQUEST_TIMEOUT)


async def _read(request: Request) -> bytes:
    """The body. Raises TooLarge, DeadlineExceeded, or Cancelled if the client has gone."""
    body, size = bytearray(), 0
    # A connection that is closed with bytes unread loses the answer on its way, so what is too much is read and
    # dropped, within reason.
    try:
        async with asyncio.timeout(_MAX_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_MESSAGE_BYTES:
                    body += part
                elif size > _MAX_DROPPED_BYTES:
                    break
            else:
                if size <= MAX_MESSAGE_BYTES:
                    return bytes(body)
    except TimeoutError:
        pass
    except ClientDisconnect:
        raise Cancelled("the client has gone") from None
    if size > MAX_MESSAGE_BYTES:
        raise TooLarge(f"the body has more than {MAX_MESSAGE_BYTES} bytes")
    raise DeadlineExceeded(f"the body did not arrive within {_MAX_BODY_SECONDS} seconds")


async def _translated(body: bytes, translate: Callable[[], _T]) -> _T:
    """What `translate` makes of `body`; off the event loop where that takes more than some milliseconds."""
    return translate() if len(body) < _THREAD_FROM_BYTES else await asyncio.to_thread(translate)


async def _no_such_path(_request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's form."""
    if not isinstance(error, HTTPException):
        raise error
    body = plain_error(error.status_code, error.detail, None, error.detail.lower().replace(" ", "_"))
    return JSONResponse(body, error.status_code, error.headers)
