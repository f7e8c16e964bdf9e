"""Tests malformed requests over both APIs: each gets its status; the next good one works."""

import gzip
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from tandem.proto import inference_pb2, limits
from tandem.tests.router.api.http_bodies import events_of
from tandem.tests.router.conftest import Service
from tandem.tests.waits import WAIT

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
GENERATE = "/tandem.v1.Inference/Generate"
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
JSON = {"content-type": "application/json"}
GOOD: dict[str, Any] = {"model": "tiny", "prompt": {"text": "hi"}, "stopping": {"max_tokens": 4}}
TOO_MANY_MESSAGES = [{"role": "user", "content": "x"}] * (limits.MAX_CHAT_MESSAGES + 1)


def message(**fields: Any) -> bytes:
    return inference_pb2.GenerateRequest(**(GOOD | fields)).SerializeToString()


def messages(count: int, **fields: str) -> dict[str, Any]:
    return {"prompt": {"chat": {"messages": [fields] * count}}}


# (body, code, what the message must name)
GRPC_CASES: list[tuple[bytes, grpc.StatusCode, str]] = [
    (b"\xff\xff\xff\xff", INVALID, "tandem.v1.GenerateRequest"),
    (b'{"prompt": "hi"}', INVALID, "tandem.v1.GenerateRequest"),
    (b"\x0a\x02\xff\xfe", INVALID, "tandem.v1.GenerateRequest"),  # a model name that is not UTF-8
    (b"", INVALID, "prompt"),
    (message(prompt={}), INVALID, "prompt"),
    (message(prompt={"text": ""}), INVALID, "prompt"),
    (message(prompt={"token_ids": {}}), INVALID, "prompt"),
    (message(prompt={"token_ids": {"ids": [258]}}), INVALID, "prompt.token_ids"),
    (message(prompt={"token_ids": {"ids": [2**32 - 1]}}), INVALID, "prompt.token_ids"),
    (message(prompt={"text": "x" * 512}), INVALID, "512 prompt tokens"),
    (message(prompt={"text": "x" * 1_000_001}), INVALID, "prompt.text"),
    (message(prompt={"text": "x" * 10_000_000}), EXHAUSTED, "larger than max"),
    (message(prompt={"chat": {}}), INVALID, "prompt.chat.messages"),
    (
        message(**messages(limits.MAX_CHAT_MESSAGES + 1, role="user")),
        INVALID,
        "prompt.chat.messages",
    ),
    (message(**messages(1, content="x")), INVALID, "prompt.chat.messages[0].role"),
    (message(**messages(1, role="r" * 65)), INVALID, "prompt.chat.messages[0].role"),
    (
        message(**messages(1, role="robot", content="x")),
        INVALID,
        "prompt.chat: the model's chat template",
    ),
    (message(model="nope"), NOT_FOUND, "'nope'"),
    (message(model="x" * 257), INVALID, "model"),
    (message(request_id="x" * 129), INVALID, "request_id"),
    (message(request_id="line\nbreak"), INVALID, "request_id"),
    (message(sampling={"temperature": math.nan}), INVALID, "sampling.temperature"),
    (message(sampling={"temperature": -math.inf}), INVALID, "sampling.temperature"),
    (message(sampling={"temperature": 100}), INVALID, "sampling.temperature"),
    (message(sampling={"top_p": 0}), INVALID, "sampling.top_p"),
    (message(sampling={"top_p": math.nan}), INVALID, "sampling.top_p"),
    (message(sampling={"top_k": -2}), INVALID, "sampling.top_k"),
    (message(sampling={"top_k": 2**31 - 1}), INVALID, "sampling.top_k"),
    (message(sampling={"min_p": -1}), INVALID, "sampling.min_p"),
    (message(sampling={"min_p": math.nan}), INVALID, "sampling.min_p"),
    (message(stopping={"max_tokens": -5}), INVALID, "stopping.max_tokens"),
    (message(stopping={"max_tokens": 0}), INVALID, "stopping.max_tokens"),
    (message(stopping={"max_tokens": 512}), INVALID, "stopping.max_tokens"),
    (message(stopping={"max_tokens": 511}), INVALID, "2 prompt tokens and 511 to generate"),
    (message(stopping={"stop": ["x"] * 10_000}), INVALID, "stopping.stop"),
    (message(stopping={"stop": ["x" * 1_025]}), INVALID, "stopping.stop[0]"),
    (message(stopping={"stop": ["a", ""]}), INVALID, "stopping.stop[1]"),
    (message(stopping={"stop_token_ids": [1] * 65}), INVALID, "stopping.stop_token_ids"),
    (message(stopping={"stop_token_ids": [9_999_999]}), INVALID, "stopping.stop_token_ids"),
]


async def test_over_grpc(grpc_service: Service) -> None:
    assert len(GRPC_CASES) >= 30
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        generate: Any = channel.unary_stream(
            GENERATE, None, inference_pb2.GenerateResponse.FromString
        )
        for body, code, named in GRPC_CASES:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(body).read()
            error = caught.value
            assert (error.code(), named in (error.details() or "")) == (code, True), (
                body[:80],
                error,
            )
            assert [len(m.token_ids) async for m in generate(message())] == [1, 1, 1, 1], body[:80]
    assert len(grpc_service.source.requests) == len(GRPC_CASES)  # the good ones only


Case = tuple[str, bytes, int, str | None, str]
"""Path, body, status, param and a part of the message."""


def text(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 4} | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | fields
    ).encode()


def anthropic(**fields: Any) -> bytes:
    return chat(**({"max_tokens": 4} | fields))


def sends(*content: Any, role: str = "user") -> bytes:
    """Returns a message of these blocks."""
    return anthropic(messages=[{"role": role, "content": content}])


def response(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": "x"} | fields).encode()


def says(**message: Any) -> bytes:
    """Returns a chat of one message."""
    return chat(messages=[{"role": "user", "content": "x"} | message])


def offers(**function: Any) -> bytes:
    """Returns a chat with one tool."""
    return chat(tools=[{"type": "function", "function": {"name": "f"} | function}])


KINDS: dict[str, Any] = {
    "text": "x",
    "flag": True,
    "whole": 7,
    "number": 1.5,
    "list": [{}],
    "object": {"a": 1},
}
NOT_FINITE = (math.nan, math.inf, -math.inf)

# A field, the kinds of value that it takes, and values of these kinds out of its bounds.
BOTH: list[tuple[str, str, tuple[Any, ...]]] = [
    ("model", "text", ("x" * 257,)),
    ("n", "whole", (-1, 0, limits.MAX_CHOICES + 1, 10**30)),
    ("best_of", "whole", (-1, 0, limits.MAX_CHOICES + 1, 2**32)),
    ("max_tokens", "whole", (-5, 0, 513, limits.MAX_TOKENS + 1, 2**31, -(10**30))),
    ("temperature", "whole number", (-0.001, 2.001, 1e300, *NOT_FINITE)),
    ("top_p", "whole number", (0, -1, 1.001, *NOT_FINITE)),
    ("top_k", "whole", (-2, 1_000_000 + 1, 2**31)),
    ("min_p", "whole number", (-0.001, 1.001, *NOT_FINITE)),
    ("typical_p", "whole number", (0, 1.001, *NOT_FINITE)),
    ("repetition_penalty", "whole number", (0, -1, 10.001, *NOT_FINITE)),
    ("presence_penalty", "whole number", (-2.001, 2.001, *NOT_FINITE)),
    ("frequency_penalty", "whole number", (-2.001, 2.001, *NOT_FINITE)),
    ("logit_bias", "object", ({"x": 1}, {"-1": 1}, {"258": 1}, {"9" * 40: 1})),
    (
        "logit_bias",
        "object",
        ({"1": 100.1}, {"1": math.nan}, {"1": "x"}, {str(i): 1 for i in range(1_025)}),
    ),
    ("bad_words", "list", ([""], ["x" * 257], ["x"] * 129, [1], ["x" * 65])),
    ("seed", "whole", (2**64, -(2**63) - 1)),
    ("stop", "text list", ("", "x" * 1_025, ["x"] * 17, [1], ["a", ""])),
    ("stop_token_ids", "list", ([258], [-1], [2**32], [1] * 65, ["x"], [1.5])),
    ("min_tokens", "whole", (-1, 513, limits.MAX_TOKENS + 1)),
    ("ignore_eos", "flag", ()),
    ("truncate_prompt", "flag", ()),
    ("beam_width", "whole", (-1, 0, limits.MAX_BEAM_WIDTH + 1)),
    ("use_beam_search", "flag", ()),
    ("length_penalty", "whole number", (2, -10.5, *NOT_FINITE)),
    ("early_stopping", "flag", (True,)),
    ("prompt_logprobs", "whole", (-1, limits.MAX_LOGPROBS + 1)),
    ("processed_logprobs", "flag", (True,)),
    (
        "response_format",
        "object",
        ({"type": "xml"}, {"type": "json_schema"}, {}, {"type": "text", "json_schema": 1}),
    ),
    (
        "structured_outputs",
        "object",
        (
            *({"regex": "("}, {"choice": []}, {"choice": [""]}, {"grammar": "x"}, {"json": "{"}),
            {"regexp": "a"},
        ),
    ),
    (
        "guided_json",
        "text object",
        ("", "{", "[]", "false", {"type": "nothing"}, "9" * 400, {"a": math.nan}),
    ),
    ("guided_regex", "text", ("", "(", "x" * (limits.MAX_GRAMMAR_CHARACTERS + 1))),
    ("guided_choice", "list", ([], [""], [1], ["x"] * 1_025)),
    ("guided_grammar", "text", ("", "x", "start: nothing")),
    ("priority", "whole", (-101, 101, 2**31)),
    (
        "stream_options",
        "object",
        ({"include_usage": 1}, {"include_obfuscation": True}),
    ),
    ("user", "text", ()),
    ("store", "flag", (True,)),
    ("service_tier", "text", ("flex",)),
    ("skip_special_tokens", "flag", (False,)),
]
FUNCTION = {"name": "f"}
TEXT_ONLY: list[tuple[str, str, tuple[Any, ...]]] = [
    (
        "prompt",
        "text",
        ("", [], ["x"] * 129, [1, "x"], [-1], [2**32], [258], ["good", ""], [[]], "x" * 512, None),
    ),
    ("logprobs", "whole", (-1, limits.MAX_LOGPROBS + 1)),
    ("echo", "flag", ()),
    ("suffix", "text", ("more",)),
]
CHAT_ONLY: list[tuple[str, str, tuple[Any, ...]]] = [
    ("messages", "list", ([], ["x"], TOO_MANY_MESSAGES, None)),
    ("max_completion_tokens", "whole", (-1, 0, 513)),
    ("logprobs", "flag", ()),
    ("top_logprobs", "whole", (-1, 5, limits.MAX_LOGPROBS + 1)),
    (
        "tools",
        "list",
        (
            [{"type": "web"}],
            [{"type": "function"}],
            [{"type": "function", "function": FUNCTION}] * 2,
        ),
    ),
    (
        "tool_choice",
        "text object",
        ("x", "required", {"type": "function"}, {"type": "function", "function": FUNCTION}),
    ),
    (
        "chat_template_kwargs",
        "object",
        ({"messages": []}, {"x": "x" * 4_096}, {"raise_exception": 1}, {"x": math.nan}),
    ),
    ("chat_template_args", "object", ({"messages": []}, {"raise_exception": 1}, {"x": math.nan})),
    ("enable_thinking", "flag", ()),
    ("thinking", "object", ({"type": "x"},)),
    ("continue_final_message", "flag", (True,)),
    ("parse_special", "flag", ()),
    ("add_generation_prompt", "flag", (False,)),
    ("parallel_tool_calls", "flag", ()),
    ("modalities", "list", (["text", "audio"], [])),
    ("echo", "flag", (True,)),
]
MESSAGES_ONLY: list[tuple[str, str, tuple[Any, ...]]] = [
    ("model", "text", ("x" * 257,)),
    ("max_tokens", "whole", (-5, 0, 513, limits.MAX_TOKENS + 1, 2**31, None)),
    ("temperature", "whole number", (-0.001, 2.001, *NOT_FINITE)),
    ("top_p", "whole number", (0, 1.001, *NOT_FINITE)),
    ("top_k", "whole", (-2, 2**31)),
    ("stop_sequences", "text list", ("", ["x"] * 17, [1], ["a", ""])),
    ("system", "text list", ([{"type": "image"}], [1])),
    ("messages", "list", ([], ["x"], TOO_MANY_MESSAGES, None)),
    (
        "tools",
        "list",
        ([{"name": "f"}], [{"name": "f", "input_schema": {"type": "array"}}], [{"type": "web"}]),
    ),
    (
        "tool_choice",
        "object",
        ({"type": "x"}, {"type": "any"}, {"type": "tool"}, {"type": "auto", "name": "f"}),
    ),
    ("thinking", "object", ({"type": "x"},)),
    (
        "output_config",
        "object",
        ({"format": {"type": "json_schema"}}, {"format": {"type": "xml", "schema": {}}}),
    ),
    ("stream", "flag", ()),
    ("metadata", "object", ()),
    ("service_tier", "text", ("priority",)),
    ("output_format", "object", ({"type": "xml"}, {"type": "json_schema"})),
    ("compaction", "", ()),
    ("container", "", ()),
    ("mcp_servers", "", ()),
    ("thread", "", ()),
]
RESPONSES_ONLY: list[tuple[str, str, tuple[Any, ...]]] = [
    ("model", "text", ("x" * 257,)),
    ("max_output_tokens", "whole", (-5, 0, 513, limits.MAX_TOKENS + 1, 2**31)),
    ("temperature", "whole number", (-0.001, 2.001, *NOT_FINITE)),
    ("top_p", "whole number", (0, 1.001, *NOT_FINITE)),
    (
        "input",
        "text list",
        (
            [],
            [1],
            [{"role": "user"}],
            [{"type": "image"}],
            [{"role": "user", "content": [1]}],
            None,
        ),
    ),
    ("instructions", "text", ()),
    (
        "tools",
        "list",
        ([{"type": "search"}], [{"type": "function"}], [{"type": "function", "name": "f"}] * 2),
    ),
    (
        "tool_choice",
        "text object",
        ("x", "required", {"type": "function"}, {"type": "function", "name": "f"}),
    ),
    ("text", "object", ({"format": {"type": "xml"}}, {"format": {"type": "json_schema"}})),
    ("reasoning", "object", ({"effort": 1}, {"effort": "x" * 4_096})),
    ("stream", "flag", ()),
    ("store", "flag", ()),
    ("conversation", "", ()),
    ("background", "flag", (True,)),
    ("include", "list", ([1], ["x"] * 65)),
    ("max_tool_calls", "whole", ()),
    ("client_metadata", "object", ()),
    ("truncation", "text", ("oldest",)),
    ("metadata", "object", ({"a": 1},)),
]
UNKNOWN = ("temprature", "function", "logits_processors", "max_new_token")


def by_field() -> Iterator[Case]:
    """Yields each field with values of wrong types and out of bounds, and unknown fields."""
    for path, body, fields in (
        *((TEXT, text, BOTH + TEXT_ONLY), (CHAT, chat, BOTH + CHAT_ONLY)),
        *((MESSAGES, anthropic, MESSAGES_ONLY), (RESPONSES, response, RESPONSES_ONLY)),
    ):
        for name, kinds, out_of_bounds in fields:
            wrong = [value for kind, value in KINDS.items() if kind not in kinds.split()]
            for value in (*wrong, *out_of_bounds):
                yield path, body(**{name: value}), 400, name, ""
        for name in UNKNOWN:
            yield path, body(**{name: "x"}), 400, name, "is not a field of this request"


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
WRONG_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}
TOO_DEEP = json.loads('{"a":' * 180 + "1" + "}" * 180)
HTTP_CASES: list[Case] = [
    *by_field(),
    (TEXT, b"", 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "hi"', 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "hi"} x', 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "\xff"}', 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "\x00"}', 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "\\ud800"}', 400, None, "not valid JSON"),
    (TEXT, b'{"prompt": "hi", "user": "\\udfff"}', 400, None, "not valid JSON"),
    (TEXT, '{"prompt": "hi"}'.encode("utf-16"), 400, None, "not valid JSON"),
    (TEXT, b"\xef\xbb\xbf" + text(), 400, None, "not valid JSON"),
    (TEXT, gzip.compress(text()), 400, None, "not valid JSON"),
    (TEXT, b"model=tiny&prompt=hi", 400, None, "not valid JSON"),
    (TEXT, b"[" * 60_000, 400, None, "not valid JSON"),
    (TEXT, b"[" * 100_000, 400, None, "too many elements"),
    (TEXT, b'{"metadata": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, 400, None, "not valid JSON"),
    (TEXT, b'{"n": 1' + b"0" * 5_000 + b', "prompt": "hi"}', 400, None, ""),
    (TEXT, b"[1]", 400, None, "should be an object"),
    (TEXT, b"null", 400, None, "should be an object"),
    (TEXT, b'{"model": "tiny"}', 400, "prompt", "required"),
    (TEXT, text(prompt="x" * 1_000_001), 400, "prompt", "maximum is 1000000"),
    (TEXT, text(prompt="x" * 10_000_000), 413, None, "4194304 bytes"),
    (TEXT, text(model="nope"), 404, None, "'nope'"),
    (TEXT, text(max_tokens=511), 400, "prompt", "511 to generate"),
    (TEXT, text(n=4, best_of=2), 400, "best_of", ""),
    (TEXT, text(n=20, use_beam_search=True), 400, "n", "1 to 16"),
    (TEXT, text(beam_width=2, temperature=0.5), 400, "temperature", ""),
    (TEXT, text(beam_width=2, n=3), 400, "n", ""),
    (TEXT, text(beam_width=2, use_beam_search=False), 400, "beam_width", "use_beam_search to true"),
    (CHAT, chat(beam_width=2, use_beam_search=False), 400, "beam_width", "use_beam_search to true"),
    (TEXT, text(guided_regex="a", guided_choice=["a"]), 400, "guided_choice", "guided_regex"),
    (
        TEXT,
        text(structured_outputs={"regex": "a", "grammar": "b"}),
        400,
        "structured_outputs.grammar",
        "cannot be combined with structured_outputs.regex",
    ),
    (TEXT, text(guided_json=TOO_DEEP), 400, "guided_json", ""),
    (CHAT, text(), 400, "messages", "required"),
    (CHAT, says(role=""), 400, "messages[0].role", "1 to 64"),
    (CHAT, says(role="r" * 65), 400, "messages[0].role", "1 to 64"),
    (CHAT, says(role="robot"), 400, "messages", "unknown role"),
    (CHAT, says(role=None), 400, "messages[0].role", "string"),
    (CHAT, says(content=7), 400, "messages[0].content", "string"),
    (CHAT, says(content=[7]), 400, "messages[0].content", "parts"),
    (CHAT, says(content=[{"type": "text"}]), 400, "messages[0].content", "parts"),
    (
        CHAT,
        says(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        400,
        "messages[0].content",
        "'image_url'",
    ),
    (CHAT, says(content=[{"type": "input_audio"}]), 400, "messages[0].content", "'input_audio'"),
    (CHAT, says(content=[{"type": "{0}"}]), 400, "messages[0].content", "'{0}'"),
    (CHAT, says(content="x" * 1_000_001), 400, "messages", "maximum is 1000000"),
    (CHAT, says(content="x" * 512), 400, "messages", "tokens for messages"),
    (CHAT, says(name="n" * 65), 400, "messages[0].name", "maximum is 64"),
    (CHAT, says(tool_calls=[1]), 400, "messages[0].tool_calls[0]", "object"),
    (CHAT, says(tool_calls=[CALL]), 400, "messages[0].tool_calls", "assistant"),
    (
        CHAT,
        says(
            role="assistant",
            tool_calls=[CALL, CALL | {"function": {"name": "f" * 129, "arguments": "{}"}}],
        ),
        400,
        "messages[0].tool_calls[1].function.name",
        "1 to 128 characters",
    ),
    (CHAT, says(role="tool", tool_call_id="c" * 4_097), 400, "messages[0].tool_call_id", "is 4096"),
    (CHAT, offers(name=""), 400, "tools[0].function.name", "1 to 128"),
    (CHAT, offers(name="f", parameters=[]), 400, "tools[0].function.parameters", "object"),
    (CHAT, offers(parameters={"type": "array"}), 400, "tools[0].function.parameters", "object"),
    (CHAT, offers(parameters={"a": math.inf}), 400, "tools[0].function.parameters", "JSON"),
    (
        CHAT,
        offers(parameters={"a": "x" * 131_072}),
        400,
        "tools[0].function.parameters",
        "maximum is",
    ),
    (CHAT, chat(structured_outputs={"x": 1}), 400, "structured_outputs.x", "not a field"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "1 to 1048576"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens", "1 to 1048576"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "0 to 20"),
    (CHAT, chat(response_format=WRONG_SCHEMA), 400, "response_format", ""),
    *(
        (path, b"{", 400, None, "not valid JSON")
        for path in (MESSAGES, f"{MESSAGES}/count_tokens", RESPONSES)
    ),
    (MESSAGES, anthropic(model="nope"), 404, "model", "'nope'"),
    (MESSAGES, sends({"type": "web"}), 400, "messages[0].content[0]", "block of type text"),
    (MESSAGES, sends({"type": "text"}), 400, "messages[0].content[0].text", "required"),
    (MESSAGES, sends("x"), 400, "messages[0].content[0]", "block of type text"),
    (
        MESSAGES,
        sends({"type": "tool_use", "id": "i", "name": "f", "input": {}}),
        400,
        "messages[0].content[0]",
        "role",
    ),
    (
        MESSAGES,
        sends({"type": "tool_result", "tool_use_id": "i"}, role="assistant"),
        400,
        "messages[0]",
        "role user",
    ),
    (
        MESSAGES,
        sends({"type": "tool_result", "tool_use_id": "i" * 4_097}),
        400,
        "messages[0].content[0]",
        "maximum is 4096",
    ),
    (
        MESSAGES,
        sends({"type": "text", "text": "x" * 1_000_001}),
        400,
        "messages",
        "maximum is 1000000",
    ),
    (
        MESSAGES,
        anthropic(messages=[{"role": "robot", "content": "x"}]),
        400,
        "messages[0].role",
        "'user'",
    ),
    (f"{MESSAGES}/count_tokens", chat(system=1), 400, "system", "array"),
    (
        MESSAGES,
        anthropic(
            messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
            tool_choice={"type": "any"},
        ),
        400,
        "messages[1]",
        "demands a call",
    ),
    (MESSAGES, anthropic(stop_token_ids=[258]), 400, "stop_token_ids", "258 tokens"),
    (MESSAGES, anthropic(stop_regex="("), 400, "stop_regex", ""),
    (MESSAGES, anthropic(stop_regex="x" * 1_025), 400, "stop_regex", "1024"),
    (RESPONSES, response(model="nope"), 404, None, "'nope'"),
    (
        RESPONSES,
        response(previous_response_id="r"),
        400,
        "previous_response_id",
        "previous_response_id: no response of this id is stored here; send the whole conversation",
    ),
    (RESPONSES, response(input=[{"type": "message", "role": "r"}]), 400, "input[0].role", "'user'"),
    (RESPONSES, response(input=[]), 400, "input", "no message"),
    (RESPONSES, response(input="x" * 512), 400, "input", "tokens for input"),
    (RESPONSES, response(input="x" * 1_000_001), 400, "input", "maximum is 1000000"),
    (
        RESPONSES,
        response(instructions="x", input=TOO_MANY_MESSAGES[1:]),
        400,
        "input",
        f"1 to {limits.MAX_CHAT_MESSAGES}",
    ),
    (
        RESPONSES,
        response(input=[{"type": "item_reference", "id": "x"}]),
        400,
        "input[0].id",
        "send the item itself",
    ),
    (
        RESPONSES,
        response(input=[{"type": "picture", "id": "x"}]),
        400,
        "input[0]",
        "item of type",
    ),
    (
        RESPONSES,
        response(
            input=[
                {"type": "function_call", "call_id": "c" * 4_097, "name": "f", "arguments": "{}"}
            ]
        ),
        400,
        "input[0]",
        "maximum is 4096",
    ),
    ("/tokenize", b"{", 400, None, "not valid JSON"),
    ("/tokenize", b"{}", 400, "prompt", "required"),
    ("/tokenize", text(prompt=[1]), 400, "prompt", "string"),
    ("/tokenize", b'{"messages": []}', 400, "messages", f"1 to {limits.MAX_CHAT_MESSAGES}"),
    ("/tokenize", b'{"prompt": "x", "model": "nope"}', 404, None, "'nope'"),
    ("/tokenize", b'{"prompt": "x", "more": 1}', 400, "more", "not a field"),
    ("/detokenize", b'{"tokens": [258]}', 400, "tokens", "258 tokens"),
    ("/detokenize", b'{"tokens": [-1]}', 400, "tokens[0]", "greater"),
    ("/detokenize", b'{"tokens": "x"}', 400, "tokens", "array"),
    ("/detokenize", b'{"tokens": [1], "model": "nope"}', 404, None, "'nope'"),
    ("/v1/watermark/detect", b"{}", 400, "prompt", "required"),
    ("/v1/watermark/detect", b'{"prompt": [258]}', 400, "prompt", "258 tokens"),
    ("/v1/watermark/detect", b'{"prompt": "x", "model": "nope"}', 404, None, "'nope'"),
]


def _plain(body: bytes) -> bytes:
    return body


def _streamed(body: bytes) -> bytes:
    """Returns the same request with `stream`; the status must not depend on it."""
    return body.replace(b'{"model"', b'{"stream": true, "model"', 1)


@pytest.mark.parametrize("form", [_plain, _streamed])
async def test_over_http(service: Service, form: Callable[[bytes], bytes]) -> None:
    """Each bad request gets its own error, and the next good one is answered as before."""
    assert len(HTTP_CASES) >= 300
    good = text(seed=1)
    async with httpx.AsyncClient(
        base_url=f"http://{service.http}", timeout=WAIT, headers=JSON
    ) as http:
        expected = (await http.post(TEXT, content=good)).json()["choices"]
        for path, body, status, param, said in HTTP_CASES:
            is_plain = path.endswith(("tokenize", "count_tokens"))
            answer = await http.post(path, content=body if is_plain else form(body))
            expected_status = status
            if answer.headers["content-type"].startswith("text/event-stream"):
                # A stream of /v1/responses whose prompt is too long begins, and fails at once.
                assert status == 400
                expected_status = 200
                (error,) = (each["error"] for each in events_of(answer) if each["type"] == "error")
            else:
                error = answer.json().get("error", {"param": None, "message": ""})
            if path.startswith(MESSAGES):  # Anthropic's errors have the field in the message only
                text_of_field = error["message"].removeprefix("prompt is too long: ")
                error["param"] = next(iter(re.findall(r"^([\w.\[\]]+): ", text_of_field)), None)
            assert answer.status_code == expected_status, (path, body[:200], answer.text[:200])
            assert _names(error["param"], param), (path, body[:200], error)
            assert said in error["message"], (path, body[:200], error)
            assert (await http.post(TEXT, content=good)).json()["choices"] == expected, body[:200]
    assert len(service.source.requests) == len(HTTP_CASES) + 1  # the good ones only


def _names(found: str | None, field: str | None) -> bool:
    """Returns True if the error is about the field or a part of it."""
    return found == field or (
        field is not None and found is not None and found.startswith((f"{field}.", f"{field}["))
    )


@pytest.mark.parametrize("header", ["", "x", "0", "-1", "nan", "inf", "86400.5", "1e999", "1 s"])
async def test_invalid_timeouts(service: Service, header: str) -> None:
    async with httpx.AsyncClient(
        base_url=f"http://{service.http}", timeout=WAIT, headers=JSON
    ) as http:
        answer = await http.post(TEXT, content=text(), headers={"x-request-timeout": header})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "x-request-timeout"
