"""The gRPC front door: tandem.v1.Inference, grpc.health.v1 and, if asked for, reflection."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument, Overloaded, TandemError, Unavailable
from ...proto.limits import MAX_MESSAGE_BYTES
from ..request import tenant_of
from .service import GenerationService, tandem_errors_only

SERVICE = "tandem.v1.Inference"
TIMELINE_KEY = "tandem-timeline-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
DETAILS_KEY = "grpc-status-details-bin"
AUTHORIZATION_KEY = "authorization"

_PROMPT_LOGPROBS_A_MESSAGE = 2_048  # with 20 alternatives each 1 MB

_Context = grpc.aio.ServicerContext[bytes, Any]
_M = TypeVar("_M", bound=Message)

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the port fails instead of taking half of the requests
    ("grpc.keepalive_time_ms", 20_000),  # a client whose machine is gone frees its blocks within half a minute
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]


class GrpcServer:
    """A gRPC server over Completions. Lives from `start` to `stop`, in one event loop."""

    def __init__(
        self,
        completions: GenerationService,
        *,
        reflection: bool,
        compression: grpc.Compression = grpc.Compression.NoCompression,
    ) -> None:
        """`compression`: of answers, to clients that accept it. Requests may come compressed in any way gRPC knows; the
        bound of their size is that of the message unpacked."""
        self._completions = completions
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=_OPTIONS, compression=compression)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection:
            _reflect(self._server)

    async def start(self, address: str) -> str:
        """Listens on HOST:PORT (port 0: a free one); returns the address with the real port.

        Raises RuntimeError if the port is taken."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            await self._server.stop(0)
            raise
        await self.set_serving(False)
        await self._server.start()
        return f"{address.rpartition(':')[0]}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers, for the server and for the service."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def stop(self, grace: float) -> None:
        """Takes no more requests; cancels those that still run after `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    def _handlers(self) -> grpc.GenericRpcHandler:
        # No deserializer: grpc answers UNKNOWN to bytes that are no message, we INVALID_ARGUMENT.
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self._generate, None, _serialize),
                "Detokenize": grpc.unary_unary_rpc_method_handler(self._detokenize, None, _serialize),
                "Tokenize": grpc.unary_unary_rpc_method_handler(self._tokenize, None, _serialize),
                "ListModels": grpc.unary_unary_rpc_method_handler(self._list_models, None, _serialize),
            },
        )

    async def _generate(self, body: bytes, context: _Context) -> None:
        arrived = time.monotonic()
        remaining = context.time_remaining()
        timeline = inference_pb2.Timeline()
        try:
            with tandem_errors_only():
                accepted = await self._completions.accept(
                    _parse(inference_pb2.GenerateRequest, body),
                    arrived=arrived,
                    deadline=None if remaining is None else arrived + remaining,
                    tenant=_tenant(context),
                )
                # grpc cancels this task when the client goes; the scope then closes the generator at once.
                async with aclosing(self._completions.run(accepted, timeline)) as messages:
                    async for message in messages:
                        for part in _parts(message):
                            await context.write(part)
        except TandemError as error:
            await _abort(context, error, timeline)
        context.set_trailing_metadata(_timeline_metadata(timeline))

    async def _tokenize(self, body: bytes, context: _Context) -> inference_pb2.TokenizeResponse:
        async def answer() -> inference_pb2.TokenizeResponse:
            return await self._completions.tokenize(_parse(inference_pb2.TokenizeRequest, body))

        return await _answered(answer, context)

    async def _detokenize(self, body: bytes, context: _Context) -> inference_pb2.DetokenizeResponse:
        async def answer() -> inference_pb2.DetokenizeResponse:
            return await self._completions.detokenize(_parse(inference_pb2.DetokenizeRequest, body))

        return await _answered(answer, context)

    async def _list_models(self, body: bytes, context: _Context) -> inference_pb2.ListModelsResponse:
        async def answer() -> inference_pb2.ListModelsResponse:
            _parse(inference_pb2.ListModelsRequest, body)
            return self._completions.list_models()

        return await _answered(answer, context)


async def _answered(answer: Callable[[], Awaitable[_M]], context: _Context) -> _M:
    try:
        with tandem_errors_only():
            return await answer()
    except TandemError as error:
        await _abort(context, error, inference_pb2.Timeline())


async def _abort(context: _Context, error: TandemError, timeline: inference_pb2.Timeline) -> NoReturn:
    code = grpc.StatusCode[error.code]
    metadata = [*_timeline_metadata(timeline), (DETAILS_KEY, _status(code, error).SerializeToString())]
    if isinstance(error, Overloaded | Unavailable):
        metadata.append((PUSHBACK_KEY, str(round(error.retry_after * 1_000))))
    await context.abort(code, error.message, tuple(metadata))


def _status(code: grpc.StatusCode, error: TandemError) -> status_pb2.Status:
    """The error in the form that Google's APIs give details in."""
    status = status_pb2.Status(code=code.value[0], message=error.message)
    if isinstance(error, InvalidArgument) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message.removeprefix(f"{error.field}: ")
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, Overloaded | Unavailable):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _tenant(context: _Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == AUTHORIZATION_KEY:
            return tenant_of(value if isinstance(value, str) else value.decode("latin-1"))
    return ""


def _parts(message: inference_pb2.GenerateResponse) -> Iterator[inference_pb2.GenerateResponse]:
    """The message, or several that say the same and that every client reads: gRPC's own bound is 4 MB."""
    while len(message.prompt_logprobs) > _PROMPT_LOGPROBS_A_MESSAGE:
        yield inference_pb2.GenerateResponse(
            request_id=message.request_id,
            first_index=message.first_index,
            choice=message.choice,
            prompt_logprobs=message.prompt_logprobs[:_PROMPT_LOGPROBS_A_MESSAGE],
        )
        del message.prompt_logprobs[:_PROMPT_LOGPROBS_A_MESSAGE]
    yield message


def _timeline_metadata(timeline: inference_pb2.Timeline) -> tuple[tuple[str, str | bytes], ...]:
    if not timeline.request_id:  # refused before it was accepted
        return ()
    return ((TIMELINE_KEY, timeline.SerializeToString()),)


def _parse(kind: type[_M], body: bytes) -> _M:
    try:
        return kind.FromString(body)
    except DecodeError:
        raise InvalidArgument(f"the body is not a {kind.DESCRIPTOR.full_name}") from None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _reflect(server: grpc.aio.Server) -> None:
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
