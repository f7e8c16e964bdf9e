"""Serves the gRPC API with responses that a test defines; tokens are bytes. For tests of clients
and commands.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from tandem.proto import inference_pb2

Responses = Iterable[inference_pb2.GenerateResponse]


def pieces(text: str, **last: Any) -> Responses:
    """Yields the responses of one choice: a token for each byte, a message for each character."""
    index = 0
    for character in text:
        ids = list(character.encode())
        yield inference_pb2.GenerateResponse(text=character, token_ids=ids, first_index=index)
        index += len(ids)
    last = {"finish_reason": inference_pb2.FINISH_REASON_STOP} | last
    usage = inference_pb2.Usage(prompt_tokens=1, completion_tokens=index)
    yield inference_pb2.GenerateResponse(request_id="stub", usage=usage, **last)


@dataclass
class Refusal(Exception):
    """Ends a call with an error; `answer` raises it."""

    code: grpc.StatusCode
    text: str


@dataclass
class StubService:
    """Answers every Generate with `answer(request)`."""

    answer: Callable[[inference_pb2.GenerateRequest], Responses]
    address: str = ""
    context_tokens: int = 64
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    tokenized: list[str] = field(default_factory=list)

    def generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Responses:
        self.requests.append(request)
        timeline = inference_pb2.Timeline(request_id="stub", completion_tokens=7)
        context.set_trailing_metadata((("tandem-timeline-bin", timeline.SerializeToString()),))
        try:
            yield from self.answer(request)
        except Refusal as refusal:
            context.abort(refusal.code, refusal.text)

    def tokenize(
        self, request: inference_pb2.TokenizeRequest, _: object
    ) -> inference_pb2.TokenizeResponse:
        self.tokenized.append(request.prompt.text)
        return inference_pb2.TokenizeResponse(token_ids=[256, *request.prompt.text.encode()])

    def list_models(self, _request: object, _: object) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(id="stub", context_tokens=self.context_tokens)
        return inference_pb2.ListModelsResponse(models=[model])


@contextmanager
def stub_service(
    answer: Callable[[inference_pb2.GenerateRequest], Responses],
) -> Iterator[StubService]:
    """Runs a StubService on a free port of this machine."""
    stub = StubService(answer)
    messages = inference_pb2
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            stub.generate, messages.GenerateRequest.FromString, _serialize
        ),
        "Tokenize": grpc.unary_unary_rpc_method_handler(
            stub.tokenize, messages.TokenizeRequest.FromString, _serialize
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            stub.list_models, messages.ListModelsRequest.FromString, _serialize
        ),
    }
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tandem.v1.Inference", methods),)
    )
    stub.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield stub
    finally:
        server.stop(0).wait()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
