"""Clients of several routers: one is lost in the middle of a stream, and nobody notices."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from google.rpc import code_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status.rpc_status import to_status  # type: ignore[import-untyped]

from tandem.proto import errors, inference_pb2
from tandem.router.api.server.grpc_server import GrpcServer
from tandem.router.api.service import GenerationService
from tandem.router.client.client import AsyncClient, Client
from tandem.router.client.types import Completion, Delta, Options
from tandem.router.client.wire import Retries
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.frontend.served_model import ServedModel
from tandem.router.request import TokenDelta, TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.fleet import Fleet, fake_rank, fleet
from tandem.tests.peers import IDENTITY
from tandem.tests.router.client.recording_server import LAST, RecordingServer
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import byte_tokenizer
from tandem.tests.waits import WAIT
from tandem.workers.tp.rank import Rank

KEY = b"k" * 32
VOCAB = 256  # that of the tokenizer, without special tokens
STEP_SECONDS = 0.003
DEAD = "127.0.0.1:1"


def byte_rank(_role: str) -> Rank:
    rank = fake_rank(step_seconds=STEP_SECONDS)
    cast(Any, rank.executor).vocab_size = VOCAB
    return replace(rank, vocab_size=VOCAB)


@dataclass
class Router:
    """A gRPC server with a dispatcher of its own, behind a connection that a test can cut."""

    workers: Fleet
    address: str = ""
    requests: list[TokenRequest] = field(default_factory=list)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def start(self, scope: AsyncExitStack) -> None:
        registry = WorkerRegistry()
        registry.update(worker.info() for worker in self.workers.workers)
        self._dispatcher = Dispatcher(registry, Admission(registry), identity=IDENTITY)
        scope.push_async_callback(self._dispatcher.close)
        model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=2_048)
        self._server = GrpcServer(
            GenerationService([model], self, resume_key=KEY), reflection=False
        )
        self._port = int((await self._server.start("127.0.0.1:0")).rpartition(":")[2])
        scope.push_async_callback(self._server.stop, 0)
        self._forwarder = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        scope.callback(self._forwarder.close)
        self.address = f"127.0.0.1:{self._forwarder.sockets[0].getsockname()[1]}"

    def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        return self._dispatcher.generate(request, timeline, ended)

    async def stop(self) -> None:
        """Ends all calls without a grace, and listens no more."""
        self._forwarder.close()
        await self._server.stop(0)

    async def cut(self) -> None:
        """Resets all connections, and listens no more: as if the process was killed."""
        self._forwarder.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, other_writer]
        await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def two_routers() -> AsyncIterator[list[Router]]:
    """Runs two routers over a pair of workers."""
    async with fleet(1, 1, rank=byte_rank) as running, AsyncExitStack() as scope:
        routers = [Router(running), Router(running)]
        for router in routers:
            await router.start(scope)
        yield routers


async def read(
    addresses: list[str], blocking: bool, options: Options, on_delta: Any
) -> tuple[list[Delta], Completion]:
    """Streams by one of the clients; calls `on_delta` for each delta, in the event loop."""
    deltas: list[Delta] = []
    if not blocking:
        async with (
            AsyncClient(addresses) as client,
            client.stream("hi", timeout=60, **options) as stream,
        ):
            async for delta in stream:
                deltas.append(delta)
                await on_delta(len(deltas))
            return deltas, await stream.completion()
    loop = asyncio.get_running_loop()

    def use_client() -> Completion:
        with (
            Client(",".join(addresses)) as client,
            client.stream("hi", timeout=60, **options) as stream,
        ):
            for delta in stream:
                deltas.append(delta)
                asyncio.run_coroutine_threadsafe(on_delta(len(deltas)), loop).result()
            return stream.completion()

    return deltas, await asyncio.to_thread(use_client)


@pytest.mark.parametrize("way", ["cut", "stop"])
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_stream_goes_on_when_its_router_is_lost(blocking: bool, way: str) -> None:
    options: Options = {
        "n": 2,
        "max_tokens": 150,
        "logprobs": 1,
        "prompt_logprobs": 0,
        "temperature": 1.0,
    }

    async def do_nothing(_: int) -> None:
        return None

    async with two_routers() as routers:

        async def lose(num_deltas: int) -> None:
            if num_deltas == 61:
                await getattr(next(router for router in routers if router.requests), way)()

        deltas, found = await read([router.address for router in routers], blocking, options, lose)
        first, second = sorted(
            routers, key=lambda router: any(request.emitted for request in router.requests)
        )
        (begun,), (resumed,) = first.requests, second.requests
        assert begun.submit.sampling.seed == resumed.submit.sampling.seed
        assert all(30 <= len(ids or ()) < 150 for ids in resumed.emitted)
        for choice in range(2):
            indices = [delta.first_index for delta in deltas if delta.choice == choice]
            assert indices == sorted(set(indices))
        seeded: Options = {**options, "seed": begun.submit.sampling.seed}
        _, expected = await read([second.address], blocking, seeded, do_nothing)
    assert found.choices == expected.choices
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (2, 300)
    assert len({len(choice.token_ids) for choice in found.choices} | {150}) == 1


async def test_a_lone_router_that_comes_back_goes_on(grpc_service: Service) -> None:
    """The service fails three times after three more tokens; what counts are tries without a token
    between them.
    """
    source = grpc_service.source
    generate, source.error, source.error_after = (
        source.generate,
        errors.Unavailable("gone", 0.01),
        3,
    )

    async def failing(request: TokenRequest, *args: Any) -> AsyncIterator[TokenDelta]:
        num_emitted = len(request.emitted[0] or ()) if request.emitted else 0
        source.error_after = num_emitted + 3
        async for delta in generate(request, *args):
            yield delta

    source.generate = failing  # type: ignore[method-assign,assignment]
    async with AsyncClient(grpc_service.grpc, max_retries=1) as client:
        found = await client.generate("hi", max_tokens=12, request_id="mine")
    assert [len(request.emitted[0] or ()) for request in source.requests[1:]] == [3, 6, 9]
    assert len(found.token_ids) == 12
    assert found.request_id == "mine"


async def test_a_service_without_resume_tokens_is_not_asked_to_go_on(
    server: RecordingServer,
) -> None:
    server.answers = [inference_pb2.GenerateResponse(text="a", token_ids=[1])]
    server.last_status = to_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone"))
    async with AsyncClient(server.address) as client:
        with pytest.raises(errors.Unavailable):
            await client.generate("hi")
    assert len(server.requests) == 1


async def test_a_stream_whose_router_was_lost_is_cancelled_and_not_tried_again(
    server: RecordingServer,
) -> None:
    begun = inference_pb2.GenerateResponse(text="a", token_ids=[1], resume_token=b"r")
    server.answers = [begun]
    server.last_status = to_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone"))
    async with AsyncClient(server.address) as client:
        stream = client.stream("hi")
        assert (await anext(stream)).text == "a"
        await stream._call.code()  # the error has come, and nobody has read it
        server.answers, server.last_status = [LAST], None
        stream.cancel()
        with pytest.raises(errors.Cancelled):
            await anext(stream)
    assert len(server.requests) == 1


async def test_an_answer_that_is_complete_needs_no_end_of_the_stream(
    server: RecordingServer,
) -> None:
    server.answers = [LAST]
    server.last_status = to_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone"))
    async with AsyncClient(server.address) as client:
        assert (await client.generate("hi")).finish_reason == "stop"
    with Client(server.address) as blocking:
        assert (await asyncio.to_thread(blocking.generate, "hi")).finish_reason == "stop"
    assert len(server.requests) == 2


async def test_prompt_logprobs_that_came_in_parts_are_not_there_twice(
    server: RecordingServer,
) -> None:
    entries = [
        inference_pb2.TokenLogprobs(token=inference_pb2.Logprob(token_id=i)) for i in range(5)
    ]
    parts = [
        inference_pb2.GenerateResponse(request_id="r", prompt_logprobs=entries[i : i + 2])
        for i in (0, 2)
    ]
    last = inference_pb2.GenerateResponse(prompt_logprobs=entries[4:])
    last.MergeFrom(LAST)
    server.answers = parts
    server.last_status = to_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone"))
    async with AsyncClient(server.address) as client, client.stream("hi") as stream:
        for _ in parts:
            await anext(stream)
        server.answers, server.last_status = [*parts, last], None
        found = await stream.completion()
    assert [each.token.token_id for each in found.prompt_logprobs] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("addresses", [f"{DEAD}, {{}}", [DEAD, "{}"], ["{}", DEAD]])
async def test_calls_go_to_the_router_that_answers(
    server: RecordingServer, addresses: str | list[str]
) -> None:
    given: Any = addresses.format(server.address) if isinstance(addresses, str) else None
    given = given or [each.format(server.address) for each in addresses]
    for _ in range(4):  # each begins with a random one
        async with asyncio.timeout(WAIT), AsyncClient(given, max_retries=1) as client:
            assert await client.tokenize("x") == [1, 2]
            assert (await client.generate("x")).finish_reason == "stop"
        with Client(given, max_retries=1) as blocking:
            assert await asyncio.to_thread(blocking.detokenize, [1]) == "detokenized"
            assert await asyncio.to_thread(blocking.detokenize, [1]) == "detokenized"


@pytest.mark.parametrize("address", ["", [], "a:1,,b:2", [""]])
def test_addresses_that_are_none(address: str | list[str]) -> None:
    with pytest.raises(errors.InvalidArgument, match="address"):
        Client(address)


def test_there_is_no_wait_before_a_router_that_was_not_tried() -> None:
    retries = Retries(max_retries=4, timeout=None, num_routers=3)
    gone = errors.Unavailable("gone", 1.0)
    assert [retries.delay(gone) == 0.0 for _ in range(4)] == [True, True, False, False]
    with pytest.raises(errors.Unavailable):
        retries.delay(gone)
    retries.reset()
    assert retries.delay(errors.Overloaded("full", 1.0)) >= 1.0
    assert retries.delay(gone) == 0.0


def test_a_stream_with_tokens_waits_for_a_router_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    gone, retries = (
        errors.Unavailable("gone", 1.0),
        Retries(max_retries=1, timeout=None, num_routers=1),
    )
    retries.reset()
    full = errors.Overloaded("full", 1.0)  # of a router that is left
    for now, error in ((200.0, gone), (201.0, full), (215.0, gone), (229.0, full)):  # noqa: B007 - the clock reads it
        assert retries.delay(error) >= 1.0
    now = 230.0
    for error in (gone, full):
        with pytest.raises(type(error)):
            retries.delay(error)
    retries.reset()
    assert retries.delay(gone) >= 1.0
    with pytest.raises(errors.InvalidArgument):
        retries.delay(errors.InvalidArgument("bad", "prompt"))
    impatient = Retries(max_retries=0, timeout=None)
    impatient.reset()
    with pytest.raises(errors.Unavailable):
        impatient.delay(gone)


async def test_a_router_that_comes_back_is_reached_within_seconds() -> None:
    """Although the channel has failed to connect for so long that by default grpc would wait for 3
    s and more.
    """
    async with fleet(1, 1, rank=byte_rank) as running, AsyncExitStack() as scope:
        router = Router(running)
        await router.start(scope)
        port = int(router.address.rpartition(":")[2])
        await router.cut()
        async with AsyncClient(router.address, max_retries=0) as client:
            for _ in range(22):
                with pytest.raises(errors.Unavailable):
                    await client.generate("hi", max_tokens=2)
                await asyncio.sleep(0.25)
            server = await asyncio.start_server(router._forward, "127.0.0.1", port)
            scope.callback(server.close)
            await asyncio.sleep(2)
            assert len((await client.generate("hi", max_tokens=2, ignore_eos=True)).token_ids) == 2
