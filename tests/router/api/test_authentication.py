"""Tests keys at the real API servers: the admission of callers, their tenants, and their limits."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.proto import inference_pb2, inference_pb2_grpc, limits
from tandem.proto.errors import InvalidArgument, Overloaded, Unauthenticated, Unavailable
from tandem.router.api.openai.openapi import REQUEST_TIMEOUT
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.auth.rate import Quota
from tandem.router.client.client import AsyncClient
from tandem.router.client.wire import API_KEY_VARIABLE
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.request import TokenDelta, TokenRequest
from tandem.tests.router.auth.keys import api_key, bearer
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT

SECRET = b"s" * 32
KEYS = (api_key("ada", max_priority=3), api_key("bob"))
PATHS = ("/version", "/v1/models", "/v1/models/tiny", "/openapi.json", "/nowhere")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    },
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 4},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/score": {"model": "tiny", "text_1": "h", "text_2": "i"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/v1/watermark/detect": {"prompt": "hi"},
}


@dataclass(kw_only=True)
class HeldSource(FakeTokenSource):
    """Holds each request after its first token until it is released."""

    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(request, timeline, ended)) as deltas:
            async for delta in deltas:
                yield delta
                await self.released.wait()


@pytest.fixture
def source() -> FakeTokenSource:
    return FakeTokenSource(answer=b"abcd")


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator(KEYS, secret=SECRET)


@pytest.fixture
async def service(
    model: ServedModel, source: FakeTokenSource, authenticator: Authenticator
) -> AsyncIterator[Service]:
    """Starts both servers with keys."""
    servers = await ApiServers.start(
        GenerationService([model], source, resume_key=SECRET),
        authenticator=authenticator,
        reflection=True,
    )
    await servers.set_serving(True)
    yield Service(
        servers=servers, source=source, grpc=servers.grpc_address, http=servers.http_address
    )
    await servers.stop(0)
    assert source.running == 0


@pytest.fixture
async def stub(service: Service) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    common: dict[str, Any] = {"prompt": {"text": "hi"}, "stopping": {"max_tokens": 4}}
    return inference_pb2.GenerateRequest(**(common | fields))


def metadata(secret: str) -> tuple[tuple[str, str], ...]:
    return tuple(bearer(secret).items())


async def code_of(call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = await asyncio.wait_for(call.code(), WAIT)
    return code


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"authorization": "Basic ada"}, bearer("wrong key")]
)
async def test_a_stranger_is_refused_everywhere_over_http(
    service: Service, http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    answers = [await http.get(path, headers=headers) for path in PATHS]
    answers += [await http.post(path, json=body, headers=headers) for path, body in BODIES.items()]
    for answer in answers:
        assert answer.status_code == 401, answer.url
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "unauthenticated")
        assert "ada" not in answer.text
    assert (await http.get("/health")).status_code == 200
    assert service.source.requests == []


async def silence() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    """Sends nothing over a stream.

    An asyncio client that writes to a stream that has just been refused overwrites the status with
    INTERNAL (github.com/grpc/grpc/issues/36066), which no server can help without reading on.
    """
    await asyncio.get_running_loop().create_future()
    yield reflection_pb2.ServerReflectionRequest()


@pytest.mark.parametrize("given", [(), metadata("wrong"), (("authorization", "ada"),)])
async def test_a_stranger_is_refused_everywhere_over_grpc(service: Service, given: Any) -> None:
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        messages = inference_pb2
        calls: list[Callable[[], Any]] = [
            lambda: stub.Generate(request(), metadata=given),
            lambda: stub.Tokenize(messages.TokenizeRequest(prompt={"text": "x"}), metadata=given),
            lambda: stub.Detokenize(messages.DetokenizeRequest(token_ids=[1]), metadata=given),
            lambda: stub.ListModels(messages.ListModelsRequest(), metadata=given),
            lambda: channel.unary_unary("/tandem.v1.Inference/Nothing", bytes)(b"", metadata=given),
            lambda: reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                silence(), metadata=given
            ),
        ]
        codes = [await code_of(call()) for call in calls]
        assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert service.source.requests == []


async def test_the_key_is_checked_before_a_body_is_read(
    service: Service, stub: inference_pb2_grpc.InferenceStub
) -> None:
    reader, writer = await asyncio.open_connection(*service.http.split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n"
    )  # and no body
    assert (await asyncio.wait_for(reader.readline(), WAIT)).split()[1] == b"401"
    writer.close()
    large = request(prompt={"text": "x" * limits.MAX_MESSAGE_BYTES})  # too large, had it been read
    assert (
        await code_of(stub.Generate(large, metadata=metadata("wrong")))
        is grpc.StatusCode.UNAUTHENTICATED
    )
    assert (
        await code_of(stub.Generate(large, metadata=metadata("ada")))
        is grpc.StatusCode.RESOURCE_EXHAUSTED
    )


async def test_tenant_cache_and_priority_come_from_the_key(
    service: Service, http: httpx.AsyncClient, stub: inference_pb2_grpc.InferenceStub
) -> None:
    for secret in ("ada", "bob"):
        async for _ in stub.Generate(request(priority=50), metadata=metadata(secret)):
            pass
        body = BODIES["/v1/completions"] | {"priority": -50, "user": "root"}
        assert (
            await http.post("/v1/completions", json=body, headers=bearer(secret))
        ).status_code == 200
    found = [(each.tenant, each.submit.priority) for each in service.source.requests]
    assert found == [("ada", 3)] * 2 + [("bob", 0)] * 2
    salts = [each.submit.cache_salt for each in service.source.requests]
    assert salts[0] == salts[1] != salts[2] == salts[3]


async def test_a_token_costs_no_check_of_its_key(
    service: Service,
    source: FakeTokenSource,
    authenticator: Authenticator,
    http: httpx.AsyncClient,
    stub: inference_pb2_grpc.InferenceStub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key costs time only at the start and the end of a call."""
    authenticator.replace([api_key("ada", tokens_per_minute=1_000_000, max_streams=4)])
    looked: list[str] = []

    def watch(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def watched(*args: Any) -> Any:
            looked.append(name)
            return method(*args)

        monkeypatch.setattr(kind, name, watched)

    watch(Authenticator, "caller")
    for name in ("call", "check_tokens", "take_tokens", "headers"):
        watch(Quota, name)
    found = []
    for length in (2, 200):
        source.answer = b"a" * length
        looked.clear()
        stopping = {"max_tokens": length}
        assert (
            len(
                [
                    _
                    async for _ in stub.Generate(
                        request(stopping=stopping), metadata=metadata("ada")
                    )
                ]
            )
            == length
        )
        body = BODIES["/v1/completions"] | {"max_tokens": length, "stream": True}
        answer = await http.post("/v1/completions", json=body, headers=bearer("ada"))
        assert answer.text.count('"text": "a"') == length
        found.append(sorted(looked))
    assert found[0] == found[1]


async def test_the_openai_client_brings_its_key(service: Service) -> None:
    for secret, expected in (("ada", "abcd"), ("wrong", None)):
        async with openai.AsyncOpenAI(
            base_url=f"http://{service.http}/v1", api_key=secret, max_retries=0
        ) as client:
            create = client.completions.create(model="tiny", prompt="hi", max_tokens=4)
            if expected is None:
                with pytest.raises(openai.AuthenticationError):
                    await create
            else:
                assert (await create).choices[0].text == expected


async def test_the_client_brings_its_key(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncClient(service.grpc) as client:
        with pytest.raises(Unauthenticated) as caught:
            await client.generate("hi", max_tokens=4)
        assert caught.value.retry_after is None
    async with AsyncClient(service.grpc, api_key="ada") as client:
        assert (await client.generate("hi", max_tokens=4)).text == "abcd"
    monkeypatch.setenv(API_KEY_VARIABLE, "bob\n")  # as of a Kubernetes Secret
    async with AsyncClient(service.grpc) as client:
        assert (await client.generate("hi", max_tokens=4)).text == "abcd"
    async with AsyncClient(service.grpc, api_key="") as client:
        with pytest.raises(Unauthenticated):
            await client.list_models()
    assert [each.tenant for each in service.source.requests] == ["ada", "bob"]


async def test_a_stream_goes_on_at_another_router_with_the_same_key(
    model: ServedModel, service: Service, source: FakeTokenSource
) -> None:
    other_source = FakeTokenSource(answer=b"abcd")
    other = await ApiServers.start(
        GenerationService([model], other_source, resume_key=SECRET),
        authenticator=Authenticator(KEYS, secret=SECRET),
    )
    source.error, source.error_after = Unavailable("the worker is gone", 0.01), 2
    while not source.requests:  # a client's first router is chosen at random
        async with AsyncClient([service.grpc, other.grpc_address], api_key="ada") as client:
            assert (await client.generate("hi", max_tokens=4)).text == "abcd"
    assert {each.tenant for each in other_source.requests} == {"ada"}
    assert source.requests[0].submit.cache_salt == other_source.requests[0].submit.cache_salt
    await other.stop(0)


async def test_a_stream_is_not_resumed_by_another_tenant(
    service: Service, stub: inference_pb2_grpc.InferenceStub
) -> None:
    sent = request(sampling={"seed": 1})
    async for message in stub.Generate(sent, metadata=metadata("ada")):
        sent.resume.add(token_ids=message.token_ids, resume_token=message.resume_token)
        break
    call = stub.Generate(sent, metadata=metadata("bob"))
    with pytest.raises(grpc.aio.AioRpcError, match="belongs to another request"):
        await call.read()
    rest = [message async for message in stub.Generate(sent, metadata=metadata("ada"))]
    assert "".join(message.text for message in rest) == "bcd"


async def test_the_audit_log_names_the_key(
    service: Service,
    http: httpx.AsyncClient,
    stub: inference_pb2_grpc.InferenceStub,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The line has the name of a valid key, even if the call was refused."""
    refused: Any = request(sampling={"temperature": 9})
    for secret in ("ada", "wrong"):
        await http.post("/v1/completions", json={}, headers=bearer(secret))
        call: Any = stub.Generate(refused, metadata=metadata(secret))
        await code_of(call)
    found = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "tandem.audit"
    ]
    assert [(line["reason"], line.get("key")) for line in found] == [
        ("400", "ada"),
        ("INVALID_ARGUMENT", "ada"),
        ("401", None),
        ("UNAUTHENTICATED", None),
    ]


async def test_requests_a_minute(
    service: Service, authenticator: Authenticator, http: httpx.AsyncClient
) -> None:
    authenticator.replace(
        [api_key("ada", requests_per_minute=2, tokens_per_minute=600), api_key("bob")]
    )
    answers = [
        await http.post("/v1/completions", json=BODIES["/v1/completions"], headers=bearer("ada"))
        for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == [
        "1",
        "0",
        "0",
    ]
    assert answers[0].headers["x-ratelimit-limit-tokens"] == "600"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
    async with AsyncClient(service.grpc, api_key="ada", max_retries=0) as client:
        with pytest.raises(Overloaded, match="2 requests a minute") as caught:
            await client.list_models()
        assert 0 < caught.value.retry_after <= 30
    answer = await http.get("/v1/models", headers=bearer("bob"))
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tokens_a_minute(service: Service, authenticator: Authenticator) -> None:
    """Uses prompts of two tokens and completions of four."""
    authenticator.replace([api_key("ada", tokens_per_minute=13)])
    async with AsyncClient(service.grpc, api_key="ada", max_retries=0) as client:
        for _ in range(2):
            await client.generate("hi", max_tokens=4)
        await client.generate(
            "hi", max_tokens=4, n=4
        )  # one token is left: it may begin, and leaves a debt
        for _ in range(2):
            with pytest.raises(Overloaded, match="13 tokens a minute") as caught:
                await client.generate("hi", max_tokens=4)
        # 30 tokens of 13, and one is needed: (30 - 13 + 1) / 13 minutes, less what has passed
        assert 60 <= caught.value.retry_after <= 18 / 13 * 60
        assert (await client.list_models())[0].id == "tiny"  # costs none


@pytest.mark.parametrize(
    ("path", "said", "num_tokens"),
    [
        ("/tokenize", {"prompt": "twelve bytes"}, 12),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}, 22),
        ("/detokenize", {"tokens": [104] * 9}, 9),
        ("/v1/watermark/detect", {"prompt": "twelve bytes"}, 12),
        (
            "/v1/messages/count_tokens",
            {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
            22,
        ),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "x" * 5_000, "max_tokens": 4},
            5_000,
        ),  # is refused
        (
            "/tokenize",
            {"messages": [{"role": "x" * 60, "content": "y" * 3_932}]},
            1_000,
        ),  # the template refuses it
        (
            "/score",
            {"model": "tiny", "text_1": "seven b", "text_2": ["eight by", ""]},
            15,
        ),  # is refused
        (
            "/score",
            {"model": "tiny", "text_1": "x" * 5_000, "text_2": ["ten bytes.", "y" * 20]},
            2 * 5_000 + 30,
        ),  # the first pair is refused
        ("/v1/embeddings", {"model": "tiny", "input": ["four", "five"]}, 8),
    ],
)
async def test_every_tokenization_is_charged(
    authenticator: Authenticator,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    said: dict[str, Any],
    num_tokens: int,
) -> None:
    authenticator.replace([api_key("ada", tokens_per_minute=1_000_000_000)])
    quota = authenticator.caller("Bearer ada", "").quota
    taken = list[int]()
    monkeypatch.setattr(quota, "take_tokens", taken.append)
    await http.post(path, json=said, headers=bearer("ada"))
    assert sum(taken) == num_tokens


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/score", {"text_1": "seven b", "text_2": ["eight by", "four"]}),
        ("/detokenize", {"tokens": [104] * 5_000}),
    ],
)
async def test_a_deadline_saves_no_tokens(
    authenticator: Authenticator,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    said: dict[str, Any],
) -> None:
    authenticator.replace([api_key("ada", tokens_per_minute=1_000_000_000)])
    quota = authenticator.caller("Bearer ada", "").quota
    charged = []
    for deadline, status in (({}, 200), ({REQUEST_TIMEOUT: "1e-6"}, 504)):
        taken = list[int]()
        monkeypatch.setattr(quota, "take_tokens", taken.append)
        answer = await http.post(path, json=said, headers=bearer("ada") | deadline)
        assert answer.status_code == status
        charged.append(sum(taken))
    assert charged[0] == charged[1] > 0


@pytest.mark.parametrize(
    ("path", "said", "encoder"),
    [
        ("/score", {"text_1": "x" * 400, "text_2": "y"}, "encode_all"),
        ("/rerank", {"query": "x" * 400, "documents": ["b", "c"]}, "encode_chat"),
    ],
)
async def test_a_deadline_ends_the_encoding_of_texts_which_is_charged(
    authenticator: Authenticator,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    said: dict[str, Any],
    encoder: str,
) -> None:
    async def encode_all(_self: Tokenizer, texts: list[str], **_options: Any) -> list[list[int]]:
        if encoder == "encode_all":
            await asyncio.Event().wait()
        return [[1] for _ in texts]

    async def encode_chat(*_args: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Tokenizer, "encode_all", encode_all)
    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat)
    authenticator.replace([api_key("ada", tokens_per_minute=1_000_000_000)])
    taken = list[int]()
    monkeypatch.setattr(authenticator.caller("Bearer ada", "").quota, "take_tokens", taken.append)
    headers = bearer("ada") | {REQUEST_TIMEOUT: "1e-6"}
    assert (await http.post(path, json=said, headers=headers)).status_code == 504
    assert sum(taken) >= 100


async def test_one_score_may_use_more_tokens_than_are_left(
    authenticator: Authenticator, http: httpx.AsyncClient
) -> None:
    authenticator.replace([api_key("ada", tokens_per_minute=10)])
    said = {"text_1": "seven b", "text_2": ["eight by", "four"]}
    answers = [await http.post("/score", json=said, headers=bearer("ada")) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


async def test_nothing_is_tokenized_without_tokens_left(
    authenticator: Authenticator, http: httpx.AsyncClient, stub: inference_pb2_grpc.InferenceStub
) -> None:
    authenticator.replace([api_key("ada", tokens_per_minute=10), api_key("bob")])
    ask: dict[str, Any] = {"headers": bearer("ada"), "json": {"prompt": "twelve bytes"}}
    assert [(await http.post("/tokenize", **ask)).status_code for _ in range(2)] == [200, 429]
    paths = BODIES | {"/v1/messages/count_tokens": BODIES["/v1/chat/completions"]}
    for path, said in paths.items():
        kept = {
            name: value
            for name, value in said.items()
            if "count" not in path or name != "max_tokens"
        }
        answer = await http.post(path, json=kept, headers=bearer("ada"))
        assert (path, answer.status_code) == (path, 429)
        assert "10 tokens a minute" in answer.text
    texts = inference_pb2.TokenizeRequest(prompt={"text": "hi"})
    ids = inference_pb2.DetokenizeRequest(token_ids=[104])
    for call in (
        stub.Tokenize(texts, metadata=metadata("ada")),
        stub.Detokenize(ids, metadata=metadata("ada")),
    ):
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Tokenize(texts, metadata=metadata("bob"))).token_ids == [104, 105]


async def held_streams(
    service: Service, secret: str, number: int
) -> tuple[list[asyncio.Task[str]], AsyncClient]:
    """Opens this number of streams, half of them over HTTP, each with its first token."""
    client = AsyncClient(service.grpc, api_key=secret, max_retries=0)

    async def over_http() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"http://{service.http}/v1", api_key=secret, max_retries=0
        ) as other:
            stream = await other.completions.create(
                model="tiny", prompt="hi", max_tokens=4, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    async def over_grpc() -> str:
        return (await client.generate("hi", max_tokens=4)).text

    streams = [asyncio.create_task(over_http() if n % 2 else over_grpc()) for n in range(number)]
    await asyncio.wait_for(service.source.wait_running(number), WAIT)
    return streams, client


@pytest.mark.parametrize("source", [HeldSource(answer=b"abcd")])
async def test_no_stream_is_cut_when_keys_change_expire_or_shrink(
    service: Service, source: HeldSource, authenticator: Authenticator
) -> None:
    source.released = asyncio.Event()  # of this test's loop
    streams, client = await held_streams(service, "ada", 16)
    changes: list[list[Any]] = [
        [api_key("ada", max_streams=1, requests_per_minute=1, tokens_per_minute=1)],
        [api_key("ada", tenant="other")],
        [api_key("ada", expires=datetime(2020, 1, 1, tzinfo=UTC))],
        [],
    ]
    refused = (Overloaded, None, Unauthenticated, Unauthenticated)
    for keys, error in zip(changes, refused, strict=True):
        authenticator.replace(keys)
        if error is not None:
            with pytest.raises(error):
                await client.generate("hi", max_tokens=4)
    assert service.source.running == 16
    source.released.set()
    assert await asyncio.gather(*streams) == ["abcd"] * 16
    await client.close()


@pytest.mark.parametrize("source", [HeldSource(answer=b"abcd")])
async def test_streams_at_a_time(
    service: Service, source: HeldSource, authenticator: Authenticator
) -> None:
    source.released = asyncio.Event()
    authenticator.replace([api_key("ada", max_streams=4), api_key("bob")])
    streams, client = await held_streams(service, "ada", 4)
    with pytest.raises(Overloaded, match="4 concurrent calls"):
        await client.generate("hi", max_tokens=4)
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = await http.post(
            "/v1/completions", json=BODIES["/v1/completions"], headers=bearer("ada")
        )
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        for stream in streams[:2]:  # who hangs up has a place again
            stream.cancel()
        await asyncio.wait_for(source.wait_running(2), WAIT)
        source.released.set()
        quota, deadline = authenticator.caller("Bearer ada", "").quota, time.monotonic() + WAIT
        while quota.num_streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert (await http.get("/v1/models", headers=bearer("ada"))).status_code == 200
    await asyncio.gather(*streams, return_exceptions=True)
    await client.close()
    assert authenticator.caller("Bearer ada", "").quota.num_streams == 0


async def test_callers_without_a_key_share_no_cache_across_connections(model: ServedModel) -> None:
    """Over HTTP, calls of one connection share a cache; gRPC does not report the connection."""
    source = FakeTokenSource(answer=b"abcd")
    servers = await ApiServers.start(
        GenerationService([model], source),
        authenticator=Authenticator(share_anonymous_prefixes=False),
    )
    body = BODIES["/v1/completions"]
    for number in (2, 1):
        async with (
            httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http,
            AsyncClient(servers.grpc_address) as client,
        ):
            for _ in range(number):
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                await client.generate("hi", max_tokens=4)
    await servers.stop(0)
    salts = [each.submit.cache_salt for each in source.requests]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 5
    assert {each.tenant for each in source.requests} == {""}


async def test_a_connection_from_the_address_of_an_earlier_one_shares_no_cache_with_it(
    model: ServedModel,
) -> None:
    """A NAT gives the port of a client that has left to another client."""
    source = FakeTokenSource(answer=b"abcd")
    servers = await ApiServers.start(
        GenerationService([model], source),
        authenticator=Authenticator(share_anonymous_prefixes=False),
    )
    host, port = servers.http_address.split(":")
    body = json.dumps(BODIES["/v1/completions"]).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    local = None
    for _ in range(2):
        connection = socket.socket()
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # no TIME_WAIT
        connection.bind(local or (host, 0))
        local = connection.getsockname()
        connection.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(message)
        assert (await asyncio.wait_for(reader.readline(), WAIT)).split()[1] == b"200"
        await asyncio.wait_for(source.wait_running(0), WAIT)
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()
    await servers.stop(0)
    first, second = [each.submit.cache_salt for each in source.requests]
    assert first != second


async def test_requests_without_a_key_go_no_further_than_their_priority(model: ServedModel) -> None:
    source = FakeTokenSource(answer=b"abcd")
    servers = await ApiServers.start(
        GenerationService([model], source), authenticator=Authenticator()
    )
    async with (
        httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http,
        AsyncClient(servers.grpc_address) as client,
    ):
        body = BODIES["/v1/completions"] | {"priority": -100}  # over HTTP the least goes first
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        await client.generate("hi", max_tokens=4, priority=100)
    await servers.stop(0)
    assert [each.submit.priority for each in source.requests] == [0, 0]


async def test_the_resume_token_of_another_tenant_is_wrong_over_http(
    http: httpx.AsyncClient,
) -> None:
    body = BODIES["/v1/completions"] | {"stream": True, "seed": 1}
    asked = {"Tandem-Resume": "1"}
    answer = await http.post("/v1/completions", json=body, headers=bearer("ada") | asked)
    event_id = answer.text.split("\n\n")[0].partition("\nid: ")[2]
    codes = []
    for secret in ("bob", "ada"):
        headers = bearer(secret) | asked | {"Last-Event-ID": event_id}
        codes.append((await http.post("/v1/completions", json=body, headers=headers)).status_code)
    assert codes == [InvalidArgument.http_status, 200]
