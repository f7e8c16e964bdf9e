"""Tests that strangers cannot misuse grpc.health.v1, which needs no key."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.proto.limits import MAX_HEALTH_BYTES
from tandem.router.api.server import grpc_server
from tandem.router.api.server.connection import ConnectionBounds
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.api.test_connections import HTTP2_PREFACE, Streams, connected, serving
from tandem.tests.waits import WAIT

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/grpc.health.v1.Health/Watch",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}
METHODS = ("Check", "Watch")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns a frame of HTTP/2 (RFC 9113)."""
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def literal(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


async def watch_without_a_window(streams: Streams) -> None:
    """Opens a Watch whose client reads nothing.

    Waits until the server has begun to answer it.
    """
    reader, writer = streams
    fields = b"".join(b"\0" + literal(name) + literal(value) for name, value in HEADERS.items())
    no_window = frame(4, 0, 0, b"\0\4" + bytes(4))
    writer.write(HTTP2_PREFACE + no_window + frame(1, 4, 1, fields) + frame(0, 1, 1, bytes(5)))
    while True:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == 1:
            return


def ask(channel: grpc.aio.Channel, method: str) -> Any:
    """Begins a call, which may send any bytes."""
    return channel.stream_stream(f"/grpc.health.v1.Health/{method}")()


async def test_an_unread_watch_does_not_block_the_status(
    model: ServedModel,
) -> None:
    """Routers set the status when the list of workers changes, and when they stop."""
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        connected(servers.grpc_address) as streams,
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        await watch_without_a_window(streams)
        other = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await other.read()).status == SERVING
        for status in (NOT_SERVING, SERVING, NOT_SERVING):
            await servers.set_serving(status == SERVING)
            assert (await other.read()).status == status


async def test_watchers_are_told_that_a_server_stops_and_do_not_keep_it_waiting(
    model: ServedModel,
) -> None:
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await servers.stop(10 * WAIT)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_whose_message_does_not_come_is_ended(model: ServedModel, method: str) -> None:
    bounds = ConnectionBounds(request_seconds=0.3)
    async with (
        serving(model, bounds) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        assert await ask(channel, method).code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_refused(model: ServedModel, method: str) -> None:
    bounds = ConnectionBounds()
    async with (
        serving(model, bounds) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        call = ask(channel, method)
        await call.write(b"\xff" * 9)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", METHODS)
async def test_a_message_that_is_too_large_is_refused(model: ServedModel, method: str) -> None:
    """A watcher would hold it as long as it waits."""
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        call = ask(channel, method)
        request = health_pb2.HealthCheckRequest(service="x" * MAX_HEALTH_BYTES)
        await call.write(request.SerializeToString())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"the maximum is {MAX_HEALTH_BYTES}" in await call.details()


async def test_health_checks_whose_messages_do_not_come_are_bounded(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may hold a part of a large message; watchers with their message do not count."""
    monkeypatch.setattr(grpc_server, "MAX_UNREAD_HEALTH_CHECKS", 2)
    async with (
        serving(model, ConnectionBounds()) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(4):
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
        calls = [ask(channel, "Watch") for _ in range(3)]
        codes = [asyncio.create_task(call.code()) for call in calls]
        refused, _ = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
        assert [code.result() for code in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for call in calls:
            call.cancel()
        while True:
            with suppress(grpc.aio.AioRpcError):
                assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
                return


async def test_watchers_of_one_address_are_bounded(model: ServedModel) -> None:
    bounds = ConnectionBounds(max_per_address=4)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with serving(model, bounds) as (servers, _), AsyncExitStack() as scope:

        async def watch() -> Any:
            channel = await scope.enter_async_context(
                grpc.aio.insecure_channel(servers.grpc_address, options=options)
            )
            return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        watches = [await watch() for _ in range(4)]
        for each in watches:
            assert (await each.read()).status == SERVING
        assert await (await watch()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        while True:
            with suppress(grpc.aio.AioRpcError):
                assert (await (await watch()).read()).status == SERVING
                return


async def test_a_service_that_is_none(model: ServedModel) -> None:
    bounds = ConnectionBounds()
    async with (
        serving(model, bounds) as (servers, _),
        grpc.aio.insecure_channel(servers.grpc_address) as channel,
    ):
        stub, unknown = (
            health_pb2_grpc.HealthStub(channel),
            health_pb2.HealthCheckRequest(service="none"),
        )
        assert (
            await stub.Watch(unknown).read()
        ).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(unknown)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
