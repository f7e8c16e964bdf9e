"""Tests the cost of parsing large messages, and the callers that have to wait for it."""

import asyncio
import gc
import json
import sys
import threading
import types
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio
import httpx
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.proto.limits import MAX_MESSAGE_BYTES, MAX_MESSAGE_ELEMENTS, MAX_TOKENS
from tandem.router.api.large_messages import check_json_elements, parse_message
from tandem.router.frontend.fair_threads import PARSER, PARSING
from tandem.router.output.choice import ChoiceOutput
from tandem.router.output.processor import OutputProcessor
from tandem.router.request import TokenDelta
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body
from tandem.tests.router.conftest import Service
from tandem.tests.waits import WAIT

SIZE = MAX_MESSAGE_BYTES - 64


def varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes((number & 127 | 128,))
        number >>= 7
    return found + bytes((number,))


def field(kind: type[Message], name: str, data: bytes) -> bytes:
    number = kind.DESCRIPTOR.fields_by_name[name].number
    return varint(number << 3 | 2) + varint(len(data)) + data


def many(kind: type[Message], name: str) -> bytes:
    """Returns 4 MiB of empty values of a field."""
    one = field(kind, name, b"")
    return one * (SIZE // len(one))


CHATS = field(inference_pb2.Prompt, "chat", many(inference_pb2.Chat, "messages"))
CALLS = field(inference_pb2.Chat, "messages", many(inference_pb2.ChatMessage, "tool_calls"))
CROWDED: list[tuple[type[Message], bytes]] = [
    (inference_pb2.TokenizeRequest, field(inference_pb2.TokenizeRequest, "prompt", CHATS)),
    (inference_pb2.GenerateRequest, field(inference_pb2.GenerateRequest, "prompt", CHATS)),
    (
        inference_pb2.GenerateRequest,
        field(inference_pb2.GenerateRequest, "prompt", field(inference_pb2.Prompt, "chat", CALLS)),
    ),
    (inference_pb2.GenerateRequest, many(inference_pb2.GenerateRequest, "resume")),
    (inference_pb2.GenerateRequest, many(inference_pb2.GenerateRequest, "prompt")),
    (
        inference_pb2.GenerateRequest,
        field(
            inference_pb2.GenerateRequest,
            "sampling",
            many(inference_pb2.SamplingParams, "logit_bias"),
        ),
    ),
    (
        inference_pb2.GenerateRequest,
        field(
            inference_pb2.GenerateRequest, "stopping", many(inference_pb2.StoppingParams, "stop")
        ),
    ),
    (inference_pb2.DetokenizeRequest, b"\x10\x01" * (SIZE // 2)),
    (inference_pb2.ListModelsRequest, b"\x10\x01" * (SIZE // 2)),
]
"""Messages with millions of elements."""

METHODS = {
    inference_pb2.TokenizeRequest: "Tokenize",
    inference_pb2.GenerateRequest: "Generate",
    inference_pb2.DetokenizeRequest: "Detokenize",
    inference_pb2.ListModelsRequest: "ListModels",
}


@pytest.mark.parametrize(("kind", "data"), CROWDED)
async def test_a_message_with_millions_of_elements_is_refused_before_it_is_parsed(
    service: Service, kind: type[Message], data: bytes
) -> None:
    class Unparsed:
        DESCRIPTOR = kind.DESCRIPTOR
        FromString = None

    with pytest.raises(InvalidArgument, match="more than 65536 fields"):
        parse_message(Unparsed, data)  # type: ignore[type-var]
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        calls: Any = channel.unary_unary(f"/tandem.v1.Inference/{METHODS[kind]}")
        with pytest.raises(grpc.aio.AioRpcError, match="more than 65536 fields") as caught:
            await calls(data, timeout=WAIT)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("num_left", [0, 1])
def test_the_bound_of_elements(num_left: int) -> None:
    """The request, its prompt and its chat count as fields."""
    messages = field(inference_pb2.Chat, "messages", b"") * (MAX_MESSAGE_ELEMENTS - 2 - num_left)
    data = field(
        inference_pb2.TokenizeRequest, "prompt", field(inference_pb2.Prompt, "chat", messages)
    )
    assert parse_message(inference_pb2.TokenizeRequest, data).SerializeToString() == data
    with pytest.raises(InvalidArgument, match="more than 65536"):
        parse_message(inference_pb2.TokenizeRequest, data + b"\x10\x01" * (num_left + 1))


def test_packed_token_ids_are_one_field() -> None:
    request = inference_pb2.DetokenizeRequest(token_ids=range(MAX_TOKENS))
    assert parse_message(inference_pb2.DetokenizeRequest, request.SerializeToString()) == request


@given(st.binary(max_size=64))
@example(b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")
@example(b"\x12\xff\xff\xff\xff\x0f")
def test_the_scan_accepts_the_same_messages_as_the_parser(data: bytes) -> None:
    """Covers everything but groups, which no message uses."""
    filled = field(inference_pb2.TokenizeRequest, "model", b"x" * PARSING.thread_from) + data
    try:
        expected = inference_pb2.TokenizeRequest.FromString(filled)
    except DecodeError:
        expected = None
    try:
        found = parse_message(inference_pb2.TokenizeRequest, filled)
    except InvalidArgument:
        assert expected is None or any(byte & 7 in (3, 4) or byte > 127 for byte in data)
    else:
        assert found == expected


def crowd(inner: str) -> str:
    return f"[{','.join([inner] * (SIZE // (len(inner) + 1) - 100))}]"


async def test_refused_messages_do_not_wait_for_the_garbage_collector(service: Service) -> None:
    """Errors refer to frames, and these to 4 MiB; full collections are rare."""
    data = CROWDED[0][1]
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        tokenize: Any = channel.unary_unary("/tandem.v1.Inference/Tokenize")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            calls = [tokenize(data, timeout=WAIT) for _ in range(8)]
            codes = [await call.code() for call in calls]
            gc.collect()
            kept = sum(
                sys.getsizeof(value)
                for each in gc.garbage
                if isinstance(each, types.FrameType)
                for value in each.f_locals.values()
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
    assert kept < SIZE


@pytest.mark.parametrize("inner", ["{}", "[]", '""', "1", '{"a":1}'])
@pytest.mark.parametrize(
    "path",
    [
        *(
            TEXT,
            CHAT,
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/embeddings",
            "/score",
        ),
        *("/tokenize", "/detokenize", "/v1/watermark/detect"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ],
)
async def test_a_body_with_millions_of_elements_is_refused_before_it_is_parsed(
    service: Service, path: str, inner: str
) -> None:
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        content = f'{{"metadata": {{"a": {crowd(inner)}}}}}'
        answer = await http.post(
            path, content=content, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert (
        "the body has too many elements; the maximum is 65536" in answer.json()["error"]["message"]
    )


def test_punctuation_in_strings_is_no_element() -> None:
    text = json.dumps({"prompt": '{[,:"\\' * 100_000, "more": ['"', "\\", '\\"', "\\\\"]})
    check_json_elements(text.encode())
    check_json_elements(json.dumps({"prompt": list(range(MAX_TOKENS))}).encode())
    num_strings = MAX_MESSAGE_ELEMENTS - 2  # beside the object and the list
    check_json_elements(json.dumps(['"'] * (MAX_MESSAGE_ELEMENTS - 1)).encode())
    with pytest.raises(InvalidArgument, match="too many elements"):
        check_json_elements(json.dumps([["}"] * num_strings, "", ""]).encode())


async def test_a_large_message_that_is_parsed_keeps_only_its_tenant_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tenants take turns, independent of the sizes of their messages."""
    began, goes_on, order = threading.Event(), threading.Event(), []

    def parse(tenant: str) -> None:
        began.set()
        assert goes_on.wait(WAIT)
        order.append(tenant)

    calls = [asyncio.create_task(PARSER.run("greedy", 1, parse, "greedy")) for _ in range(10)]
    await asyncio.to_thread(began.wait, WAIT)
    calls.append(asyncio.create_task(PARSER.run("modest", 1, parse, "modest")))
    await asyncio.sleep(0)  # it waits now
    goes_on.set()
    await asyncio.gather(*calls)
    assert order.index("modest") <= 2
    assert len(order) == 11


@pytest.mark.parametrize("is_ranked", [False, True])
async def test_an_answer_that_is_not_streamed_keeps_no_message_of_each_token(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_ranked: bool
) -> None:
    made: list[inference_pb2.GenerateResponse] = []
    counts: list[int] = []
    push, run = ChoiceOutput.push, OutputProcessor.run

    def recorded(self: ChoiceOutput, delta: TokenDelta) -> inference_pb2.GenerateResponse:
        made.append(push(self, delta))
        return made[-1]

    async def counted(
        self: OutputProcessor, *args: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        async for message in run(self, *args):
            yield message
            if not counts and sum(each.finish_reason > 0 for each in made) == (
                3 if is_ranked else 2
            ):
                counts.extend(sys.getrefcount(each) for each in made if not each.finish_reason)

    monkeypatch.setattr(ChoiceOutput, "push", recorded)
    monkeypatch.setattr(OutputProcessor, "run", counted)
    service.source.answer = b"hello world, hello"
    asked = body(TEXT, max_tokens=18, n=2, logprobs=1, **({"best_of": 3} if is_ranked else {}))
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = (await http.post(TEXT, json=asked)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello world, hello"] * 2
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [18] * 2
    assert answer["usage"]["completion_tokens"] == (54 if is_ranked else 36)
    assert len(counts) == (51 if is_ranked else 34)
    assert max(counts) <= 3  # the list here, the loop over it, and the argument
