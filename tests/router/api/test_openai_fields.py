"""Tests that each field of the openai package and of vLLM is supported or refused with a reason."""

import json
import math
import re
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.proto.parameters import PARAMETERS
from tandem.router.api.dialect import Dialect
from tandem.router.api.openai.bodies import REASONS, ChatBody, CompletionBody
from tandem.router.api.openai.embeddings import parse_embeddings
from tandem.router.api.openai.parsing import MAX_NAME, left_out
from tandem.router.api.openai.parsing import parse as parse_body
from tandem.router.api.openai.requests import (
    OpenAIRequest,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource
from tandem.tests.waits import WAIT

MESSAGES = [{"role": "user", "content": "x"}]


def parse(path: str, **fields: Any) -> OpenAIRequest:
    if path == "chat":
        return parse_chat(json.dumps({"messages": MESSAGES} | fields).encode(), "id")
    return parse_completion(json.dumps({"prompt": "x"} | fields).encode(), "id")


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatBody),
        (completion_create_params.CompletionCreateParamsBase, CompletionBody),
    ],
)
def test_every_parameter_of_the_openai_package_is_a_field_or_refused_with_a_reason(
    params: Any, body: Any
) -> None:
    names = set(params.__annotations__)
    assert {"model", "temperature", "top_p", "seed"} <= names
    assert names - set(body.model_fields) - set(REASONS) == set()


ACCEPTED: list[tuple[str, str, Any]] = [
    ("chat", "verbosity", "medium"),
    ("chat", "functions", []),
    ("chat", "function_call", "auto"),
    ("chat", "function_call", "none"),
    ("chat", "include_reasoning", True),
    ("chat", "prediction", {"type": "content", "content": "x"}),
    ("chat", "modalities", ["text"]),
    ("both", "return_token_ids", False),
    ("both", "prompt_cache_options", {}),
    ("completions", "suffix", ""),
    ("both", "web_search_options", None),
    ("both", "functions", None),
]


@pytest.mark.parametrize(("path", "name", "value"), ACCEPTED)
def test_a_value_that_asks_for_nothing_changes_nothing(path: str, name: str, value: Any) -> None:
    for each in ("chat", "completions") if path == "both" else (path,):
        assert parse(each, **{name: value}).common == parse(each).common


REFUSED: list[tuple[str, str, Any]] = [
    ("chat", "verbosity", "low"),
    ("chat", "reasoning_effort", 3),
    ("chat", "reasoning_effort", "x" * 33),
    ("chat", "functions", [{"name": "f"}]),
    ("chat", "function_call", {"name": "f"}),
    ("chat", "web_search_options", {}),
    ("chat", "audio", {"voice": "x"}),
    ("chat", "modalities", ["audio"]),
    ("chat", "moderation", {}),
    ("chat", "documents", "x"),
    ("chat", "chat_template", "{{ messages }}"),
    ("chat", "include_reasoning", False),
    ("both", "allowed_token_ids", [1]),
    ("completions", "prompt_embeds", "x"),
    ("both", "kv_transfer_params", {}),
    ("both", "request_id", "x"),
    ("both", "cache_salt", "x"),
    ("both", "return_tokens_as_token_ids", True),
    ("both", "vllm_xargs", {}),
    ("both", "mm_processor_kwargs", {}),
]


@pytest.mark.parametrize(("path", "name", "value"), REFUSED)
def test_what_cannot_be_honoured_is_refused_with_what_to_do(
    path: str, name: str, value: Any
) -> None:
    for each in ("chat", "completions") if path == "both" else (path,):
        with pytest.raises(InvalidArgument) as caught:
            parse(each, **{name: value})
        assert caught.value.field.partition("[")[0] == name
        assert str(caught.value) == f"{caught.value.field}: {REASONS[name]}"


def test_documents_and_effort_are_variables_of_the_template_and_its_own_win() -> None:
    documents = [{"title": "a", "text": "b"}]
    (prompt,) = parse("chat", documents=documents, reasoning_effort="low").prompts
    assert json.loads(prompt.chat.template_kwargs) == {
        "documents": documents,
        "reasoning_effort": "low",
    }
    (prompt,) = parse(
        "chat", reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}
    ).prompts
    assert json.loads(prompt.chat.template_kwargs) == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}),
        ({"chat_template_args": {"a": [1]}}, {"a": [1]}),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "a": 1}, "enable_thinking": True},
            {"enable_thinking": True, "a": 1},
        ),
        (
            {"chat_template_args": {"b": 2}, "chat_template_kwargs": {"a": 1}},
            {"a": 1, "b": 2},
        ),
        (
            {"reasoning_effort": "low", "chat_template_args": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_the_fields_by_which_agents_switch_thinking_are_variables_of_the_template(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    (prompt,) = parse("chat", **fields).prompts
    assert json.loads(prompt.chat.template_kwargs) == expected
    body = json.dumps({"messages": MESSAGES} | fields).encode()
    assert parse_tokenize(body)[0].prompt.chat.template_kwargs == prompt.chat.template_kwargs


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            "enable_thinking",
        ),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        (
            {"chat_template_kwargs": {"enable_thinking": 0}, "thinking": {"type": "enabled"}},
            "thinking",
        ),
        ({"chat_template_kwargs": {"a": 1}, "chat_template_args": {"a": 2}}, "chat_template_args"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match="set it once") as caught:
        parse("chat", **fields)
    assert caught.value.field == field


UNKNOWN = {"temprature": 1, "nothing": None, "a\nö": [{"b": 1}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "stream": True},
    "/v1/chat/completions": {"messages": MESSAGES, "stream": True},
    "/v1/responses": {"input": "x", "stream": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9, "stream": True},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_service_may_ignore_unknown_fields_and_names_them(
    generation: GenerationService, source: FakeTokenSource, path: str
) -> None:
    generation.dialect = Dialect(ignores_unknown=True)
    source.answer = [*b"hello", EOS_ID]
    body = BODIES[path]
    server = HttpServer(generation)
    try:
        url = f"http://{await server.start('127.0.0.1:0')}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT) as http:
            for sent in (body, {name: body[name] for name in body if name != "stream"}):
                ignored = await http.post(path, json=sent | UNKNOWN)
                assert ignored.status_code == 200
                assert ignored.headers["tandem-left-out"] == r"temprature, a\n\xf6"
                known = await http.post(path, json=sent)
                assert "tandem-left-out" not in known.headers
            refused = await http.post(path, json=body | {"chat_template": "x"})
            assert refused.status_code == 400  # a field of vLLM, with an alternative
    finally:
        await server.stop(0)


def test_embeddings_may_have_unknown_fields_that_are_ignored() -> None:
    body = b'{"input": "x", "dimension": 3}'
    with pytest.raises(InvalidArgument, match="dimension: is not a field of this request"):
        parse_embeddings(body, "id")
    assert left_out(parse_embeddings(body, "id", ignores_unknown=True).body) == "dimension"


def test_unknown_members_of_parameters_are_never_ignored() -> None:
    body = json.dumps({"prompt": "x", "structured_outputs": {"regexp": "b"}}).encode()
    with pytest.raises(InvalidArgument, match="is not a field of this request") as caught:
        parse_completion(body, "id", ignores_unknown=True)
    assert caught.value.field == "structured_outputs.regexp"


@given(names=st.lists(st.text(), max_size=20, unique=True))
def test_the_names_of_unknown_fields_fit_a_header(names: list[str]) -> None:
    fields: dict[str, Any] = {f" {name}": 1 for name in names} | {"prompt": "x"}
    parsed = parse_body(CompletionBody, json.dumps(fields).encode(), ignores_unknown=True)
    found = left_out(parsed)
    assert re.fullmatch("[ -~]*", found)
    assert found == found.strip()
    assert len(found) <= 16 * (MAX_NAME + 2)


FREE = {"schema", "parameters", "input_schema", "input", "metadata"}
"""Members whose objects have any names."""


def with_unknown_members(value: Any) -> Any:
    """Returns a value in which every object has another member, such as clients add."""
    if isinstance(value, list):
        return [with_unknown_members(each) for each in value]
    if not isinstance(value, dict):
        return value
    more = {"client_member": {"a": [1]}}
    return more | {
        name: inner if name in FREE else with_unknown_members(inner)
        for name, inner in value.items()
    }


NESTED: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": "y",
            "cache_control": {"type": "ephemeral"},
        },
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
}


def test_unknown_members_of_nested_objects_change_nothing() -> None:
    expected = parse("chat", **NESTED)
    found = parse("chat", **{name: with_unknown_members(each) for name, each in NESTED.items()})
    assert (found.common, found.prompts) == (expected.common, expected.prompts)


INTEGERS = [
    (path, name)
    for path, is_chat in (("chat", True), ("completions", False))
    for row in PARAMETERS
    if row.kind in ("int32", "uint32", "uint64")
    for name in row.body_names(chat=is_chat)
]


@pytest.mark.parametrize(("path", "name"), INTEGERS)
def test_an_integer_may_have_a_point_but_no_fraction(path: str, name: str) -> None:
    more = {"logprobs": True} if name == "top_logprobs" else {}
    expected = parse(path, **more, **{name: 2}).common
    found = parse(path, **more, **{name: 2.0}).common
    assert found == expected != parse(path, **more).common
    for value in (2.5, "2", True, math.inf):
        with pytest.raises(InvalidArgument) as caught:
            parse(path, **more, **{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_an_unknown_constraint_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument, match="not a field") as caught:
        parse(path, structured_outputs={"regex": "a", "regexp": "b"})
    assert caught.value.field == "structured_outputs.regexp"


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": OPEN}}}, CLOSED),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": OPEN}},
                "structured_outputs": {"disable_additional_properties": False},
            },
            OPEN,
        ),
        ({"structured_outputs": {"json": OPEN}}, OPEN),
        ({"structured_outputs": {"json": OPEN, "disable_additional_properties": True}}, CLOSED),
        (
            {
                "structured_outputs": {
                    "json": json.dumps(OPEN),
                    "disable_additional_properties": True,
                }
            },
            CLOSED,
        ),
        ({"structured_outputs": {"json": json.dumps(OPEN)}}, OPEN),
        ({"guided_json": OPEN}, OPEN),
    ],
)
def test_a_schema_of_response_format_is_closed_unless_the_request_says_otherwise(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert json.loads(parse("chat", **fields).common.constraint.json_schema) == expected


@pytest.mark.parametrize("schema", [{}, {"schema": None}])
def test_a_schema_is_optional_in_a_response_format(schema: dict[str, None]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "any", "strict": True, **schema}}
    constraint = parse("chat", response_format=form).common.constraint
    assert constraint == inference_pb2.Constraint(json_object=True)
