"""Tests that large bodies are refused before any work, or leave the event loop free."""

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.responses import JSONResponse

from tandem.proto import errors, inference_pb2, limits
from tandem.proto.errors import InvalidArgument
from tandem.proto.parameters import ROWS
from tandem.router.api.openai import answers
from tandem.router.api.openai.answers import MAX_PROMPT_LOGPROBS
from tandem.router.api.openai.bodies import (
    DetectWatermarkBody,
    DetokenizeBody,
    OpenModel,
    TokenizeBody,
)
from tandem.router.api.openai.logprobs import prompt_logprobs
from tandem.router.api.openai.parsing import parse
from tandem.router.api.openai.requests import (
    OpenAIRequest,
    ParsedRequest,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from tandem.router.api.server import http_operations
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.api.http_bodies import CHAT, TEXT, body, events
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT

MESSAGE = {"role": "user", "content": ""}
CALL = {"id": "", "function": {"name": "f", "arguments": ""}}
TOOL = {"type": "function", "function": {"name": "f"}}
TEXTS = limits.MAX_CONSTRAINT_CHOICES
CHATS = limits.MAX_CHAT_MESSAGES

# The field, what a body of text or of a chat has besides, and the most that is taken.
TOO_MANY: list[tuple[str, dict[str, Any], int]] = [
    (
        "logit_bias",
        {"prompt": ["x"] * 128, "logit_bias": {str(i): 0 for i in range(30_000)}},
        ROWS["sampling.logit_bias"].max_items,
    ),
    ("stop", {"stop": ["a"] * 60_000}, ROWS["stopping.stop"].max_items),
    ("stop_token_ids", {"stop_token_ids": [1] * 1_000_000}, limits.MAX_STOP_TOKEN_IDS),
    ("bad_words", {"bad_words": ["a"] * 60_000}, limits.MAX_BAD_WORDS),
    ("guided_choice", {"guided_choice": ["a"] * 60_000}, TEXTS),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"] * 60_000}}, TEXTS),
    ("prompt", {"prompt": ["a"] * 60_000}, limits.MAX_PROMPTS),
    ("prompt", {"prompt": [[1]] * 60_000}, limits.MAX_PROMPTS),
    ("messages", {"messages": [MESSAGE] * 9_000}, CHATS),
    (
        "messages[0].content",
        {"messages": [MESSAGE | {"content": [{"type": "text", "text": ""}] * 9_000}]},
        CHATS,
    ),
    (
        "messages[0].tool_calls",
        {"messages": [MESSAGE | {"tool_calls": [CALL] * 4_500}]},
        limits.MAX_TOOL_CALLS,
    ),
    ("tools", {"messages": [MESSAGE], "tools": [TOOL] * 6_000}, limits.MAX_TOOLS),
]


@pytest.mark.parametrize(
    ("field", "fields", "most"), TOO_MANY, ids=lambda value: value if isinstance(value, str) else ""
)
def test_lists_that_are_too_long_are_refused_at_parsing(
    field: str, fields: dict[str, Any], most: int
) -> None:
    translate: Callable[[bytes, str], OpenAIRequest] = (
        parse_chat if "messages" in fields else parse_completion
    )
    with pytest.raises(InvalidArgument, match=rf"(at most|1 to|maximum is) {most}\b") as caught:
        translate(
            json.dumps(
                {"prompt": "x"} | fields if translate is parse_completion else fields
            ).encode(),
            "id",
        )
    assert caught.value.field == field


def test_other_bodies_are_bounded() -> None:
    with pytest.raises(InvalidArgument, match=f"at most {CHATS}"):
        parse_tokenize(json.dumps({"messages": [MESSAGE] * 9_000}).encode())
    with pytest.raises(InvalidArgument, match="at most 1048576"):
        parse(DetokenizeBody, json.dumps({"tokens": [1] * (limits.MAX_TOKENS + 1)}).encode())


def schemas(found: object, kind: str) -> Iterator[dict[str, Any]]:
    """Yields the schemas of this kind in a core schema of pydantic."""
    if isinstance(found, dict):
        if found.get("type") == kind:
            yield found
        found = [each for name, each in found.items() if name != "serialization"]
    if isinstance(found, list | tuple):
        for each in found:
            yield from schemas(each, kind)


def bodies(base: type[OpenModel]) -> Iterator[type[OpenModel]]:
    """Yields all classes that derive from `base`."""
    for each in base.__subclasses__():
        yield each
        yield from bodies(each)


def test_the_first_wrong_element_of_a_list_ends_parsing() -> None:
    """Otherwise pydantic makes an error of each element, of which there may be a million."""
    found = list(bodies(OpenModel))
    assert {each.__name__ for each in found} >= {
        "ChatBody",
        "MessagesBody",
        "ResponsesBody",
        "BatchBody",
        "RerankBody",
    }
    for each in found:
        for schema in schemas(each.__pydantic_core_schema__, "list"):
            takes_any = schema.get("items_schema", {"type": "any"})["type"] == "any"
            is_short = schema.get("max_length", math.inf) <= 64
            assert takes_any or is_short or schema.get("fail_fast"), (each.__name__, schema)


def test_older_versions_of_pydantic_can_import_the_bodies() -> None:
    """Before 2.14, pydantic raises an error for a dict with FailFast."""
    for each in bodies(OpenModel):
        for schema in schemas(each.__pydantic_core_schema__, "dict"):
            assert "fail_fast" not in schema, (each.__name__, schema)


def test_a_thousand_wrong_elements_are_one_error() -> None:
    cases: list[tuple[type[OpenModel], dict[str, Any], int]] = [
        (TokenizeBody, {"documents": [1] * 1_000}, 1),
        (DetectWatermarkBody, {"prompt": [-1] * 1_000}, 2),  # no text, and a wrong token id
    ]
    for kind, said, num_errors in cases:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(json.dumps(said))
        assert caught.value.error_count() == num_errors


def test_unknown_fields_make_no_objects() -> None:
    """Otherwise a million empty lists would be made in one call."""
    parsed = parse(DetokenizeBody, b'{"tokens": [1], "more": null}')
    assert parsed.model_extra == {"more": None}
    extra = DetokenizeBody.model_validate_json(b'{"tokens": [1], "more": [[], []]}').model_extra
    assert extra == {"more": True}


async def test_a_request_that_is_refused_is_made_once(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of 128 prompts would have a copy of the wrong 2 MB."""
    made = []
    requests = ParsedRequest.requests

    def counted(body: OpenAIRequest) -> Any:
        for request in requests(body):
            made.append(request)
            yield request

    monkeypatch.setattr(ParsedRequest, "requests", counted)
    server = HttpServer(GenerationService([model], FakeTokenSource()))
    address = await server.start("127.0.0.1:0")
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT) as http:
            for wrong in ({"stop": "x" * 2_000_000}, {"guided_regex": "x" * 2_000_000}):
                answer = await http.post(TEXT, json=body(TEXT, prompt=["x"] * 128, **wrong))
                assert answer.status_code == 400
                assert answer.json()["error"]["param"].startswith(next(iter(wrong)))
    finally:
        await server.stop(0)
    assert len(made) == 2


@pytest.fixture
def model(tokenizer: Any) -> ServedModel:
    return ServedModel(name="tiny", tokenizer=tokenizer, context_tokens=20_000)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_probabilities_of_prompts_are_bounded(
    service: Service, asked: dict[str, Any], stream: bool
) -> None:
    fields = asked | {"prompt": ["x" * 4_000] * 2, "max_tokens": 1, "stream": stream}
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = await http.post(TEXT, json=body(TEXT, n=4, **fields))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (
            400,
            next(name for name in asked if "logprobs" in name),
        )
        assert "672000 log probabilities" in error["message"]
        assert f"the maximum of one response is {MAX_PROMPT_LOGPROBS}" in error["message"]
        assert service.source.requests == []
        assert (await http.post(TEXT, json=body(TEXT, n=3, **fields))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_report_is_written_once_and_off_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    written: list[threading.Thread] = []

    def noted(tokens: Sequence[inference_pb2.TokenLogprobs]) -> str:
        written.append(threading.current_thread())
        return prompt_logprobs(tokens)

    monkeypatch.setattr("tandem.router.api.openai.answers.prompt_logprobs", noted)
    fields: dict[str, Any] = {
        "prompt": ["long " * 20, "longer " * 20],
        "n": 3,
        "max_tokens": 2,
        "stream": stream,
    }
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = await http.post(TEXT, json=body(TEXT, prompt_logprobs=1, **fields))
    assert len(written) == 2
    assert threading.main_thread() not in written
    found = (
        answer.json()["choices"]
        if not stream
        else [c for e in events(answer)[:-1] for c in e["choices"]]
    )
    lengths = {(c["index"], len(c["prompt_logprobs"])) for c in found if "prompt_logprobs" in c}
    # A stream tells it once, with the first choice; otherwise each choice has it, as in vLLM.
    expected = {(0, 100), (3, 140)}
    assert lengths == (expected if stream else expected | {(1, 100), (2, 100), (4, 140), (5, 140)})


@pytest.mark.parametrize(
    ("path", "said", "function"),
    [
        (
            CHAT,
            {
                "messages": [{"role": "assistant", "tool_calls": [CALL | {"id": "x" * 16}] * 40}]
                * 100
            },
            "chat._check_call_id",
        ),
        (TEXT, {"prompt": [1] * 100_000}, "prepare.check_token_ids"),
        (
            "/tokenize",
            {"prompt": "x" * 100_000, "return_token_strs": True},
            "tokenizer.Tokenizer.token_bytes",
        ),
        (TEXT, {"prompt": [1], "bad_words": ["x" * 200] * 100}, "tokenizer.encode_text"),
        (
            "/score",
            {"text_1": "x" * 30_000, "text_2": ["x" * 4_000] * 100},
            "tokenizer.encode_text",
        ),
    ],
)
async def test_slow_work_on_a_large_body_does_not_block_the_event_loop(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    said: dict[str, Any],
    function: str,
) -> None:
    """A million names, ids or tokens take half a second, during which streams would stand still."""
    ran: set[threading.Thread] = set()
    place = f"tandem.router.frontend.{function}"
    original = resolve_name(place)

    def noted(*arguments: Any, **options: Any) -> Any:
        ran.add(threading.current_thread())
        return original(*arguments, **options)

    monkeypatch.setattr(place, noted)
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=60) as http:
        assert (await http.post(path, json=said)).status_code in (200, 400)
    assert ran
    assert threading.main_thread() not in ran


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_echo_is_written_off_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    ran: set[threading.Thread] = set()

    def noted(*arguments: Any) -> str:
        ran.add(threading.current_thread())
        return original(*arguments)

    original = answers._with_logprobs
    monkeypatch.setattr(answers, "_with_logprobs", noted)
    monkeypatch.setattr(answers, "_CHARACTERS_PER_LOGPROB", 64)
    fields: dict[str, Any] = {"prompt": "x" * 18_000, "max_tokens": 0, "echo": True}
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = await http.post(TEXT, json=body(TEXT, stream=stream, n=2, **fields))
    assert answer.text.count("x" * 18_000) == 2
    assert ran
    assert threading.main_thread() not in ran


async def test_the_text_of_many_tokens_is_written_off_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[threading.Thread] = []

    def noted(content: object) -> JSONResponse:
        ran.append(threading.current_thread())
        return JSONResponse(content)

    monkeypatch.setattr(http_operations, "JSONResponse", noted)
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = await http.post("/detokenize", json={"tokens": [120] * 5_000})
    assert answer.json() == {"prompt": "x" * 5_000}
    assert ran
    assert threading.main_thread() not in ran


async def test_the_last_event_of_a_broken_stream_names_the_field_of_the_body(
    service: Service,
) -> None:
    service.source.error = errors.InvalidArgument("cannot be followed", "constraint")
    service.source.error_after = 1
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=WAIT) as http:
        answer = await http.post(TEXT, json=body(TEXT, guided_regex="[a-z]+", stream=True))
    last = json.loads(answer.text.removesuffix("\n\n").rpartition("data: ")[2])
    assert (last["error"]["param"], last["error"]["message"]) == (
        "guided_regex",
        "guided_regex: cannot be followed",
    )


def test_errors_of_a_demanded_call_name_tools() -> None:
    fields = {"messages": [MESSAGE], "tools": [TOOL], "tool_choice": "required"}
    assert parse_chat(json.dumps(fields).encode(), "id").field("constraint") == "tools"
    assert (
        parse_chat(json.dumps(fields | {"guided_regex": "x"}).encode(), "id").field("constraint")
        == "guided_regex"
    )
    assert (
        parse_chat(json.dumps(fields | {"tool_choice": "auto"}).encode(), "id").field("constraint")
        == "response_format"
    )
