"""Structured output and tool calls of a real model, through the official `openai` package."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tandem.router.api.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.frontend.prepare import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.fleet import split_fleet
from tandem.tests.router.api.test_openai import ASK, TOOLS
from tandem.tests.schemas import random_schema

NUM_SCHEMAS = 200


@pytest.fixture
async def real_client(tiny_model: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """Of a prefill and a decode worker whose model has random weights."""
    tiny = ServedModel(name="tiny", tokenizer=Tokenizer.load(tiny_model), context_tokens=2_048)
    async with split_fleet(tiny_model, {"prefill": [1], "decode": [1]}) as workers:
        servers = await ApiServers.start(GenerationService([tiny], workers.dispatcher))
        async with openai.AsyncOpenAI(
            base_url=f"http://{servers.http_address}/v1", api_key="x", max_retries=0
        ) as client:
            yield client
        await servers.stop(0)


async def test_output_of_random_weights_fits_every_schema(real_client: openai.AsyncOpenAI) -> None:
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

    await asyncio.gather(*(ask(seed) for seed in range(NUM_SCHEMAS)))


def opened(schema: Any) -> Any:
    """The schema as pydantic would write it."""
    if isinstance(schema, list):
        return [opened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: opened(value) for name, value in schema.items() if name != "additionalProperties"}


async def test_output_fits_schemas_that_are_left_open_and_has_no_key_twice(real_client: openai.AsyncOpenAI) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    for seed in range(NUM_SCHEMAS, NUM_SCHEMAS + 20):
        schema = random_schema(seed)
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": opened(schema)}}
        said = await real_client.chat.completions.create(model="tiny", messages=ASK, seed=seed, response_format=form)
        assert said.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(said.choices[0].message.content or "", object_pairs_hook=unique), schema)


async def test_a_named_tool_is_called_with_arguments_of_its_schema(real_client: openai.AsyncOpenAI) -> None:
    tools: Any = opened(json.loads(json.dumps(TOOLS).replace('"string"', '"string", "maxLength": 9')))
    said = await real_client.chat.completions.create(
        model="tiny", messages=ASK, tools=tools, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    (call,) = [call for call in said.choices[0].message.tool_calls or () if call.type == "function"]
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
