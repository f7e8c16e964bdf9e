"""The messages that the clients send, and the results that they make of responses."""

import asyncio
import json
from typing import Any

import pytest

import tandem
from tandem.proto import errors, inference_pb2
from tandem.router.client.client import AsyncClient, Client
from tandem.router.client.request import tokenize_request
from tandem.router.client.types import (
    ChatOptions,
    Logprob,
    Message,
    Options,
    TemplateOptions,
    TokenLogprobs,
    Tool,
    ToolCall,
)
from tandem.tests.router.client.recording_server import LAST, RecordingServer

CHAT = [{"role": "user", "content": "hello?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather somewhere.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


async def sent(server: RecordingServer, **options: Any) -> inference_pb2.GenerateRequest:
    async with AsyncClient(server.address) as client:
        await client.generate("hi", **options)
    request: inference_pb2.GenerateRequest = server.requests[-1]
    return request


OPTIONS = Options(
    model="m",
    request_id="r",
    priority=-7,
    truncate_prompt=True,
    truncate_prompt_tokens=9,
    truncation="disabled",
    n=2,
    best_of=5,
    temperature=0.0,
    top_k=3,
    top_p=0.5,
    min_p=0.25,
    typical_p=0.75,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={7: -100.0, 9: 1.5},
    bad_words=["worse", "worst"],
    watermark=True,
    seed=2**64 - 1,
    max_tokens=0,
    min_tokens=1,
    stop=["x", "y"],
    stop_token_ids=[4, 5],
    ignore_eos=True,
    max_time_ms=500,
    stop_regex="b+",
    repetition_stop_ngram=3,
    repetition_stop_count=2,
    logprobs=0,
    prompt_logprobs=4,
    processed_logprobs=True,
    echo=True,
    regex="a+",
)
EXPECTED = inference_pb2.GenerateRequest(
    model="m",
    prompt=inference_pb2.Prompt(text="hi"),
    request_id="r",
    priority=-7,
    truncate_prompt=True,
    truncate_prompt_tokens=9,
    truncation="disabled",
    n=2,
    best_of=5,
    sampling=inference_pb2.SamplingParams(
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: -100.0, 9: 1.5},
        bad_words=["worse", "worst"],
        watermark=True,
        seed=2**64 - 1,
    ),
    stopping=inference_pb2.StoppingParams(
        max_tokens=0,
        min_tokens=1,
        stop=["x", "y"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        max_time_ms=500,
        stop_regex="b+",
        repetition_stop_ngram=3,
        repetition_stop_count=2,
    ),
    logprobs=0,
    prompt_logprobs=4,
    processed_logprobs=True,
    echo=True,
    constraint=inference_pb2.Constraint(regex="a+"),
)


async def test_every_option_has_its_field(server: RecordingServer) -> None:
    request = await sent(server, **OPTIONS)
    assert request == EXPECTED
    assert request.HasField("logprobs")  # 0 alternatives are not the same as none asked for
    used = {
        *OPTIONS,
        "beam_width",
        "length_penalty",
        "early_stopping",
        "json_schema",
        "json_object",
        "choice",
        "grammar",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
    assert used == set(Options.__annotations__)


@pytest.mark.parametrize("value", ["absent", None])
async def test_absent_options_set_no_field(server: RecordingServer, value: str | None) -> None:
    request = await sent(server, **({} if value else dict.fromkeys(Options.__annotations__)))
    assert request == inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="hi"))
    for name in ("logprobs", "prompt_logprobs", "beam_search", "constraint"):
        assert not request.HasField(name), name


async def test_beam_search(server: RecordingServer) -> None:
    request = await sent(server, beam_width=4, length_penalty=0.0, early_stopping=True, n=2)
    assert request.beam_search == inference_pb2.BeamSearch(
        width=4, length_penalty=0.0, early_stopping=True
    )
    assert request.beam_search.HasField("length_penalty")
    assert not request.HasField("sampling")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"json_schema": {"type": "object"}},
            inference_pb2.Constraint(json_schema='{"type": "object"}'),
        ),
        (
            {"json_schema": '{"type":"null"}'},
            inference_pb2.Constraint(json_schema='{"type":"null"}'),
        ),
        ({"json_object": True}, inference_pb2.Constraint(json_object=True)),
        (
            {"choice": ["yes", "no"]},
            inference_pb2.Constraint(choice=inference_pb2.StringChoices(texts=["yes", "no"])),
        ),
        ({"grammar": 'start: "a"'}, inference_pb2.Constraint(grammar='start: "a"')),
    ],
)
async def test_constraints(
    server: RecordingServer, options: dict[str, object], expected: inference_pb2.Constraint
) -> None:
    assert (await sent(server, **options)).constraint == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": -1}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"logit_bias": {"x": 2.0}}, "logit_bias"),
        ({"stop": 3}, "stop"),
        ({"bad_words": [3]}, "bad_words"),
        ({"choice": [1]}, "choice"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema"),
        ({"regex": "a", "grammar": "b"}, "grammar"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"beam_width": "wide"}, "beam_width"),
        ({"priority": 2**40}, "priority"),
        ({"tempreature": 1.0}, "tempreature"),
        ({"tools": [WEATHER]}, "tools"),  # of chats
    ],
)
async def test_values_that_no_field_holds_are_refused_by_option(
    server: RecordingServer, options: dict[str, object], field: str
) -> None:
    async with AsyncClient(server.address) as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            await client.generate("hi", **options)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert server.requests == []


async def test_none_is_as_good_as_absent_in_a_chat_and_in_tokenize(server: RecordingServer) -> None:
    none: Any = dict.fromkeys(ChatOptions.__annotations__)
    template: Any = dict.fromkeys(TemplateOptions.__annotations__)
    async with AsyncClient(server.address) as client:
        await client.chat([{"role": "user", "content": "x"}], **none)
        assert server.requests[-1] == inference_pb2.GenerateRequest(
            prompt={"chat": {"messages": [{"role": "user", "content": "x"}]}}
        )
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ("hi", {"tool": []}, "tool"),
            ("hi", {"tools": [WEATHER]}, "tools"),
            ([{"role": "user", "content": "x"}], {"tool": None}, "tool"),
        ]
        for prompt, options, field in wrong:
            with pytest.raises(errors.InvalidArgument) as caught:
                await client.tokenize(prompt, **options)
            assert caught.value.field == field
    assert tokenize_request("hi", "", template).prompt.text == "hi"


@pytest.mark.parametrize(
    "tool",
    [
        tandem.Tool(**WEATHER),  # type: ignore[arg-type]
        {"type": "function", "function": WEATHER},
    ],
)
async def test_a_chat_with_tools(server: RecordingServer, tool: Any) -> None:
    call = ToolCall(id="c1", name="weather", arguments='{"city": "Rome"}')
    openai_call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    options = TemplateOptions(
        tools=[tool],
        tool_choice="weather",
        template_kwargs={"enable_thinking": False},
        continue_final_message=True,
        parse_special=True,
    )
    for calls, content in ([call], ""), ([openai_call], None):
        messages: list[Message] = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Rome"}, {"type": "text", "text": "?"}],
                "name": "me",
            },
            {"role": "assistant", "content": content, "tool_calls": calls},
            {"role": "tool", "content": "warm", "tool_call_id": "c1"},
        ]
        async with AsyncClient(server.address) as client:
            await client.chat(messages, **options)
            assert await client.tokenize(messages, **options) == [1, 2]
        generate, tokenize = server.requests[-2:]
        assert tokenize.prompt == generate.prompt
        chat = generate.prompt.chat
        expected = inference_pb2.ToolCall(id="c1", name="weather", arguments='{"city": "Rome"}')
        assert list(chat.messages) == [
            inference_pb2.ChatMessage(role="user", content="Rome\n?", name="me"),
            inference_pb2.ChatMessage(role="assistant", tool_calls=[expected]),
            inference_pb2.ChatMessage(role="tool", content="warm", tool_call_id="c1"),
        ]
        assert (chat.tools[0].name, chat.tools[0].description) == (
            "weather",
            "The weather somewhere.",
        )
        assert json.loads(chat.tools[0].parameters) == WEATHER["parameters"]
        assert (chat.tool_choice.mode, chat.tool_choice.name) == (
            inference_pb2.ToolChoice.MODE_NAMED,
            "weather",
        )
        assert json.loads(chat.template_kwargs) == {"enable_thinking": False}
        assert chat.continue_final_message
        assert chat.parse_special


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ("auto", inference_pb2.ToolChoice.MODE_UNSPECIFIED),
        ("none", inference_pb2.ToolChoice.MODE_NONE),
        ("required", inference_pb2.ToolChoice.MODE_REQUIRED),
    ],
)
async def test_tool_choices(
    server: RecordingServer, choice: str, mode: "inference_pb2.ToolChoice.Mode"
) -> None:
    async with AsyncClient(server.address) as client:
        await client.chat(CHAT, tools=[Tool(name="f")], tool_choice=choice)
    assert server.requests[-1].prompt.chat.tool_choice == inference_pb2.ToolChoice(mode=mode)
    assert server.requests[-1].prompt.chat.tools[0].parameters == ""


async def test_choices_are_sorted_out_of_a_mixed_stream(server: RecordingServer) -> None:
    def scores(token_id: int) -> inference_pb2.TokenLogprobs:
        token = inference_pb2.Logprob(token_id=token_id, text=b"\xc3", logprob=-0.5, rank=4)
        return inference_pb2.TokenLogprobs(token=token, top=[token, token])

    first = inference_pb2.TokenLogprobs(token=inference_pb2.Logprob(token_id=8, text=b"h"))
    call = inference_pb2.ToolCall(id="c1", name="f", arguments="{}")
    message = inference_pb2.GenerateResponse
    server.answers = [
        message(
            choice=0,
            text="a",
            token_ids=[1],
            logprobs=[scores(1)],
            prompt_logprobs=[first, scores(9)],
        ),
        message(choice=1, text="x", token_ids=[5, 6], logprobs=[scores(5), scores(6)]),
        message(
            choice=1,
            finish_reason=inference_pb2.FINISH_REASON_TOOL_CALLS,
            tool_calls=[call],
            score=-2.5,
            stop_string="END",
        ),
        message(
            request_id="r",
            choice=0,
            text="b",
            token_ids=[2],
            first_index=1,
            logprobs=[scores(2)],
            finish_reason=inference_pb2.FINISH_REASON_LENGTH,
            usage=LAST.usage,
        ),
    ]

    def use_client() -> None:
        with Client(server.address) as client, client.stream("hi") as stream:
            deltas = list(stream)
            assert [delta.choice for delta in deltas] == [0, 1, 1, 0]
            assert [delta.finish_reason for delta in deltas] == [None, None, "tool_calls", "length"]
            done = stream.completion()
        assert [choice.text for choice in done.choices] == ["ab", "x"]
        assert [choice.token_ids for choice in done.choices] == [(1, 2), (5, 6)]
        assert (done.text, done.token_ids, done.finish_reason, done.request_id) == (
            "ab",
            (1, 2),
            "length",
            "r",
        )
        other = done.choices[1]
        assert other.tool_calls == (ToolCall(id="c1", name="f", arguments="{}"),)
        assert (other.score, other.finish_reason, other.stop_string) == (-2.5, "tool_calls", "END")
        assert other.message == {
            "role": "assistant",
            "content": "x",
            "tool_calls": other.tool_calls,
        }
        assert done.message == {"role": "assistant", "content": "ab"}
        one = Logprob(token_id=1, token_bytes=b"\xc3", logprob=-0.5, rank=4)
        assert done.logprobs[0] == TokenLogprobs(token=one, top=(one, one))
        assert one.text == "\ufffd"
        assert [each.token.logprob for each in done.prompt_logprobs] == [None, -0.5]
        assert done.usage == deltas[-1].usage

    await asyncio.to_thread(use_client)


@pytest.mark.parametrize("missing", ["usage", "finish reason of choice 1"])
async def test_a_stream_without_its_end_is_an_error(server: RecordingServer, missing: str) -> None:
    half = inference_pb2.GenerateResponse(choice=1, text="x")
    server.answers = [half] if missing == "usage" else [half, LAST]
    async with AsyncClient(server.address) as client:
        with pytest.raises(errors.InternalError, match="without a finish reason"):
            await client.generate("hi")


async def test_the_key_goes_with_every_call(server: RecordingServer) -> None:
    async with AsyncClient(server.address, api_key="k-1", compression=True) as client:
        await client.generate("hi")
        assert await client.detokenize([1, 2], model="m") == "detokenized"

    def use_client() -> None:
        with tandem.connect(server.address, api_key="k-1") as client:
            client.chat(CHAT)
            assert client.detokenize([1, 2], model="m") == "detokenized"
            with pytest.raises(errors.InvalidArgument) as caught:
                client.detokenize([-1])
            assert caught.value.field == "token_ids"

    await asyncio.to_thread(use_client)
    assert [each["authorization"] for each in server.metadata] == ["Bearer k-1"] * 4
    assert server.requests[1] == inference_pb2.DetokenizeRequest(model="m", token_ids=[1, 2])


async def test_without_a_key_no_metadata(server: RecordingServer) -> None:
    await sent(server)
    assert "authorization" not in server.metadata[0]
    with pytest.raises(errors.InvalidArgument, match="api_key"):
        Client(server.address, api_key="schlüssel")


def test_the_package_exports_the_clients() -> None:
    assert tandem.errors.Overloaded is errors.Overloaded
    assert {name for name in tandem.__all__ if not hasattr(tandem, name)} == set()
    with pytest.raises(AttributeError, match="nothing"):
        tandem.nothing  # noqa: B018
