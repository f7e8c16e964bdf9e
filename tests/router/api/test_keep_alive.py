"""Tests that no HTTP stream stays silent while its request waits or its tool call is generated."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from starlette.types import Message

from tandem.cluster.sim.loop import run_simulated
from tandem.proto import errors, inference_pb2
from tandem.router.api.openai.keep_alive import EventSender
from tandem.router.api.openai.parsing import parse
from tandem.router.api.responses.answers import ResponsesWriter
from tandem.router.api.responses.bodies import ResponsesBody
from tandem.router.api.responses.requests import translate_responses
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.http_bodies import CHAT, MESSAGES, TEXT
from tandem.tests.router.api.weather_tool import CALL, HERMES, SCHEMA
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer
from tandem.tests.waits import NEVER, WAIT

ANTHROPIC = "/v1/messages"
RESPONSES = "/v1/responses"
PATHS = (TEXT, CHAT, RESPONSES, ANTHROPIC)
COMMENT = ": keep-alive\n\n"
PING = 'event: ping\ndata: {"type": "ping"}\n\n'
CREATED = "event: response.created\n"
KEEP_ALIVES = {
    TEXT: COMMENT,
    CHAT: COMMENT,
    RESPONSES: "event: response.in_progress\n",
    ANTHROPIC: PING,
}
"""The first line of a keep-alive, or all of it."""
ENDS = {
    TEXT: "data: [DONE]\n\n",
    CHAT: "data: [DONE]\n\n",
    RESPONSES: '"stop_reason": null}}\n\n',
    ANTHROPIC: 'event: message_stop\ndata: {"type": "message_stop"}\n\n',
}
ASK: Any = MESSAGES
INTERVAL = 0.02  # seconds
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    CHAT: {"type": "function", "function": FUNCTION},
    RESPONSES: {"type": "function"} | FUNCTION,
    ANTHROPIC: {"name": "weather", "input_schema": SCHEMA},
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


@pytest.fixture
def keepalive_seconds() -> float:
    return INTERVAL


@pytest.fixture
async def url(
    generation: GenerationService, source: FakeTokenSource, keepalive_seconds: float
) -> AsyncIterator[str]:
    """Yields the address of a server whose streams wait before the first token."""
    source.answer, source.stall_after = [*b"hello", EOS_ID], 0
    server = HttpServer(generation, keepalive_seconds=keepalive_seconds)
    yield f"http://{await server.start('127.0.0.1:0')}"
    await server.stop(0)
    assert source.running == 0


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=WAIT) as client:
        yield client


def numbered_events(text: str) -> list[dict[str, Any]]:
    """Returns the events of a stream of the Responses API, whose numbers it checks."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {TEXT: "prompt", RESPONSES: "input"}.get(path, "messages")
    size = "max_output_tokens" if path == RESPONSES else "max_tokens"
    asked = MESSAGES if prompt == "messages" else "hello?"
    return {"model": "tiny", prompt: asked, size: 200, "stream": True} | fields


async def read(
    http: httpx.AsyncClient,
    path: str,
    source: FakeTokenSource,
    *,
    after: str = "",
    error: errors.TandemError | None = None,
    **fields: Any,
) -> str:
    """Returns the text of a stream.

    The source goes on, or fails with `error`, once a keep-alive has come after the text `after`.
    """
    text = ""
    async with http.stream("POST", path, json=body(path, **fields)) as answer:
        assert answer.status_code == 200
        async for part in answer.aiter_text():
            text += part
            if KEEP_ALIVES[path] in (text.partition(after)[2] if after else text):
                source.error = error
                source.goes_on.set()
    return text


@given(gaps=st.lists(st.floats(0, 50), max_size=8), seconds=st.floats(1, 20))
def test_the_interval_bounds_every_silence(gaps: list[float], seconds: float) -> None:
    """A keep-alive comes only after such a silence, and changes no event."""
    sent: list[tuple[float, bytes]] = []

    async def send(message: Message) -> None:
        sent.append((asyncio.get_running_loop().time(), message.get("body", b"head")))

    async def run() -> None:
        sender = EventSender(send, [])
        async with sender.kept_alive(lambda: b"keep", seconds):
            for gap in gaps:
                await asyncio.sleep(gap)
                await sender.send(b"event")
        assert len(asyncio.all_tasks()) == 1
        await sender.end(b"end")

    run_simulated(run())
    bodies = [body for _, body in sent if body != b"keep"]
    assert bodies == [b"head"] + [b"event"] * len(gaps) + [b"end"]
    times = [0.0, *(time for time, _ in sent)]
    for (time, body), before in zip(sent, times, strict=False):
        assert time - before <= seconds + 1e-6
        if body == b"keep" and before < time:
            assert time - before >= seconds - 1e-6


def test_events_without_bytes_do_not_count() -> None:
    """A part of a tool call makes no bytes."""
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))

    async def run() -> None:
        sender = EventSender(send, [])
        async with sender.kept_alive(lambda: b"keep", 10.0):
            for _ in range(25):
                await sender.send(b"")
                await asyncio.sleep(1.0)

    run_simulated(run())
    assert [body for body in sent if body] == [b"head", b"keep", b"keep"]


def test_nothing_passes_what_a_slow_client_has_not_read() -> None:
    """The head goes first, and no keep-alives pile up."""
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(95.0)
        sent.append(message.get("body", b"head"))

    async def run() -> None:
        sender = EventSender(send, [])
        async with sender.kept_alive(lambda: b"keep", 10.0):
            await asyncio.sleep(11.0)
            await sender.send(b"event")
        await sender.end(b"")

    run_simulated(run())
    assert sent == [b"head", b"keep", b"event", b""]


def test_a_head_that_was_not_sent_leaves_the_status_to_an_error() -> None:
    async def send(_message: Message) -> None:
        await asyncio.sleep(100.0)

    async def wait(sender: EventSender) -> None:
        async with sender.kept_alive(lambda: b"keep", 10.0):
            await asyncio.sleep(50.0)
            raise errors.Unavailable("no worker")

    async def run() -> EventSender:
        sender = EventSender(send, [])
        with pytest.raises(errors.Unavailable):
            await wait(sender)
        return sender

    assert not run_simulated(run()).has_started


@pytest.mark.parametrize("path", PATHS)
async def test_keep_alives_before_the_first_token(
    http: httpx.AsyncClient, source: FakeTokenSource, path: str
) -> None:
    text = await read(http, path, source)
    assert text.startswith(CREATED if path == RESPONSES else KEEP_ALIVES[path])
    assert text.endswith(ENDS[path])
    assert len(source.requests) == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC])
async def test_keep_alives_during_a_tool_call(
    http: httpx.AsyncClient, source: FakeTokenSource, path: str
) -> None:
    source.answer = [*f"A{CALL}".encode(), EOS_ID]
    source.stall_after = 20
    text = await read(http, path, source, after=': "A"', tools=[TOOLS[path]])
    assert KEEP_ALIVES[path] in text.partition(': "A"')[2].partition("weather")[0]
    assert text.endswith(ENDS[path])


@pytest.mark.parametrize("keepalive_seconds", [None, NEVER])
@pytest.mark.parametrize("path", PATHS)
async def test_no_keep_alives_while_tokens_flow(
    http: httpx.AsyncClient, source: FakeTokenSource, path: str
) -> None:
    source.stall_after = None
    text = (await http.post(path, json=body(path))).text
    begins = path in (RESPONSES, ANTHROPIC)  # these streams begin with such an event
    assert text.count(KEEP_ALIVES[path]) == begins
    assert text.endswith(ENDS[path])


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_a_keep_alive_ends_the_stream(
    http: httpx.AsyncClient, source: FakeTokenSource, path: str
) -> None:
    """An answer in full sends no bytes meanwhile, so its error has its status."""
    full = asyncio.create_task(http.post(path, json=body(path, stream=False)))
    await source.wait_running(1)
    text = await read(http, path, source, error=errors.Overloaded("full"))
    assert (await full).status_code == 429
    if path == RESPONSES:
        begin, *repeated, error, last_event = numbered_events(text)
        assert (begin["type"], error["type"]) == ("response.created", "error")
        assert {each["type"] for each in repeated} == {"response.in_progress"}
        assert last_event["type"] == "response.failed"
        assert (error["message"], error["param"]) == ("full", None)
        failed = last_event["response"]
        assert failed["error"] == {"code": error["code"], "message": "full"}
        assert (failed["status"], failed["store"]) == ("failed", False)
    else:
        last = text.removeprefix(KEEP_ALIVES[path]).rpartition(KEEP_ALIVES[path])[2]
        (error,) = [json.loads(each) for each in re.findall("^data: (.+)$", last, re.MULTILINE)]
        assert last.startswith("event: error\n") == (path == ANTHROPIC)
    assert (error["error"]["type"], error["error"]["message"]) == ("rate_limit_error", "full")


async def test_keep_alives_of_a_response_are_numbered_events(
    http: httpx.AsyncClient, source: FakeTokenSource
) -> None:
    """Codex CLI counts only events: comments do not stop its timer."""
    source.stall_after = 2
    events = numbered_events(await read(http, RESPONSES, source, after=': "e"'))
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
    (at,) = [i for i, each in enumerate(events) if each.get("delta") == "e"]
    assert events[at + 1]["type"] == "response.in_progress"
    response = events[at + 1]["response"]
    assert response["id"] == events[0]["response"]["id"]
    assert response["status"] == "in_progress"
    assert response["output"][0]["content"][0]["text"] == "he"
    assert [each["type"] for each in events].count("response.created") == 1
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hello"


async def test_keep_alives_of_a_response_whose_events_have_ids_are_comments(
    http: httpx.AsyncClient, source: FakeTokenSource
) -> None:
    """So they take no number that a resumed stream begins with."""
    source.stall_after = 2
    http.headers["Tandem-Resume"] = "1"
    text = ""
    async with http.stream("POST", RESPONSES, json=body(RESPONSES)) as answer:
        async for part in answer.aiter_text():
            text += part
            if ": keep-alive\n" in text.partition('"delta": "e"')[2]:
                source.goes_on.set()
    kinds = [each["type"] for each in numbered_events(text)]
    assert kinds.count("response.in_progress") == 1
    assert kinds[-1] == "response.completed"


async def test_a_keep_alive_while_a_response_is_stored_has_no_number() -> None:
    """Events with lower numbers are sent only afterwards."""
    parsed = parse(ResponsesBody, b'{"input": "hello?"}')
    keep_alives: list[bytes] = []

    async def keep(response: dict[str, Any]) -> dict[str, Any]:
        keep_alives.append(writer.keep_alive(has_ids=False))
        return response

    writer = ResponsesWriter(translate_responses(parsed, "id"), "tiny", (), keep)
    message = inference_pb2.GenerateResponse(
        text="hello", finish_reason=inference_pb2.FINISH_REASON_STOP
    )
    events = numbered_events((await writer.chunk(0, message)).decode())
    assert events[-1]["type"] == "response.completed"
    assert keep_alives == [COMMENT.encode()]


async def test_an_invalid_request_has_its_status(http: httpx.AsyncClient) -> None:
    for path in PATHS:
        assert (await http.post(path, json=body(path, temperature=9))).status_code == 400


async def test_a_client_that_goes_cancels(http: httpx.AsyncClient, source: FakeTokenSource) -> None:
    async with http.stream("POST", TEXT, json=body(TEXT)) as answer:
        async for text in answer.aiter_text():
            assert text.startswith(COMMENT)
            break
    await asyncio.wait_for(source.wait_running(0), WAIT)
    assert source.cancelled == 1


async def test_events_with_ids(http: httpx.AsyncClient, source: FakeTokenSource) -> None:
    """OpenAI's package parses the stream, and any id before a keep-alive resumes it."""
    source.stall_after = 2
    http.headers["Tandem-Resume"] = "1"
    text = ""
    async with http.stream("POST", TEXT, json=body(TEXT)) as answer:
        async for part in answer.aiter_text():
            text += part
            if ": keep-alive\n" in text.partition('"text": "e"')[2]:
                source.goes_on.set()
    found = events_by_id(text)
    assert "".join(found.values()) == "hello"
    headers = {"Last-Event-ID": list(found)[1]}
    rest = events_by_id((await http.post(TEXT, json=body(TEXT), headers=headers)).text)
    assert "".join(rest.values()) == "llo"


def events_by_id(text: str) -> dict[str, str]:
    """Returns the texts of a stream's events, as OpenAI's package parses them."""
    *found, end = SSEDecoder().iter_bytes(iter([text.encode()]))
    assert end.data == "[DONE]"
    texts = {str(event.id): json.loads(event.data)["choices"][0]["text"] for event in found}
    assert len(texts) == len(found)
    return texts


@pytest.mark.parametrize("fails", [False, True])
async def test_openai_clients_ignore_keep_alives(
    url: str, source: FakeTokenSource, fails: bool
) -> None:
    """The client has the stream as soon as its head has come, which is before the first token."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, stream=True, max_tokens=9
        )
        source.error = errors.Overloaded("full") if fails else None
        source.goes_on.set()
        if fails:
            with pytest.raises(openai.APIError, match="full"):
                await anext(stream)
            return
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "hello"
        source.goes_on.clear()
        events = await client.responses.create(model="tiny", input="hello?", stream=True)
        source.goes_on.set()
        last: Any = [event async for event in events][-1]
        assert last.response.output_text == "hello"


@pytest.mark.parametrize("fails", [False, True])
async def test_anthropic_clients_ignore_pings(
    url: str, source: FakeTokenSource, fails: bool
) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as client,
        client.messages.stream(model="tiny", messages=ASK, max_tokens=9) as stream,
    ):
        source.error = errors.Overloaded("full") if fails else None
        source.goes_on.set()
        if fails:
            with pytest.raises(anthropic.APIStatusError, match="full"):
                await stream.get_final_message()
            return
        assert (await stream.get_final_text()) == "hello"
        assert (await stream.get_final_message()).usage.input_tokens > 0
