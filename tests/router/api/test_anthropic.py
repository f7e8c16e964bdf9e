"""Tests the HTTP API with the official `anthropic` package."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase

from tandem.proto import errors, limits
from tandem.router.api.anthropic.bodies import MessagesBody
from tandem.router.api.anthropic.requests import parse_messages
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.slo import SloClass
from tandem.tests.router.api.test_openai_fields import with_unknown_members
from tandem.tests.router.api.weather_tool import CALL, HERMES, SCHEMA, last_prompt
from tandem.tests.router.auth.keys import api_key
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer
from tandem.tests.router.frontend.test_tools import accepts
from tandem.tests.waits import WAIT

PATH = "/v1/messages"
ASK: Any = [{"role": "user", "content": "hello?"}]
# The package no longer has arguments for these.
SAMPLED = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
TOOLS: Any = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": SCHEMA,
    }
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{service.http}", api_key="key", max_retries=0
    ) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, **fields: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = await client.messages.create(
        **({"model": "tiny", "messages": ASK, "max_tokens": 100} | fields)
    )
    return message


async def test_a_message(service: Service, client: anthropic.AsyncAnthropic) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    said = await ask(client, system="Be brief.", metadata={"user_id": "x"}, extra_body=SAMPLED)
    assert (said.type, said.role, said.model) == ("message", "assistant", "tiny")
    assert said.id.startswith("msg_")
    assert [(block.type, block.text) for block in said.content if block.type == "text"] == [
        ("text", "hello")
    ]
    assert (said.stop_reason, said.stop_sequence) == ("end_turn", None)
    assert last_prompt(service) == "system: Be brief.\nuser: hello?\nassistant: "
    assert (said.usage.input_tokens, said.usage.output_tokens) == (len(last_prompt(service)), 6)
    assert said.usage.cache_read_input_tokens == 0
    sampling = service.source.requests[-1].submit.sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 3)


async def test_texts_in_blocks_and_the_begin_of_an_answer(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    service.source.answer = [*b" is", EOS_ID]
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "The river"}]
    await ask(client, system=[cached, {"type": "text", "text": "!"}], messages=messages)
    assert last_prompt(service) == "system: Be brief.\n!\nuser: a\nb\nassistant: The river"


@pytest.mark.parametrize("as_text", [False, True])
async def test_claude_codes_billing_line_is_not_part_of_the_prompt(
    service: Service, client: anthropic.AsyncAnthropic, as_text: bool
) -> None:
    """It differs in each request, and would keep the prefix cache from having the prompt."""
    service.source.answer = [*b"so", EOS_ID]
    prompts = []
    for digest in ("36ee5", "0abc1"):
        line = f"x-anthropic-billing-header: cc_version=2.1.1; cch={digest};"
        texts = [{"type": "text", "text": line}, {"type": "text", "text": "You are an agent."}]
        system = f"{line}\nYou are an agent." if as_text else texts
        later = {"role": "system", "content": system}
        await ask(client, system=system, messages=[*ASK, later])
        prompts.append(last_prompt(service))
    text = "system: You are an agent.\n"
    assert prompts == [f"{text}user: hello?\n{text}assistant: "] * 2
    await ask(client, system=line)
    assert last_prompt(service) == "user: hello?\nassistant: "
    await ask(client, messages=[{"role": "user", "content": line}])
    assert last_prompt(service) == f"user: {line}\nassistant: "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, "one two three", "end_turn", None),
        ({"max_tokens": 7}, "one two", "max_tokens", None),
        ({"stop_sequences": ["x", " t"]}, "one", "stop_sequence", " t"),
    ],
)
async def test_stop_reasons(
    service: Service,
    client: anthropic.AsyncAnthropic,
    fields: dict[str, Any],
    text: str,
    reason: str,
    sequence: str | None,
    stream: bool,
) -> None:
    service.source.answer = [*b"one two three", EOS_ID]
    if stream:
        async with client.messages.stream(
            **({"model": "tiny", "messages": ASK, "max_tokens": 100} | fields)
        ) as events:
            said: Any = await events.get_final_message()
    else:
        said = await ask(client, **fields)
    assert [block.text for block in said.content] == [text]
    assert (said.stop_reason, said.stop_sequence) == (reason, sequence)
    assert said.usage.input_tokens == len(last_prompt(service))


async def test_the_events_of_a_stream(service: Service, client: anthropic.AsyncAnthropic) -> None:
    service.source.answer = [*f"I look.\n{CALL}\n{CALL}".encode(), EOS_ID]
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        body = {"model": "tiny", "messages": ASK, "max_tokens": 300, "tools": TOOLS, "stream": True}
        answer = await http.post(PATH, json=body)
    events = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert kinds[:2] == ["message_start", "ping"]
    assert [kind for kind in kinds[2:] if kind != "content_block_delta"] == [
        *(["content_block_start", "content_block_stop"] * 3),
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [
        0,
        1,
        2,
    ]
    assert "".join(event["delta"].get("text", "") for event in deltas) == "I look."
    inputs = [event["delta"]["partial_json"] for event in deltas if event["index"] == 2]
    assert json.loads("".join(inputs)) == {"city": "Köln"}
    assert events[0]["message"]["usage"]["input_tokens"] == len(last_prompt(service))
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_and_their_results(
    service: Service, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    """The model calls; the caller answers with the objects of the client library."""
    service.source.answer = [*f"I look.\n{CALL}\n{CALL}".encode(), EOS_ID]
    fields: Any = {"model": "tiny", "messages": ASK, "max_tokens": 300, "tools": TOOLS}
    if stream:
        async with client.messages.stream(**fields) as events:
            said: Any = await events.get_final_message()
    else:
        said = await client.messages.create(**fields)
    assert [block.type for block in said.content] == ["text", "tool_use", "tool_use"]
    assert [(call.name, call.input) for call in said.content[1:]] == [
        ("weather", {"city": "Köln"})
    ] * 2
    assert said.stop_reason == "tool_use"
    assert last_prompt(service) == "[weather] user: hello?\nassistant: "
    results = [
        {"type": "tool_result", "tool_use_id": said.content[1].id, "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": said.content[2].id,
            "content": [{"type": "text", "text": "sun"}],
        },
        {"type": "text", "text": "So?"},
    ]
    service.source.answer = [*b"It rains.", EOS_ID]
    content = [
        block.model_dump(exclude_none=True, include={"type", "text", "id", "name", "input"})
        for block in said.content
    ]
    messages = [
        *ASK,
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]
    said = await ask(client, messages=messages, tools=TOOLS)
    assert [block.text for block in said.content] == ["It rains."]
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert last_prompt(service).endswith(
        f"assistant: I look.{call}{call}\ntool: rain\ntool: sun\nuser: So?\nassistant: "
    )


async def test_tool_choice(service: Service, client: anthropic.AsyncAnthropic) -> None:
    service.source.answer = [*f"{CALL}\n{CALL}".encode(), EOS_ID]
    choices: list[tuple[dict[str, Any], int, bool]] = [
        ({"type": "auto"}, 2, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1, False),
        ({"type": "none"}, 0, False),
        ({"type": "any"}, 2, True),
        ({"type": "tool", "name": "weather"}, 2, True),
    ]
    for choice, num_calls, bound in choices:
        said = await ask(client, tools=TOOLS, tool_choice=choice, max_tokens=300)
        assert [block.type for block in said.content].count("tool_use") == num_calls
        assert bool(service.source.requests[-1].submit.grammar) is bound


async def test_output_of_a_schema(service: Service, client: anthropic.AsyncAnthropic) -> None:
    service.source.answer = [*b"{}", EOS_ID]
    form = {
        "type": "json_schema",
        "schema": {"type": "object", "properties": {"age": {"type": "integer"}}},
    }
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        await ask(client, extra_body=fields)
        assert '"age"' in service.source.requests[-1].submit.grammar
    with pytest.raises(anthropic.BadRequestError, match=r"output_format: cannot be combined"):
        await ask(client, extra_body={"output_config": {"format": form}, "output_format": form})


def test_every_parameter_of_the_anthropic_package_is_a_field() -> None:
    in_headers = {"user_profile_id", "workspace_id"}
    assert MessageCreateParamsBase.__annotations__.keys() - MessagesBody.model_fields.keys() == (
        in_headers
    )


def translated(**fields: Any) -> Any:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 100} | fields
    request = parse_messages(json.dumps(body).encode(), "id")
    return request.common, request.prompts


BETA: dict[str, Any] = {
    "betas": ["fast-mode-2026-02-01"],
    "billing_policy": {"type": "user_profile"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallback_credit_token": "x",
    "fallbacks": "default",
    "inference_geo": "eu",
    "speed": "fast",
    "mcp_servers": [],
    "container": None,
}


@pytest.mark.parametrize("name", BETA)
def test_a_beta_field_without_effect_on_the_answer_is_ignored(name: str) -> None:
    assert translated(**{name: BETA[name]}) == translated()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("mcp_servers", [{"type": "url", "url": "https://x", "name": "x"}], "in tools"),
        ("container", "container_1", "runs no code"),
        ("compaction", {"type": "auto"}, "ask for a summary"),
        ("thread", {"type": "create"}, "whole conversation"),
    ],
)
def test_a_beta_field_that_changes_the_answer_is_refused(
    name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=remedy) as caught:
        translated(**{name: value})
    assert caught.value.field == name


def test_unknown_members_of_nested_objects_change_nothing() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    fields: dict[str, Any] = {
        "system": [{"type": "text", "text": "s", "cache_control": mark}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "rain"}],
            },
        ],
        "tools": [TOOLS[0] | {"cache_control": mark}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1_024},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    more = {name: with_unknown_members(each) for name, each in fields.items()}
    assert translated(**more) == translated(**fields)


async def test_a_format_does_not_bind_a_call_that_is_demanded(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    service.source.answer = [*CALL.encode(), EOS_ID]
    form = {"type": "json_schema", "schema": {"properties": {"age": {"type": "integer"}}}}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        said = await ask(
            client,
            tools=TOOLS,
            tool_choice=choice,
            extra_body={"output_config": {"format": form}},
        )
        assert [block.type for block in said.content] == ["tool_use"]
        assert '"age"' not in service.source.requests[-1].submit.grammar


async def test_a_format_leaves_room_for_a_call(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    form = {"type": "json_schema", "schema": {"properties": {"age": {"type": "integer"}}}}
    for answer, kind in ((CALL, "tool_use"), ('{"age": 36}', "text")):
        service.source.answer = [*answer.encode(), EOS_ID]
        said = await ask(client, tools=TOOLS, extra_body={"output_config": {"format": form}})
        assert [block.type for block in said.content] == [kind]
        assert accepts(service.source.requests[-1].submit.grammar, answer)


async def test_counting_tokens(service: Service, client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(
        model="tiny", messages=ASK, tools=TOOLS, system="Be brief."
    )
    await ask(client, tools=TOOLS, system="Be brief.")
    assert counted.input_tokens == len(service.source.requests[-1].submit.token_ids)
    with pytest.raises(anthropic.BadRequestError, match="messages: has 1000001 characters"):
        await client.messages.count_tokens(
            model="tiny", messages=[{"role": "user", "content": "x" * 1_000_001}]
        )


async def test_errors(service: Service, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        await ask(client, extra_body={"temperature": 9})
    assert bad.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "temperature: must be from 0 to 2"},
    }
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await ask(client, model="nope")
    service.source.error = errors.Overloaded("full", retry_after=3)
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error") as full:
        await ask(client)
    assert full.value.response.headers["retry-after"] == "3"
    service.source.error = errors.InternalError("broken")
    service.source.error_after = 2
    with pytest.raises(anthropic.APIStatusError, match="broken"):
        async with client.messages.stream(model="tiny", messages=ASK, max_tokens=9) as stream:
            await stream.get_final_message()


async def test_a_prompt_that_does_not_fit_is_known_by_its_words(
    client: anthropic.AsyncAnthropic,
) -> None:
    """Agents look for the words and the numbers, and then shorten the conversation."""
    long: Any = [{"role": "user", "content": "x" * 600}]
    num_prompt = 600 + len("user: \nassistant: ")
    with pytest.raises(anthropic.BadRequestError) as caught:
        await ask(client, messages=long)
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {num_prompt} tokens > 511 maximum; shorten messages",
        },
    }


async def test_a_prompt_of_too_many_characters_has_the_same_words(
    client: anthropic.AsyncAnthropic,
) -> None:
    long: Any = [{"role": "user", "content": "x" * (limits.MAX_PROMPT_CHARACTERS + 1)}]
    words = "prompt is too long: messages: has 1000001 characters; the maximum is 1000000"
    with pytest.raises(anthropic.BadRequestError, match=words):
        await ask(client, messages=long)
    with pytest.raises(anthropic.BadRequestError, match=words):
        await client.messages.count_tokens(model="tiny", messages=long)


async def test_a_key_in_its_own_header(model: ServedModel) -> None:
    """`x-api-key` works like a bearer key; refusals have Anthropic's form."""
    servers = await ApiServers.start(
        GenerationService([model], FakeTokenSource(answer=b"x")),
        authenticator=Authenticator([api_key("ada")]),
    )
    await servers.set_serving(True)
    url = f"http://{servers.http_address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="ada", max_retries=0) as client:
        assert (await ask(client)).stop_reason == "max_tokens"
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="ada", max_retries=0) as client:
        assert (await ask(client)).stop_reason == "max_tokens"
    for name in ("bob", "ada2"):
        async with anthropic.AsyncAnthropic(base_url=url, api_key=name, max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await ask(client)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT) as http:
        for path in (PATH, f"{PATH}/count_tokens", "/v1/chat/completions"):
            assert (await http.post(path, json={}, headers={"x-api-key": "bob"})).status_code == 401
        both = {"x-api-key": "ada", "authorization": "Bearer bob"}
        assert (await http.get("/v1/models", headers={"x-api-key": "ada"})).status_code == 200
        assert (await http.get("/v1/models", headers=both)).status_code == 401
    await servers.stop(0)


async def test_a_service_tier_names_an_slo_class(model: ServedModel) -> None:
    """Anthropic's own names stand for the class of requests that name none."""
    classes = {"default": SloClass(ttft_ms=9_000), "interactive": SloClass(ttft_ms=500)}
    source = FakeTokenSource(answer=b"x")
    servers = await ApiServers.start(GenerationService([replace(model, slo=classes)], source))
    await servers.set_serving(True)
    url = f"http://{servers.http_address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as client:
        for tier, seconds in (
            (None, 9.0),
            ("auto", 9.0),
            ("standard_only", 9.0),
            ("interactive", 0.5),
        ):
            await ask(client, extra_body={"service_tier": tier})
            asked = source.requests[-1]
            assert asked.first_token_due == asked.arrived + seconds, tier
        with pytest.raises(
            anthropic.BadRequestError,
            match="service_tier: must be one of auto, default, interactive",
        ):
            await ask(client, extra_body={"service_tier": "priority"})
    await servers.stop(0)


async def test_the_first_event_counts_cached_tokens_once(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    """In each usage, cached and other input tokens add up to the prompt's length."""
    service.source.answer = [*b"hello", EOS_ID]
    service.source.cached_tokens = 16
    events = [
        event
        async for event in await client.messages.create(
            model="tiny", messages=ASK, max_tokens=9, stream=True
        )
    ]
    usages: Any = [event.message.usage for event in events if event.type == "message_start"]
    usages += [event.usage for event in events if event.type == "message_delta"]
    num_prompt = len(last_prompt(service))
    assert [(each.input_tokens, each.cache_read_input_tokens) for each in usages] == [
        (num_prompt - 16, 16)
    ] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_become_what_the_prompt_leaves(
    service: Service, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    create = client.messages.with_raw_response.create
    made = await create(model="tiny", messages=ASK, max_tokens=512, stream=stream)
    most = 512 - len(last_prompt(service))
    assert made.headers["tandem-max-tokens"] == str(most)
    assert service.source.requests[-1].submit.max_tokens == most
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: 513"):
        await create(model="tiny", messages=ASK, max_tokens=513, stream=stream)


async def test_a_cut_answer_with_calls_ends_by_max_tokens(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    service.source.answer = f"{CALL}\n<tool_".encode()
    said = await ask(client, tools=TOOLS)
    assert ([block.type for block in said.content], said.stop_reason) == (
        ["text", "tool_use"],
        "max_tokens",
    )
    service.source.answer = f"{CALL}\n{CALL}".encode()
    said = await ask(
        client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert ([block.type for block in said.content], said.stop_reason) == (["tool_use"], "tool_use")
    assert said.usage.output_tokens == len(CALL.encode())


async def test_what_libraries_add_to_an_answer_comes_back(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    content = [
        {"type": "text", "text": "So.", "citations": None, "parsed_output": {"a": 1}},
        {
            "type": "tool_use",
            "id": "t",
            "name": "weather",
            "input": {},
            "index": 1,
            "caller": {"type": "direct"},
        },
    ]
    said = {"id": "msg_1", "type": "message", "role": "assistant", "content": content, "usage": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "rain", "is_error": False}
    await ask(client, messages=[*ASK, said, {"role": "user", "content": [result]}], tools=TOOLS)
    assert "assistant: So.<tool_call>" in last_prompt(service)


async def test_a_schema_of_an_answer_is_closed(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    schema = {k: v for k, v in SCHEMA.items() if k != "additionalProperties"}
    form = {"format": {"type": "json_schema", "schema": schema}}
    await ask(client, extra_body={"output_config": form})
    assert '"additionalProperties":false' in service.source.requests[-1].submit.grammar.replace(
        " ", ""
    )
