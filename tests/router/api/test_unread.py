"""Tests that streams without a reader do not hold resources that other requests need."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import httpx
import pytest

from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.frontend.prepare import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.scheduling.admission import Admission
from tandem.tests.fleet import Fleet, fake_rank, fleet
from tandem.tests.peers import IDENTITY
from tandem.tests.router.api.http_bodies import TEXT
from tandem.tests.waits import WAIT
from tandem.workers.tp.rank import Rank

NUM_OTHERS = 15
UNREAD = {"n": 32, "logprobs": 20, "max_tokens": 100, "stream": True, "ignore_eos": True}
"""Two of these take all sequences of a worker. Each answer has 7 MB, over gRPC 0.7 MB: more
than the sockets hold.
"""


@dataclass(frozen=True, kw_only=True)
class Running:
    """Holds a service of two fake workers, with real admission."""

    fleet: Fleet
    admission: Admission
    servers: ApiServers


@asynccontextmanager
async def running(tokenizer: Tokenizer) -> AsyncIterator[Running]:
    model = ServedModel(name="tiny", tokenizer=tokenizer, context_tokens=512)

    def rank(role: str) -> Rank:
        return fake_rank(num_blocks=1_024, context_tokens=512, vocab_size=128)

    async with fleet(rank=rank, max_sequences=64) as workers:
        admission = Admission(workers.registry)
        dispatcher = Dispatcher(workers.registry, admission, identity=IDENTITY)
        servers = await ApiServers.start(GenerationService([model], dispatcher, admission))
        try:
            yield Running(fleet=workers, admission=admission, servers=servers)
        finally:
            await servers.stop(0)
            await dispatcher.close()


@asynccontextmanager
async def unread_http(address: str) -> AsyncIterator[None]:
    """Opens a stream and reads nothing of it."""
    host, port = address.split(":")
    body = json.dumps(UNREAD | {"prompt": "hi"}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(connection, head.encode() + body)
        yield


@asynccontextmanager
async def unread_grpc(address: str) -> AsyncIterator[None]:
    """Opens a stream and reads nothing of it."""
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 16_384),
    ]  # a window that does not grow
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(
            inference_pb2.GenerateRequest(
                prompt={"text": "hi"},
                n=32,
                logprobs=20,
                stopping={"max_tokens": 100, "ignore_eos": True},
            )
        )
        await call.initial_metadata()
        yield
        call.cancel()


async def ask_http(address: str, number: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
        answer = await http.post(
            TEXT, json={"prompt": f"other {number}", "max_tokens": 5, "ignore_eos": True}
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5


async def ask_grpc(address: str, number: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        stopping = inference_pb2.StoppingParams(max_tokens=5, ignore_eos=True)
        request = inference_pb2.GenerateRequest(
            prompt={"text": f"other {number}"}, stopping=stopping
        )
        answers = [answer async for answer in stub.Generate(request, timeout=WAIT)]
    assert answers[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_two_unread_streams_stop_no_other_request(tokenizer: Tokenizer, api: str) -> None:
    """They hold all sequences until the workers finish; then the router frees them as well."""
    async with running(tokenizer) as service, AsyncExitStack() as scope:
        http, address = service.servers.http_address, service.servers.grpc_address
        for _ in range(2):
            await scope.enter_async_context(
                unread_http(http) if api == "http" else unread_grpc(address)
            )
        async with asyncio.timeout(WAIT):
            while service.admission.num_active < 2:
                await asyncio.sleep(0.01)
            ask = [
                ask_http(http, n) if api == "http" else ask_grpc(address, n)
                for n in range(NUM_OTHERS)
            ]
            await asyncio.gather(*ask)
            while service.admission.num_active:
                await asyncio.sleep(0.01)
        free, size = (
            service.fleet.registry.capacity.free(),
            service.fleet.registry.capacity.largest(),
        )
        assert free is not None
        assert size is not None
        assert free.sequences == size.sequences
