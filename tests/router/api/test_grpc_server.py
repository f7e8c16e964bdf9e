import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.proto import errors, inference_pb2, inference_pb2_grpc, limits
from tandem.router.api.server.grpc_server import GrpcServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**({"prompt": {"text": "hi"}} | fields))


def inference_stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


@pytest.fixture
async def channel(grpc_service: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_stub(channel)


def timeline(trailing: Any) -> inference_pb2.Timeline | None:
    found = dict(trailing or ()).get("tandem-timeline-bin")
    return None if found is None else inference_pb2.Timeline.FromString(found)


def status_of(error: grpc.aio.AioRpcError) -> Any:
    """Returns the google.rpc.Status in the trailing metadata."""
    return status_pb2.Status.FromString(
        dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    )


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_generate_streams_and_ends_with_a_timeline(
    grpc_service: Service, stub: inference_pb2_grpc.InferenceStub
) -> None:
    grpc_service.source.answer = b"hello world"
    call = stub.Generate(request(request_id="mine", stopping={"stop": ["rl"]}))
    messages = [message async for message in call]
    assert "".join(message.text for message in messages) == "hello wo"
    assert len(messages) == len(b"hello worl")
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
    found = timeline(await call.trailing_metadata())
    assert found is not None
    assert (found.request_id, found.completion_tokens) == ("mine", 10)


async def test_the_first_token_does_not_wait_for_the_second(
    grpc_service: Service, stub: inference_pb2_grpc.InferenceStub
) -> None:
    grpc_service.source.answer, grpc_service.source.stall_after = b"ab", 1
    call = stub.Generate(request())
    assert (await asyncio.wait_for(call.read(), WAIT)).text == "a"
    call.cancel()
    await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)


async def test_tokenize_and_list_models(stub: inference_pb2_grpc.InferenceStub) -> None:
    answer = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt={"text": "hé"}))
    assert bytes(answer.token_ids) == "hé".encode()
    models = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(model.id, model.context_tokens) for model in models.models] == [("tiny", 512)]


@pytest.mark.parametrize("error_after", [0, 2])
@pytest.mark.parametrize(
    ("error", "code", "pushback"),
    [
        (errors.Overloaded("the queue is full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "2500"),
        (errors.Unavailable("no worker is ready", 0.25), grpc.StatusCode.UNAVAILABLE, "250"),
        (errors.DeadlineExceeded("too late"), grpc.StatusCode.DEADLINE_EXCEEDED, None),
        (errors.InternalError("given up"), grpc.StatusCode.INTERNAL, None),
        (errors.PermissionDenied("not you"), grpc.StatusCode.PERMISSION_DENIED, None),
    ],
)
async def test_errors_have_their_code_text_and_metadata(
    grpc_service: Service,
    stub: inference_pb2_grpc.InferenceStub,
    error: errors.TandemError,
    code: grpc.StatusCode,
    pushback: str | None,
    error_after: int,
) -> None:
    grpc_service.source.error, grpc_service.source.error_after = error, error_after
    caught = await failure(stub.Generate(request()))
    assert (caught.code(), caught.details()) == (code, error.message)
    trailing = dict(caught.trailing_metadata() or ())
    assert trailing.get("grpc-retry-pushback-ms") == pushback
    status = status_of(caught)
    assert (status.code, status.message) == (code.value[0], error.message)
    if pushback is None:
        assert not status.details
    else:
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == int(pushback)
    found = timeline(trailing.items())  # the request had been accepted
    assert found is not None
    assert found.completion_tokens == error_after


async def test_a_defect_is_internal_with_a_fixed_text(
    grpc_service: Service, stub: inference_pb2_grpc.InferenceStub, caplog: pytest.LogCaptureFixture
) -> None:
    grpc_service.source.error = RuntimeError("/secret/path")
    caught = await failure(stub.Generate(request()))
    assert (caught.code(), caught.details()) == (
        grpc.StatusCode.INTERNAL,
        "the service failed at this request",
    )
    assert "RuntimeError at " in caplog.text
    assert "/secret/path" not in caplog.text


async def test_a_refused_request_has_no_timeline(stub: inference_pb2_grpc.InferenceStub) -> None:
    caught = await failure(stub.Generate(request(sampling={"top_k": -2})))
    assert caught.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.details() == "sampling.top_k: must be from -1 to 1000000"
    assert timeline(caught.trailing_metadata()) is None


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
async def test_a_bad_field_is_named_in_the_details(
    stub: inference_pb2_grpc.InferenceStub, method: str
) -> None:
    bad_prompt = {"token_ids": {"ids": [258]}}
    call: Any = {
        "Generate": lambda: stub.Generate(request(prompt=bad_prompt)),
        "Tokenize": lambda: stub.Tokenize(inference_pb2.TokenizeRequest(prompt=bad_prompt)),
        "Detokenize": lambda: stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[258])),
    }[method]()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if method == "Generate" else call)
    bad = error_details_pb2.BadRequest()
    assert status_of(caught.value).details[0].Unpack(bad)
    (violation,) = bad.field_violations
    assert violation.field == ("token_ids" if method == "Detokenize" else "prompt.token_ids")
    assert violation.description == "258 is not a token id; the vocabulary has 258 tokens"


async def test_choices_logprobs_and_usage(
    grpc_service: Service, stub: inference_pb2_grpc.InferenceStub
) -> None:
    grpc_service.source.answers = [b"abc", b"de"]
    call = stub.Generate(request(n=2, logprobs=1))
    messages = [message async for message in call]
    texts = ["".join(m.text for m in messages if m.choice == choice) for choice in range(2)]
    assert texts == ["abc", "de"]
    assert all(m.logprobs[0].token.text == m.text.encode() for m in messages)
    assert messages[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
async def test_a_request_that_unpacks_to_more_than_the_bound_is_refused(
    grpc_service: Service, method: str
) -> None:
    """Sends one kilobyte for each megabyte of the unpacked request.

    The text also has too many characters, so the code shows that nobody has parsed it.
    """
    kind = inference_pb2.TokenizeRequest if method == "Tokenize" else inference_pb2.GenerateRequest
    bomb = kind(prompt={"text": "x" * 64 * 2**20})
    assert len(gzip.compress(bomb.SerializeToString())) < limits.MAX_MESSAGE_BYTES / 50
    async with grpc.aio.insecure_channel(
        grpc_service.grpc,
        compression=grpc.Compression.Gzip,
        options=[("grpc.max_send_message_length", -1)],
    ) as channel:
        stub = inference_stub(channel)
        call: Any = stub.Tokenize(bomb) if method == "Tokenize" else stub.Generate(bomb).read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt={"text": "x" * 100_000}))
        assert len(answer.token_ids) == 100_000  # compressed requests are welcome


@asynccontextmanager
async def counting_relay(target: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Yields another address of a server, and the sizes of the data from it."""
    sizes: list[int] = []
    host, _, port = target.rpartition(":")

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: list[int]
    ) -> None:
        while data := await reader.read(65_536):
            counts.append(len(data))
            writer.write(data)
            await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            copy(reader, upstream_writer, []), copy(upstream_reader, writer, sizes)
        )

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", sizes


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_responses_are_compressed_if_configured(
    model: ServedModel, compression: grpc.Compression
) -> None:
    server = GrpcServer(
        GenerationService([model], FakeTokenSource()), reflection=False, compression=compression
    )
    async with counting_relay(await server.start("127.0.0.1:0")) as (address, sizes):
        async with grpc.aio.insecure_channel(address) as channel:
            request = inference_pb2.TokenizeRequest(prompt={"text": "x" * 200_000})
            answer = await inference_stub(channel).Tokenize(request)
            assert len(answer.token_ids) == 200_000
        await server.stop(0)
    assert (sum(sizes) < 20_000) == (compression == grpc.Compression.Gzip)


async def test_log_probabilities_of_a_long_prompt_come_in_messages_that_every_client_reads(
    model: ServedModel,
) -> None:
    long = replace(model, context_tokens=16_384)
    source = FakeTokenSource(cached_tokens=5)
    server = GrpcServer(GenerationService([long], source), reflection=False)
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        asked = request(
            prompt={"text": "x" * 15_000}, prompt_logprobs=20, stopping={"max_tokens": 2}
        )
        messages = [message async for message in inference_stub(channel).Generate(asked)]
    await server.stop(0)
    assert max(message.ByteSize() for message in messages) < 2 * 2**20
    found = [entry for message in messages for entry in message.prompt_logprobs]
    assert [entry.token.HasField("logprob") for entry in found] == [False] + [True] * 14_999
    assert [message.first_index for message in messages if message.token_ids] == [0, 1]
    assert messages[0].cached_tokens == messages[-1].usage.cached_tokens == 5


@pytest.mark.parametrize("stall_after", [0, 3])
async def test_cancellation_reaches_the_source(
    grpc_service: Service, stub: inference_pb2_grpc.InferenceStub, stall_after: int
) -> None:
    grpc_service.source.stall_after = stall_after
    call = stub.Generate(request())
    for _ in range(stall_after):
        await call.read()
    await asyncio.wait_for(grpc_service.source.wait_running(1), WAIT)
    call.cancel()
    await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)
    assert grpc_service.source.cancelled == 1


async def test_a_lost_connection_reaches_the_source(grpc_service: Service) -> None:
    grpc_service.source.stall_after = 1
    channel = grpc.aio.insecure_channel(grpc_service.grpc)
    call = inference_stub(channel).Generate(request())
    await call.read()
    await channel.close()
    await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)
    assert grpc_service.source.cancelled == 1


async def test_deadline(grpc_service: Service, stub: inference_pb2_grpc.InferenceStub) -> None:
    grpc_service.source.stall_after = 1
    caught = await failure(stub.Generate(request(), timeout=0.2))
    assert caught.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)
    deadline = grpc_service.source.requests[0].deadline
    assert deadline is not None
    # gRPC rounds what is left up, by about a millisecond.
    assert 0 < deadline - grpc_service.source.requests[0].arrived < 0.25


async def test_bytes_that_are_no_message(channel: grpc.aio.Channel) -> None:
    for method in ("Tokenize", "ListModels"):
        call: Any = channel.unary_unary(f"/tandem.v1.Inference/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"tandem.v1.{method}Request" in (caught.value.details() or "")
    generate: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
    found = await failure(generate(b"\xff\xff\xff"))
    assert found.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_unknown_method(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary("/tandem.v1.Inference/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_that_is_too_large(stub: inference_pb2_grpc.InferenceStub) -> None:
    message = request(prompt={"text": "x" * (limits.MAX_MESSAGE_BYTES + 1)})
    assert (await failure(stub.Generate(message))).code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_follows_set_serving(grpc_service: Service, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    statuses = health_pb2.HealthCheckResponse
    for name in ("", "tandem.v1.Inference"):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        assert (await watch.read()).status == statuses.SERVING
        await grpc_service.servers.set_serving(False)
        assert (await asyncio.wait_for(watch.read(), WAIT)).status == statuses.NOT_SERVING
        assert (
            await stub.Check(health_pb2.HealthCheckRequest(service=name))
        ).status == statuses.NOT_SERVING
        await grpc_service.servers.set_serving(True)
        watch.cancel()


async def reflected(address: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests)
        return {
            each.name async for answer in answers for each in answer.list_services_response.service
        }


async def test_reflection_behind_its_flag(grpc_service: Service, model: ServedModel) -> None:
    assert "tandem.v1.Inference" in await reflected(grpc_service.grpc)
    server = GrpcServer(GenerationService([model], FakeTokenSource()), reflection=False)
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        # Without a message, which may come after the answer: the client would report only that.
        call = stub.ServerReflectionInfo(iter(()))
        assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)


async def test_not_serving_until_set(model: ServedModel) -> None:
    server = GrpcServer(GenerationService([model], FakeTokenSource()), reflection=False)
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)


async def test_a_taken_port_fails(grpc_service: Service, model: ServedModel) -> None:
    server = GrpcServer(GenerationService([model], FakeTokenSource()), reflection=False)
    with pytest.raises(RuntimeError):
        await server.start(grpc_service.grpc)


async def test_stop_lets_streams_end(model: ServedModel) -> None:
    server = GrpcServer(
        GenerationService([model], FakeTokenSource(answer=b"hello")), reflection=False
    )
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        call = inference_stub(channel).Generate(request())
        text = (await call.read()).text
        stopping = asyncio.create_task(server.stop(WAIT))
        while (message := await call.read()) is not grpc.aio.EOF:
            text += message.text
        assert text == "hello"
        await asyncio.wait_for(stopping, WAIT)


async def test_stop_cancels_after_the_grace(model: ServedModel) -> None:
    source = FakeTokenSource(stall_after=1)
    server = GrpcServer(GenerationService([model], source), reflection=False)
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        call = inference_stub(channel).Generate(request())
        await call.read()
        await asyncio.wait_for(server.stop(0.1), WAIT)
        await asyncio.wait_for(source.wait_running(0), WAIT)
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
