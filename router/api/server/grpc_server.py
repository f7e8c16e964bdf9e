"""Serves tandem.v1.Inference, grpc.health.v1 and optionally reflection over gRPC.

One file because all services share one server with its bounds, deadlines and end.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from operator import methodcaller
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection as reflection_service

from ....proto import inference_pb2
from ....proto.addresses import network_of
from ....proto.errors import (
    DeadlineExceeded,
    InvalidArgument,
    Overloaded,
    TandemError,
    Unauthenticated,
)
from ....proto.limits import (
    MAX_HEALTH_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MAX_STREAMS_PER_CONNECTION,
    MAX_UNREAD_HEALTH_CHECKS,
)
from ....proto.strangers import StrangerSweep
from ...auth.authenticator import Authenticator, Caller
from ...auth.tls import ServerTls
from ...frontend.fair_threads import PARSING
from ...frontend.prepare import RequestContext
from ...telemetry.trace import TRACEPARENT, parse_traceparent
from ..large_messages import parse_message
from ..service import GenerationService, tandem_errors_only
from .audit import AuditLog, is_refusal
from .connection import ConnectionBounds
from .health import HealthStatus
from .stall import StallTimer

SERVICE = "tandem.v1.Inference"
TIMELINE_KEY = "tandem-timeline-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
DETAILS_KEY = "grpc-status-details-bin"
AUTHORIZATION_KEY = "authorization"
_HEALTH = f"/{health.SERVICE_NAME}/"

_CONCURRENT = "concurrent calls, the maximum (router.max_connections_per_address)"
_UNREAD = "health checks without their message, the maximum"

_PROMPT_LOGPROBS_PER_MESSAGE = 2_048  # 1 MB if each has 20 alternatives

_Context = grpc.aio.ServicerContext[bytes, Any]
_M = TypeVar("_M", bound=Message)
_serialize: Callable[[Message], bytes] = methodcaller("SerializeToString")

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The blocks of a client whose machine has failed are freed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # After an hour, the streams of a connection have another hour to end.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
]


class GrpcServer:
    """Serves a GenerationService over gRPC from `start` to `stop`, in one event loop."""

    def __init__(
        self,
        service: GenerationService,
        *,
        reflection: bool,
        compression: grpc.Compression = grpc.Compression.NoCompression,
        audit: AuditLog | None = None,
        bounds: ConnectionBounds | None = None,
        authenticator: Authenticator | None = None,
        tls: ServerTls | None = None,
        shares_port: bool = False,
    ) -> None:
        """`compression`: of responses, to clients that accept it; `bounds`: None: the default ones.

        Requests may use any compression of gRPC; their size is the size of the unpacked message.
        Without an `authenticator`, the server needs no key; without `tls`, it serves plaintext.
        Unless `shares_port`, a second server on the port fails instead of receiving half of the
        requests.
        """
        self._service = service
        self._audit = audit or AuditLog()
        self._bounds = bounds or ConnectionBounds()
        self._sweep = StrangerSweep(self._bounds.max_connections)
        self._calls: Counter[str] = Counter()  # running, by address
        self._health_calls: Counter[str] = Counter()
        self._unread_health: Counter[str] = Counter()  # whose message has not arrived in full
        self._tls = tls
        self._health = HealthStatus(("", SERVICE))
        self._authenticator = authenticator or Authenticator()
        self._server = grpc.aio.server(
            interceptors=[_KeyInterceptor(self._authenticator, self._audit)],
            options=[
                *_OPTIONS,
                # gRPC does not report connections to Python. So the bound by address counts calls,
                # and gRPC refuses new connections above a maximum of all.
                ("grpc.max_allowed_incoming_connections", self._sweep.max_connections),
                ("grpc.server_handshake_timeout_ms", round(1_000 * self._bounds.head_seconds)),
                ("grpc.max_connection_idle_ms", round(1_000 * self._bounds.idle_seconds)),
                ("grpc.so_reuseport", shares_port),
            ],
            compression=compression,
        )
        self._server.add_generic_rpc_handlers((self._handlers(), self._health_handlers()))
        if reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection_service.SERVICE_NAME)
            reflection_service.enable_server_reflection(names, self._server)

    async def start(self, address: str) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port.

        Raises RuntimeError if the port is taken.
        """
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError:
            await self._server.stop(0)
            raise
        await self._server.start()
        self._sweep.ports.add(port)
        self._sweep.start()
        return f"{address.rpartition(':')[0]}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """Sets the status in grpc.health.v1, for the server and for the service."""
        self._health.set(serving)

    async def stop(self, grace: float) -> None:
        """Accepts no more requests; cancels requests that still run after `grace` seconds."""
        self._health.end()
        await self._server.stop(grace)
        self._sweep.stop()

    def _handlers(self) -> grpc.GenericRpcHandler:
        # No deserializer: for bytes that are no message, grpc answers UNKNOWN, our parser
        # INVALID_ARGUMENT. All methods take streams of messages: for a single message grpc waits
        # without a limit, before it calls any code of ours.
        service = self._service
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.stream_stream_rpc_method_handler(self._generate, None, _serialize),
                "Detokenize": self._unary(inference_pb2.DetokenizeRequest, service.detokenize),
                "Tokenize": self._unary(inference_pb2.TokenizeRequest, service.tokenize),
                "DetectWatermark": self._unary(
                    inference_pb2.DetectWatermarkRequest, service.detect_watermark
                ),
                "ListModels": self._unary(inference_pb2.ListModelsRequest, service.list_models),
                "LoadLoraAdapter": self._unary(
                    inference_pb2.LoadLoraAdapterRequest, service.load_adapter
                ),
                "UnloadLoraAdapter": self._unary(
                    inference_pb2.UnloadLoraAdapterRequest, service.unload_adapter
                ),
            },
        )

    def _health_handlers(self) -> grpc.GenericRpcHandler:
        """Makes the handlers of grpc.health.v1, which need no key.

        They have their own count of calls by address, so that probes get an answer even if other
        calls of the address reach the limit.
        """

        @asynccontextmanager
        async def received(context: _Context) -> AsyncIterator[str]:
            """Yields the name of the service that the message asks for."""
            try:
                with _counted(self._health_calls, context, self._bounds.max_per_address):
                    with _counted(self._unread_health, context, MAX_UNREAD_HEALTH_CHECKS, _UNREAD):
                        request = await self._read(
                            health_pb2.HealthCheckRequest, context, most=MAX_HEALTH_BYTES
                        )
                    yield request.service
            except TandemError as error:
                await _abort(context, error, self._audit)

        async def check(_messages: object, context: _Context) -> Message:
            async with received(context) as service:
                answer: Message = self._health.check(service)
            return answer

        async def watch(_messages: object, context: _Context) -> None:
            async def write(answer: Message) -> None:
                with StallTimer(self._bounds.stall_seconds) as writes:
                    writes.begin()
                    await context.write(answer)

            async with received(context) as service:
                await self._health.watch(service, write)

        handlers: dict[str, Any] = {
            "Check": grpc.stream_unary_rpc_method_handler(check, None, _serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, None, _serialize),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    async def _generate(self, _messages: object, context: _Context) -> None:
        timeline = inference_pb2.Timeline()
        try:
            with tandem_errors_only(), self._call(context) as caller:
                message = await self._read(
                    inference_pb2.GenerateRequest, context, caller.fairness_id
                )
                arrived = time.monotonic()
                remaining = context.time_remaining()
                trace = _metadata_value(context.invocation_metadata(), TRACEPARENT)
                request = await self._service.accept(
                    message,
                    RequestContext(
                        arrived=arrived,
                        deadline=None if remaining is None else arrived + remaining,
                        caller=caller,
                        is_resumable=True,
                        trace=parse_traceparent(trace),
                    ),
                )
                # grpc cancels this task when the client leaves. The scope then closes the generator
                # at once.
                with StallTimer(self._bounds.stall_seconds) as writes:
                    async with aclosing(self._service.run(request, timeline)) as answers:
                        async for answer in answers:
                            for part in _split_prompt_logprobs(answer):
                                writes.begin()
                                await context.write(part)
                                writes.end()
        except TandemError as error:
            await _abort(context, error, self._audit, self._key_name(context), timeline)
        context.set_trailing_metadata(_timeline_metadata(timeline))

    def _unary(
        self, kind: type[_M], method: Callable[[_M, Caller], Awaitable[Message]]
    ) -> "grpc.RpcMethodHandler[Any, Message]":
        """Makes the handler of an RPC with one request of this kind and one response."""

        async def respond(_messages: object, context: _Context) -> Message:
            try:
                with tandem_errors_only(), self._call(context) as caller:
                    return await method(await self._read(kind, context, caller.fairness_id), caller)
            except TandemError as error:
                await _abort(context, error, self._audit, self._key_name(context))

        return grpc.stream_unary_rpc_method_handler(respond, None, _serialize)

    @contextmanager
    def _call(self, context: _Context) -> Iterator[Caller]:
        """Counts a call for its address and its key until it ends; yields the caller.

        Begins before the message is read. Raises Unauthenticated, or Overloaded above a limit.
        """
        with _counted(self._calls, context, self._bounds.max_per_address):
            caller = self._caller(context)
            self._sweep.admit(context.peer())
            with caller.quota.call():
                yield caller

    async def _read(
        self,
        kind: type[_M],
        context: _Context,
        fairness_id: str = "",
        most: int = MAX_MESSAGE_BYTES,
    ) -> _M:
        """Reads the message of a call, which has at most `most` bytes.

        Raises InvalidArgument or DeadlineExceeded.
        """
        seconds = self._bounds.request_seconds
        try:
            async with asyncio.timeout(seconds):
                body: Any = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the message did not arrive within {seconds:g} seconds"
            ) from None
        if body is grpc.aio.EOF:
            raise InvalidArgument("the call has no message")
        if len(body) > most:
            raise InvalidArgument(f"the message has {len(body)} bytes; the maximum is {most}")
        return await PARSING.run(fairness_id, len(body), parse_message, kind, body)

    def _caller(self, context: _Context) -> Caller:
        # gRPC names connections only by address and port, which belong to another client later. So
        # each call counts as a connection.
        authorization = _authorization(context.invocation_metadata())
        return self._authenticator.caller(authorization, secrets.token_hex(16), context.peer())

    def _key_name(self, context: _Context) -> str:
        with suppress(Unauthenticated):  # the key may have expired since
            return self._caller(context).key_name
        return ""


class _KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key before their body is read. Health checks need none."""

    def __init__(self, authenticator: Authenticator, audit: AuditLog) -> None:
        self._authenticator = authenticator
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if not handler_call_details.method.startswith(_HEALTH):
            try:
                self._authenticator.caller(
                    _authorization(handler_call_details.invocation_metadata), ""
                )
            except Unauthenticated as error:
                return _refusal(error, self._audit)
        return await continuation(handler_call_details)


@contextmanager
def _counted(
    calls: Counter[str], context: _Context, most: int, what: str = _CONCURRENT
) -> Iterator[None]:
    """Counts a call for its address in this context. Raises Overloaded above `most` calls.

    `what`: the calls and their bound, for the error.
    """
    address = network_of(_peer_address(context))
    if calls[address] >= most:
        raise Overloaded(f"this address has {most} {what}; try again when one has ended")
    calls[address] += 1
    try:
        yield
    finally:
        calls[address] -= 1
        if not calls[address]:
            del calls[address]


def _refusal(error: TandemError, audit: AuditLog) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_messages: object, context: _Context) -> None:
        await _abort(context, error, audit)

    # grpc reads no message for a handler of this kind, which fits every call.
    return grpc.stream_stream_rpc_method_handler(refuse)


async def _abort(
    context: _Context,
    error: TandemError,
    audit: AuditLog,
    key_name: str = "",
    timeline: inference_pb2.Timeline | None = None,
) -> NoReturn:
    audit.failed("grpc", error.code)
    if is_refusal(error.http_status):
        audit.refused("grpc", _peer_address(context), error.code, key_name)
    code = grpc.StatusCode[error.code]
    metadata = [
        *_timeline_metadata(timeline),
        (DETAILS_KEY, _status(code, error).SerializeToString()),
    ]
    if error.retry_after is not None:
        metadata.append((PUSHBACK_KEY, str(round(error.retry_after * 1_000))))
    # grpc keeps the error in a cycle with frames of its own. With its traceback, the message of
    # each refused call would stay in memory until a full garbage collection.
    error.with_traceback(None)
    error.__context__ = None
    await context.abort(code, error.message, tuple(metadata))


def _status(code: grpc.StatusCode, error: TandemError) -> status_pb2.Status:
    """Returns the error with its details as messages of google.rpc."""
    status = status_pb2.Status(code=code.value[0], message=error.message)
    if isinstance(error, InvalidArgument) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message.removeprefix(f"{error.field}: ")
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    return _metadata_value(metadata, AUTHORIZATION_KEY)


def _metadata_value(metadata: Iterable[tuple[str, str | bytes]] | None, wanted: str) -> str | None:
    for key, value in metadata or ():
        if key == wanted:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


def _peer_address(context: _Context) -> str:
    """Returns the address of `ipv4:ADDRESS:PORT` or `ipv6:[ADDRESS]:PORT`."""
    return unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")


def _split_prompt_logprobs(
    message: inference_pb2.GenerateResponse,
) -> Iterator[inference_pb2.GenerateResponse]:
    """Yields the message in parts of at most _PROMPT_LOGPROBS_PER_MESSAGE prompt log probabilities.

    The last part is the message itself, with the rest. The other parts repeat the numbers that the
    first message of a stream has. gRPC clients refuse messages above 4 MB.
    """
    while len(message.prompt_logprobs) > _PROMPT_LOGPROBS_PER_MESSAGE:
        yield inference_pb2.GenerateResponse(
            request_id=message.request_id,
            first_index=message.first_index,
            choice=message.choice,
            cached_tokens=message.cached_tokens,
            cache_write_tokens=message.cache_write_tokens,
            prompt_logprobs=message.prompt_logprobs[:_PROMPT_LOGPROBS_PER_MESSAGE],
        )
        del message.prompt_logprobs[:_PROMPT_LOGPROBS_PER_MESSAGE]
    yield message


def _timeline_metadata(
    timeline: inference_pb2.Timeline | None,
) -> tuple[tuple[str, str | bytes], ...]:
    if timeline is None or not timeline.request_id:  # the request was never accepted
        return ()
    return ((TIMELINE_KEY, timeline.SerializeToString()),)
