"""Tests connections that waste resources: slow, large, idle, too many, or with unread answers."""

import asyncio
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.proto.limits import MAX_MESSAGE_BYTES
from tandem.router.api.server import listener
from tandem.router.api.server.connection import ConnectionBounds, HttpConnection
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.api.http_bodies import TEXT, body
from tandem.tests.router.api.test_unread import unread_grpc, unread_http
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(
    model: ServedModel, bounds: ConnectionBounds
) -> AsyncIterator[tuple[ApiServers, FakeTokenSource]]:
    source = FakeTokenSource()
    servers = await ApiServers.start(GenerationService([model], source), bounds=bounds)
    await servers.set_serving(True)
    try:
        async with asyncio.timeout(WAIT):
            yield servers, source
    finally:
        await servers.stop(0)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Streams]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def drip(streams: Streams, data: bytes) -> None:
    """Sends the same bytes repeatedly, until the server ends the connection."""
    reader, writer = streams
    with suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(data)
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(65_536), 0.02)


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_a_stream_that_is_not_read_is_cut(model: ServedModel, api: str) -> None:
    async with serving(model, ConnectionBounds(stall_seconds=0.3)) as (servers, source):
        unread = (
            unread_http(servers.http_address)
            if api == "http"
            else unread_grpc(servers.grpc_address)
        )
        async with unread:
            await source.wait_running(1)
            await source.wait_running(0)
    assert source.cancelled == 1


async def test_who_reads_a_cut_stream_later_learns_why(model: ServedModel) -> None:
    async with serving(model, ConnectionBounds(stall_seconds=0.3)) as (servers, source):
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
        async with grpc.aio.insecure_channel(servers.grpc_address, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            stopping = inference_pb2.StoppingParams(max_tokens=200, ignore_eos=True)
            request = inference_pb2.GenerateRequest(
                prompt={"text": "hi"}, n=32, logprobs=20, stopping=stopping
            )
            call = stub.Generate(request)
            await source.wait_running(1)
            await source.wait_running(0)
            with pytest.raises(grpc.aio.AioRpcError, match="the client has read nothing for"):
                _ = [message async for message in call]
            assert await call.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", b"G"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"a"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n", b"a"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n",
            b"a",
        ),
    ],
    ids=[
        "no head",
        "a long head",
        "a body that nobody reads",
        "nothing after an answer",
        "a slow body",
    ],
)
async def test_a_connection_that_sends_a_byte_now_and_then_is_ended(
    model: ServedModel, first: bytes, more: bytes
) -> None:
    bounds = ConnectionBounds(head_seconds=0.3, request_seconds=0.3)
    async with serving(model, bounds) as (servers, _), connected(servers.http_address) as streams:
        streams[1].write(first)
        await drip(streams, more)
    assert not bounds.per_address
    assert not bounds.idle


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"GET /health HTTP/1.1\r\nA: ", b"a" * 1_024),
        (
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"A: " + b"a" * 1_024 + b"\r\n",
        ),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;a=", b"a" * 1_024),
    ],
    ids=["headers", "trailers", "extensions of a chunk"],
)
async def test_a_connection_with_a_head_without_end_is_ended(
    model: ServedModel, first: bytes, more: bytes
) -> None:
    """Covers headers, trailers and the extensions of a chunk."""
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        connected(servers.http_address) as streams,
    ):
        streams[1].write(first)
        await drip(streams, more * 16)


@pytest.mark.parametrize(
    "bounds", [ConnectionBounds(max_connections=8), ConnectionBounds(max_per_address=8)]
)
async def test_slow_connections_give_way_to_a_good_client(
    model: ServedModel, bounds: ConnectionBounds
) -> None:
    async with serving(model, bounds) as (servers, _), AsyncExitStack() as scope:
        for _ in range(8):
            for _ in range(8):
                _, writer = await scope.enter_async_context(connected(servers.http_address))
                writer.write(b"GET /health HTT")
            async with httpx.AsyncClient(
                base_url=f"http://{servers.http_address}", timeout=WAIT
            ) as http:
                assert (await http.post(TEXT, json=body(TEXT))).status_code == 200
            assert bounds.per_address.total() <= 9


async def test_connections_that_come_and_go_leave_nothing(model: ServedModel) -> None:
    bounds = ConnectionBounds()
    async with serving(model, bounds) as (servers, _):
        for _ in range(500):
            async with connected(servers.http_address):
                pass
        while bounds.per_address or bounds.idle:
            await asyncio.sleep(0.01)


async def test_a_running_answer_does_not_give_way(model: ServedModel) -> None:
    bounds = ConnectionBounds(max_connections=2)
    async with serving(model, bounds) as (servers, source), AsyncExitStack() as scope:
        source.stall_after = 1
        streams = [
            await scope.enter_async_context(connected(servers.http_address)) for _ in range(2)
        ]
        text = b'{"prompt": "hi", "stream": true}'
        for _, writer in streams:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        await source.wait_running(2)
        reader, _ = await scope.enter_async_context(connected(servers.http_address))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert source.running == 2


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(
    model: ServedModel,
) -> None:
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        connected(servers.http_address) as (reader, writer),
    ):
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(f"{head}Content-Length: {MAX_MESSAGE_BYTES + 1}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


async def answer_of(streams: Streams) -> bytes:
    """Reads an answer that has a content-length; returns its status line."""
    reader, _ = streams
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head.partition(b"\r\n")[0]


def only_connection(servers: ApiServers) -> HttpConnection:
    """Returns the only open HTTP connection."""
    (connection,) = servers._http._listener.server_state.connections
    assert isinstance(connection, HttpConnection)
    return connection


async def late_body(scope: AsyncExitStack, address: str) -> Streams:
    """Opens a connection on which the body of a request has ended after its response."""
    streams = await scope.enter_async_context(connected(address))
    streams[1].write(HEALTH + b"Content-Length: 1\r\n\r\n")
    assert await answer_of(streams) == b"http/1.1 200 ok"
    streams[1].write(b"x")
    return streams


async def unread_pipeline(scope: AsyncExitStack, address: str) -> Streams:
    """Opens a connection with thousands of requests and reads none of the answers."""
    streams = await scope.enter_async_context(connected(address))
    streams[0]._transport.pause_reading()  # type: ignore[attr-defined]
    streams[1].write((HEALTH + b"\r\n") * 4_000)
    return streams


@pytest.mark.parametrize("hold", [late_body, unread_pipeline])
@pytest.mark.parametrize(
    "bounds", [ConnectionBounds(max_connections=8), ConnectionBounds(max_per_address=8)]
)
async def test_connections_whose_requests_are_answered_give_way(
    model: ServedModel,
    bounds: ConnectionBounds,
    hold: Callable[[AsyncExitStack, str], Awaitable[Streams]],
) -> None:
    bounds = replace(bounds, per_address=Counter(), idle=defaultdict(OrderedDict))
    async with serving(model, bounds) as (servers, _), AsyncExitStack() as scope:
        for _ in range(8):
            await hold(scope, servers.http_address)
        for _ in range(8):
            good = await scope.enter_async_context(connected(servers.http_address))
            good[1].write(HEALTH + b"\r\n")
            assert await answer_of(good) == b"http/1.1 200 ok"
        assert bounds.per_address.total() <= 9


async def test_a_connection_whose_body_ended_after_the_answer_is_used_again_or_ended(
    model: ServedModel,
) -> None:
    async with (
        serving(model, ConnectionBounds(head_seconds=0.3)) as (servers, _),
        AsyncExitStack() as scope,
    ):
        streams = await late_body(scope, servers.http_address)
        streams[1].write(HEALTH + b"\r\n")
        assert await answer_of(streams) == b"http/1.1 200 ok"
        streams = await late_body(scope, servers.http_address)
        await drip(streams, b"\r\n")


async def test_a_connection_whose_body_ended_after_the_answer_has_the_time_of_an_idle_one(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_IDLE_SECONDS", 0.3)
    async with serving(model, ConnectionBounds()) as (servers, _), AsyncExitStack() as scope:
        reader, _ = await late_body(scope, servers.http_address)
        assert await reader.read() == b""


async def test_all_requests_of_a_pipeline_are_answered_in_order(model: ServedModel) -> None:
    """Includes bodies that are longer than the part that is parsed at a time."""
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        connected(servers.http_address) as (reader, writer),
    ):
        lines = []
        for length in range(1, 101):
            path = b"/none/" + b"x" * length
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n" % path
                + b"y" * 5_000
            )
            lines.append(b"/none/" + b"x" * min(length, 74) + b": ")
        writer.write(HEALTH + b"Connection: close\r\n\r\n")
        found = await reader.read()
    assert [found.find(line) for line in lines] == sorted(found.find(line) for line in lines)
    assert found.count(b"HTTP/1.1 404 Not Found") == 100
    assert found.count(b"HTTP/1.1 200 OK") == 1


async def test_a_pipeline_is_parsed_as_far_as_it_is_answered(model: ServedModel) -> None:
    async with serving(model, ConnectionBounds()) as (servers, source), AsyncExitStack() as scope:
        source.stall_after = 1
        _, writer = await scope.enter_async_context(connected(servers.http_address))
        text = b'{"prompt": "hi", "stream": true}'
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(
            f"{head}Content-Length: {len(text)}\r\n\r\n".encode()
            + text
            + (HEALTH + b"\r\n") * 4_000
        )
        await source.wait_running(1)
        connection = only_connection(servers)
        assert 1 <= len(connection.pipeline) < 16


async def test_invalid_bytes_after_a_request_do_not_change_its_answer(
    model: ServedModel,
) -> None:
    async with (
        serving(model, ConnectionBounds()) as (servers, source),
        connected(servers.http_address) as streams,
    ):
        reader, writer = streams
        source.stall_after = 1
        text = b'{"prompt": "hi", "stream": true, "max_tokens": 3}'
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        found = await reader.readuntil(b"data: ")
        writer.write(b"no request\r\n\r\n")
        await writer.drain()
        source.goes_on.set()
        found += await reader.read()
    assert found.count(b"HTTP/1.1 ") == 1
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"


def offering(prompt: str, *, is_chunked: bool = False) -> tuple[bytes, bytes]:
    """Returns the head and the body of a completion whose client offers HTTP/2, as Java's does."""
    text = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    framing = b"Content-Length: %d" % len(text)
    if is_chunked:
        framing = b"Transfer-Encoding: chunked"
        text = b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    return head + OFFER + framing + b"\r\n\r\n", text


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("prompt", ["hi", "x" * 400])
@pytest.mark.parametrize("is_at_once", [False, True])
async def test_an_offer_of_another_protocol_is_ignored(
    model: ServedModel, is_at_once: bool, prompt: str, is_chunked: bool
) -> None:
    async with (
        serving(model, ConnectionBounds()) as (servers, source),
        connected(servers.http_address) as streams,
    ):
        head, text = offering(prompt, is_chunked=is_chunked)
        for _ in range(2):
            streams[1].write(head + text if is_at_once else head)
            if not is_at_once:
                while (cycle := only_connection(servers).cycle) is None or cycle.response_complete:
                    await asyncio.sleep(0)
                streams[1].write(text)
            assert await answer_of(streams) == b"http/1.1 200 ok"
            assert bytes(source.requests[-1].submit.token_ids).decode() == prompt
        streams[1].write(HEALTH + OFFER + b"\r\n" + HEALTH + b"\r\n")
        for _ in range(2):
            assert await answer_of(streams) == b"http/1.1 200 ok"


async def test_offers_in_a_pipeline_are_ignored(model: ServedModel) -> None:
    async with (
        serving(model, ConnectionBounds()) as (servers, source),
        connected(servers.http_address) as streams,
    ):
        prompts = ["hi", "x" * 400, "ho"]
        streams[1].write(b"".join(b"".join(offering(prompt)) for prompt in prompts))
        for _ in prompts:
            assert await answer_of(streams) == b"http/1.1 200 ok"
        sent = [bytes(each.submit.token_ids).decode() for each in source.requests]
        assert sent == prompts


@pytest.mark.parametrize(
    "bad",
    [
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEALTH + OFFER + b"Transfer-Encoding: gzip\r\n\r\n",
        HEALTH + OFFER + b"Transfer-Encoding: chunked\r\n\r\nx",
    ],
)
async def test_a_tunnel_or_an_offer_with_a_bad_body_is_refused(
    model: ServedModel, bad: bytes
) -> None:
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        connected(servers.http_address) as (reader, writer),
    ):
        writer.write(bad)
        assert (await reader.read()).startswith(b"HTTP/1.1 400")


async def test_a_client_of_a_pipeline_that_leaves_cancels_its_requests(model: ServedModel) -> None:
    async with serving(model, ConnectionBounds()) as (servers, source):
        source.stall_after = 1
        async with connected(servers.http_address) as (reader, writer):
            text = b'{"prompt": "hi", "stream": true}'
            head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(
                f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text + HEALTH + b"\r\n"
            )
            await reader.readuntil(b"data: ")
            connection = only_connection(servers)
            connection.abort()
            await source.wait_running(0)
        assert source.cancelled == 1


def test_the_address_with_the_most_connections_gives_way() -> None:
    """A connection of another address stays, even if it has been idle for longest."""

    class Ended:
        is_ended = False

        def abort(self) -> None:
            self.is_ended = True

    bounds = ConnectionBounds(max_connections=4)
    good, bad = Ended(), [Ended() for _ in range(4)]
    bounds.enter("10.0.0.1", good.abort)
    for each in bad:
        bounds.enter("10.0.0.2", each.abort)
    assert [each.is_ended for each in (good, *bad)] == [False, True, False, False, False]


def silent_call(
    channel: grpc.aio.Channel, method: str = "Generate"
) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """Begins a call, and sends no message."""
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(
        f"/tandem.v1.Inference/{method}"
    )()
    return call


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_grpc_call_whose_message_does_not_come_is_ended(
    model: ServedModel, method: str
) -> None:
    bounds = ConnectionBounds(request_seconds=0.3)
    async with (
        serving(model, bounds) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        assert await silent_call(channel, method).code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_grpc_call_without_a_message_is_refused(model: ServedModel, method: str) -> None:
    bounds = ConnectionBounds()
    async with (
        serving(model, bounds) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        call = silent_call(channel, method)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("says_something", [False, True])
async def test_grpc_calls_of_one_address_are_bounded(
    model: ServedModel, says_something: bool
) -> None:
    """Counts the calls of all connections, with or without a message, but no health checks."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        serving(model, ConnectionBounds(max_per_address=4)) as (servers, source),
        AsyncExitStack() as scope,
    ):
        source.stall_after = 1

        async def channel() -> grpc.aio.Channel:
            return await scope.enter_async_context(
                grpc.aio.insecure_channel(servers.grpc_address, options=options)
            )

        calls = [silent_call(await channel()) for _ in range(4)]
        if says_something:
            for call in calls:
                await call.write(
                    inference_pb2.GenerateRequest(prompt={"text": "hi"}).SerializeToString()
                )
            await source.wait_running(4)
        other = inference_pb2_grpc.InferenceStub(await channel())  # type: ignore[no-untyped-call]
        await until_code(other, grpc.StatusCode.RESOURCE_EXHAUSTED)
        health = await health_pb2_grpc.HealthStub(await channel()).Check(
            health_pb2.HealthCheckRequest()
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        for call in calls:
            call.cancel()
        await until_code(other, grpc.StatusCode.OK)


async def until_code(stub: inference_pb2_grpc.InferenceStub, wanted: grpc.StatusCode) -> None:
    """Calls until the answer has this code."""
    while (
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=WAIT).code() is not wanted
    ):
        await asyncio.sleep(0.01)


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame without any


async def list_models(address: str) -> None:
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        assert await stub.ListModels(
            inference_pb2.ListModelsRequest(), timeout=WAIT, wait_for_ready=True
        )


@pytest.mark.parametrize("said", [b"", HTTP2_PREFACE], ids=["nothing", "no settings"])
async def test_a_grpc_connection_that_says_nothing_is_ended(
    model: ServedModel, said: bytes
) -> None:
    async with serving(model, ConnectionBounds(head_seconds=0.3)) as (servers, _):
        async with connected(servers.grpc_address) as (reader, writer):
            writer.write(said)
            with suppress(ConnectionError):
                await reader.read()  # to its end
        await list_models(servers.grpc_address)


async def test_a_grpc_connection_without_a_call_is_ended(model: ServedModel) -> None:
    async with serving(model, ConnectionBounds(idle_seconds=0.5)) as (servers, _):
        async with connected(servers.grpc_address) as (reader, writer):
            writer.write(HTTP2_PREFACE + HTTP2_SETTINGS)
            with suppress(ConnectionError):
                await reader.read()
        await list_models(servers.grpc_address)


async def test_grpc_takes_no_more_connections_than_its_bound_and_new_ones_when_some_end(
    model: ServedModel,
) -> None:
    bounds = ConnectionBounds(max_connections=8, head_seconds=0.5)
    async with serving(model, bounds) as (servers, _), AsyncExitStack() as scope:
        for _ in range(40):
            await scope.enter_async_context(connected(servers.grpc_address))
        with pytest.raises(grpc.aio.AioRpcError):
            await refused_call(servers.grpc_address)
        await list_models(
            servers.grpc_address
        )  # it tries again, and those that say nothing have been ended


async def test_grpc_connections_without_a_call_keep_no_client_out(model: ServedModel) -> None:
    async with (
        serving(model, ConnectionBounds(max_connections=16)) as (servers, _),
        AsyncExitStack() as scope,
    ):
        for _ in range(16):
            _, writer = await scope.enter_async_context(connected(servers.grpc_address))
            writer.write(HTTP2_PREFACE + HTTP2_SETTINGS)
        await list_models(servers.grpc_address)  # it tries again


async def refused_call(address: str) -> None:
    """Fails with the first connection that fails."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=WAIT)


async def test_thousands_of_grpc_connections_that_come_and_go_leave_room(
    model: ServedModel,
) -> None:
    async with serving(model, ConnectionBounds(max_connections=16)) as (servers, _):
        for _ in range(500):
            async with connected(servers.grpc_address):
                pass
        async with asyncio.timeout(WAIT):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await list_models(servers.grpc_address)
                    return
