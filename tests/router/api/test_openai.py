"""Tests completions and chats over HTTP with the official `openai` package."""

import asyncio
import json
from collections.abc import AsyncIterable, Awaitable
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from tandem.proto import errors, limits
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.weather_tool import CALL, HERMES, SCHEMA, last_prompt
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import BOS_ID, EOS_ID, byte_tokenizer
from tandem.tests.router.frontend.test_tools import accepts

TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": SCHEMA,
        },
    }
]


class Person(BaseModel):
    name: str
    age: int


PERSON_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": Person.model_json_schema()},
}
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello?"}]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


async def test_sync_client(service: Service) -> None:
    """Runs the blocking client in a thread: completions, streams, chats, models, errors."""
    service.source.answer = [*b"hello", EOS_ID]

    def use() -> None:
        with openai.OpenAI(
            base_url=f"http://{service.http}/v1", api_key="key", max_retries=0
        ) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            assert client.models.retrieve("tiny").owned_by == "tandem"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("nope")
            whole = client.completions.create(model="tiny", prompt="hi", max_tokens=9)
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("hello", "stop")
            chunks = client.completions.create(model="tiny", prompt="hi", max_tokens=9, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
            said = client.chat.completions.create(model="tiny", messages=ASK)
            assert said.choices[0].message.content == "hello"
            with client.chat.completions.stream(model="tiny", messages=ASK) as stream:
                assert stream.get_final_completion().choices[0].message.content == "hello"
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="tiny", prompt="hi", temperature=9)
            assert caught.value.param == "temperature"

    await asyncio.to_thread(use)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_of_each_prompt(client: openai.AsyncOpenAI, stream: bool) -> None:
    """Choice i of prompt p has index p * n + i; it equals a request with seed + i."""
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 20}
    alone = {
        (prompt, seed): (await client.completions.create(prompt=prompt, seed=seed, **fields))
        .choices[0]
        .text
        for prompt in ("one", "two")
        for seed in (7, 8, 9)
    }
    assert len(set(alone.values())) == 6
    made: Any = await client.completions.create(
        prompt=["one", "two"], n=3, seed=7, stream=stream, **fields
    )
    texts = [""] * 6
    if stream:
        async for chunk in made:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        assert [choice.index for choice in made.choices] == [0, 1, 2, 3, 4, 5]
        texts = [choice.text for choice in made.choices]
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (6, 120)
    assert texts == list(alone.values())


async def test_n_choices_of_a_chat(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answers = [[*b"short", EOS_ID], [*b"longer!", EOS_ID]]
    said = await client.chat.completions.create(model="tiny", messages=ASK, n=2)
    assert [choice.message.content for choice in said.choices] == ["short", "longer!"]
    stream = await client.chat.completions.create(model="tiny", messages=ASK, n=2, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    for index, expected in enumerate(["short", "longer!"]):
        own = [choice for choice in chunks if choice.index == index]
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(choice.delta.content or "" for choice in own) == expected
        assert [choice.finish_reason for choice in own][-2:] == [None, "stop"]


async def test_best_of_and_beam_search(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answers = [b"zz", b"!!", b"mm"]  # the fake finds low bytes likely
    made = await client.completions.create(model="tiny", prompt="hi", n=2, best_of=3, max_tokens=2)
    assert [choice.text for choice in made.choices] == ["!!", "mm"]
    search: dict[str, Any] = {
        "use_beam_search": True,
        "length_penalty": 0.5,
        "top_k": -1,
        "repetition_penalty": 1.0,
    }
    made = await client.completions.create(
        model="tiny", prompt="hi", n=3, max_tokens=2, temperature=0, extra_body=search
    )
    assert len(made.choices) == 3
    beam = service.source.requests[-1].submit.beam_search
    assert beam is not None
    assert (beam.width, beam.length_penalty, beam.early_stopping) == (3, 0.5, False)


async def test_stop_seed_and_lengths(service: Service, client: openai.AsyncOpenAI) -> None:
    first, again, other = [
        (await client.completions.create(model="tiny", prompt="hi", seed=seed, max_tokens=30))
        .choices[0]
        .text
        for seed in (1, 1, 2)
    ]
    assert first == again != other
    service.source.answer = b"one two three"
    for stop, text, reason in (
        (" three", "one two", "stop"),
        ([" t", "x"], "one", "stop"),
        (None, "one two ", "length"),
    ):
        made = await client.completions.create(
            model="tiny", prompt="hi", stop=stop, max_tokens=8 if stop is None else 20
        )
        assert (made.choices[0].text, made.choices[0].finish_reason) == (text, reason)


async def test_logprobs_of_completions(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = "aé!".encode()
    made = await client.completions.create(model="tiny", prompt="hi", logprobs=2, max_tokens=4)
    found = made.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert found.token_logprobs == pytest.approx([-0.098, -0.196, -0.170, -0.034])
    assert found.text_offset == [0, 1, 1, 2]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == pytest.approx({"\x00": -0.001, "\x01": -0.002, "a": -0.098})
    stream = await client.completions.create(
        model="tiny", prompt="hi", logprobs=2, max_tokens=4, stream=True
    )
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert [part.tokens for part in parts if part] == [[token] for token in found.tokens]
    assert [part.text_offset for part in parts if part] == [[0], [1], [1], [2]]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_scores_the_prompt(
    service: Service, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """Evaluation harnesses ask for the log probabilities of a text without generating."""
    service.source.answer = b"!"
    for max_tokens, text in ((0, "hi"), (1, "hi!")):
        made: Any = await client.completions.create(
            model="tiny",
            prompt="hi",
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            stream=stream,
            n=2,
        )
        choices = [chunk.choices[0] async for chunk in made] if stream else made.choices
        assert [choice.text for choice in choices] == [text, text]
        for choice in choices:
            assert choice.logprobs.tokens == list(text)
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1] == pytest.approx(-0.106)
            assert choice.logprobs.top_logprobs[0] is None
            assert choice.logprobs.text_offset == list(range(len(text)))
            assert "prompt_logprobs" not in (choice.model_extra or {})


async def test_logprobs_of_chats(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = "é".encode()
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": ASK,
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 2,
    }
    said = await client.chat.completions.create(**fields)
    found = said.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [(entry.bytes, entry.token) for entry in found.content] == [
        ([0xC3], "\ufffd"),
        ([0xA9], "\ufffd"),
    ]
    assert [entry.logprob for entry in found.content] == pytest.approx([-0.196, -0.170])
    assert [[other.token for other in entry.top_logprobs] for entry in found.content] == [
        ["\x00"],
        ["\x00"],
    ]
    stream = await client.chat.completions.create(stream=True, **fields)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert [entry for part in parts if part for entry in part.content or []] == found.content
    bare = await client.chat.completions.create(model="tiny", messages=ASK, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content or ()] == [[], []]


async def test_prompt_logprobs_in_the_form_of_vllm(client: openai.AsyncOpenAI) -> None:
    made = await client.completions.create(
        model="tiny", prompt="hi", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    first, second = made.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert first is None
    assert second == {
        "105": {"logprob": pytest.approx(-0.106), "rank": 106, "decoded_token": "i"},
        "0": {"logprob": pytest.approx(-0.001), "rank": 1, "decoded_token": "\x00"},
    }


async def test_tool_calls_and_their_answers(service: Service, client: openai.AsyncOpenAI) -> None:
    """The model calls; the caller answers with the objects of the client library."""
    service.source.answer = [*f"I look.\n{CALL}\n{CALL}".encode(), EOS_ID]
    said = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    choice = said.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    calls = [call for call in choice.message.tool_calls if call.type == "function"]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Köln"})
    ] * 2
    assert (
        bytes(service.source.requests[0].submit.token_ids) == b"[weather] user: hello?\nassistant: "
    )
    one = await client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, parallel_tool_calls=False
    )
    assert len(one.choices[0].message.tool_calls or ()) == 1
    answer: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": calls[0].id,
        "content": "rain",
    }
    messages: Any = [*ASK, choice.message.model_dump(), answer]
    service.source.answer = [*b"It rains.", EOS_ID]
    said = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert (said.choices[0].finish_reason, said.choices[0].message.content) == ("stop", "It rains.")
    seen = bytes(service.source.requests[-1].submit.token_ids).decode()
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>' in seen
    assert seen.endswith("tool: rain\nassistant: ")


async def test_streamed_tool_calls(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*f"I look.\n{CALL}\n{CALL}".encode(), EOS_ID]
    async with client.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert (final.finish_reason, final.message.content) == ("tool_calls", "I look.")
    assert final.message.tool_calls is not None
    assert [call.function.name for call in final.message.tool_calls] == ["weather", "weather"]
    assert len({call.id for call in final.message.tool_calls}) == 2


@pytest.mark.parametrize("tokens_per_delta", [1, 200])
@pytest.mark.parametrize("is_single", [False, True])
async def test_the_package_reports_the_last_streamed_call_as_done(
    service: Service, client: openai.AsyncOpenAI, tokens_per_delta: int, is_single: bool
) -> None:
    """It does so at a finish reason that comes in a chunk after the call."""
    service.source.answer = [*CALL.encode(), EOS_ID]
    service.source.tokens_per_delta = tokens_per_delta
    async with client.chat.completions.stream(
        model="tiny", messages=ASK, tools=TOOLS, parallel_tool_calls=not is_single
    ) as stream:
        events: list[Any] = [event async for event in stream]
    done = [each for each in events if each.type == "tool_calls.function.arguments.done"]
    assert [each.name for each in done] == ["weather"]
    last = [each.chunk.choices[0] for each in events if each.type == "chunk"][-1]
    assert (last.finish_reason, last.delta.content, last.delta.tool_calls) == (
        "tool_calls",
        None,
        None,
    )


async def test_tool_choice(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*CALL.encode(), EOS_ID]
    choices: list[tuple[Any, bool, bool]] = [
        ("auto", True, False),
        ("none", False, False),
        ("required", True, True),
        ({"type": "function", "function": {"name": "weather"}}, True, True),
    ]
    for choice, calls, bound in choices:
        said = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice=choice
        )
        assert bool(said.choices[0].message.tool_calls) is calls
        assert bool(service.source.requests[-1].submit.grammar) is bound


async def test_allowed_tools_are_the_only_ones_of_the_prompt(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    other: Any = {"type": "function", "function": {"name": "now"}}
    bad: Any = {"type": "function", "function": {"name": "x y", "parameters": {}}}
    fields: Any = {"model": "tiny", "messages": ASK, "tools": [bad, other, *TOOLS]}
    service.source.answer = [*CALL.encode(), EOS_ID]

    def choice(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for names, listed in (
        (("weather",), "[weather] "),
        (("weather", "now", "weather"), "[weather] [now] "),
        ((), ""),
    ):
        await client.chat.completions.create(**fields, tool_choice=choice("auto", *names))
        assert last_prompt(service).startswith(f"{listed}user: hello?")
        assert not service.source.requests[-1].submit.grammar
    await client.chat.completions.create(**fields, tool_choice=choice("required", "weather"))
    assert accepts(service.source.requests[-1].submit.grammar, CALL)
    for refused, field, said in (
        (choice("auto", "now", "f"), "tool_choice.allowed_tools.tools[1].function.name", "one of"),
        (choice("auto", "now", "x y"), "tools[0].function.name", "letters"),
        (choice("none"), "tool_choice.allowed_tools.mode", "required"),
        (choice("required"), "tool_choice", "no tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            await client.chat.completions.create(**fields, tool_choice=refused)
        assert caught.value.param == field


async def test_a_format_does_not_bind_a_call_that_is_demanded(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = [*CALL.encode(), EOS_ID]
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
    for choice in choices:
        said = await client.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=TOOLS,
            tool_choice=choice,
            response_format=PERSON_FORMAT,
        )
        assert said.choices[0].finish_reason == "tool_calls"
        assert '"age"' not in service.source.requests[-1].submit.grammar
    with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.regex: not allowed"):
        await client.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=TOOLS,
            tool_choice="required",
            extra_body={"structured_outputs": {"regex": "a"}},
        )


async def test_a_format_leaves_room_for_a_call(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """Without a tool_choice the answer is a call or in the format."""
    for answer, reason in ((CALL, "tool_calls"), ('{"name": "Ada", "age": 36}', "stop")):
        service.source.answer = [*answer.encode(), EOS_ID]
        said = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, response_format=PERSON_FORMAT
        )
        (choice,) = said.choices
        assert choice.finish_reason == reason
        assert choice.message.content == (answer if reason == "stop" else None)
        grammar = service.source.requests[-1].submit.grammar
        assert accepts(grammar, answer)
        assert not accepts(grammar, "Hm.")


async def test_parse(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*b'{"name": "Ada", "age": 36}', EOS_ID]
    said = await client.chat.completions.parse(model="tiny", messages=ASK, response_format=Person)
    assert said.choices[0].message.parsed == Person(name="Ada", age=36)
    assert '"Ada"' not in service.source.requests[0].submit.grammar
    assert '"age"' in service.source.requests[0].submit.grammar


FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "integer"}},
        }
    },
    {"structured_outputs": {"json": {"type": "integer"}}},
    {"structured_outputs": {"regex": "[0-9]+"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"guided_json": '{"type": "integer"}'},
    {"guided_regex": "[0-9]+"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": 'start: "a" | "b"'},
]


@pytest.mark.parametrize("fields", FORMATS)
async def test_every_way_to_bind_the_output(
    service: Service, client: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    await client.completions.create(model="tiny", prompt="hi", extra_body=fields)
    await client.chat.completions.create(model="tiny", messages=ASK, extra_body=fields)
    first, second = service.source.requests
    assert first.submit.grammar == second.submit.grammar != ""


async def test_continuing_the_last_message_and_template_variables(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    messages: list[ChatCompletionMessageParam] = [*ASK, {"role": "assistant", "content": "Well, "}]
    await client.chat.completions.create(
        model="tiny",
        messages=messages,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert bytes(service.source.requests[0].submit.token_ids) == b"user: hello?\nassistant: Well, "
    await client.chat.completions.create(
        model="tiny", messages=ASK, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )


async def test_errors(service: Service, client: openai.AsyncOpenAI) -> None:
    async def ask(**fields: Any) -> Any:
        return await client.chat.completions.create(**{"model": "tiny", "messages": ASK} | fields)

    with pytest.raises(openai.BadRequestError) as caught:
        await ask(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        )
    assert (caught.value.param, "'image_url' are not supported" in str(caught.value)) == (
        "messages[0].content",
        True,
    )
    with pytest.raises(openai.NotFoundError):
        await ask(model="nope")
    kinds: list[tuple[errors.TandemError, type[openai.APIStatusError]]] = [
        (errors.Overloaded("the queue is full", 2.5), openai.RateLimitError),
        (errors.Unavailable("no worker"), openai.InternalServerError),
        (errors.DeadlineExceeded("too late"), openai.InternalServerError),
    ]
    for error, kind in kinds:
        service.source.error = error
        with pytest.raises(kind, match=error.message) as failed:
            await ask()
        assert failed.value.status_code == error.http_status
    service.source.error = None
    service.source.stall_after = 0
    with pytest.raises(openai.InternalServerError) as late:
        await ask(extra_headers={"x-request-timeout": "0.05"})
    assert late.value.status_code == 504


async def test_the_openai_client_retries(service: Service) -> None:
    service.source.error = errors.Overloaded("the queue is full", 0.01)
    async with openai.AsyncOpenAI(
        base_url=f"http://{service.http}/v1", api_key="key", max_retries=1
    ) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="hi")
        assert len(service.source.requests) == 2


async def test_usage_in_every_chunk(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = b"abc"
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model="tiny", prompt="hi", max_tokens=3, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    usages = [
        (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for chunk in chunks
        if chunk.usage
    ]
    assert usages == [(2, 1), (2, 2), (2, 3), (2, 3)]
    assert chunks[-1].choices == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_stopped_a_choice_is_told(
    service: Service, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """As in vLLM: the stop string, also a special token, or the id of the stop token."""
    service.source.answer = [*b"abcde", EOS_ID]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"stop": ["x", "d"]}, "d"),
        ({"stop": ["<|end|>"], "extra_body": {"ignore_eos": True}}, "<|end|>"),
        ({"extra_body": {"stop_token_ids": [ord("c")]}}, ord("c")),
        ({"extra_body": {"stop_regex": "[c-e]{2}"}}, "cd"),
        ({"extra_body": {"repetition_stop_ngram": 1, "repetition_stop_count": 3}}, None),
        ({}, None),
        ({"max_tokens": 2}, None),
    ]
    for fields, expected in cases:
        for create, asked in (
            (client.chat.completions.create, {"messages": ASK}),
            (client.completions.create, {"prompt": "hi"}),
        ):
            made: Any = await create(model="tiny", stream=stream, **asked, **fields)
            chunks = [chunk async for chunk in made] if stream else [made]
            choices = [choice for chunk in chunks for choice in chunk.choices]
            assert choices[-1].stop_reason == expected
            assert choices[-1].finish_reason == ("length" if "max_tokens" in fields else "stop")
            assert not any("stop_reason" in (each.model_extra or {}) for each in choices[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_single_call_ends_the_answer(
    service: Service, client: openai.AsyncOpenAI, stream: bool
) -> None:
    service.source.answer = f"{CALL}\n{CALL}".encode()
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": ASK,
        "tools": TOOLS,
        "parallel_tool_calls": False,
    }
    if stream:
        chunks = await client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        found = [chunk async for chunk in chunks]
        reasons = [choice.finish_reason for chunk in found for choice in chunk.choices]
        usage = found[-1].usage
    else:
        whole = await client.chat.completions.create(**fields)
        reasons = [whole.choices[0].finish_reason]
        usage = whole.usage
        assert len(whole.choices[0].message.tool_calls or ()) == 1
    assert reasons[-1] == "tool_calls"
    assert usage is not None
    assert usage.completion_tokens == len(CALL.encode())


async def test_a_cut_answer_with_calls_ends_by_length(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    service.source.answer = f"{CALL}\n<tool_".encode()
    said = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    assert len(said.choices[0].message.tool_calls or ()) == 1
    assert said.choices[0].finish_reason == "length"


async def test_messages_come_back_as_clients_keep_them(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """Services and libraries add fields: the `index` of streamed calls, parsed objects."""
    service.source.answer = [*b"hello", EOS_ID]
    function = {"name": "weather", "arguments": '{"city": "x"}', "parsed_arguments": {"city": "x"}}
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": function,
        "provider": {"a": 1},
    }
    said: Any = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "audio": None,
        "function_call": None,
        "refusal": None,
        "annotations": [{"type": "url_citation"}],
        "parsed": {"a": 1},
        "reasoning": "hm",
        "reasoning_details": [{"text": "hm"}],
    }
    answer: Any = {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "rain"}],
    }
    await client.chat.completions.create(model="tiny", messages=[*ASK, said, answer], tools=TOOLS)
    prompt = bytes(service.source.requests[-1].submit.token_ids).decode()
    assert prompt.endswith(
        'assistant: <tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>\ntool: '
        "rain\nassistant: "
    )
    refused: Any = {"role": "assistant", "content": None, "refusal": "I cannot."}
    await client.chat.completions.create(model="tiny", messages=[*ASK, refused])
    assert b"assistant: I cannot." in bytes(service.source.requests[-1].submit.token_ids)
    for more, field in (
        (
            {"role": "assistant", "content": "x", "function_call": {"name": "f"}},
            "messages[0].function_call",
        ),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
    ):
        message: Any = more
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=[message])
        assert caught.value.param == field


async def test_a_developer_is_the_system(service: Service, client: openai.AsyncOpenAI) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    developer: Any = {"role": "developer", "content": "Be brief."}
    await client.chat.completions.create(model="tiny", messages=[developer, *ASK])
    assert (
        bytes(service.source.requests[-1].submit.token_ids)
        == b"system: Be brief.\nuser: hello?\nassistant: "
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_of_a_chat_become_what_the_prompt_leaves(
    service: Service, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """A header has the reduced number. A completion is refused; the error names the maximum."""
    service.source.answer = [*b"hello", EOS_ID]
    create = client.chat.completions.with_raw_response.create
    most = 512 - len("user: hello?\nassistant: ")
    for asked, header in ((512, str(most)), (most + 1, str(most)), (most, None), (9, None)):
        made = await create(model="tiny", messages=ASK, max_tokens=asked, stream=stream)
        assert made.headers.get("tandem-max-tokens") == header
        assert service.source.requests[-1].submit.max_tokens == min(asked, most)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="tiny", messages=ASK, max_tokens=513, stream=stream)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="ask for at most 510") as caught:
        await client.completions.create(model="tiny", prompt="hi", max_tokens=511, stream=stream)
    assert caught.value.code == "context_length_exceeded"


async def read(answer: Awaitable[AsyncIterable[object]]) -> None:
    """Reads a stream to its end."""
    async for _ in await answer:
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_known_by_its_code(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    """Libraries look for the code or for the first words, and then shorten the conversation."""
    ask: Any = [{"role": "user", "content": "x" * 600}]
    num_prompt = 600 + len("user: \nassistant: ")
    creators: list[tuple[str, int, Any, dict[str, Any]]] = [
        ("prompt", 600, client.completions.create, {"prompt": "x" * 600, "max_tokens": 1}),
        ("messages", num_prompt, client.chat.completions.create, {"messages": ask}),
        ("input", num_prompt, client.responses.create, {"input": "x" * 600}),
    ]
    for param, count, create, fields in creators:
        is_event = stream and param == "input"
        with pytest.raises(openai.APIError) as caught:
            await read(create(model="tiny", stream=stream, **fields))
        assert isinstance(caught.value, openai.BadRequestError) == (not is_event)
        assert caught.value.body == {
            "message": "The input exceeds the context window. "
            * is_event
            + "This model's maximum context length is 512 tokens. However, the request "
            f"needs {count} tokens for {param} and 1 to generate; shorten the prompt",
            "type": "invalid_request_error",
            "param": param,
            "code": "context_length_exceeded",
        }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
async def test_a_prompt_of_too_many_characters_is_known_by_the_same_code(
    http: httpx.AsyncClient, path: str
) -> None:
    long = "x" * (limits.MAX_PROMPT_CHARACTERS + 1)
    fields: dict[str, tuple[str, object]] = {
        "/v1/completions": ("prompt", long),
        "/v1/chat/completions": ("messages", [{"role": "user", "content": long}]),
        "/v1/embeddings": ("input", long),
    }
    name, value = fields[path]
    answer = await http.post(path, json={"model": "tiny", name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    assert error["message"] == f"{name}: has 1000001 characters; the maximum is 1000000"


async def test_special_tokens_of_a_prompt_are_echoed(client: openai.AsyncOpenAI) -> None:
    """The prompt is sent as text and as ids; text_offset is the position of each token."""
    text = "a<|end|>b"
    ids = [ord("a"), EOS_ID, ord("b")]
    texts = []
    for prompt in (text, ids):
        made: Any = await client.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=0, max_tokens=1
        )
        (choice,) = made.choices
        texts.append(choice.text[: len(text)])
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text[offset : offset + len(token)] == token
    assert texts == [text, text]


def bytes_after_begin() -> Tokenizer:
    """Returns a tokenizer that puts a special token before a text."""
    tokenizer = byte_tokenizer()
    tokenizer._backend.post_processor = processors.TemplateProcessing(
        "<|begin|> $A", None, [("<|begin|>", BOS_ID)]
    )
    return tokenizer


def words_after_begin() -> Tokenizer:
    """Returns a tokenizer as by SentencePiece, whose first word begins with a space."""
    pieces = [("<unk>", -9.0), *((piece, -5.0) for piece in ("\u2581", "a", "b", "\u2581a"))]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 5)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "offsets"),
    [
        (bytes_after_begin(), "a b", [0, 0, 1, 2, 3]),
        (bytes_after_begin(), "<|begin|>b", [0, 0, 9, 10]),
        (bytes_after_begin(), [BOS_ID, BOS_ID, 97], [0, 0, 9, 10]),
        (bytes_after_begin(), [97, 98], [0, 1, 2]),
        (bytes_after_begin(), "", [0, 0]),
        (words_after_begin(), "ab a", [0, 0, 1, 2, 4]),
        (words_after_begin(), "a", [0, 0, 1]),
        (words_after_begin(), "  a", [0, 0, 1, 3]),
        (words_after_begin(), [4, 2, 4], [0, 1, 2, 4]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_if_the_echo_lacks_what_the_tokenizer_adds(
    service: Service,
    client: openai.AsyncOpenAI,
    prompt: str | list[int],
    offsets: list[int],
    stream: bool,
) -> None:
    """It adds a special token or, like SentencePiece, a space before the text."""
    service.source.answer = [2]
    made: Any = await client.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=0, max_tokens=1, n=2, stream=stream
    )
    choices = [chunk.choices[0] async for chunk in made] if stream else made.choices
    assert [choice.logprobs.text_offset for choice in choices] == [offsets, offsets]
    for choice in choices:
        tokens = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        for token, offset in list(tokens)[2:]:
            assert choice.text[offset : offset + len(token)] == token
