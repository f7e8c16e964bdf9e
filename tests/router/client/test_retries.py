"""The clients' retries: before the first token, as often as allowed, when and if the service says
so.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.rpc import code_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status.rpc_status import to_status  # type: ignore[import-untyped]

from tandem.proto import errors
from tandem.router.client.client import AsyncClient, Client
from tandem.router.client.wire import Retries
from tandem.router.request import TokenDelta
from tandem.tests.router.client.recording_server import RecordingServer
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT

DEAD = "127.0.0.1:1"
LONG = 25.0  # seconds


def fail(source: FakeTokenSource, failures: list[errors.TandemError], after: int = 0) -> None:
    """Makes the next requests fail after so many tokens, one for each of `failures`."""
    generate = source.generate

    async def failing(*args: object, **kwargs: object) -> AsyncIterator[TokenDelta]:
        source.error, source.error_after = (failures.pop(0), after) if failures else (None, 0)
        async for delta in generate(*args, **kwargs):  # type: ignore[arg-type]
            yield delta

    source.generate = failing  # type: ignore[method-assign,assignment]


async def generate(service: Service, blocking: bool, **options: float) -> str:
    """Generates by the blocking or the asynchronous client."""
    timeout, max_retries = options.get("timeout"), int(options.get("max_retries", 2))
    if not blocking:
        async with AsyncClient(service.grpc, max_retries=max_retries) as client:
            return (await client.generate("hi", max_tokens=3, seed=1, timeout=timeout)).text

    def use_client() -> str:
        with Client(service.grpc, max_retries=max_retries) as client:
            return client.generate("hi", max_tokens=3, seed=1, timeout=timeout).text

    return await asyncio.to_thread(use_client)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    "error", [errors.Overloaded("full", 0.05), errors.Unavailable("no worker", 0.05)]
)
async def test_errors_with_retry_after_are_retried(
    grpc_service: Service, blocking: bool, error: errors.TandemError
) -> None:
    expected = await generate(grpc_service, blocking)
    fail(grpc_service.source, [error, error])
    started = time.monotonic()
    assert await generate(grpc_service, blocking) == expected
    assert time.monotonic() - started >= 0.1  # twice the `retry_after`
    assert len(grpc_service.source.requests) == 4


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("failures", "after", "options", "num_requests"),
    [
        ([errors.Overloaded("full", 0.01)] * 3, 0, {}, 3),  # two retries, no more
        ([errors.Overloaded("full", 0.01)], 0, {"max_retries": 0}, 1),
        ([errors.Overloaded("full", 0.01)], 2, {}, 1),  # tokens were shown
        ([errors.InternalError("given up")], 0, {}, 1),
        ([errors.Overloaded("full", 5.0)], 0, {"timeout": 3.0}, 1),  # would be too late
        ([errors.Overloaded("full", 31.0)], 0, {}, 1),  # nobody waits for so long
    ],
)
async def test_other_errors_are_raised_at_once(
    grpc_service: Service,
    blocking: bool,
    failures: list[errors.TandemError],
    after: int,
    options: dict[str, float],
    num_requests: int,
) -> None:
    fail(grpc_service.source, failures.copy(), after)
    with pytest.raises(type(failures[0])):
        await generate(grpc_service, blocking, **options)
    assert len(grpc_service.source.requests) == num_requests


async def test_cancelling_ends_the_wait_for_another_try(grpc_service: Service) -> None:
    fail(grpc_service.source, [errors.Overloaded("full", 20.0)] * 2)

    def use_client() -> None:
        with Client(grpc_service.grpc) as client, client.stream("hi") as stream:
            threading.Timer(0.2, stream.cancel).start()
            with pytest.raises(errors.Cancelled):
                next(stream)

    async with asyncio.timeout(WAIT):
        await asyncio.to_thread(use_client)
        async with AsyncClient(grpc_service.grpc) as client, client.stream("hi") as stream:
            asyncio.get_running_loop().call_later(0.2, stream.cancel)
            with pytest.raises(errors.Cancelled):
                await anext(stream)


def wait_long(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes clients wait for long before the next try; the event says that one begins to wait."""
    begun = threading.Event()

    def delay(*_: object) -> float:
        begun.set()
        return LONG

    monkeypatch.setattr(Retries, "delay", delay)
    return begun


@pytest.mark.parametrize(
    "use", [lambda client: client.tokenize("x"), lambda client: next(client.stream("x"))]
)
def test_closing_a_client_ends_its_waits(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Client], object]
) -> None:
    begun, client, started = wait_long(monkeypatch), Client(DEAD), time.monotonic()

    def close() -> None:
        begun.wait(WAIT)
        client.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(errors.Cancelled):
        use(client)
    closing.join()
    assert time.monotonic() - started < LONG


@pytest.mark.parametrize(
    "use", [lambda client: client.tokenize("x"), lambda client: anext(client.stream("x"))]
)
async def test_closing_a_client_of_an_event_loop_ends_its_waits(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[AsyncClient], Awaitable[object]]
) -> None:
    begun, client, started = wait_long(monkeypatch), AsyncClient(DEAD), time.monotonic()

    async def close() -> None:
        await asyncio.to_thread(begun.wait, WAIT)
        await client.close()

    closing = asyncio.create_task(close())
    with pytest.raises(errors.Cancelled):
        await use(client)
    await closing
    assert time.monotonic() - started < LONG


async def test_a_stream_whose_reader_leaves_a_wait_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = wait_long(monkeypatch)
    async with AsyncClient(DEAD) as client:
        stream = client.stream("x")
        reading: asyncio.Future[Any] = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(begun.wait, WAIT)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(errors.Cancelled):
            await anext(stream)


async def test_an_adapter_is_loaded_and_unloaded_in_one_try(server: RecordingServer) -> None:
    """A second try would fail although the first one, whose answer was lost, was a success."""
    server.status = to_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="lost"))
    async with AsyncClient(server.address) as client:
        with pytest.raises(errors.Unavailable):
            await client.load_lora_adapter("a", "b")
        with pytest.raises(errors.Unavailable):
            await client.unload_lora_adapter("a")
    with Client(server.address) as blocking:
        with pytest.raises(errors.Unavailable):
            await asyncio.to_thread(blocking.load_lora_adapter, "a", "b")
        with pytest.raises(errors.Unavailable):
            await asyncio.to_thread(blocking.unload_lora_adapter, "a")
    assert len(server.requests) == 4


async def test_unary_calls_are_tried_again() -> None:
    started = time.monotonic()
    async with AsyncClient("127.0.0.1:1", max_retries=1) as client:
        with pytest.raises(errors.Unavailable):
            await client.tokenize("x")
    with Client("127.0.0.1:1", max_retries=1) as blocking, pytest.raises(errors.Unavailable):
        await asyncio.to_thread(blocking.tokenize, "x")
    assert (
        time.monotonic() - started >= 2.0
    )  # an unreachable service names no time; each waits for a second


def test_the_timeout_is_of_all_tries_together() -> None:
    retries = Retries(max_retries=5, timeout=60.0)
    assert 1.0 <= retries.delay(errors.Overloaded("full", 1.0)) <= 1.25
    assert retries.timeout is not None
    assert 50 < retries.timeout <= 60
    assert Retries(5, None).timeout is None
