import asyncio
import contextlib
import gzip
import json
import logging.handlers
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tandem.proto import errors, limits
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body, events, streamed_text
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource
from tandem.tests.waits import WAIT

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def test_completions_with_the_openai_client(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = [*"Grüße, 🦊 and more".encode(), EOS_ID]
    whole = await client.completions.create(
        model="tiny", prompt="hi", max_tokens=100, stop=" and", temperature=0
    )
    assert (whole.object, whole.model) == ("text_completion", "tiny")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Grüße, 🦊", "stop")
    assert whole.usage is not None
    tokens = len("Grüße, 🦊 and".encode())
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        2,
        tokens,
        tokens + 2,
    )
    stream = await client.completions.create(
        model="tiny", prompt="hi", max_tokens=100, stop=" and", stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Grüße, 🦊"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_with_the_openai_client(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = b"hello world"
    whole = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello?"}], max_completion_tokens=5
    )
    assert whole.object == "chat.completion"
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == (
        "assistant",
        "hello",
    )
    assert whole.choices[0].finish_reason == "length"
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello?"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.object for chunk in chunks] == ["chat.completion.chunk"] * 7
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_models_with_the_openai_client(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [(model.id, model.owned_by) for model in models.data] == [("tiny", "tandem")]


async def test_requests_of_vllm_bench_serve(service: Service, http: httpx.AsyncClient) -> None:
    """Sends the requests of `vllm bench serve --backend openai` and reads the answers as it does.

    The requests have sampling options and --ignore-eos.
    """
    service.source.answer = [104, EOS_ID, *range(97, 107)]
    payload = {
        "model": "tiny",
        "prompt": "x" * 100,
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    seen, usage = [], None
    async with http.stream(
        "POST", TEXT, json=payload, headers={"x-request-id": "bench-0"}
    ) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "bench-0"
        async for line in answer.aiter_lines():
            chunk = line.removeprefix("data: ")
            if not chunk or chunk == "[DONE]":
                continue
            data = json.loads(chunk)
            if choices := data.get("choices"):
                seen.append(choices[0].get("text"))
            elif found := data.get("usage"):
                usage = found
    assert len(seen) == 8  # one event a token: what ITL is measured by
    assert "".join(seen) == "habcdef"
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (100, 8)


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_streamed_and_whole_are_equal(http: httpx.AsyncClient, path: str) -> None:
    fields = {"seed": 3, "max_tokens": 50, "stop": ["zz"], "temperature": 0.7}
    whole = (await http.post(path, json=body(path, **fields))).json()
    chunks = events(await http.post(path, json=body(path, stream=True, **fields)))
    assert chunks.pop() == "[DONE]"
    choice = whole["choices"][0]
    assert streamed_text(chunks) == (
        choice["text"] if path == TEXT else choice["message"]["content"]
    )
    assert len(streamed_text(chunks)) == 50
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(service: Service, http: httpx.AsyncClient, stream: bool) -> None:
    prompts: list[Any] = ["one", [116, 119, 111], "three"]
    fields = {"seed": 5, "max_tokens": 20}
    alone = [
        (await http.post(TEXT, json=body(TEXT, prompt=prompt, **fields))).json()["choices"][0][
            "text"
        ]
        for prompt in prompts
    ]
    assert len(set(alone)) == 3
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await http.post(TEXT, json=body(TEXT, prompt=prompts, **fields, **options))
    if stream:
        chunks = events(answer)[:-1]
        texts = [streamed_text(chunks, index) for index in range(3)]
        usage = chunks[-1]["usage"]
    else:
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts, usage = [choice["text"] for choice in choices], answer.json()["usage"]
    assert texts == alone
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 60)
    assert service.source.max_running == 3


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_seed_of_minus_one_is_a_random_seed(
    service: Service, http: httpx.AsyncClient, path: str
) -> None:
    for _ in range(2):
        await http.post(path, json=body(path, seed=-1))
    seeds = [each.submit.sampling.seed for each in service.source.requests]
    assert len({2**64 - 1, *seeds}) == 3


async def test_every_field_reaches_the_service(service: Service, http: httpx.AsyncClient) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 9,
        "min_p": 0.125,
        "seed": -2,
        "max_tokens": 4,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "truncate_prompt": True,
        "typical_p": 0.75,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"7": -100, "8": 0.5},
        "bad_words": ["no"],
        "min_tokens": 3,
        "n": 2,
        "best_of": 3,
        "logprobs": 4,
        "prompt_logprobs": 5,
        "priority": 6,
    }
    answer = await http.post(TEXT, json=body(TEXT, prompt="x" * 600, **fields))
    assert answer.status_code == 200, answer.text
    seen = service.source.requests[0].submit
    assert (seen.sampling.temperature, seen.sampling.top_p, seen.sampling.top_k) == (0.5, 0.25, 9)
    assert (seen.sampling.min_p, seen.sampling.seed) == (0.125, 2**64 - 2)
    assert (seen.max_tokens, seen.ignore_eos, len(seen.token_ids)) == (4, True, 508)
    assert list(seen.stop_token_ids) == [1, 2]
    assert (seen.sampling.typical_p, seen.sampling.repetition_penalty) == (0.75, 1.5)
    assert (seen.sampling.presence_penalty, seen.sampling.frequency_penalty) == (-1, 2)
    assert dict(seen.sampling.logit_bias) == {7: -100, 8: 0.5}
    assert b"no" in [bytes(word.ids) for word in seen.bad_words]
    assert (seen.min_tokens, seen.num_choices, seen.logprobs, seen.prompt_logprobs) == (3, 3, 4, 5)
    assert seen.priority == -6  # as in vLLM, the lower number goes first


async def test_default_lengths(service: Service, http: httpx.AsyncClient) -> None:
    await http.post(TEXT, json=body(TEXT))
    await http.post(TEXT, json=body(TEXT, prompt="x" * 510))
    await http.post(CHAT, json=body(CHAT))
    prompt = len("[user] hello?\n[assistant] ")
    assert [request.submit.max_tokens for request in service.source.requests] == [
        16,
        2,
        512 - prompt,
    ]


async def test_harmless_values_and_nulls_are_accepted(http: httpx.AsyncClient) -> None:
    harmless = {
        "n": 1,
        "echo": False,
        "logprobs": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "somebody",
        "stop": None,
        "temperature": None,
        "max_tokens": None,
        "stream": None,
        "tools": None,
        "response_format": {"type": "text"},
        "best_of": None,
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "skip_special_tokens": True,
        "structured_outputs": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "unheard_of": None,
    }
    harmless_to_chats = {
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "logprobs": False,
    }
    for path in (TEXT, CHAT):
        own = {**harmless, **harmless_to_chats} if path == CHAT else harmless
        own = {
            name: value
            for name, value in own.items()
            if path == CHAT or name != "parallel_tool_calls"
        }
        answer = await http.post(path, json=body(path, **own))
        assert answer.status_code == 200, answer.text


async def test_messages_in_parts_and_as_the_openai_client_repeats_them(
    service: Service, http: httpx.AsyncClient
) -> None:
    said = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "name": "x"}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}],
    }
    empty = {"role": "assistant", "content": None}
    answer = await http.post(CHAT, json=body(CHAT, messages=[parts, said, empty]))
    assert answer.status_code == 200
    expected = b"[user] a\nc\n[assistant] b\n[assistant] \n[assistant] "
    assert bytes(service.source.requests[0].submit.token_ids) == expected


async def test_request_ids(service: Service, http: httpx.AsyncClient) -> None:
    answer = await http.post(TEXT, json=body(TEXT), headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["id"] == "cmpl-mine"
    made = await http.post(TEXT, json=body(TEXT))
    assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
    failed = await http.post(TEXT, json=body(TEXT, n=-1), headers={"x-request-id": "mine"})
    assert failed.status_code == 400
    assert failed.headers["x-request-id"] == "mine"
    service.source.error = errors.Overloaded("full")
    failed = await http.post(TEXT, json=body(TEXT), headers={"x-request-id": "mine"})
    assert failed.headers["x-request-id"] == "mine"
    assert (
        await http.post(TEXT, json=body(TEXT), headers={"x-request-id": "x" * 200})
    ).status_code == 400


ERRORS: list[tuple[Exception, int, str, str | None]] = [
    (errors.Overloaded("the queue is full", 2.2), 429, "rate_limit_error", "3"),
    (errors.Unavailable("no worker is ready", 0.1), 503, "server_error", "1"),
    (errors.DeadlineExceeded("too late"), 504, "server_error", None),
    (errors.InternalError("given up"), 500, "server_error", None),
    (errors.NotFound("no such model"), 404, "invalid_request_error", None),
    (RuntimeError("/secret/path"), 500, "server_error", None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token(
    service: Service, http: httpx.AsyncClient, stream: bool
) -> None:
    for error, status, kind, retry_after in ERRORS:
        service.source.error = error
        for path, prompt in ((TEXT, {"prompt": ["a", "b"]}), (TEXT, {}), (CHAT, {})):
            answer = await http.post(path, json=body(path, stream=stream, **prompt))
            assert answer.status_code == status
            assert answer.headers.get("retry-after") == retry_after
            found = answer.json()["error"]
            assert found["type"] == kind
            assert found["message"] == getattr(
                error, "message", "the service failed at this request"
            )


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_an_error_after_the_first_token(
    service: Service, http: httpx.AsyncClient, path: str
) -> None:
    service.source.error, service.source.error_after = errors.InternalError("given up"), 2
    chunks = events(await http.post(path, json=body(path, stream=True)))
    assert [list(chunk) for chunk in chunks[-2:]] == [
        ["id", "object", "created", "model", "choices"],
        ["error"],
    ]
    assert chunks[-1]["error"]["message"] == "given up"
    assert all(
        choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"]
    )
    assert (await http.post(path, json=body(path))).status_code == 500


async def test_the_openai_client_meets_its_errors(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="hi", temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_argument")
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nope", prompt="hi")
    service.source.error, service.source.error_after = errors.Overloaded("full"), 1
    stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
    await anext(stream)
    with pytest.raises(openai.APIError, match="full"):
        await anext(stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_cancels(service: Service, stream: bool) -> None:
    cancelled = 0
    for stall_after, prompts in ((0, 1), (2, 1), (0, 3), (2, 3)):
        service.source.stall_after = stall_after
        reader, writer = await asyncio.open_connection(*service.http.split(":"))
        content = json.dumps(
            body(TEXT, prompt=["hi"] * prompts, stream=stream, max_tokens=50)
        ).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
        if stream and stall_after:
            assert b"200" in await asyncio.wait_for(reader.readline(), WAIT)
        await asyncio.wait_for(service.source.wait_running(prompts), WAIT)
        writer.close()
        await asyncio.wait_for(service.source.wait_running(0), WAIT)
        cancelled += prompts
        assert service.source.cancelled == cancelled


async def test_the_first_token_does_not_wait_for_the_second(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.source.answer, service.source.stall_after = b"ab", 1
    async with http.stream("POST", TEXT, json=body(TEXT, stream=True)) as answer:
        lines = answer.aiter_lines()
        first = await asyncio.wait_for(anext(lines), WAIT)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
    await asyncio.wait_for(service.source.wait_running(0), WAIT)


async def test_health(service: Service, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    await service.servers.set_serving(False)
    answer = await http.get("/health")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_models_are_listed_from_the_first_time_on_that_the_service_is_ready(
    model: ServedModel,
) -> None:
    """Some scripts wait for the list of models as others wait for /health."""
    servers = await ApiServers.start(GenerationService([model], FakeTokenSource()))
    async with httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http:
        for path in ("/v1/models", "/v1/models/", "/v1/models/tiny", "/v1/models/other"):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        for serving in (True, False):
            await servers.set_serving(serving)
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            assert (await http.get("/v1/models/other")).status_code == 404
    await servers.stop(0)


async def test_head_is_answered_wherever_get_is(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    gets = [path.replace("{name}", "tiny") for path, methods in paths.items() if "get" in methods]
    for path in (*gets, "/openapi.json", "/console", "/console/data"):
        expected, answer = await http.get(path), await http.head(path)
        is_stored = "/tiny" in path and "models" not in path  # of this name nothing is stored
        assert (answer.status_code, answer.content) == (404 if is_stored else 200, b"")
        assert answer.headers["content-type"] == expected.headers["content-type"]
    answer = await http.head(TEXT)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (405, "POST", b"")
    assert (await http.post("/health")).headers["allow"] == "GET, HEAD"


async def test_a_slash_at_the_end_of_a_path_changes_nothing(http: httpx.AsyncClient) -> None:
    for path in (
        "/health",
        "/version",
        "/v1/models",
        "/v1/models/tiny",
        "/openapi.json",
        "/console/main.js",
    ):
        assert (await http.get(f"{path}/")).content == (await http.get(path)).content
    for path in (TEXT, CHAT):
        assert (await http.post(f"{path}/", json=body(path))).status_code == 200
    assert (await http.get("/v1/nothing/")).status_code == 404


async def test_a_stream_tells_proxies_not_to_buffer_it(http: httpx.AsyncClient) -> None:
    for path in (TEXT, CHAT):
        answer = await http.post(path, json=body(path, stream=True))
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == (
            "no-cache",
            "no",
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_no_chunks(service: Service, stream: bool) -> None:
    """The end of the connection ends the body of a stream."""
    service.source.answer = b"hello"
    reader, writer = await asyncio.open_connection(*service.http.split(":"))
    content = json.dumps(body(TEXT, stream=stream)).encode()
    writer.write(
        HEAD.replace(b"1.1", b"1.0") + b"content-length: %d\r\n\r\n" % len(content) + content
    )
    head, _, found = (await asyncio.wait_for(reader.read(), WAIT)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in head
    if stream:
        assert found.startswith(b"data: {")
        assert found.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(found)["choices"][0]["text"] == "hello"


async def test_usage_is_null_before_the_chunk_that_has_it(http: httpx.AsyncClient) -> None:
    for path in (TEXT, CHAT):
        asked = body(path, stream=True, stream_options={"include_usage": True})
        *others, last, _ = events(await http.post(path, json=asked))
        assert others
        assert {each["usage"] for each in others} == {None}
        assert last["usage"]["completion_tokens"] > 0
        assert "usage" not in events(await http.post(path, json=body(path, stream=True)))[0]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "identity, gzip"])
async def test_a_body_in_gzip_is_decoded(http: httpx.AsyncClient, encoding: str) -> None:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    for path in (TEXT, CHAT):
        content = gzip.compress(json.dumps(body(path)).encode())
        assert (await http.post(path, content=content, headers=headers)).status_code == 200


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "x" * 1_000])
async def test_other_encodings_are_refused_by_name(http: httpx.AsyncClient, encoding: str) -> None:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    answer = await http.post(TEXT, content=b"x" * 100, headers=headers)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip")
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == ("Content-Encoding", "invalid_request_error")
    assert "send gzip" in error["message"]
    assert len(error["message"]) < 200
    assert (await http.post(TEXT, json=body(TEXT))).status_code == 200


async def test_a_body_that_is_too_large_in_gzip_is_not_decompressed_to_its_end(
    http: httpx.AsyncClient,
) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    for size in (limits.MAX_MESSAGE_BYTES + 1, 64 * limits.MAX_MESSAGE_BYTES):
        content = gzip.compress(bytes(size))
        tracemalloc.start()
        answer = await http.post(TEXT, content=content, headers=headers)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert answer.status_code == 413
        assert peak < 8 * limits.MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"x", id="other bytes"),
        # Named, because the header of gzip holds the time, and every test process has to collect
        # the same names.
        pytest.param(gzip.compress(b"{}")[:-1], id="cut off"),
        pytest.param(gzip.compress(b"{}") * 2, id="two members"),
    ],
)
async def test_a_body_that_is_no_gzip_is_refused(http: httpx.AsyncClient, content: bytes) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = await http.post(TEXT, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Encoding")


async def test_no_such_path(http: httpx.AsyncClient) -> None:
    for method, path, status in (("POST", "/v1/nothing", 404), ("GET", TEXT, 405)):
        answer = await http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"].startswith(f"{path}: ")
    long = (await http.get("/v1/" + "x%0a" * 400)).json()["error"]["message"]
    assert len(long) < 200
    assert "\n" not in long


@pytest.mark.parametrize("declared", [False, True])
async def test_a_body_that_is_too_large(
    service: Service, http: httpx.AsyncClient, declared: bool
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 1_000_000

    content: Any = b"x" * 10_000_000 if declared else parts()
    assert (await http.post(TEXT, content=content)).status_code == 413
    assert (await http.post(TEXT, json=body(TEXT))).status_code == 200


async def test_a_body_without_end_is_not_read_for_ever(service: Service) -> None:
    _, writer = await asyncio.open_connection(*service.http.split(":"))
    writer.write(HEAD + b"content-length: 999999999999\r\n\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):  # the server closes with bytes unread
        while sent < 64 * limits.MAX_MESSAGE_BYTES and not writer.transport.is_closing():
            writer.write(b"x" * 1_000_000)
            await writer.drain()
            sent += 1_000_000
    assert sent < 32 * limits.MAX_MESSAGE_BYTES
    writer.close()


async def test_events_leave_at_once(model: ServedModel) -> None:
    """Without TCP_NODELAY, the second small packet waits 40 ms for the ACK of the first."""
    server = HttpServer(GenerationService([model], FakeTokenSource()))
    address = await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(timeout=WAIT) as http:
        await http.get(f"http://{address}/health")
        (connection,) = server._listener.server_state.connections
        transport = connection.transport
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await server.stop(0)


def test_a_server_leaves_the_process_logging_alone(model: ServedModel) -> None:
    """A replica whose handlers of Ray Serve are closed cannot answer a new controller."""
    target = logging.NullHandler()
    handler = logging.handlers.MemoryHandler(100, target=target)
    try:
        HttpServer(GenerationService([model], FakeTokenSource()))
        assert handler.target is target
    finally:
        handler.close()
