"""Tests that parts of messages that are not text are refused in the terms of each API."""

from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.client.client import AsyncClient
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.weather_tool import HERMES
from tandem.tests.router.conftest import CONTEXT_TOKENS, Service
from tandem.tests.router.fake_source import byte_tokenizer

ARCHITECTURE = "Gemma3ForConditionalGeneration"
READS = {
    "": "the model only reads text",
    ARCHITECTURE: f"this service has the text model of {ARCHITECTURE} only",
}
TEXT: dict[str, Any] = {"type": "text", "text": "What is this?"}
IMAGE_URL: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA"}


SEARCH_RESULT: dict[str, Any] = {
    "type": "search_result",
    "title": "Rivers",
    "source": "https://localhost/rivers",
    "content": [{"type": "text", "text": "The Rhine."}, {"type": "text", "text": "The Elbe."}],
    "citations": {"enabled": True},
    "cache_control": {"type": "ephemeral"},
}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def call_with_result(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a call and its result, as messages of Anthropic's API."""
    call = {"type": "tool_use", "id": "i", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "i", "content": list(parts)}
    return [{"role": "assistant", "content": [call]}, *user(result)]


# Path, body, field and type.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "/v1/chat/completions",
        {"messages": user(TEXT, IMAGE_URL)},
        "messages[0].content",
        "image_url",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "x"}, *user({"type": "input_audio"})]},
        "messages[1].content",
        "input_audio",
    ),
    (
        "/v1/chat/completions",
        {"messages": user({"type": "video_url"})},
        "messages[0].content",
        "video_url",
    ),
    ("/v1/chat/completions", {"messages": user({"type": "file"})}, "messages[0].content", "file"),
    ("/tokenize", {"messages": user(TEXT, IMAGE_URL)}, "messages[0].content", "image_url"),
    (
        "/v1/responses",
        {"input": user({"type": "input_text", "text": "x"}, {"type": "input_image"})},
        "input[0]",
        "input_image",
    ),
    ("/v1/responses", {"input": user({"type": "input_file"})}, "input[0]", "input_file"),
    (
        "/v1/responses",
        {"input": [{"role": "assistant", "content": [{"type": "output_image"}]}]},
        "input[0]",
        "output_image",
    ),
    (
        "/v1/messages",
        {"messages": user(TEXT, {"type": "image", "source": SOURCE}), "max_tokens": 4},
        "messages[0].content[1]",
        "image",
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": user({"type": "image", "source": SOURCE})},
        "messages[0].content[0]",
        "image",
    ),
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


@pytest.fixture(params=list(READS), ids=["text model", "text model of a multimodal model"])
def model(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> ServedModel:
    return ServedModel(
        name="tiny",
        tokenizer=tokenizer,
        context_tokens=CONTEXT_TOKENS,
        text_model_of=request.param,
    )


async def test_http_names_the_field_of_its_api(
    service: Service, http: httpx.AsyncClient, model: ServedModel
) -> None:
    for path, body, field, kind in CASES:
        answer = await http.post(path, json={"model": "tiny"} | body)
        error = answer.json()["error"]
        expected = f"parts of type {kind!r} are not supported; {READS[model.text_model_of]}"
        assert (answer.status_code, error["message"]) == (400, f"{field}: {expected}"), path
        if not path.startswith("/v1/messages"):
            assert error["param"] == field
    assert service.source.requests == []


CALL: dict[str, Any] = {
    "id": "c",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}
RESULTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                *user(TEXT),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [TEXT, IMAGE_URL]},
            ]
        },
        "What is this?\n[image_url left out: the model only reads text]",
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image"}],
                },
            ]
        },
        "[input_image left out: the model only reads text]",
    ),
    (
        "/v1/messages",
        {
            "messages": [
                *user(TEXT),
                *call_with_result(TEXT, {"type": "document"}, {"type": "image"}),
            ],
            "max_tokens": 4,
        },
        "What is this?\n[document left out: the model only reads text]\n"
        "[image left out: the model only reads text]",
    ),
    (
        "/v1/messages",
        {
            "messages": [
                *user(SEARCH_RESULT),
                *call_with_result(
                    SEARCH_RESULT,
                    {"type": "tool_reference", "tool_name": "f"},
                    {"type": "browser_state"},
                ),
            ],
            "max_tokens": 4,
        },
        "Rivers\nhttps://localhost/rivers\nThe Rhine.\nThe Elbe.\n"
        "[tool_reference left out: the model only reads text]\n"
        "[browser_state left out: the model only reads text]",
    ),
]


@pytest.mark.parametrize(("path", "body", "expected"), RESULTS)
async def test_other_parts_of_a_result_do_not_end_the_conversation(
    service: Service, http: httpx.AsyncClient, path: str, body: dict[str, Any], expected: str
) -> None:
    """An agent sends the results of its tools again with each turn."""
    answer = await http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    prompt = bytes(service.source.requests[-1].submit.token_ids).decode()
    assert f"tool: {expected}\n" in prompt


async def test_grpc_names_the_field_of_the_message(
    service: Service, grpc_service: Service, model: ServedModel
) -> None:
    message = {"role": "user", "content": "What is this?", "other_parts": ["image_url", "file"]}
    prompt = {"chat": {"messages": [message]}}
    requests: list[tuple[str, Any]] = [
        ("Generate", inference_pb2.GenerateRequest(prompt=prompt)),
        ("Tokenize", inference_pb2.TokenizeRequest(prompt=prompt)),
    ]
    async with grpc.aio.insecure_channel(grpc_service.grpc) as channel:
        for name, request in requests:
            path = f"/tandem.v1.Inference/{name}"
            make: Any = channel.unary_stream if name == "Generate" else channel.unary_unary
            call = make(path)(request.SerializeToString())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if name == "Generate" else call)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == (
                "prompt.chat.messages[0].content: parts of type 'image_url' are not supported; "
                + READS[model.text_model_of]
            )
    assert grpc_service.source.requests == []


async def test_the_client_passes_the_types_of_parts_on(
    grpc_service: Service, model: ServedModel
) -> None:
    async with AsyncClient(grpc_service.grpc) as client:
        for parts in ([TEXT, IMAGE_URL], [{"type": "image_url", "text": "no text"}]):
            with pytest.raises(InvalidArgument) as caught:
                await client.chat(user(*parts))
            assert caught.value.field == "prompt.chat.messages[0].content"
            assert caught.value.message == (
                "prompt.chat.messages[0].content: parts of type 'image_url' are not supported; "
                + READS[model.text_model_of]
            )
    assert grpc_service.source.requests == []


async def test_a_block_that_only_users_send_is_refused_in_an_answer(
    http: httpx.AsyncClient,
) -> None:
    messages = [{"role": "assistant", "content": [{"type": "image", "source": SOURCE}]}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    error = (await http.post("/v1/messages", json=body)).json()["error"]
    assert error["message"] == "messages[0].content[0]: a block of type image requires role user"
