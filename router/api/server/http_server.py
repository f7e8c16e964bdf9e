"""Serves completions, chats, models, tokenization, health, and the OpenAPI document over HTTP."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....proto import inference_pb2
from ....proto.errors import NotFound, TandemError, Unavailable
from ....proto.parameters import ROWS
from ...auth.authenticator import Authenticator, Caller
from ...auth.tls import ServerTls
from ...frontend.fair_threads import COPYING
from ...frontend.prepare import RequestContext, ServedModel
from ..anthropic.answers import ANTHROPIC_FORM, anthropic_plain_error
from ..anthropic.bodies import CountTokensBody, MessagesBody
from ..anthropic.requests import parse_count_tokens, parse_messages
from ..browsers import BrowserRules
from ..canonical import canonical
from ..console.feed import ConsoleFeed
from ..console.routes import console_endpoints
from ..openai.answers import error_response, plain_error
from ..openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadLoraAdapterBody,
    TokenizeBody,
    UnloadLoraAdapterBody,
)
from ..openai.embeddings import (
    EMBEDDINGS_FORM,
    SCORE_FORM,
    EmbeddingsBody,
    ScoreBody,
    make_score_request,
    parse_embeddings,
)
from ..openai.openapi import (
    MAX_TOKENS,
    REQUEST_ID,
    command,
    document,
    generation,
    request_body,
    responses,
)
from ..openai.parsing import http_field, json_list, parse
from ..openai.requests import ParsedRequest, parse_chat, parse_completion, parse_tokenize
from ..openai.respond import off_loop, respond
from ..openai.streaming import OPENAI_FORM, AnswerForm, GenerationResponse
from ..responses.answers import RESPONSES_FORM
from ..responses.bodies import ResponsesBody
from ..responses.requests import parse_responses
from ..service import GenerationService
from .audit import AuditLog, is_refusal
from .connection import ConnectionBounds, HttpConnection
from .gate import KeyGate
from .listener import HttpListener

_VERSION: Final = version("tandem-llm")
_MAX_IDLE_SECONDS: Final = 60  # a connection without a request
_MAX_PATH: Final = 80  # characters that an error repeats
_BODIES: Final = (
    *(
        CompletionBody,
        ChatBody,
        TokenizeBody,
        DetokenizeBody,
        LoadLoraAdapterBody,
        UnloadLoraAdapterBody,
    ),
    *(MessagesBody, CountTokensBody, ResponsesBody, EmbeddingsBody, ScoreBody),
)
_ANTHROPIC_PATH: Final = "/v1/messages"
"""Its errors, and those of the paths below it, have Anthropic's form."""


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

    def _app(self) -> FastAPI:
        app = FastAPI(redoc_url=None, redirect_slashes=False)
        app.openapi = lambda: document(app, _VERSION, _BODIES)  # type: ignore[method-assign]
        generates, reads = (
            (400, 401, 404, 413, 415, 429, 500, 503, 504),
            (400, 401, 404, 413, 415, 429),
        )
        completion, chat = (
            generation(CompletionBody, "completion"),
            generation(ChatBody, "chat completion"),
        )
        message = generation(MessagesBody, "message", ("id", "content", "stop_reason", "usage"))
        response = generation(ResponsesBody, "response", ("id", "output", "status", "usage"))
        tokenize, detokenize = request_body(TokenizeBody), request_body(DetokenizeBody)

        def add(
            path: str, endpoint: Callable[..., Any], found: dict[int | str, Any], body: Any = None
        ) -> None:
            methods = ["GET"] if body is None else ["POST"]
            refused = responses(
                "", 403, form="AnthropicError" if path.startswith(_ANTHROPIC_PATH) else "Error"
            )
            app.add_api_route(
                path, endpoint, methods=methods, responses=found | refused, openapi_extra=body
            )

        add("/health", self._health, responses("", 503))
        add("/version", self._version, responses("", 401, 429))
        add("/v1/models", self._models, responses("ModelList", 401, 429, 503))
        add("/v1/models/{name:path}", self._model, responses("Model", 401, 404, 429, 503))
        add("/v1/completions", self._complete, responses("", *generates), completion)
        add("/v1/chat/completions", self._chat, responses("", *generates), chat)
        add("/v1/responses", self._respond, responses("", *generates), response)
        add(
            _ANTHROPIC_PATH,
            self._message,
            responses("", *generates, form="AnthropicError"),
            message,
        )
        counted = responses("TokenCount", *reads, form="AnthropicError")
        add(
            f"{_ANTHROPIC_PATH}/count_tokens",
            self._count_tokens,
            counted,
            request_body(CountTokensBody),
        )
        embeddings = generation(EmbeddingsBody, "list of embeddings", ("data", "model", "usage"))
        add("/v1/embeddings", self._embed, responses("", *generates), embeddings)
        scores = generation(ScoreBody, "list of scores", ("id", "data", "usage"))
        for path in ("/score", "/v1/score"):
            add(path, self._score, responses("", *generates), scores)
        add("/tokenize", self._tokenize, responses("TokenizeResponse", *reads), tokenize)
        add("/detokenize", self._detokenize, responses("DetokenizeResponse", *reads), detokenize)
        load, unload = command(LoadLoraAdapterBody), command(UnloadLoraAdapterBody)
        add(
            "/v1/load_lora_adapter",
            self._load_adapter,
            responses("", 400, 401, 413, 415, 429, 503, 504),
            load,
        )
        add(
            "/v1/unload_lora_adapter",
            self._unload_adapter,
            responses("", 400, 401, 404, 413, 415, 429, 504),
            unload,
        )
        for path, answer in console_endpoints(self._console).items():
            app.add_route(path, answer, include_in_schema=False)
        app.add_exception_handler(HTTPException, _not_found)
        return app

    async def _health(self) -> Response:
        """Returns whether the service answers requests now."""
        if self._serving:
            return JSONResponse({"status": "ok"})
        return _not_ready()

    async def _version(self) -> Response:
        """Returns the version of Tandem."""
        return JSONResponse({"version": _VERSION})

    async def _models(self) -> Response:
        """Returns the models that are served."""
        if not self._has_served:
            return _not_ready()
        return JSONResponse({"object": "list", "data": list(map(self._card, self._service.models))})

    async def _model(self, name: str) -> Response:
        """Returns one of the models that are served."""
        if not self._has_served:
            return _not_ready()
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

    async def _complete(self, request: Request) -> Response:
        """Completes prompts."""
        return await respond(request, partial(self._generate, parse_completion))

    async def _chat(self, request: Request) -> Response:
        """Answers a chat."""
        return await respond(request, partial(self._generate, parse_chat))

    async def _respond(self, request: Request) -> Response:
        """Answers a request of OpenAI's Responses API."""
        return await respond(request, partial(self._generate, parse_responses, form=RESPONSES_FORM))

    async def _message(self, request: Request) -> Response:
        """Answers a request of Anthropic's Messages API."""
        return await respond(
            request, partial(self._generate, parse_messages, form=ANTHROPIC_FORM), ANTHROPIC_FORM
        )

    async def _count_tokens(self, request: Request) -> Response:
        """Returns the number of tokens that the prompt of a message has."""
        return await respond(request, self._token_count, ANTHROPIC_FORM)

    async def _embed(self, request: Request) -> Response:
        """Returns the embeddings of texts."""
        return await respond(
            request, partial(self._generate, parse_embeddings, form=EMBEDDINGS_FORM)
        )

    async def _score(self, request: Request) -> Response:
        """Returns how likely texts are after others: log probabilities."""
        return await respond(request, self._scores)

    async def _tokenize(self, request: Request) -> Response:
        """Returns the token ids of a text or a chat."""
        return await respond(request, self._token_ids)

    async def _detokenize(self, request: Request) -> Response:
        """Returns the text of token ids."""
        return await respond(request, self._text)

    async def _load_adapter(self, request: Request) -> Response:
        """Answers with a LoRA adapter, too."""

        async def load(body: bytes, _request_id: str, context: RequestContext) -> Response:
            parsed = await off_loop(context.caller.turn, body, partial(parse, LoadLoraAdapterBody))
            message = inference_pb2.LoadLoraAdapterRequest(
                lora_name=parsed.lora_name, lora_path=parsed.lora_path
            )
            await self._service.load_adapter(message, context.caller)
            return PlainTextResponse(
                f"Success: LoRA adapter '{parsed.lora_name}' added successfully."
            )

        return await respond(request, load)

    async def _unload_adapter(self, request: Request) -> Response:
        """Answers with a LoRA adapter no more."""

        async def unload(body: bytes, _request_id: str, context: RequestContext) -> Response:
            parsed = await off_loop(
                context.caller.turn, body, partial(parse, UnloadLoraAdapterBody)
            )
            message = inference_pb2.UnloadLoraAdapterRequest(lora_name=parsed.lora_name)
            await self._service.unload_adapter(message, context.caller)
            return PlainTextResponse(
                f"Success: LoRA adapter '{parsed.lora_name}' removed successfully."
            )

        return await respond(request, unload)

    async def _generate(
        self,
        parse_body: Callable[[bytes, str], ParsedRequest],
        body: bytes,
        request_id: str,
        context: RequestContext,
        form: AnswerForm = OPENAI_FORM,
    ) -> Response:
        parsed = await off_loop(context.caller.turn, body, parse_body, request_id)
        return GenerationResponse(self._service, parsed, context, form)

    async def _scores(self, body: bytes, request_id: str, context: RequestContext) -> Response:
        parsed = await off_loop(context.caller.turn, body, partial(parse, ScoreBody))
        model = self._service.model(parsed.model or "")
        request = await make_score_request(parsed, model, request_id, context.caller)
        return GenerationResponse(self._service, request, context, SCORE_FORM)

    async def _token_count(
        self, body: bytes, _request_id: str, context: RequestContext
    ) -> Response:
        parsed = await off_loop(context.caller.turn, body, parse_count_tokens)
        request = inference_pb2.TokenizeRequest(model=parsed.common.model, prompt=parsed.prompts[0])
        try:
            ids = await self._service.encode(request, context.caller, context.deadline)
            return JSONResponse({"input_tokens": len(ids)})
        except TandemError as error:
            return ANTHROPIC_FORM.error_response(error, parsed.field)

    async def _token_ids(self, body: bytes, _request_id: str, context: RequestContext) -> Response:
        caller = context.caller
        request, parsed = await off_loop(caller.turn, body, parse_tokenize)
        adds = parsed.prompt is None or parsed.add_special_tokens is not False
        ids = await self._service.encode(request, caller, context.deadline, add_special_tokens=adds)
        model = self._service.model(request.model)

        def answer() -> bytes:
            head = {"count": len(ids), "max_model_len": model.context_tokens}
            text = f'{json.dumps(head)[:-1]}, "tokens": {json_list(ids)}'
            if parsed.return_token_strs:
                strings = [
                    model.tokenizer.token_bytes(token).decode(errors="replace") for token in ids
                ]
                text += f', "token_strs": {json_list(strings)}'
            return f"{text}}}".encode()

        body = await COPYING.run(caller.turn, len(ids), answer)
        return Response(body, media_type="application/json")

    async def _text(self, body: bytes, _request_id: str, context: RequestContext) -> Response:
        parsed = await off_loop(context.caller.turn, body, partial(parse, DetokenizeBody))
        request = inference_pb2.DetokenizeRequest(model=parsed.model or "", token_ids=parsed.tokens)
        answer = await self._service.detokenize(request, context.caller, context.deadline)
        return JSONResponse({"prompt": answer.text})


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
    form = ANTHROPIC_FORM if path.startswith(_ANTHROPIC_PATH) else OPENAI_FORM
    return form.error_response(error, http_field)


async def _not_found(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method in the form of the API that it would belong to."""
    if not isinstance(error, HTTPException):
        raise error
    path, text, headers = (
        repr(request.url.path)[1:-1][:_MAX_PATH],
        error.detail,
        dict(error.headers or {}),
    )
    if error.status_code == 404:
        text = f"{path}: there is no such path here; OpenAI's begin with /v1, and /docs lists all"
    elif error.status_code == 405:
        text = f"{path}: does not take {request.method[:16]}"
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"
    if request.url.path.startswith(_ANTHROPIC_PATH):
        body = anthropic_plain_error(error.status_code, text)
    else:
        body = plain_error(error.status_code, text, None, error.detail.lower().replace(" ", "_"))
    return JSONResponse(body, error.status_code, headers)
