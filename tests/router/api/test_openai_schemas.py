"""Tests structured output and tool calls of real models with `openai` and `anthropic`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests import demo_model
from tandem.tests.fleet import split_fleet
from tandem.tests.router.api.test_openai import ASK, TOOLS
from tandem.tests.schemas import random_schema


@asynccontextmanager
async def served(folder: Path, **config: Any) -> AsyncIterator[str]:
    """Yields the URL of a service with a prefill and a decode worker."""
    model = ServedModel(name="tiny", tokenizer=Tokenizer.load(folder), context_tokens=2_048)
    async with split_fleet(folder, {"prefill": [1], "decode": [1]}, **config) as workers:
        servers = await ApiServers.start(GenerationService([model], workers.dispatcher))
        yield f"http://{servers.http_address}"
        await servers.stop(0)


@pytest.fixture
async def url(tiny_model: Path) -> AsyncIterator[str]:
    """Returns the URL of a service whose model has random weights."""
    async with served(tiny_model) as url:
        yield url


@pytest.fixture
async def real_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("num_schemas", [80, pytest.param(200, marks=pytest.mark.soak)])
async def test_output_of_random_weights_fits_every_schema(
    real_client: openai.AsyncOpenAI, num_schemas: int
) -> None:
    free = asyncio.Semaphore(8)

    async def ask(seed: int) -> None:
        schema = random_schema(seed)
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        async with free:
            said = await real_client.chat.completions.create(
                model="tiny", messages=ASK, seed=seed, response_format=form
            )
        assert said.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(said.choices[0].message.content or ""), schema)

    await asyncio.gather(*(ask(seed) for seed in range(num_schemas)))


def opened(schema: Any) -> Any:
    """Returns the schema as pydantic writes it."""
    if isinstance(schema, list):
        return [opened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: opened(value) for name, value in schema.items() if name != "additionalProperties"}


async def test_output_fits_schemas_that_are_left_open_and_has_no_key_twice(
    real_client: openai.AsyncOpenAI,
) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    for seed in range(200, 220):
        schema = random_schema(seed)
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": opened(schema)}}
        said = await real_client.chat.completions.create(
            model="tiny", messages=ASK, seed=seed, response_format=form
        )
        assert said.choices[0].finish_reason == "stop"
        jsonschema.validate(
            json.loads(said.choices[0].message.content or "", object_pairs_hook=unique), schema
        )


async def test_a_named_tool_is_called_with_arguments_of_its_schema(
    real_client: openai.AsyncOpenAI,
) -> None:
    tools: Any = opened(
        json.loads(json.dumps(TOOLS).replace('"string"', '"string", "maxLength": 9'))
    )
    said = await real_client.chat.completions.create(
        model="tiny",
        messages=ASK,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    (call,) = [call for call in said.choices[0].message.tool_calls or () if call.type == "function"]
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])


async def test_agents_call_tools_of_random_weights(url: str) -> None:
    """A random model must call; the clients of both other APIs parse its calls, streamed or not."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}},
        "required": ["city"],
    }
    schema["additionalProperties"] = False
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
        fields: Any = {
            "model": "tiny",
            "messages": ASK,
            "max_tokens": 200,
            "extra_body": {"temperature": 0},
        }
        fields |= {"tools": [{"name": "weather", "input_schema": schema}]}
        fields |= {"tool_choice": {"type": "tool", "name": "weather"}}
        said = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        found: list[Any] = [*said.content, *streamed.content]
        call, again = found
        assert said.stop_reason == "tool_use"
        assert (call.type, again.type) == ("tool_use", "tool_use")
        jsonschema.validate(call.input, schema)
        assert again.input == call.input
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as other:
        fields = {"model": "tiny", "input": "hello?", "temperature": 0, "tool_choice": "required"}
        fields |= {
            "tools": [{"type": "function", "name": "weather", "parameters": schema, "strict": True}]
        }
        made = await other.responses.create(max_output_tokens=300, **fields)
        async with other.responses.stream(max_output_tokens=300, **fields) as events:
            final = await events.get_final_response()
        assert [item.arguments for item in made.output if item.type == "function_call"][:1] == [
            item.arguments for item in final.output if item.type == "function_call"
        ][:1]
        assert made.output_text == final.output_text == ""


async def test_agents_and_the_demo_model() -> None:
    question = "What is the capital of France?"
    schema = opened(TOOLS[0]["function"]["parameters"])
    async with served(demo_model.folder(), kv_cache_bytes=2**26) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
            fields: Any = {"model": "tiny", "max_tokens": 16, "extra_body": {"temperature": 0}}
            fields["messages"] = [{"role": "user", "content": question}]
            said = await client.messages.create(**fields)
            async with client.messages.stream(**fields) as stream:
                streamed: list[Any] = (await stream.get_final_message()).content
            whole: list[Any] = said.content
            assert [block.text for block in streamed] == [block.text for block in whole]
            assert "Paris" in str(said.content)
            assert (await client.messages.create(**fields)).usage.cache_read_input_tokens
            fields |= {"max_tokens": 100, "tools": [{"name": "weather", "input_schema": schema}]}
            said = await client.messages.create(
                **fields, tool_choice={"type": "tool", "name": "weather"}
            )
            (call,) = [block for block in said.content if block.type == "tool_use"]
            jsonschema.validate(call.input, schema)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as other:
            asked: Any = {
                "model": "tiny",
                "input": question,
                "max_output_tokens": 16,
                "temperature": 0,
            }
            made = await other.responses.create(**asked)
            assert "Paris" in made.output_text
            async with other.responses.stream(**asked) as events:
                assert (await events.get_final_response()).output_text == made.output_text
            asked |= {"max_output_tokens": 100, "tool_choice": "required"}
            asked["tools"] = [
                {"type": "function", "name": "weather", "parameters": schema, "strict": False}
            ]
            made = await other.responses.create(**asked)
            calls = [item for item in made.output if item.type == "function_call"]
            assert calls
            for each in calls:
                jsonschema.validate(json.loads(each.arguments), schema)
