"""Calls a Tandem service from Python, over gRPC: `Client` blocks, `AsyncClient` awaits.

    with tandem.connect("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.stream_chat([{"role": "user", "content": "Tell me a story."}]) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)

Every call raises the errors of `tandem.proto.errors`: InvalidArgument (with the `field`), NotFound, Overloaded and
Unavailable (with `retry_after` seconds), TooLarge, DeadlineExceeded, Cancelled, Unauthenticated, PermissionDenied,
InternalError. `timeout` is in seconds for the whole call; without it a call may last as long as the service takes.
What fails with a `retry_after` before its first token is tried again, `max_retries` times. More examples:
docs/clients.md.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtobufMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ...proto import inference_pb2, inference_pb2_grpc
from ...proto.errors import Cancelled, Unavailable
from . import wire
from .request import chat_prompt, detokenize_request, generate_request, text_prompt, tokenize_request
from .results import Collector
from .types import ChatOptions, Completion, Delta, Message, ModelInfo, Options, TemplateOptions, Timeline

_S = TypeVar("_S")
Seconds = float | None
TextOrIds = str | Sequence[int]
Messages = Sequence[Message]
_StartCall = Callable[[Seconds], Any]
"""Starts a call of grpc with so many seconds to its deadline."""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_CANCELLED: Final = "the client cancelled the request"


def connect(address: str, *, api_key: str = "", compression: bool = False, max_retries: int = 2) -> "Client":
    """Returns a client of the service at HOST:PORT; it connects with the first call."""
    return Client(address, api_key=api_key, compression=compression, max_retries=max_retries)


class Stream:
    """Iterates over the deltas of a completion. Leaving the `with` block early cancels the request."""

    def __init__(self, start: _StartCall, retries: wire.Retries) -> None:
        self._start = start
        self._retries = retries
        self._collector = Collector()
        self._cancelled = threading.Event()
        self._call = start(retries.timeout)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                return self._collector.delta(next(self._call))
            except StopIteration:
                self._collector.ended(self._call.trailing_metadata())
                raise
            except grpc.RpcError as failure:
                self._collector.ended(self._call.trailing_metadata())
                error = wire.error_of(failure)
            if self._collector.has_begun:
                raise error
            if self._cancelled.wait(self._retries.delay(error)):
                raise Cancelled(_CANCELLED)
            self._call = self._start(self._retries.timeout)
            if self._cancelled.is_set():  # while the call was started
                self._call.cancel()

    def cancel(self) -> None:
        """Ends the request, from any thread; the iteration then raises Cancelled. No effect after the end."""
        self._cancelled.set()
        self._call.cancel()

    @property
    def timeline(self) -> Timeline | None:
        """Where the time went; None before the end and for a request that was not accepted."""
        return self._collector.timeline

    def completion(self) -> Completion:
        """Reads the rest of the stream; returns the whole completion."""
        for _ in self:
            pass
        return self._collector.completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.cancel()


class AsyncStream:
    """Iterates over the deltas of a completion. Leaving the `async with` block early cancels the request."""

    def __init__(self, start: _StartCall, retries: wire.Retries) -> None:
        self._start = start
        self._retries = retries
        self._collector = Collector()
        self._cancelled = asyncio.Event()
        self._call: Any = start(retries.timeout)  # None between two tries

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if self._cancelled.is_set():  # grpc.aio would raise CancelledError, as if this task had been cancelled
                raise Cancelled(_CANCELLED)
            try:
                message = await self._call.read()
                break
            except grpc.aio.AioRpcError as failure:
                self._collector.ended(failure.trailing_metadata())
                error = wire.error_of(failure)
            except asyncio.CancelledError:
                if self._cancelled.is_set():  # while it was waiting
                    raise Cancelled(_CANCELLED) from None
                raise
            if self._collector.has_begun:
                raise error
            delay, self._call = self._retries.delay(error), None
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._cancelled.wait()
                    raise Cancelled(_CANCELLED)
            self._call = self._start(self._retries.timeout)
        if message is grpc.aio.EOF:
            self._collector.ended(await self._call.trailing_metadata())
            raise StopAsyncIteration
        return self._collector.delta(message)

    def cancel(self) -> None:
        """Ends the request; the iteration then raises Cancelled. No effect after the end."""
        if self._call is None or self._call.cancel():
            self._cancelled.set()

    @property
    def timeline(self) -> Timeline | None:
        """Where the time went; None before the end and for a request that was not accepted."""
        return self._collector.timeline

    async def completion(self) -> Completion:
        """Reads the rest of the stream; returns the whole completion."""
        async for _ in self:
            pass
        return self._collector.completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.cancel()


class _BaseClient(Generic[_S]):
    """Starts streams on a channel, in the same way for both clients."""

    _channels: Any  # the module of grpc that makes them
    _make_stream: Callable[[_StartCall, wire.Retries], _S]

    def __init__(self, address: str, *, api_key: str = "", compression: bool = False, max_retries: int = 2) -> None:
        """`address`: HOST:PORT of the gRPC server. `compression`: gzip requests, for slow networks. `max_retries`: of
        one request; 0 raises every error at once."""
        encoding = grpc.Compression.Gzip if compression else grpc.Compression.NoCompression
        self._metadata = wire.credentials(api_key)
        self._max_retries = max_retries
        self._channel = self._channels.insecure_channel(address, wire.CHANNEL_OPTIONS, encoding)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def stream(self, prompt: TextOrIds, *, timeout: Seconds = None, **options: Unpack[Options]) -> _S:
        """Continues a text or token ids; the stream yields the completion piece by piece."""
        return self._generate(text_prompt(prompt), options, timeout)

    def stream_chat(self, messages: Messages, *, timeout: Seconds = None, **options: Unpack[ChatOptions]) -> _S:
        """Answers a chat; the stream yields the assistant's answer piece by piece."""
        return self._generate(chat_prompt(messages, options), options, timeout)

    def _generate(self, prompt: inference_pb2.Prompt, options: Options | ChatOptions, timeout: Seconds) -> _S:
        request = generate_request(prompt, options)
        start = self._starting(self._inference.Generate, request)
        return self._make_stream(start, wire.Retries(self._max_retries, timeout))

    def _starting(self, method: Callable[..., Any], request: ProtobufMessage) -> _StartCall:
        return lambda seconds: method(request, timeout=seconds, metadata=self._metadata)


class Client(_BaseClient[Stream]):
    """Blocks in its calls. Thread-safe; close it, or use it as a context manager."""

    _channels = grpc
    _make_stream = Stream

    def generate(self, prompt: TextOrIds, *, timeout: Seconds = None, **options: Unpack[Options]) -> Completion:
        """Continues a text or token ids."""
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.completion()

    def chat(self, messages: Messages, *, timeout: Seconds = None, **options: Unpack[ChatOptions]) -> Completion:
        """Returns the assistant's answer to a chat."""
        with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return stream.completion()

    def tokenize(
        self, prompt: str | Messages, *, model: str = "", timeout: Seconds = None, **options: Unpack[TemplateOptions]
    ) -> list[int]:
        """Returns the token ids that `generate` sees for a text, `chat` for messages with the same template options."""
        request = tokenize_request(prompt, model, options)
        return list(self._call(self._inference.Tokenize, request, timeout).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: Seconds = None) -> str:
        """Returns the text of token ids."""
        request = detokenize_request(token_ids, model)
        return str(self._call(self._inference.Detokenize, request, timeout).text)

    def list_models(self, *, timeout: Seconds = None) -> list[ModelInfo]:
        """Returns the models that the service answers for."""
        request = inference_pb2.ListModelsRequest()
        return list(self._call(self._inference.ListModels, request, timeout).models)

    def health(self, *, timeout: Seconds = None) -> bool:
        """Returns whether the service can be reached and reports that it can answer."""
        start = self._starting(self._health.Check, health_pb2.HealthCheckRequest())
        try:
            return bool(wire.call(start, wire.Retries(0, timeout)).status == _SERVING)
        except Unavailable:
            return False

    def close(self) -> None:
        """Closes the connection; requests that still run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], request: ProtobufMessage, timeout: Seconds) -> Any:
        return wire.call(self._starting(method, request), wire.Retries(self._max_retries, timeout))


class AsyncClient(_BaseClient[AsyncStream]):
    """Awaits in its calls. Make it and use it in one event loop; close it, or use it as a context manager."""

    _channels = grpc.aio
    _make_stream = AsyncStream

    async def generate(self, prompt: TextOrIds, *, timeout: Seconds = None, **options: Unpack[Options]) -> Completion:
        """Continues a text or token ids."""
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.completion()

    async def chat(self, messages: Messages, *, timeout: Seconds = None, **options: Unpack[ChatOptions]) -> Completion:
        """Returns the assistant's answer to a chat."""
        async with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return await stream.completion()

    async def tokenize(
        self, prompt: str | Messages, *, model: str = "", timeout: Seconds = None, **options: Unpack[TemplateOptions]
    ) -> list[int]:
        """Returns the token ids that `generate` sees for a text, `chat` for messages with the same template options."""
        request = tokenize_request(prompt, model, options)
        return list((await self._call(self._inference.Tokenize, request, timeout)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: Seconds = None) -> str:
        """Returns the text of token ids."""
        request = detokenize_request(token_ids, model)
        return str((await self._call(self._inference.Detokenize, request, timeout)).text)

    async def list_models(self, *, timeout: Seconds = None) -> list[ModelInfo]:
        """Returns the models that the service answers for."""
        request = inference_pb2.ListModelsRequest()
        return list((await self._call(self._inference.ListModels, request, timeout)).models)

    async def health(self, *, timeout: Seconds = None) -> bool:
        """Returns whether the service can be reached and reports that it can answer."""
        start = self._starting(self._health.Check, health_pb2.HealthCheckRequest())
        try:
            return bool((await wire.call_async(start, wire.Retries(0, timeout))).status == _SERVING)
        except Unavailable:
            return False

    async def close(self) -> None:
        """Closes the connection; requests that still run are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _call(self, method: Callable[..., Any], request: ProtobufMessage, timeout: Seconds) -> Any:
        return await wire.call_async(self._starting(method, request), wire.Retries(self._max_retries, timeout))
