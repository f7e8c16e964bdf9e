"""Calls a Tandem service from Python, over gRPC: `Client` blocks, `AsyncClient` awaits.

    with tandem.connect("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.stream_chat([{"role": "user", "content": "Tell me a story."}]) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)

Every call raises the errors of `tandem.proto.errors`: InvalidArgument (with the `field`), NotFound,
Overloaded and Unavailable (with `retry_after` seconds), TooLarge, DeadlineExceeded, Cancelled,
Unauthenticated, PermissionDenied, InternalError. `timeout` is the maximum of seconds for the whole
call; without it a call has no time limit. A call that fails with a `retry_after` before its first
token is tried again, `max_retries` times in a row, unless it loads or unloads an adapter. A stream
whose router is lost continues at the next of several addresses, or at the only one. More examples:
docs/clients/. One file because the two clients offer the same calls.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtobufMessage
from grpc_health.v1 import health_pb2

from ...proto import inference_pb2
from ...proto.errors import Cancelled, TandemError, Unavailable
from . import wire
from .request import (
    chat_prompt,
    detokenize_request,
    generate_request,
    text_prompt,
    tokenize_request,
    watermark_request,
)
from .results import Collector
from .routers import (
    CANCELLED,
    RoutedCall,
    Routers,
    RouterStubs,
    call,
    call_async,
    is_task_cancelled,
)
from .types import (
    ChatOptions,
    Completion,
    Delta,
    Message,
    ModelInfo,
    Options,
    TemplateOptions,
    Timeline,
    WatermarkEvidence,
)

_S = TypeVar("_S")
Seconds = float | None
TextOrIds = str | Sequence[int]
Messages = Sequence[Message]
Addresses = str | Sequence[str]
"""HOST:PORT of each router of the service: one text with commas, or several texts."""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING


class _Generation:
    """Makes one stream of a request's tries; each continues where the last one broke off."""

    def __init__(self, routed: RoutedCall, request: inference_pb2.GenerateRequest) -> None:
        self.collector = Collector()
        self.routed = routed
        self._request = request
        self._has_begun = False  # the present try has answered

    def start(self) -> Any:
        """Returns a call of gRPC for the rest of the stream."""
        self._has_begun = False
        return self.routed.start(self.collector.resumed(self._request))

    def delta(self, message: inference_pb2.GenerateResponse) -> Delta:
        self._has_begun = True
        if message.token_ids:
            self.routed.retries.reset()
        return self.collector.delta(message)

    def delay(self, error: TandemError) -> float:
        """Returns the seconds until the next try. Raises `error` if there is no next try."""
        if self._has_begun and not (isinstance(error, Unavailable) and self.collector.can_resume):
            raise error
        return self.routed.delay(error)


class Stream:
    """Iterates over the deltas of a completion. Leaving the block early cancels the request."""

    def __init__(self, generation: _Generation) -> None:
        self._generation = generation
        self._collector = generation.collector
        self._cancelled = threading.Event()
        self._call = generation.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                return self._generation.delta(next(self._call))
            except StopIteration:
                self._collector.ended(self._call.trailing_metadata())
                raise
            except grpc.RpcError as failure:
                self._collector.ended(self._call.trailing_metadata())
                error = wire.error_of(failure)
            if self._collector.is_complete:
                raise StopIteration
            if self._generation.routed.wait(self._generation.delay(error), self._cancelled):
                raise Cancelled(CANCELLED)
            self._call = self._generation.start()
            if self._cancelled.is_set():  # while the call was started
                self._call.cancel()

    def cancel(self) -> None:
        """Ends the request, from any thread; the iteration then raises Cancelled.

        Has no effect after the end.
        """
        self._cancelled.set()
        self._call.cancel()

    @property
    def timeline(self) -> Timeline | None:
        """Returns the times of the parts; None before the end and for a refused request."""
        return self._collector.timeline

    def completion(self) -> Completion:
        """Reads the rest of the stream; returns the completion."""
        for _ in self:
            pass
        return self._collector.completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.cancel()


class AsyncStream:
    """Iterates over the deltas of a completion. Leaving the block early cancels the request."""

    def __init__(self, generation: _Generation) -> None:
        self._generation = generation
        self._collector = generation.collector
        self._cancelled = asyncio.Event()
        self._call: Any = generation.start()  # None in the wait for the next try

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            # grpc.aio would raise CancelledError, as if this task had been cancelled. Without a
            # call, the reader was cancelled in the wait for the next try, as by a timeout.
            if self._cancelled.is_set() or self._call is None:
                raise Cancelled(CANCELLED)
            try:
                message = await self._call.read()
                break
            except grpc.aio.AioRpcError as failure:
                self._collector.ended(failure.trailing_metadata())
                error = wire.error_of(failure)
            except asyncio.CancelledError:
                if self._cancelled.is_set() or not is_task_cancelled():
                    raise Cancelled(CANCELLED) from None
                raise
            if self._collector.is_complete:
                raise StopAsyncIteration
            delay = self._generation.delay(error)
            self._call = None
            if await self._generation.routed.wait_async(delay, self._cancelled):
                raise Cancelled(CANCELLED)
            self._call = self._generation.start()
        if message is grpc.aio.EOF:
            self._collector.ended(await self._call.trailing_metadata())
            raise StopAsyncIteration
        return self._generation.delta(message)

    def cancel(self) -> None:
        """Ends the request; the iteration then raises Cancelled. No effect after the end."""
        if self._call is not None:
            self._call.cancel()
        # Also if the call has already failed: the iteration would try again.
        if not self._collector.is_complete:
            self._cancelled.set()

    @property
    def timeline(self) -> Timeline | None:
        """Returns the times of the parts; None before the end and for a refused request."""
        return self._collector.timeline

    async def completion(self) -> Completion:
        """Reads the rest of the stream; returns the completion."""
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
    _make_stream: Callable[[_Generation], _S]

    def __init__(
        self,
        address: Addresses,
        *,
        api_key: str | None = None,
        tls: wire.ClientTls = wire.ClientTls(),
        compression: bool = False,
        max_retries: int = 2,
        use_proxy: bool = True,
    ) -> None:
        """Opens channels, which connect at the first call.

        `address`: HOST:PORT of the gRPC server of one or several routers, with TLS
        grpcs://HOST:PORT. `api_key`: None takes the key of the environment, TANDEM_API_KEY. `tls`:
        the files for TLS. `compression`: compress requests with gzip, for slow networks.
        `max_retries`: of one request, without an answer in between; 0 raises every error at once.
        `use_proxy`: go through the proxy that the environment names (https_proxy and the like),
        unless the host is loopback.
        """
        encoding = grpc.Compression.Gzip if compression else grpc.Compression.NoCompression
        self._metadata = wire.credentials(api_key)
        self._max_retries = max_retries
        self._routers = Routers(
            address, lambda one: wire.open_channel(self._channels, one, tls, encoding, use_proxy)
        )

    def stream(
        self, prompt: TextOrIds, *, timeout: Seconds = None, **options: Unpack[Options]
    ) -> _S:
        """Continues a text or token ids; the stream yields the completion piece by piece."""
        return self._generate(text_prompt(prompt), options, timeout)

    def stream_chat(
        self, messages: Messages, *, timeout: Seconds = None, **options: Unpack[ChatOptions]
    ) -> _S:
        """Sends a chat; the stream yields the assistant's answer piece by piece."""
        return self._generate(chat_prompt(messages, options), options, timeout)

    def _generate(
        self, prompt: inference_pb2.Prompt, options: Options | ChatOptions, timeout: Seconds
    ) -> _S:
        request = generate_request(prompt, options)
        routed = self._routed(lambda router: router.inference.Generate, timeout, self._max_retries)
        return self._make_stream(_Generation(routed, request))

    def _health_call(self, timeout: Seconds) -> RoutedCall:
        return self._routed(lambda router: router.health.Check, timeout, len(self._routers.all) - 1)

    def _single_try(self, choose: Callable[[RouterStubs], Any], timeout: Seconds) -> RoutedCall:
        """Makes a call that is not tried again, since it fails if a lost answer was a success."""
        return self._routed(choose, timeout, max_retries=0)

    def _routed(
        self, choose: Callable[[RouterStubs], Any], timeout: Seconds, max_retries: int
    ) -> RoutedCall:
        retries = wire.Retries(max_retries, timeout, len(self._routers.all))
        return RoutedCall(self._routers, choose, self._metadata, retries)


class Client(_BaseClient[Stream]):
    """Blocks in its calls. Thread-safe; close it, or use it as a context manager."""

    _channels = grpc
    _make_stream = Stream

    def generate(
        self, prompt: TextOrIds, *, timeout: Seconds = None, **options: Unpack[Options]
    ) -> Completion:
        """Continues a text or token ids."""
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.completion()

    def chat(
        self, messages: Messages, *, timeout: Seconds = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """Returns the assistant's answer to a chat."""
        with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return stream.completion()

    def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        timeout: Seconds = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """Returns the token ids of a text in `generate`, or of messages in `chat`."""
        request = tokenize_request(prompt, model, options)
        return list(
            self._call(lambda router: router.inference.Tokenize, request, timeout).token_ids
        )

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout: Seconds = None
    ) -> str:
        """Returns the text of token ids."""
        request = detokenize_request(token_ids, model)
        return str(self._call(lambda router: router.inference.Detokenize, request, timeout).text)

    def detect_watermark(
        self, prompt: TextOrIds, *, model: str = "", timeout: Seconds = None
    ) -> WatermarkEvidence:
        """Tests a text or token ids for the service's watermark.

        Raises NotFound if the service has no key for one.
        """
        request = watermark_request(prompt, model)
        found: WatermarkEvidence = self._call(
            lambda router: router.inference.DetectWatermark, request, timeout
        )
        return found

    def list_models(self, *, timeout: Seconds = None) -> list[ModelInfo]:
        """Returns the models that the service serves."""
        request = inference_pb2.ListModelsRequest()
        return list(self._call(lambda router: router.inference.ListModels, request, timeout).models)

    def load_lora_adapter(self, name: str, path: str, *, timeout: Seconds = None) -> None:
        """Makes the service load a LoRA adapter, for requests whose model is `name`.

        The key must be an operator's.
        """
        request = inference_pb2.LoadLoraAdapterRequest(lora_name=name, lora_path=path)
        call(self._single_try(lambda router: router.inference.LoadLoraAdapter, timeout), request)

    def unload_lora_adapter(self, name: str, *, timeout: Seconds = None) -> None:
        """Makes the service refuse new requests for an adapter. The key must be an operator's."""
        request = inference_pb2.UnloadLoraAdapterRequest(lora_name=name)
        call(self._single_try(lambda router: router.inference.UnloadLoraAdapter, timeout), request)

    def health(self, *, timeout: Seconds = None) -> bool:
        """Returns True if the service can be reached and reports that it can answer."""
        try:
            answer = call(self._health_call(timeout), health_pb2.HealthCheckRequest())
        except Unavailable:
            return False
        return bool(answer.status == _SERVING)

    def close(self) -> None:
        """Closes the connections; requests that still run raise Cancelled."""
        self._routers.close()
        for router in self._routers.all:
            router.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _call(
        self, choose: Callable[[RouterStubs], Any], request: ProtobufMessage, timeout: Seconds
    ) -> Any:
        return call(self._routed(choose, timeout, self._max_retries), request)


connect = Client
"""Opens a client: `with tandem.connect("127.0.0.1:50051") as client`."""


class AsyncClient(_BaseClient[AsyncStream]):
    """Calls the service from one event loop.

    Make it and use it in the same loop; close it, or use it as a context manager.
    """

    _channels = grpc.aio
    _make_stream = AsyncStream

    async def generate(
        self, prompt: TextOrIds, *, timeout: Seconds = None, **options: Unpack[Options]
    ) -> Completion:
        """Continues a text or token ids."""
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.completion()

    async def chat(
        self, messages: Messages, *, timeout: Seconds = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """Returns the assistant's answer to a chat."""
        async with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return await stream.completion()

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        timeout: Seconds = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """Returns the token ids of a text in `generate`, or of messages in `chat`."""
        request = tokenize_request(prompt, model, options)
        return list(
            (await self._call(lambda router: router.inference.Tokenize, request, timeout)).token_ids
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout: Seconds = None
    ) -> str:
        """Returns the text of token ids."""
        request = detokenize_request(token_ids, model)
        return str(
            (await self._call(lambda router: router.inference.Detokenize, request, timeout)).text
        )

    async def detect_watermark(
        self, prompt: TextOrIds, *, model: str = "", timeout: Seconds = None
    ) -> WatermarkEvidence:
        """Tests a text or token ids for the service's watermark.

        Raises NotFound if the service has no key for one.
        """
        request = watermark_request(prompt, model)
        found: WatermarkEvidence = await self._call(
            lambda router: router.inference.DetectWatermark, request, timeout
        )
        return found

    async def list_models(self, *, timeout: Seconds = None) -> list[ModelInfo]:
        """Returns the models that the service serves."""
        request = inference_pb2.ListModelsRequest()
        return list(
            (await self._call(lambda router: router.inference.ListModels, request, timeout)).models
        )

    async def load_lora_adapter(self, name: str, path: str, *, timeout: Seconds = None) -> None:
        """Makes the service load a LoRA adapter, for requests whose model is `name`.

        The key must be an operator's.
        """
        request = inference_pb2.LoadLoraAdapterRequest(lora_name=name, lora_path=path)
        routed = self._single_try(lambda router: router.inference.LoadLoraAdapter, timeout)
        await call_async(routed, request)

    async def unload_lora_adapter(self, name: str, *, timeout: Seconds = None) -> None:
        """Makes the service refuse new requests for an adapter. The key must be an operator's."""
        request = inference_pb2.UnloadLoraAdapterRequest(lora_name=name)
        routed = self._single_try(lambda router: router.inference.UnloadLoraAdapter, timeout)
        await call_async(routed, request)

    async def health(self, *, timeout: Seconds = None) -> bool:
        """Returns True if the service can be reached and reports that it can answer."""
        try:
            answer = await call_async(self._health_call(timeout), health_pb2.HealthCheckRequest())
        except Unavailable:
            return False
        return bool(answer.status == _SERVING)

    async def close(self) -> None:
        """Closes the connections; requests that still run raise Cancelled."""
        self._routers.close()
        for router in self._routers.all:
            await router.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _call(
        self, choose: Callable[[RouterStubs], Any], request: ProtobufMessage, timeout: Seconds
    ) -> Any:
        return await call_async(self._routed(choose, timeout, self._max_retries), request)
