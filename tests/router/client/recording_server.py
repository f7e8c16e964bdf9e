"""A gRPC server that records requests and answers with fixed messages or an error."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tandem.proto import inference_pb2

LAST = inference_pb2.GenerateResponse(
    request_id="r",
    finish_reason=inference_pb2.FINISH_REASON_STOP,
    usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=9, cached_tokens=2),
)


@dataclass
class RecordingServer:
    """Records requests and metadata; answers with `answers`, or with `status`."""

    address: str = ""
    answers: list[inference_pb2.GenerateResponse] = field(default_factory=lambda: [LAST])
    status: Any = None
    last_status: Any = None  # the end of a stream after its answers, if it is an error
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)

    async def generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        last_status = (
            self.last_status
        )  # as the call begins: a test sets the next one as soon as it has the answers
        await self._record(request, context)
        for answer in self.answers:
            yield answer
        if last_status is not None:
            await context.abort_with_status(last_status)

    async def detokenize(self, request: inference_pb2.DetokenizeRequest, context: Any) -> Any:
        await self._record(request, context)
        return inference_pb2.DetokenizeResponse(text="detokenized")

    async def tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> Any:
        await self._record(request, context)
        return inference_pb2.TokenizeResponse(token_ids=[1, 2])

    async def load_adapter(
        self, request: inference_pb2.LoadLoraAdapterRequest, context: Any
    ) -> Any:
        await self._record(request, context)
        return inference_pb2.LoadLoraAdapterResponse()

    async def unload_adapter(
        self, request: inference_pb2.UnloadLoraAdapterRequest, context: Any
    ) -> Any:
        await self._record(request, context)
        return inference_pb2.UnloadLoraAdapterResponse()

    async def _record(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.status is not None:
            await context.abort_with_status(self.status)


@asynccontextmanager
async def recording_server() -> AsyncIterator[RecordingServer]:
    """Runs one on a free port."""
    kept = RecordingServer()
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            kept.generate,
            inference_pb2.GenerateRequest.FromString,
            lambda message: message.SerializeToString(),
        ),
        "Tokenize": grpc.unary_unary_rpc_method_handler(
            kept.tokenize,
            inference_pb2.TokenizeRequest.FromString,
            lambda message: message.SerializeToString(),
        ),
        "Detokenize": grpc.unary_unary_rpc_method_handler(
            kept.detokenize,
            inference_pb2.DetokenizeRequest.FromString,
            lambda message: message.SerializeToString(),
        ),
        "LoadLoraAdapter": grpc.unary_unary_rpc_method_handler(
            kept.load_adapter,
            inference_pb2.LoadLoraAdapterRequest.FromString,
            lambda message: message.SerializeToString(),
        ),
        "UnloadLoraAdapter": grpc.unary_unary_rpc_method_handler(
            kept.unload_adapter,
            inference_pb2.UnloadLoraAdapterRequest.FromString,
            lambda message: message.SerializeToString(),
        ),
    }
    running = grpc.aio.server()
    running.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tandem.v1.Inference", methods),)
    )
    kept.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    await running.start()
    yield kept
    await running.stop(0)
