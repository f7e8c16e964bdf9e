"""Tests every bound over a gRPC stream; test_http_api.py and test_bad_requests.py test HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from tandem.proto import inference_pb2, inference_pb2_grpc, limits
from tandem.router.api.server.grpc_server import GrpcServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.bounds import ALLOWED, REFUSED
from tandem.tests.router.fake_source import FakeTokenSource


@pytest.fixture
async def stub(tokenizer: Tokenizer) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    model = ServedModel(name="tiny", tokenizer=tokenizer, context_tokens=64)
    server = GrpcServer(GenerationService([model], FakeTokenSource()), reflection=False)
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    await server.stop(0)


def request(text: str, fields: dict[str, Any]) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**({"prompt": {"text": text}} | fields))


async def test_one_past_each_bound_is_refused_and_the_field_named(
    stub: inference_pb2_grpc.InferenceStub,
) -> None:
    for fields, field, words in REFUSED:
        asked = request("hi", fields)
        if asked.ByteSize() > limits.MAX_MESSAGE_BYTES:
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(asked):
                pass
        error = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, error.details())
        assert words in (error.details() or "")
        status = status_pb2.Status.FromString(
            dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
        )
        violations = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(violations)
        assert violations.field_violations[0].field == field


async def test_the_bounds_themselves_are_taken(stub: inference_pb2_grpc.InferenceStub) -> None:
    for fields, text in ALLOWED:
        messages = [message async for message in stub.Generate(request(text, fields))]
        assert messages[-1].HasField("usage"), fields
