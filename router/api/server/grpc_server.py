"""Serves tandem.v1.Inference, grpc.health.v1 and optionally reflection over gRPC."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
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
from ....proto.errors import (
    DeadlineExceeded,
    InvalidArgument,
    Overloaded,
    TandemError,
    Unauthenticated,
)
from ....proto.limits import (
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MAX_STREAMS_PER_CONNECTION,
    STALL_SECONDS,
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
from .health import HealthStatus
from .stall import StallTimer

SERVICE = "tandem.v1.Inference"
TIMELINE_KEY = "tandem-timeline-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
DETAILS_KEY = "grpc-status-details-bin"
AUTHORIZATION_KEY = "authorization"
_HEALTH = f"/{health.SERVICE_NAME}/"

_PROMPT_LOGPROBS_PER_MESSAGE = 2_048  # with 20 alternatives each 1 MB

_Context = grpc.aio.ServicerContext[bytes, Any]
_M = TypeVar("_M", bound=Message)
_serialize: Callable[[Message], bytes] = methodcaller("SerializeToString")

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    (
        "grpc.keepalive_time_ms",
        20_000,
    ),  # the blocks of a client whose machine is gone are freed within half a minute
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_connection_age_ms", 3_600_000),  # its streams then have as long to end
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
        stall_seconds: float = STALL_SECONDS,
        head_seconds: float = 10.0,
        message_seconds: float = 70.0,
        idle_seconds: float = 300.0,
        max_connections: int = MAX_CONNECTIONS,
        max_calls_per_address: int = MAX_CONNECTIONS_PER_ADDRESS,
        authenticator: Authenticator | None = None,
        tls: ServerTls | None = None,
        shares_port: bool = False,
    ) -> None:
        """`compression`: of responses, to clients that accept it. Requests may come in any
        compression of gRPC; their size is that of the unpacked message, for which a call has
        `message_seconds`. Without an `authenticator` everyone is let in, without `tls` all is in
        plaintext. Unless `shares_port`, a second server on the port fails instead of receiving half
        of the requests.
        """
        self._service = service
        self._audit = audit or AuditLog()
        self._stall_seconds = stall_seconds
        self._message_seconds = message_seconds
        self._max_calls_per_address = max_calls_per_address
        self._sweep = StrangerSweep(max_connections)
        self._calls: Counter[str] = Counter()  # under way, by address
        self._health_calls: Counter[str] = Counter()
        self._tls = tls
        self._health = HealthStatus(("", SERVICE))
        self._authenticator = authenticator or Authenticator()
        self._server = grpc.aio.server(
            interceptors=[_KeyInterceptor(self._authenticator, self._audit)],
            options=[
                *_OPTIONS,
                # A client has so long for the begin of HTTP/2. gRPC tells nobody of a connection,
                # so the bound by address is one of calls; it refuses new connections when there are
                # too many.
                ("grpc.server_handshake_timeout_ms", round(1_000 * head_seconds)),
                ("grpc.max_connection_idle_ms", round(1_000 * idle_seconds)),
                ("grpc.max_allowed_incoming_connections", max_connections),
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

        Raises RuntimeError if the port is taken."""
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
        """Sets what grpc.health.v1 answers, for the server and for the service."""
        self._health.set(serving)

    async def stop(self, grace: float) -> None:
        """Accepts no more requests; cancels those that still run after `grace` seconds."""
        self._health.end()
        await self._server.stop(grace)
        self._sweep.stop()

    def _handlers(self) -> grpc.GenericRpcHandler:
        # No deserializer: grpc answers UNKNOWN to bytes that are no message, we INVALID_ARGUMENT.
        # All take streams of
        # messages: for a single one grpc waits without end, before any code of ours knows of the
        # call.
        service, unary = self._service, self._unary
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.stream_stream_rpc_method_handler(self._generate, None, _serialize),
                "Detokenize": self._unary_by(inference_pb2.DetokenizeRequest, service.detokenize),
                "Tokenize": self._unary_by(inference_pb2.TokenizeRequest, service.tokenize),
                "ListModels": unary(inference_pb2.ListModelsRequest, service.list_models),
                "LoadLoraAdapter": self._unary_by(
                    inference_pb2.LoadLoraAdapterRequest, service.load_adapter
                ),
                "UnloadLoraAdapter": self._unary_by(
                    inference_pb2.UnloadLoraAdapterRequest, service.unload_adapter
                ),
            },
        )

    def _health_handlers(self) -> grpc.GenericRpcHandler:
        """Makes the handlers of grpc.health.v1. They need no key, and bound calls of an address by
        themselves, so that probes are answered whatever else it calls.
        """

        async def read(context: _Context) -> health_pb2.HealthCheckRequest:
            return await self._read(health_pb2.HealthCheckRequest, context)

        async def check(_messages: object, context: _Context) -> Message:
            try:
                with _counted(self._health_calls, context, self._max_calls_per_address):
                    answer: Message = self._health.check(await read(context))
                    return answer
            except TandemError as error:
                await _abort(context, error, inference_pb2.Timeline(), self._audit)

        async def watch(_messages: object, context: _Context) -> None:
            async def write(answer: Message) -> None:
                with StallTimer(self._stall_seconds) as writes:
                    writes.begin()
                    await context.write(answer)

            try:
                with _counted(self._health_calls, context, self._max_calls_per_address):
                    await self._health.watch(await read(context), write)
            except TandemError as error:
                await _abort(context, error, inference_pb2.Timeline(), self._audit)

        handlers: dict[str, Any] = {
            "Check": grpc.stream_unary_rpc_method_handler(check, None, _serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, None, _serialize),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    async def _generate(self, _messages: object, context: _Context) -> None:
        timeline = inference_pb2.Timeline()
        try:
            with tandem_errors_only(), self._call(context) as caller:
                message = await self._read(inference_pb2.GenerateRequest, context, caller.turn)
                arrived, remaining = time.monotonic(), context.time_remaining()
                deadline = None if remaining is None else arrived + remaining
                request = await self._service.accept(
                    message,
                    RequestContext(
                        arrived=arrived,
                        deadline=deadline,
                        caller=caller,
                        is_resumable=True,
                        trace=parse_traceparent(
                            _metadata_value(context.invocation_metadata(), TRACEPARENT)
                        ),
                    ),
                )
                # grpc cancels this task when the client goes; the scope then closes the generator
                # at once.
                with StallTimer(self._stall_seconds) as writes:
                    async with aclosing(self._service.run(request, timeline)) as answers:
                        async for answer in answers:
                            for part in _split_prompt_logprobs(answer):
                                writes.begin()
                                await context.write(part)
                                writes.end()
        except TandemError as error:
            await _abort(context, error, timeline, self._audit, self._key_name(context))
        context.set_trailing_metadata(_timeline_metadata(timeline))

    def _unary(
        self, kind: type[_M], method: Callable[[_M], Awaitable[Message]]
    ) -> "grpc.RpcMethodHandler[Any, Message]":
        """Makes the handler of an RPC with one request of this kind and one response."""
        return self._unary_by(kind, lambda request, _caller: method(request))

    def _unary_by(
        self, kind: type[_M], method: Callable[[_M, Caller], Awaitable[Message]]
    ) -> "grpc.RpcMethodHandler[Any, Message]":
        """Makes one likewise whose response depends on the caller."""

        async def respond(_messages: object, context: _Context) -> Message:
            try:
                with tandem_errors_only(), self._call(context) as caller:
                    return await method(await self._read(kind, context, caller.turn), caller)
            except TandemError as error:
                await _abort(
                    context, error, inference_pb2.Timeline(), self._audit, self._key_name(context)
                )

        return grpc.stream_unary_rpc_method_handler(respond, None, _serialize)

    @contextmanager
    def _call(self, context: _Context) -> Iterator[Caller]:
        """Counts a call among those of its address and of its key, from before its message is read
        to its end; returns who calls. Raises Unauthenticated, and Overloaded if it is one too many.
        """
        with _counted(self._calls, context, self._max_calls_per_address):
            caller = self._caller(context)
            self._sweep.admit(context.peer())
            with caller.quota.call():
                yield caller

    async def _read(self, kind: type[_M], context: _Context, turn: str = "") -> _M:
        """Reads the message of a call. Raises InvalidArgument, and DeadlineExceeded if it does not
        come.
        """
        try:
            async with asyncio.timeout(self._message_seconds):
                body: Any = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the message did not arrive within {self._message_seconds:g} seconds"
            ) from None
        if body is grpc.aio.EOF:
            raise InvalidArgument("the call has no message")
        return await PARSING.run(turn, len(body), parse_message, kind, body)

    def _caller(self, context: _Context) -> Caller:
        # gRPC names connections by address and port alone, which belong to another client later:
        # each call is apart.
        authorization = _authorization(context.invocation_metadata())
        return self._authenticator.caller(authorization, secrets.token_hex(16), context.peer())

    def _key_name(self, context: _Context) -> str:
        with suppress(Unauthenticated):  # a key that has expired since
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
        """See grpc.aio.ServerInterceptor."""
        if not handler_call_details.method.startswith(_HEALTH):
            try:
                self._authenticator.caller(
                    _authorization(handler_call_details.invocation_metadata), ""
                )
            except Unauthenticated as error:
                return _refusal(error, self._audit)
        return await continuation(handler_call_details)


@contextmanager
def _counted(calls: Counter[str], context: _Context, most: int) -> Iterator[None]:
    """Counts a call among those of its address. Raises Overloaded if it is one too many."""
    address = _peer_address(context)
    if calls[address] >= most:
        raise Overloaded(f"the limit of {most} calls at a time of one address is reached")
    calls[address] += 1
    try:
        yield
    finally:
        calls[address] -= 1
        if not calls[address]:
            del calls[address]


def _refusal(error: TandemError, audit: AuditLog) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_messages: object, context: _Context) -> None:
        await _abort(context, error, inference_pb2.Timeline(), audit)

    # Of this kind because grpc reads no message for it; it fits every call.
    return grpc.stream_stream_rpc_method_handler(refuse)


async def _abort(
    context: _Context,
    error: TandemError,
    timeline: inference_pb2.Timeline,
    audit: AuditLog,
    key_name: str = "",
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
    """Yields the message, after others into which most of its prompt log probabilities are moved if
    it has many: the limit of gRPC's clients is 4 MB.
    """
    while len(message.prompt_logprobs) > _PROMPT_LOGPROBS_PER_MESSAGE:
        yield inference_pb2.GenerateResponse(
            request_id=message.request_id,
            first_index=message.first_index,
            choice=message.choice,
            prompt_logprobs=message.prompt_logprobs[:_PROMPT_LOGPROBS_PER_MESSAGE],
        )
        del message.prompt_logprobs[:_PROMPT_LOGPROBS_PER_MESSAGE]
    yield message


def _timeline_metadata(timeline: inference_pb2.Timeline) -> tuple[tuple[str, str | bytes], ...]:
    if not timeline.request_id:  # refused before it was accepted
        return ()
    return ((TIMELINE_KEY, timeline.SerializeToString()),)
