"""Whoever is not of the service gets nothing from a worker, does nothing to it, and is believed
nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.proto import worker_pb2
from tandem.proto.channel import PeerChannel, PeerServer, PeerStream
from tandem.proto.hashing import hash_prompt
from tandem.proto.identity import MAX_SKEW_SECONDS, PeerIdentity
from tandem.tests.fleet import VOCAB, Fleet, fake_rank, fleet, worker_stub
from tandem.tests.peers import IDENTITY, STRANGER
from tandem.tests.router.fake_worker import open_session
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.raw_session import ended, executor_of, submit, worker_of
from tandem.tests.workers.transfer.played import EPOCH, handle, one_table, sender_of
from tandem.workers.engine.plan import FirstTokens
from tandem.workers.transfer.endpoint import KvEndpoint
from tandem.workers.transfer.frames import CONNECT_METHOD, PULL_METHOD, TransferKey

WORKER_METHODS = tuple(f"/tandem.v1.Worker/{name}" for name in ("Session", "GetStatus", "Drain"))
METHODS = (
    *WORKER_METHODS,
    PULL_METHOD,
    CONNECT_METHOD,
    "/tandem.v1.Rank/Control",
    "/tandem.v1.Worker/None",
)
PROMPT = range(100)
KEY = "tandem-proof-bin"
RawCall = grpc.aio.StreamStreamCall[bytes, bytes]


def proofs(
    method: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[tuple[str, str | bytes], ...]]:
    """Returns metadata of strangers: with nothing, noise, another secret, and real proofs for
    something else.
    """
    good = IDENTITY.make_proof(method, address)
    with monkeypatch.context() as context:
        before = time.time() - 2 * MAX_SKEW_SECONDS
        context.setattr("tandem.proto.identity.time.time", lambda: before)
        old = IDENTITY.make_proof(method, address)
    others = [
        b"",
        bytes(56),
        good[:-1],
        good + b"\0",
        good[:-1] + bytes([good[-1] ^ 1]),
        IDENTITY.secret,
        old,
    ]
    others.append(STRANGER.make_proof(method, address))
    others.append(IDENTITY.make_proof("/tandem.v1.Worker/Other", address))
    others.append(
        IDENTITY.make_proof(method, "127.0.0.2:50051")
    )  # which a stranger may have got in another's place
    return [
        (),
        (("authorization", "Bearer key"),),
        (("tandem-proof", "text"),),
        *(((KEY, each),) for each in others),
    ]


async def call(
    address: str, method: str, metadata: tuple[tuple[str, str | bytes], ...]
) -> grpc.aio.AioRpcError:
    """Opens a call, sends bytes that are no message, and returns how it is refused."""
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(100):
            opened: RawCall = channel.stream_stream(method)(
                metadata=grpc.aio.Metadata(*metadata), timeout=WAIT
            )
            with suppress(
                asyncio.InvalidStateError, grpc.aio.AioRpcError
            ):  # it may be refused already
                await opened.write(b"\xff" * 100)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await opened.read()
            if (
                refused.value.code() is not grpc.StatusCode.INTERNAL
            ):  # which a write that meets the refusal ends with
                break
    return refused.value


async def check_whole(running: Fleet) -> None:
    """Fails unless the workers answer as ever, and hold nothing."""
    tokens, _ = await running.generate(token_request(PROMPT, 5))
    assert tokens == expected_tokens(PROMPT, 5, VOCAB)
    await running.check_idle()
    assert not any(status.info.draining for status in await running.statuses())


async def test_a_stranger_gets_nothing_from_a_worker_and_does_nothing_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over every method, refused before a byte of the message is read: it would not parse."""
    async with fleet() as running:
        for worker in running.workers:
            tries = [
                (method, one)
                for method in METHODS
                for one in proofs(method, worker.address, monkeypatch)
            ]
            for refused in await asyncio.gather(*(call(worker.address, *each) for each in tries)):
                assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
                assert refused.details() == "not a peer of this service"
                assert not refused.initial_metadata()
        await check_whole(running)
        assert sum(status.num_sessions for status in await running.statuses()) == 2, (
            "those of the one router"
        )


async def test_streams_that_a_stranger_opens_and_cancels_kill_nothing() -> None:
    async with fleet() as running:
        for worker in running.workers:
            async with grpc.aio.insecure_channel(worker.address) as channel:
                for method in METHODS:
                    opened: RawCall = channel.stream_stream(method)()
                    with suppress(grpc.aio.AioRpcError):  # it may be refused already
                        await opened.wait_for_connection()
                    opened.cancel()
        await check_whole(running)


async def test_a_stranger_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.proto.channel.HANDSHAKE_SECONDS", 0.3)
    async with fleet() as running:
        for worker in running.workers:
            host, _, port = worker.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(WAIT):
                with suppress(ConnectionError):
                    while await reader.read(4_096):
                        pass
            writer.close()
        await check_whole(running)


async def test_a_peer_with_another_secret_cannot_drain_a_worker_or_read_its_status() -> None:
    async with fleet() as running:
        for worker in running.workers:
            async with PeerChannel(worker.address, STRANGER) as channel:
                stub = worker_stub(channel)
                for ask, request in (
                    (stub.Drain, worker_pb2.DrainRequest()),
                    (stub.GetStatus, worker_pb2.GetStatusRequest()),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await ask(request, timeout=WAIT)
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await check_whole(running)


@asynccontextmanager
async def stranger_with_kv_cache() -> AsyncIterator[tuple[worker_pb2.KvHandle, list[str]]]:
    """Runs an endpoint of a stranger who knows all of the protocol but the secret, and offers the
    KV cache of another text under the prompt's name; and lists the calls that come.
    """
    calls: list[str] = []

    class Impostor(PeerIdentity):
        def accepts(self, proof: bytes, method: str, targets: Iterable[str]) -> bool:
            calls.append(method)
            return True

    rank = fake_rank()
    kv, blocks = executor_of(rank).kv, tuple(range(7))
    kv.compute([blocks], 0, [token + 1 for token in PROMPT], b"")
    sender = sender_of(kv, ())
    key = TransferKey(transfer_id=b"0123456789abcdef", epoch=EPOCH)
    sender.offer(1, key.transfer_id, one_table(blocks), len(PROMPT), hash_prompt(PROMPT))
    sender.progress(1, len(PROMPT))
    sender.complete(1, FirstTokens(tokens=(7,)))
    impostor = Impostor(STRANGER.secret)
    server, endpoint = PeerServer(impostor), KvEndpoint(sender, impostor)
    endpoint.serve_on(server)
    address = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield handle(key, [address], kv.layout, len(PROMPT)), calls
    finally:
        await server.stop(0)
        await endpoint.close()


async def test_a_submit_with_a_foreign_kv_endpoint_fails_and_poisons_no_cache() -> None:
    """Not even who may submit can have a worker take KV cache from elsewhere."""
    async with worker_of(fake_rank()) as (_, session), stranger_with_kv_cache() as (foreign, calls):
        await session.send(submit(task=worker_pb2.TASK_DECODE, token_ids=PROMPT, kv=foreign))
        failure = await session.failure()
        assert failure.kind == worker_pb2.FAILURE_KIND_TRANSFER
        assert PULL_METHOD in calls, "it was asked, but could not answer"
        await session.send(submit("public", token_ids=PROMPT))
        await session.until(ended)
        assert session.tokens("public") == expected_tokens(PROMPT, 5, VOCAB)
        (admitted,) = (
            each.admitted for each in session.outputs("public") if each.HasField("admitted")
        )
        assert admitted.cached_tokens == 0
        await session.half_close()


async def test_a_stranger_at_the_address_of_a_worker_that_is_gone_gets_no_prompt() -> None:
    """And no request is blamed for what it answers."""
    heard: list[object] = []

    async def listen(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await context.send_initial_metadata((("tandem-proof-bin", bytes(32)),))
        await context.write(worker_pb2.SessionResponse().SerializeToString())
        heard.extend([each async for each in requests])

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(listen)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tandem.v1.Worker", handlers),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    wake, messages = asyncio.Event(), list[object]()
    client = open_session(
        ("worker", 1), address, on_message=lambda client, message: messages.append(message)
    )
    try:
        stream = client.submit(submit(token_ids=PROMPT), wake)
        async with asyncio.timeout(WAIT):
            while stream.failure is None:
                await wake.wait()
                wake.clear()
    finally:
        await client.close()
        await server.stop(0)
    assert stream.failure.kind == worker_pb2.FAILURE_KIND_GONE
    assert not heard
    assert not messages


HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


async def test_connections_of_strangers_keep_no_peer_out() -> None:
    """They speak HTTP/2, and call nothing. A peer that is there stays, and a new one gets in."""

    async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(request)

    server = PeerServer(IDENTITY, max_connections=16)
    handler = grpc.method_handlers_generic_handler(
        "echo", {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    )
    server.add_generic_rpc_handlers([handler])
    address = server.bind("127.0.0.1", 0)
    await server.start()
    host, _, port = address.rpartition(":")
    writers = []
    async with asyncio.timeout(WAIT), PeerChannel(address, IDENTITY) as first:
        stream: PeerStream[bytes, bytes] = first.stream_stream("/echo/Echo")()
        await stream.write(b"1")
        assert await stream.read() == b"1"
        for _ in range(16):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(HTTP2_BEGIN)
            writers.append(writer)
        assert await echoed(address) == b"2"
        await stream.write(b"3")
        assert await stream.read() == b"3"
        stream.cancel()
    for writer in writers:
        writer.close()
    await server.stop(0)


async def echoed(address: str) -> object:
    """Returns the answer of an echo over a connection of its own, which is tried until there is
    one.
    """
    while True:
        async with PeerChannel(address, IDENTITY) as channel:
            stream: PeerStream[bytes, bytes] = channel.stream_stream("/echo/Echo")()
            with suppress(grpc.aio.AioRpcError):
                await stream.write(b"2")
                return await stream.read()
