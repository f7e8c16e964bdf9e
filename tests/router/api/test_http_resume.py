"""Tests streams over HTTP whose events have ids: a broken stream continues after the last event."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.proto import errors, worker_pb2
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.resume import event_ids
from tandem.router.resume.policy import MAX_USES, ResumePolicy
from tandem.tests.fleet import split_fleet
from tandem.tests.router.api.http_bodies import CHAT, MESSAGES, TEXT, body
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT

KEY = b"k" * 32
CALL = b'<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ASKED = {"Tandem-Resume": "1"}


@pytest.fixture(params=[event_ids.MAX_ID_BYTES, 0], ids=["ids of tokens", "counts"])
def id_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the bound that selects the form of event ids: token ids, or their counts."""
    monkeypatch.setattr(event_ids, "MAX_ID_BYTES", request.param)
    return int(request.param)


@pytest.fixture
def source() -> FakeTokenSource:
    return FakeTokenSource()


@pytest.fixture
async def routers(
    model: ServedModel, source: FakeTokenSource
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Yields clients of two routers of one service."""
    servers = [HttpServer(GenerationService([model], source, resume_key=KEY)) for _ in range(2)]
    addresses = [await server.start("127.0.0.1:0") for server in servers]
    yield [httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) for address in addresses]
    await asyncio.gather(*(server.stop(0) for server in servers))


async def stream(
    router: httpx.AsyncClient, path: str, fields: dict[str, Any], **headers: str
) -> list[tuple[str, Any]]:
    """Returns the events, each with its id."""
    answer = await router.post(
        path, json=body(path, stream=True, **fields), headers=ASKED | headers
    )
    assert answer.status_code == 200, answer.text
    return parse(answer.text)


def parse(text: str) -> list[tuple[str, Any]]:
    """Returns the events of a stream, each with its id."""
    found = []
    for event in text.strip().split("\n\n"):
        data, _, event_id = event.partition("\nid: ")
        value = data.removeprefix("data: ")
        found.append((event_id, value if value == "[DONE]" else json.loads(value)))
    return found


def comparable(events: list[tuple[str, Any]]) -> list[Any]:
    """Returns the parts of events that two runs share: no ids of requests, no time."""
    found = json.loads(json.dumps([data for _, data in events]))
    for each in found:
        if each != "[DONE]":
            del each["id"], each["created"]
    return sorted(
        found,
        key=lambda each: (
            each["choices"][0]["index"] if each != "[DONE]" and each["choices"] else 99
        ),
    )


CASES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"max_tokens": 12, "seed": 5}),
    (TEXT, {"max_tokens": 12, "seed": 5, "n": 2, "logprobs": 1, "stop": ["x", "ab"]}),
    (TEXT, {"max_tokens": 12, "echo": True, "seed": 5}),
    (TEXT, {"max_tokens": 6, "n": 2, "best_of": 3, "seed": 5}),
    (
        TEXT,
        {
            "max_tokens": 6,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (
        CHAT,
        {
            "max_tokens": 12,
            "seed": 5,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "prompt_logprobs": 0,
        },
    ),
    (CHAT, {"max_tokens": 150, "tools": TOOLS}),
    (TEXT, {"max_tokens": 70, "n": 4, "stop": ["x", "ab"]}),
]


@pytest.mark.parametrize(("path", "fields"), CASES)
@pytest.mark.usefixtures("id_bytes")
async def test_a_stream_goes_on_after_any_event(
    routers: list[httpx.AsyncClient], source: FakeTokenSource, path: str, fields: dict[str, Any]
) -> None:
    if "tools" in fields:
        source.answer = b"a " + CALL + CALL
    first, second = routers
    expected = await stream(first, path, fields)
    assert expected[-1] == ("", "[DONE]")
    positions = [i for i, (event_id, _) in enumerate(expected) if event_id][:-1]
    assert len(positions) >= 1
    for at in random.Random(3).sample(positions, min(len(positions), 6)):
        rest = await stream(second, path, fields, **{"Last-Event-ID": expected[at][0]})
        assert comparable(expected[: at + 1] + rest) == comparable(expected)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("tokens_per_delta", [1, 2])
@pytest.mark.usefixtures("id_bytes")
async def test_a_stream_of_agents_goes_on_after_any_event(
    routers: list[httpx.AsyncClient], source: FakeTokenSource, path: str, tokens_per_delta: int
) -> None:
    """With two tokens in a delta, one delta has the end of a call and the text after it."""
    source.tokens_per_delta = tokens_per_delta
    source.answer = b"a " + CALL + b"b " + CALL
    fields: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": [{"name": "f", "input_schema": {}}],
        "max_tokens": 200,
    }
    if path == "/v1/responses":
        fields = {"input": "hello?", "tools": [{"type": "function", "name": "f"}]}

    async def events(router: httpx.AsyncClient, **headers: str) -> list[tuple[str, dict[str, Any]]]:
        answer = await router.post(path, json={"stream": True} | fields, headers=ASKED | headers)
        found = []
        for event in answer.text.strip().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in event.split("\n"))
            # Also an event with an id has data: OpenAI's package fails on one that has none.
            found.append((lines.get("id", ""), json.loads(lines["data"])))
        return found

    def made(found: list[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Returns the message that a client builds, without the id of the request."""
        deltas: dict[int, str] = {}
        calls: list[str] = []
        for _, event in found:
            index = event.get("index", event.get("output_index"))
            if isinstance(event.get("delta"), dict):
                delta = event["delta"].get("text") or event["delta"].get("partial_json") or ""
            else:
                delta = event.get("delta", "")
            if index is not None:
                deltas[index] = deltas.get(index, "") + delta
            if event["type"] in ("content_block_start", "response.output_item.done"):
                calls += call_ids([event.get("content_block") or event["item"]])
        assert len(set(calls)) == 2
        last = found[-1][1].get("response", {"usage": None, "status": None})
        assert path == "/v1/messages" or call_ids(last["output"]) == calls
        types = [event["type"] for _, event in found]
        return [deltas, calls, types, last["usage"], last["status"]]

    first, second = routers
    expected = await events(first)
    positions = [i for i, (event_id, _) in enumerate(expected) if event_id][:-1]
    for at in random.Random(3).sample(positions, min(len(positions), 6)):
        whole = expected[: at + 1] + await events(second, **{"Last-Event-ID": expected[at][0]})
        assert made(whole) == made(expected)
        numbers = [event.get("sequence_number", i) for i, (_, event) in enumerate(whole)]
        assert numbers == sorted(set(numbers))


def call_ids(items: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the ids of the calls among content blocks or items of a response."""
    return [
        each["call_id"] if "call_id" in each else each["id"]
        for each in items
        if each["type"] in ("tool_use", "function_call")
    ]


async def test_events_have_ids_only_if_that_is_asked_for(routers: list[httpx.AsyncClient]) -> None:
    answer = await routers[0].post(TEXT, json=body(TEXT, stream=True))
    assert "\nid:" not in answer.text


async def test_what_does_not_fit_is_refused(
    routers: list[httpx.AsyncClient], source: FakeTokenSource
) -> None:
    router = routers[0]
    events = await stream(router, TEXT, {"max_tokens": 5})
    event_id = events[2][0]
    num_requests = len(source.requests)
    refused: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("last-event-id", {}, {"Last-Event-ID": "!"}),
        ("last-event-id", {}, {"Last-Event-ID": "YWFh"}),
        ("last-event-id", {}, {"Last-Event-ID": "A" * 50_000}),
        ("last_event_id", {"last_event_id": "YWFh"}, {}),
        ("last_event_id", {"last_event_id": "YWFh"}, {"Last-Event-ID": event_id}),
        ("last-event-id", {"max_tokens": 5}, {"Last-Event-ID": f"{event_id[:-8]}AAAAAAAA"}),
        ("last-event-id", {"max_tokens": 6}, {"Last-Event-ID": event_id}),
        ("last-event-id", {"max_tokens": 5}, {"Last-Event-ID": events[-2][0]}),  # nothing is left
        ("tandem-resume", {"stream": False}, ASKED),
        ("prompt", {"prompt": ["a", "b"]}, ASKED),
        ("echo", {"echo": True, "logprobs": 1}, ASKED),
    ]
    for param, fields, headers in refused:
        answer = await router.post(
            TEXT, json=body(TEXT, **{"stream": True, **fields}), headers=headers
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            errors.InvalidArgument.http_status,
            param,
        )
    assert len(source.requests) == num_requests


async def test_the_id_may_come_in_the_body(routers: list[httpx.AsyncClient]) -> None:
    first, second = routers
    fields = {"max_tokens": 12, "seed": 5}
    expected = await stream(first, TEXT, fields)

    async def ask(event_id: str) -> list[tuple[str, Any]]:
        sent = body(TEXT, stream=True, last_event_id=event_id, **fields)
        answer = await second.post(TEXT, json=sent)
        assert answer.status_code == 200, answer.text
        return parse(answer.text)

    begun = await ask("")
    assert [bool(event_id) for event_id, _ in begun] == [bool(each) for each, _ in expected]
    rest = await ask(expected[4][0])
    assert comparable(expected[:5] + rest) == comparable(expected)


async def test_ids_are_bounded_and_the_stream_goes_on_after_each_of_them(
    routers: list[httpx.AsyncClient], source: FakeTokenSource
) -> None:
    """Resumes four choices before and after their tokens exceed the room in an id."""
    first, second = routers
    source.answers = [
        [97 + (7 * index + 5 * choice) % 26 for index in range(250)] for choice in range(4)
    ]
    fields = {"max_tokens": 250, "n": 4, "ignore_eos": True, "seed": 5}
    expected = await stream(first, TEXT, fields)
    ids = [event_id for event_id, _ in expected]
    longest = max(map(len, ids))
    assert longest < 2 * event_ids.MAX_ID_BYTES
    assert longest < event_ids.MAX_EVENT_ID_CHARACTERS
    assert len(ids[-2]) < longest / 3, "counts are shorter than ids"
    num_bytes = sum(len(json.dumps(data)) for _, data in expected)
    assert sum(map(len, ids)) < 5 * num_bytes
    for at in (0, 3, *range(100, 1000, 97)):
        rest = await stream(second, TEXT, fields, **{"Last-Event-ID": ids[at]})
        assert comparable(expected[: at + 1] + rest) == comparable(expected)


async def test_an_answer_that_is_computed_again_and_differs_is_an_error(
    routers: list[httpx.AsyncClient],
    source: FakeTokenSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_ids, "MAX_ID_BYTES", 0)
    first, second = routers
    source.answer = b"one answer"
    fields = {"max_tokens": 8, "ignore_eos": True}
    expected = await stream(first, TEXT, fields)
    source.answer = b"one other answer"
    for at, same in ((3, True), (6, False)):
        answer = await second.post(
            TEXT, json=body(TEXT, stream=True, **fields), headers={"Last-Event-ID": expected[at][0]}
        )
        assert (answer.status_code == 200) == same
    assert "cannot be computed again" in answer.json()["error"]["message"]


async def test_an_id_expires(model: ServedModel, source: FakeTokenSource) -> None:
    now = 1000.0
    policy = ResumePolicy(600, wall_clock=lambda: now)
    service = GenerationService([model], source, resume_key=KEY, resume_policy=policy)
    server = HttpServer(service)
    address = await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as router:
        events = await stream(router, TEXT, {"max_tokens": 5})
        now = 1600.0
        rest = await stream(router, TEXT, {"max_tokens": 5}, **{"Last-Event-ID": events[2][0]})
        assert comparable(events[:3] + rest) == comparable(events)
        now = 1601.0
        answer = await router.post(
            TEXT,
            json=body(TEXT, stream=True, max_tokens=5),
            headers={"Last-Event-ID": events[2][0]},
        )
        assert answer.status_code == errors.InvalidArgument.http_status
        assert "has expired after 600 seconds" in answer.json()["error"]["message"]
    await server.stop(0)


@pytest.mark.usefixtures("id_bytes")
async def test_a_chat_goes_on_after_midnight_although_its_prompt_has_the_date(
    source: FakeTokenSource,
) -> None:
    now = datetime(2026, 3, 1, 23, 59, 50).timestamp()
    template = "{{ strftime_now('%d %B') }}: {{ messages[0].content }}"
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(template), context_tokens=512)
    policy = ResumePolicy(wall_clock=lambda: now)
    service = GenerationService([model], source, resume_key=KEY, resume_policy=policy)
    server = HttpServer(service)
    address = await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as router:
        events = await stream(router, CHAT, {"max_tokens": 9, "seed": 5})
        now += 40
        last = {"Last-Event-ID": events[3][0]}
        rest = await stream(router, CHAT, {"max_tokens": 9, "seed": 5}, **last)
        assert comparable(events[:4] + rest) == comparable(events)
        await stream(router, CHAT, {"max_tokens": 9, "seed": 5})
    await server.stop(0)
    prompts = [bytes(asked.submit.token_ids) for asked in source.requests]
    assert prompts == [b"01 March: hello?"] * 2 + [b"02 March: hello?"]


@pytest.mark.usefixtures("id_bytes")
async def test_an_id_is_used_a_few_times_and_only_the_first_goes_ahead(
    routers: list[httpx.AsyncClient], source: FakeTokenSource
) -> None:
    first, second = routers
    fields = {"max_tokens": 9, "ignore_eos": True, "seed": 5}
    expected = await stream(first, TEXT, fields)
    headers = {"Last-Event-ID": expected[2][0]}
    sent = body(TEXT, stream=True, **fields)
    answers = await asyncio.gather(
        *(second.post(TEXT, json=sent, headers=headers) for _ in range(6))
    )
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] * MAX_USES + [400] * (6 - MAX_USES)
    assert "was used 3 times" in max(answers, key=lambda each: each.status_code).text
    turns = [asked.submit.turn for asked in source.requests[1:]]
    ahead = worker_pb2.TURN_FIRST_OF_PRIORITY
    others = worker_pb2.TURN_IN_ORDER
    assert sorted(turns) == [ahead] + [others] * (MAX_USES - 1)
    later = {"Last-Event-ID": expected[4][0]}  # of one that has received more
    assert (await second.post(TEXT, json=sent, headers=later)).status_code == 200
    assert source.requests[-1].submit.turn == others
    assert (await second.post(TEXT, json=sent, headers=headers)).status_code == 400
    assert (await first.post(TEXT, json=sent, headers=headers)).status_code == 200


@pytest.mark.usefixtures("id_bytes")
async def test_a_resumption_that_the_service_could_not_begin_does_not_count(
    routers: list[httpx.AsyncClient], source: FakeTokenSource
) -> None:
    first, second = routers
    fields = {"max_tokens": 9, "ignore_eos": True, "seed": 5}
    expected = await stream(first, TEXT, fields)
    headers = {"Last-Event-ID": expected[2][0]}
    sent = body(TEXT, stream=True, **fields)
    source.error = errors.Unavailable("no worker is ready")
    for _ in range(2 * MAX_USES):
        assert (await second.post(TEXT, json=sent, headers=headers)).status_code == 503
    source.error = errors.InternalError("the worker failed")
    assert (await second.post(TEXT, json=sent, headers=headers)).status_code == 500
    assert source.requests[-1].submit.turn == worker_pb2.TURN_FIRST_OF_PRIORITY
    source.error = None
    for status in [200] * (MAX_USES - 1) + [400]:
        assert (await second.post(TEXT, json=sent, headers=headers)).status_code == status


@pytest.mark.usefixtures("id_bytes")
async def test_streams_of_workers_go_on_after_each_event(tiny_model: Path) -> None:
    """With prefill and decode workers and a real model, the repeated answer is equal."""
    model = ServedModel(name="tiny", tokenizer=Tokenizer.load(tiny_model), context_tokens=2_048)
    fields = {"max_tokens": 30, "n": 4, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    async with split_fleet(tiny_model, {"prefill": [1], "decode": [1, 1]}) as running:
        services = [
            GenerationService([model], running.dispatcher, resume_key=KEY) for _ in range(2)
        ]
        servers = [HttpServer(each) for each in services]
        addresses = [await server.start("127.0.0.1:0") for server in servers]
        first, second = (
            httpx.AsyncClient(base_url=f"http://{address}", timeout=60) for address in addresses
        )
        expected = await stream(first, TEXT, fields)
        texts = text_of(expected)
        assert sorted(texts) == [0, 1, 2, 3]
        assert len(set(texts.values())) == 4
        for at in range(0, len(expected) - 2, 7):
            rest = await stream(second, TEXT, fields, **{"Last-Event-ID": expected[at][0]})
            assert text_of(expected[: at + 1] + rest) == texts
        await asyncio.gather(*(server.stop(0) for server in servers))


def text_of(events: list[tuple[str, Any]]) -> dict[int, str]:
    """Returns the text of each choice."""
    texts: dict[int, str] = {}
    for choice in (choice for _, data in events if data != "[DONE]" for choice in data["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts
