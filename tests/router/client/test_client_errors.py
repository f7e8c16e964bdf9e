"""Errors with the details of google.rpc, as the clients raise them."""

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from tandem.proto import errors
from tandem.router.client.client import AsyncClient
from tandem.router.client.wire import to_error
from tandem.tests.router.client.recording_server import RecordingServer


def rich(code: int, message: str, *details: Any) -> Any:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))


async def test_details_of_errors(server: RecordingServer) -> None:
    violations = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field="n", description="at most 32")
        ]
    )
    retry = error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000)
    )
    cases: list[tuple[Any, type[errors.TandemError], dict[str, object]]] = [
        (
            rich(code_pb2.INVALID_ARGUMENT, "n: at most 32", violations),
            errors.InvalidArgument,
            {"field": "n", "message": "n: at most 32"},
        ),
        (rich(code_pb2.RESOURCE_EXHAUSTED, "full", retry), errors.Overloaded, {"retry_after": 2.5}),
        (rich(code_pb2.UNAVAILABLE, "draining", retry), errors.Unavailable, {"retry_after": 2.5}),
        (rich(code_pb2.RESOURCE_EXHAUSTED, "large"), errors.TooLarge, {"message": "large"}),
    ]
    async with AsyncClient(server.address, max_retries=0) as client:
        for status, kind, attributes in cases:
            server.status = status
            with pytest.raises(kind) as caught:
                await client.generate("hi")
            assert {name: getattr(caught.value, name) for name in attributes} == attributes
            with pytest.raises(kind):
                await client.detokenize([1])


def test_details_that_cannot_be_read_leave_the_text() -> None:
    found = to_error(
        grpc.StatusCode.INVALID_ARGUMENT,
        "top_k: too large",
        (("grpc-status-details-bin", b"\xff\xff\xff"),),
    )
    assert isinstance(found, errors.InvalidArgument)
    assert (found.field, found.message) == ("top_k", "top_k: too large")
