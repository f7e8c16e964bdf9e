"""The HTTP front door: OpenAI's completions and chat completions, /v1/models and /health."""

import asyncio
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ..proto.errors import DeadlineExceeded, TandemError, TooLarge, Unavailable
from ..proto.limits import MAX_MESSAGE_BYTES
from .completion import Completions, tandem_errors_only
from .http_answer import Answer
from .http_reply import error_response, plain_error
from .http_schema import Job, chat_job, completion_job
from .prepare import check_request_id

_REQUEST_ID = "x-request-id"
_MAX_IDLE_SECONDS = 60  # a connection without a request
_MAX_BODY_SECONDS = 60
_MAX_DROPPED_BYTES = 16 * MAX_MESSAGE_BYTES


class HttpDoor:
    """An HTTP server over Completions. Lives from `start` to `stop`, in the running event loop."""

    def __init__(self, completions: Completions) -> None:
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
        app = FastAPI(openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_exception_handler(HTTPException, _no_such_path)
        return app

    async def _health(self) -> Response:
        if self._serving:
            return JSONResponse({"status": "ok"})
        return error_response(Unavailable("the service is not ready"))

    async def _models(self) -> Response:
        data = [
            {
                "id": model.name,
                "object": "model",
                "created": self._started_at,
                "owned_by": "tandem",
                "max_model_len": model.context_tokens,
            }
            for model in self._completions.models
        ]
        return JSONResponse({"object": "list", "data": data})

    async def _complete(self, request: Request) -> Response:
        return await self._reply(request, completion_job)

    async def _chat(self, request: Request) -> Response:
        return await self._reply(request, chat_job)

    async def _reply(self, request: Request, translate: Callable[[bytes, str], Job]) -> Response:
        arrived = time.monotonic()
        request_id = uuid.uuid4().hex
        response: Response
        try:
            check_request_id(request.headers.get(_REQUEST_ID, ""))
            request_id = request.headers.get(_REQUEST_ID) or request_id
            body = await _read(request)
            with tandem_errors_only():
                response = Answer(self._completions, translate(body, request_id), request_id, arrived)
        except TandemError as error:
            response = error_response(error)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it
        response.headers[_REQUEST_ID] = request_id
        return response


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


async def _read(request: Request) -> bytes:
    """The body. Raises TooLarge if it is, and ClientDisconnect."""
    body, size = bytearray(), 0
    # A connection that is closed with bytes unread loses the answer on its way, so what is too much is read and
    # dropped, within reason.
    with suppress(TimeoutError):
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
    if size > MAX_MESSAGE_BYTES:
        raise TooLarge(f"the body has more than {MAX_MESSAGE_BYTES} bytes")
    raise DeadlineExceeded(f"the body did not arrive within {_MAX_BODY_SECONDS} seconds")


async def _no_such_path(_request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's form."""
    if not isinstance(error, HTTPException):
        raise error
    body = plain_error(error.status_code, error.detail, None, error.detail.lower().replace(" ", "_"))
    return JSONResponse(body, error.status_code, error.headers)
