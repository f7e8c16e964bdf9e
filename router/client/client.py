"""The Python client of a Tandem service, over gRPC: `Client` blocks, `AsyncClient` awaits.

    with tandem.connect("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.stream_chat([{"role": "user", "content": "Tell me a story."}]) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)

Every call raises the errors of `tandem.proto.errors`: InvalidArgument (with the `field`), NotFound, Overloaded and
Unavailable (with `retry_after` seconds), TooLarge, DeadlineExceeded, Cancelled, Unauthenticated, PermissionDenied,
InternalError. `timeout` is in seconds for the whole call; without it a call may last as long as the service takes.
Nothing is tried again by itself. More examples: docs/clients.md.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtobufMessage
from grpc_health.v1 import health_pb2

from ...proto import inference_pb2
from ...proto.errors import Cancelled, Unavailable
from . import types, wire
from .request import chat_prompt, detokenize_request, generate_request, text_prompt, tokenize_request
from .results import Collector, model_infos
from .types import ChatOptions, Completion, Delta, Message, ModelInfo, Options, TemplateOptions, Timeline

_R = TypeVar("_R", bound=ProtobufMessage)
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING


def connect(address: str, *, api_key: str = "", compression: bool = False) -> "Client":
    """A client of the service at HOST:PORT; connects with the first call."""
    return Client(address, api_key=api_key, compression=compression)


class Stream:
    """A completion as it comes: an iterator of deltas. Leaving the `with` block early cancels the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._collector = Collector()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            return self._collector.delta(next(self._call))
        except StopIteration:
            self._collector.ended(self._call.trailing_metadata())
            raise
        except grpc.RpcError as error:
            self._collector.ended(self._call.trailing_metadata())
            raise wire.error_of(error) from None

    def cancel(self) -> None:
        """Ends the request, from any thread; the iteration then raises Cancelled. No effect after the end."""
        self._call.cancel()

    @property
    def timeline(self) -> Timeline | None:
        """Where the time went; None before the end and for a request that was not accepted."""
        return self._collector.timeline

    def completion(self) -> Completion:
        """The whole completion, after reading what is left of the stream."""
        for _ in self:
            pass
        return self._collector.completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A blocking client. Safe to share between threads; close it, or use it as a context manager."""

    def __init__(self, address: str, *, api_key: str = "", compression: bool = False) -> None:
        """`address`: HOST:PORT of the gRPC front door. `compression`: gzip what is sent, for slow networks."""
        self._metadata = wire.credentials(api_key)
        self._channel = grpc.insecure_channel(
            address, options=wire.CHANNEL_OPTIONS, compression=wire.compression(compression)
        )

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The continuation of a text or of token ids."""
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.completion()

    def chat(
        self, messages: Sequence[Message], *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """The assistant's answer to a chat."""
        with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return stream.completion()

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Stream:
        """As `generate`, piece by piece."""
        return self._start(text_prompt(prompt), options, timeout)

    def stream_chat(
        self, messages: Sequence[Message], *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """As `chat`, piece by piece."""
        return self._start(chat_prompt(messages, options), options, timeout)

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """The token ids that `generate` sees for a text, `chat` for messages with the same options of the template."""
        request = tokenize_request(prompt, model, options)
        return list(self._ask(types.TOKENIZE, request, inference_pb2.TokenizeResponse, timeout).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, model)
        return self._ask(types.DETOKENIZE, request, inference_pb2.DetokenizeResponse, timeout).text

    def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """The names under which the service answers."""
        request = inference_pb2.ListModelsRequest()
        return model_infos(self._ask(types.LIST_MODELS, request, inference_pb2.ListModelsResponse, timeout))

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether the service can be reached and says that it can answer."""
        try:
            answer = self._ask(types.HEALTH, health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse, timeout)
        except Unavailable:
            return False
        return bool(answer.status == _SERVING)

    def close(self) -> None:
        """Closes the connection; what still runs is cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, prompt: inference_pb2.Prompt, options: Options | ChatOptions, timeout: float | None) -> Stream:
        start = self._channel.unary_stream(types.GENERATE, wire.serialize, inference_pb2.GenerateResponse.FromString)
        return Stream(start(generate_request(prompt, options), timeout=timeout, metadata=self._metadata))

    def _ask(self, method: str, request: ProtobufMessage, answer: type[_R], timeout: float | None) -> _R:
        try:
            return self._channel.unary_unary(method, wire.serialize, answer.FromString)(
                request, timeout=timeout, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise wire.error_of(error) from None


class AsyncStream:
    """A completion as it comes: an async iterator of deltas. Leaving the `async with` block early cancels it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cancelled = False
        self._collector = Collector()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._cancelled:  # grpc.aio would raise CancelledError, as if this task had been cancelled
            raise Cancelled("the client cancelled the request")
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._collector.ended(error.trailing_metadata())
            raise wire.error_of(error) from None
        except asyncio.CancelledError:
            if self._cancelled:  # while it waited
                raise Cancelled("the client cancelled the request") from None
            raise
        if message is grpc.aio.EOF:
            self._collector.ended(await self._call.trailing_metadata())
            raise StopAsyncIteration
        return self._collector.delta(message)

    def cancel(self) -> None:
        """Ends the request; the iteration then raises Cancelled. No effect after the end."""
        self._cancelled = self._call.cancel() or self._cancelled

    @property
    def timeline(self) -> Timeline | None:
        """Where the time went; None before the end and for a request that was not accepted."""
        return self._collector.timeline

    async def completion(self) -> Completion:
        """The whole completion, after reading what is left of the stream."""
        async for _ in self:
            pass
        return self._collector.completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """The same for asyncio. Make it and use it in one event loop; close it, or use it as a context manager."""

    def __init__(self, address: str, *, api_key: str = "", compression: bool = False) -> None:
        """`address`: HOST:PORT of the gRPC front door. `compression`: gzip what is sent, for slow networks."""
        self._metadata = wire.credentials(api_key)
        self._channel = grpc.aio.insecure_channel(
            address, options=wire.CHANNEL_OPTIONS, compression=wire.compression(compression)
        )

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The continuation of a text or of token ids."""
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.completion()

    async def chat(
        self, messages: Sequence[Message], *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """The assistant's answer to a chat."""
        async with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return await stream.completion()

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """As `generate`, piece by piece."""
        return self._start(text_prompt(prompt), options, timeout)

    def stream_chat(
        self, messages: Sequence[Message], *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncStream:
        """As `chat`, piece by piece."""
        return self._start(chat_prompt(messages, options), options, timeout)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """The token ids that `generate` sees for a text, `chat` for messages with the same options of the template."""
        request = tokenize_request(prompt, model, options)
        return list((await self._ask(types.TOKENIZE, request, inference_pb2.TokenizeResponse, timeout)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, model)
        return (await self._ask(types.DETOKENIZE, request, inference_pb2.DetokenizeResponse, timeout)).text

    async def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """The names under which the service answers."""
        request = inference_pb2.ListModelsRequest()
        return model_infos(await self._ask(types.LIST_MODELS, request, inference_pb2.ListModelsResponse, timeout))

    async def health(self, *, timeout: float | None = None) -> bool:
        """Whether the service can be reached and says that it can answer."""
        request = health_pb2.HealthCheckRequest()
        try:
            answer = await self._ask(types.HEALTH, request, health_pb2.HealthCheckResponse, timeout)
        except Unavailable:
            return False
        return bool(answer.status == _SERVING)

    async def close(self) -> None:
        """Closes the connection; what still runs is cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(
        self, prompt: inference_pb2.Prompt, options: Options | ChatOptions, timeout: float | None
    ) -> AsyncStream:
        start = self._channel.unary_stream(types.GENERATE, wire.serialize, inference_pb2.GenerateResponse.FromString)
        return AsyncStream(start(generate_request(prompt, options), timeout=timeout, metadata=self._metadata))

    async def _ask(self, method: str, request: ProtobufMessage, answer: type[_R], timeout: float | None) -> _R:
        try:
            return await self._channel.unary_unary(method, wire.serialize, answer.FromString)(
                request, timeout=timeout, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise wire.error_of(error) from None
