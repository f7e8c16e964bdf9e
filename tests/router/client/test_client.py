import asyncio
import socket
import threading

import grpc
import pytest

from tandem.proto import errors
from tandem.router.client.client import AsyncClient, Client, connect
from tandem.router.client.types import Options
from tandem.router.client.wire import to_error
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID
from tandem.tests.waits import WAIT

CHAT = [{"role": "user", "content": "hello?"}]


async def test_sync_and_async_give_the_same(grpc_service: Service) -> None:
    options: Options = {
        "seed": 7,
        "max_tokens": 40,
        "stop": "z",
        "temperature": 0.5,
        "model": "tiny",
    }

    def use_client() -> list[object]:
        with connect(grpc_service.grpc) as client:
            return [
                client.generate("hi", **options),
                client.chat(CHAT, **options),
                client.generate([1, 2, 3], **options),
                client.tokenize("hé"),
                client.tokenize(CHAT),
                client.list_models(),
                client.health(),
            ]

    async with AsyncClient(grpc_service.grpc) as client:
        found = [
            await client.generate("hi", **options),
            await client.chat(CHAT, **options),
            await client.generate([1, 2, 3], **options),
            await client.tokenize("hé"),
            await client.tokenize(CHAT),
            await client.list_models(),
            await client.health(),
        ]
    expected = await asyncio.to_thread(use_client)
    for a, b in zip(found[:3], expected[:3], strict=True):
        for name in ("text", "token_ids", "finish_reason", "usage"):
            assert getattr(a, name) == getattr(b, name)
        assert a.timeline.request_id == a.request_id  # type: ignore[attr-defined]
    assert found[3:] == expected[3:]
    assert found[3:] == [[104, 195, 169], list(b"[user] hello?\n[assistant] "), found[5], True]


async def test_every_option_reaches_the_service(grpc_service: Service) -> None:
    grpc_service.source.answer = b"abcdefgh"
    async with AsyncClient(grpc_service.grpc) as client:
        result = await client.generate(
            "x" * 600,
            model="tiny",
            temperature=0.0,
            top_k=5,
            top_p=0.5,
            min_p=0.25,
            seed=2**64 - 1,
            max_tokens=6,
            stop=["zz", "e"],
            stop_token_ids=[1],
            ignore_eos=True,
            truncate_prompt=True,
            request_id="mine",
        )
    assert (result.text, result.finish_reason, result.request_id) == ("abcd", "stop", "mine")
    seen = grpc_service.source.requests[0].submit
    assert (seen.sampling.temperature, seen.sampling.top_k, seen.sampling.top_p) == (0.0, 5, 0.5)
    assert (seen.sampling.min_p, seen.sampling.seed) == (0.25, 2**64 - 1)
    assert (seen.max_tokens, seen.ignore_eos, len(seen.token_ids)) == (6, True, 506)
    assert list(seen.stop_token_ids) == [1]


async def test_choices_and_logprobs(grpc_service: Service) -> None:
    grpc_service.source.answers = [b"one", b"zwei"]
    options: Options = {"n": 2, "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 8}
    async with AsyncClient(grpc_service.grpc) as client:
        found = await client.generate("hi", **options)
    assert [choice.text for choice in found.choices] == ["one", "zwei"]
    for choice in found.choices:
        assert [each.token.token_id for each in choice.logprobs] == list(choice.token_ids)
        assert b"".join(each.token.token_bytes for each in choice.logprobs).decode() == choice.text
        assert all(len(each.top) == 1 for each in choice.logprobs)
    assert [each.token.text for each in found.prompt_logprobs] == ["h", "i"]
    assert [each.token.logprob is None for each in found.prompt_logprobs] == [True, False]
    assert found.usage.completion_tokens == 7

    def use_client() -> None:
        with Client(grpc_service.grpc) as client:
            again = client.generate("hi", **options)
            assert (again.choices, again.prompt_logprobs) == (found.choices, found.prompt_logprobs)
            assert client.detokenize(client.tokenize("né")) == "né"

    await asyncio.to_thread(use_client)


async def test_beam_search(grpc_service: Service) -> None:
    async with AsyncClient(grpc_service.grpc) as client:
        found = await client.generate("hi", beam_width=3, n=2, max_tokens=4)
    assert len(found.choices) == 2
    assert all(choice.score < 0 for choice in found.choices)
    (request,) = grpc_service.source.requests
    assert request.has_beam_search
    assert request.submit.beam_search.width == 3


async def test_stream(grpc_service: Service) -> None:
    grpc_service.source.answer = [*"né".encode(), EOS_ID]
    async with AsyncClient(grpc_service.grpc) as client, client.stream("hi") as stream:
        deltas = [delta async for delta in stream]
    assert [delta.text for delta in deltas] == ["n", "", "é", ""]
    assert [delta.first_index for delta in deltas] == [0, 1, 2, 3]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 4
    assert stream.timeline is not None
    assert stream.timeline.completion_tokens == 4
    assert (await stream.completion()).text == "né"  # of what has been read


async def test_sync_stream(grpc_service: Service) -> None:
    grpc_service.source.answer = b"hello"

    def use_client() -> None:
        with Client(grpc_service.grpc) as client, client.stream_chat(CHAT) as stream:
            assert next(stream).text == "h"
            assert stream.timeline is None
            assert stream.completion().text == "hello"
            assert stream.timeline is not None
            assert list(stream) == []

    await asyncio.to_thread(use_client)


async def test_cancel_from_another_thread(grpc_service: Service) -> None:
    grpc_service.source.stall_after = 1
    first = threading.Event()

    def use_client() -> None:
        with Client(grpc_service.grpc) as client, client.stream("hi") as stream:
            next(stream)
            threading.Timer(0, stream.cancel).start()
            first.set()
            with pytest.raises(errors.Cancelled):
                next(stream)

    await asyncio.wait_for(asyncio.to_thread(use_client), WAIT)
    assert first.is_set()
    await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)
    assert grpc_service.source.cancelled == 1


async def test_async_cancel(grpc_service: Service) -> None:
    grpc_service.source.stall_after = 1
    async with AsyncClient(grpc_service.grpc) as client:
        stream = client.stream("hi")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(errors.Cancelled):
            await waiting
        with pytest.raises(errors.Cancelled):
            await anext(stream)
        await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)


async def test_a_cancelled_task_is_no_cancelled_error_of_ours(grpc_service: Service) -> None:
    grpc_service.source.stall_after = 0
    async with AsyncClient(grpc_service.grpc) as client:
        task = asyncio.create_task(client.generate("hi"))
        await asyncio.wait_for(grpc_service.source.wait_running(1), WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)


async def test_closing_ends_the_requests_of_other_tasks_with_an_error_of_ours(
    grpc_service: Service,
) -> None:
    """Not with CancelledError, which would end a task group without a word."""
    grpc_service.source.stall_after = 1
    client = AsyncClient(grpc_service.grpc)
    streams = [client.stream("hi") for _ in range(2)]
    for stream in streams:
        await anext(stream)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asked = AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}")
        tasks = [
            asyncio.create_task(streams[0].completion()),
            asyncio.create_task(asked.detokenize([1])),
        ]
        await asyncio.sleep(0)
        await client.close()
        await asked.close()
        for task in tasks:
            with pytest.raises(errors.Cancelled, match="the client cancelled the request"):
                await asyncio.wait_for(task, WAIT)
    with pytest.raises(errors.Cancelled):
        await anext(streams[1])
    with pytest.raises(errors.Cancelled, match="the client is closed"):
        await client.generate("hi")
    blocking = Client(grpc_service.grpc)
    blocking.close()
    with pytest.raises(errors.Cancelled, match="the client is closed"):
        blocking.generate("hi")


async def test_leaving_the_block_cancels(grpc_service: Service) -> None:
    grpc_service.source.stall_after = 2

    def use_client() -> None:
        with Client(grpc_service.grpc) as client, client.stream("hi") as stream:
            next(stream)

    async with AsyncClient(grpc_service.grpc) as client:
        async with client.stream("hi") as stream:
            await anext(stream)
        await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)
        await asyncio.to_thread(use_client)
        await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)
    assert grpc_service.source.cancelled == 2


@pytest.mark.parametrize("error_after", [0, 2])
@pytest.mark.parametrize(
    "error",
    [
        errors.Overloaded("full", 2.5),
        errors.Unavailable("no worker", 0.5),
        errors.DeadlineExceeded("late"),
        errors.InternalError("given up"),
        errors.Unauthenticated("who"),
        errors.PermissionDenied("no"),
        errors.NotFound("what"),
    ],
)
async def test_typed_errors(
    grpc_service: Service, error: errors.TandemError, error_after: int
) -> None:
    grpc_service.source.error, grpc_service.source.error_after = error, error_after
    async with AsyncClient(grpc_service.grpc, max_retries=0) as client:
        stream = client.stream("hi")
        with pytest.raises(type(error), match=error.message) as caught:
            await stream.completion()
    assert getattr(caught.value, "retry_after", None) == getattr(error, "retry_after", None)
    assert stream.timeline is not None

    def use_client() -> None:
        with Client(grpc_service.grpc, max_retries=0) as client:
            client.generate("hi")

    with pytest.raises(type(error), match=error.message):
        await asyncio.to_thread(use_client)


async def test_invalid_argument_has_its_field(grpc_service: Service) -> None:
    async with AsyncClient(grpc_service.grpc) as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            await client.generate("hi", temperature=-1.0)
        assert caught.value.field == "sampling.temperature"
        assert caught.value.message == "sampling.temperature: must be from 0 to 2"
        with pytest.raises(errors.NotFound):
            await client.tokenize("hi", model="nope")
        with pytest.raises(errors.TooLarge):
            await client.generate("x" * 5_000_000)


async def test_values_that_no_message_holds_are_refused_here(grpc_service: Service) -> None:
    async with AsyncClient(grpc_service.grpc) as client:
        for prompt in ([-1], [2**32], ["a"], "\ud800"):
            with pytest.raises(errors.InvalidArgument, match="prompt"):
                await client.generate(prompt)  # type: ignore[arg-type]
        for messages in ([{"role": "user"}], [{"role": "user", "content": 3}]):
            with pytest.raises(errors.InvalidArgument, match="messages"):
                await client.chat(messages)
        with pytest.raises(errors.InvalidArgument, match="seed"):
            await client.generate("hi", seed=-1)
    assert grpc_service.source.requests == []


async def test_timeouts(grpc_service: Service) -> None:
    grpc_service.source.stall_after = 1

    def use_client() -> None:
        with Client(grpc_service.grpc) as client:
            client.generate("hi", timeout=0.1)

    with pytest.raises(errors.DeadlineExceeded):
        await asyncio.to_thread(use_client)
    async with AsyncClient(grpc_service.grpc) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("hi", timeout=0.1)
    await asyncio.wait_for(grpc_service.source.wait_running(0), WAIT)


async def test_an_unreachable_service() -> None:
    async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
        assert await client.health() is False
        with pytest.raises(errors.Unavailable):
            await client.generate("hi")


async def test_health_of_a_service_that_cannot_answer(grpc_service: Service) -> None:
    await grpc_service.servers.set_serving(False)
    async with AsyncClient(grpc_service.grpc) as client:
        assert await client.health() is False


def test_unknown_codes_are_internal_errors() -> None:
    assert isinstance(to_error(grpc.StatusCode.UNKNOWN, "x", None), errors.InternalError)
    # A stream that was reset, by a router that stops, goes on at another; one that somebody
    # cancelled does not.
    assert isinstance(to_error(grpc.StatusCode.CANCELLED, "CANCELLED", None), errors.Unavailable)
    assert isinstance(to_error(grpc.StatusCode.CANCELLED, "nobody reads", None), errors.Cancelled)
