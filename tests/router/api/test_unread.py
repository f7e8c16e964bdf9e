"""Tests that answers without a reader hold no resources, and that who reads is not disconnected."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest
import uvicorn
from hypothesis import example, given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from tandem.cluster.sim.loop import run_simulated
from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.router.api.server.connection import ConnectionBounds, HttpConnection
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.frontend.served_model import ServedModel
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


STALL_SECONDS = 10.0
HIGH, LOW = 64 * 2**10, 16 * 2**10  # bytes, between which asyncio pauses and resumes writing

Answer = Sequence[tuple[float, int]]
"""The parts of an answer: the seconds before each, and its bytes."""


class UnreadTransport(asyncio.Transport):
    """Holds what a connection writes until `read` takes it, with the bounds of asyncio."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.num_unread = 0
        self.is_aborted = False
        self.reads = True
        self._connection = connection
        self._is_closing = False
        self._is_paused = False

    def write(self, data: Any) -> None:
        self.num_unread += len(data)
        if self.num_unread > HIGH and not self._is_paused:
            self._is_paused = True
            self._connection.pause_writing()

    def read(self, most: int) -> None:
        self.num_unread = max(self.num_unread - most, 0)
        if self.num_unread <= LOW and self._is_paused:
            self._is_paused = False
            self._connection.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_aborted = self._is_closing = True


class Exchange:
    """Connects a client on virtual time, whose requests get `answers` one after another."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.num_answered = 0
        self._answers = iter(answers)
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=3_600,
            ws="none",
        )
        bounds = ConnectionBounds(stall_seconds=STALL_SECONDS, head_seconds=3_600)
        self.connection = HttpConnection(config, ServerState(), {}, bounds=bounds)
        self.transport = UnreadTransport(self.connection)
        self.connection.connection_made(self.transport)

    def ask(self) -> None:
        if self.transport.reads:
            self.connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")

    async def _app(self, _scope: Any, _receive: Any, send: Any) -> None:
        answer = next(self._answers)
        headers = [(b"content-length", b"%d" % sum(size for _, size in answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, (seconds, size) in enumerate(answer, 1):
            await asyncio.sleep(seconds)
            has_more = number < len(answer)
            await send({"type": "http.response.body", "body": bytes(size), "more_body": has_more})
        self.num_answered += 1


_PARTS = st.lists(st.tuples(st.floats(0, 15), st.integers(1, 200_000)), min_size=1, max_size=4)


# A rest of the first answer waits when the second one comes, which is much larger.
@example(answers=[(0.0, [(0.0, 40_000)]), (5.0, [(0.0, 1_000_000)])])
@given(answers=st.lists(st.tuples(st.floats(0, 30), _PARTS), min_size=1, max_size=4))
def test_a_client_that_reads_is_never_disconnected(answers: list[tuple[float, Answer]]) -> None:
    """It sends each request before it has read the whole answer to the one before."""

    async def run() -> None:
        exchange = Exchange([answer for _, answer in answers])

        async def read() -> None:
            while not exchange.transport.is_aborted:
                await asyncio.sleep(1)
                exchange.transport.read(4_096)

        reading = asyncio.create_task(read())
        for number, (seconds, _) in enumerate(answers, 1):
            await asyncio.sleep(seconds)
            exchange.ask()
            while exchange.num_answered < number and not exchange.transport.is_aborted:
                await asyncio.sleep(1)
        while exchange.transport.num_unread and not exchange.transport.is_aborted:
            await asyncio.sleep(1)
        assert not exchange.transport.is_aborted
        reading.cancel()
        exchange.connection.connection_lost(None)

    run_simulated(run())


@pytest.mark.parametrize("size", [100, 10_000, 60_000, 200_000])
def test_new_requests_do_not_save_a_client_that_reads_nothing(size: int) -> None:
    """Its requests are answered only until the answers fill the buffer."""

    async def run() -> None:
        exchange = Exchange([[(0.0, size)]] * HIGH)
        while not exchange.transport.is_aborted:
            exchange.ask()
            await asyncio.sleep(1)
        now = asyncio.get_running_loop().time()
        assert now <= HIGH / size + 2 * STALL_SECONDS
        exchange.connection.connection_lost(None)

    run_simulated(run())


def test_the_last_bytes_of_an_answer_are_watched_too() -> None:
    """The client lets the server write the whole answer, and does not read its end."""

    async def run() -> None:
        exchange = Exchange([[(0.0, HIGH + LOW // 2)]])
        exchange.ask()
        await asyncio.sleep(1)
        assert exchange.num_answered == 1
        exchange.transport.read(HIGH)
        await asyncio.sleep(STALL_SECONDS + 1)
        assert exchange.transport.is_aborted
        exchange.connection.connection_lost(None)

    run_simulated(run())
