"""Tests the HTTP API beside generation, its OpenAPI document, and every field at its bounds."""

from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import processors

import tandem
from tandem.proto import limits
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.http_bodies import CHAT, MESSAGES, TEXT, body
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT

AT_THE_BOUNDS: dict[str, list[Any]] = {
    "n": [1, limits.MAX_CHOICES],
    "best_of": [limits.MAX_CHOICES],
    "max_tokens": [1, 460],
    "temperature": [0, 2],
    "top_p": [1, 1e-30],
    "top_k": [-1, 1_000_000],
    "min_p": [0, 1],
    "typical_p": [1, 1e-30],
    "repetition_penalty": [0.01, 10],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [{"0": -100, "257": 100}],
    "bad_words": [["x"] * limits.MAX_BAD_WORDS, ["x" * (limits.MAX_BAD_WORD_TOKENS - 1)]],
    "seed": [-(2**63), 2**64 - 1],
    "stop": [["x"] * 16, "x" * 1_024],
    "stop_token_ids": [[257] * limits.MAX_STOP_TOKEN_IDS],
    "beam_width": [limits.MAX_BEAM_WIDTH],
    "prompt_logprobs": [0, limits.MAX_LOGPROBS],
    "guided_regex": ["(" + "x" * (limits.MAX_GRAMMAR_CHARACTERS // 64) + ")?"],
    "guided_choice": [[str(i) for i in range(limits.MAX_CONSTRAINT_CHOICES)]],
    "priority": [-100, 100],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_every_field_at_its_bounds_is_taken(
    http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    for name, values in AT_THE_BOUNDS.items():
        for value in values:
            fields: dict[str, Any] = {"stream": stream, "max_tokens": 1, name: value}
            answer = await http.post(path, json=body(path, **fields))
            assert answer.status_code == 200, (name, value, answer.text)
    own: dict[str, Any] = {"logprobs": limits.MAX_LOGPROBS}
    if path == CHAT:
        own = {"logprobs": True, "top_logprobs": limits.MAX_LOGPROBS}
    assert (await http.post(path, json=body(path, **own))).status_code == 200
    prompts = {"prompt": ["x"] * limits.MAX_PROMPTS} if path == TEXT else {}
    assert (await http.post(path, json=body(path, max_tokens=1, **prompts))).status_code == 200


async def test_tokens_of_texts_and_chats(service: Service, http: httpx.AsyncClient) -> None:
    """Tests vLLM's whole answer, with the tokens that `vllm bench serve` uses to align prompts."""
    asked = {"model": "tiny", "prompt": "hé", "add_special_tokens": False}
    answer = (await http.post("/tokenize", json=asked)).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [104, 195, 169]}
    chat = {"messages": MESSAGES, "return_token_strs": True}
    answer = (await http.post("/tokenize", json=chat)).json()
    assert bytes(answer["tokens"]) == b"[user] hello?\n[assistant] "
    assert "".join(answer["token_strs"]) == "[user] hello?\n[assistant] "
    await http.post(CHAT, json=body(CHAT))
    assert list(service.source.requests[0].submit.token_ids) == answer["tokens"]
    answer = (
        await http.post("/detokenize", json={"model": "tiny", "tokens": [104, 195, 169, EOS_ID]})
    ).json()
    assert answer == {"prompt": "hé<|end|>"}


async def test_special_tokens_of_texts(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    backend = tokenizer._backend
    kept = backend.post_processor
    backend.post_processor = processors.TemplateProcessing(
        "<|begin|> $A", None, [("<|begin|>", 257)]
    )
    try:
        for wanted, expected in (({}, [257, 104]), ({"add_special_tokens": False}, [104])):
            assert (await http.post("/tokenize", json={"prompt": "h"} | wanted)).json()[
                "tokens"
            ] == expected
    finally:
        backend.post_processor = kept


async def test_the_longest_name_with_several_prompts(
    service: Service, http: httpx.AsyncClient
) -> None:
    name = "x" * limits.MAX_REQUEST_ID_CHARACTERS
    many = body(TEXT, prompt=["a"] * 12, max_tokens=1)
    answer = await http.post(TEXT, json=many, headers={"x-request-id": name})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, name)
    assert {request.request_id.partition(".")[0][-3:] for request in service.source.requests} >= {
        "x-0",
        "-11",
    }


async def test_models_and_version(http: httpx.AsyncClient) -> None:
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["root"] == "tiny"  # `vllm bench serve` takes the tokenizer's name from it
    assert (await http.get("/v1/models/tiny")).json() == card
    assert (await http.get("/v1/models/org/nope")).json()["error"]["code"] == "not_found"
    assert (await http.get("/version")).json() == {"version": tandem.__version__}


async def test_defaults_of_the_operator_are_listed_and_reach_all_chats() -> None:
    template = byte_tokenizer("{{ messages[0].content }}{{ mood }}{{ tone }}")._template
    defaults = {"mood": "!", "tone": "~"}
    model = ServedModel(
        name="tiny",
        tokenizer=Tokenizer(template, chat_template_kwargs=defaults),
        context_tokens=512,
        defaults={"sampling.temperature": 0.5},
    )
    source = FakeTokenSource()
    servers = await ApiServers.start(GenerationService([model], source))
    await servers.set_serving(True)
    async with httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert card["default_sampling_params"] == {"temperature": 0.5}
        assert card["default_chat_template_kwargs"] == defaults
        said = [{"role": "user", "content": "hi"}]
        cases: list[tuple[str, dict[str, Any], bytes]] = [
            (CHAT, {"messages": said}, b"hi!~"),
            (CHAT, {"messages": said, "chat_template_kwargs": {"mood": "?"}}, b"hi?~"),
            ("/v1/responses", {"input": "hi"}, b"hi!~"),
            ("/v1/messages", {"messages": said, "max_tokens": 9}, b"hi!~"),
        ]
        for path, fields, prompt in cases:
            answer = await http.post(path, json={"model": "tiny", **fields})
            assert answer.status_code == 200, answer.text
            submit = source.requests[-1].submit
            assert (bytes(submit.token_ids), submit.sampling.temperature) == (prompt, 0.5)
    await servers.stop(0)


async def test_the_openapi_document(http: httpx.AsyncClient) -> None:
    """The document is OpenAPI 3.1; its schemas accept good bodies and refuse wrong ones."""
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    posts = {
        path: methods["post"] for path, methods in document["paths"].items() if "post" in methods
    }
    agents = ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
    adapters = ["/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    stored = ["/v1/files", "/v1/batches/{name}/cancel", "/reset_prefix_cache"]
    prompts = ["/v1/embeddings", "/score", "/v1/score"]
    prompts += ["/rerank", "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize"]
    prompts.append("/v1/watermark/detect")
    assert list(posts) == [TEXT, CHAT, *agents, *prompts, *adapters, *stored]
    for path in (TEXT, CHAT):
        assert {"200", "400", "401", "403", "404", "413", "415", "429", "500", "503", "504"} == set(
            posts[path]["responses"]
        )
        reference = posts[path]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = {"$ref": reference, "components": document["components"]}
        jsonschema.validate(body(path, stop="x", temperature=0.5, n=None), schema)
        for wrong in (
            body(path, top_p=0),
            body(path, typical_p=0),
            body(path, stop_token_ids=[1] * 65),
            body(path, logit_bias={str(i): 1 for i in range(1_025)}),
            body(path, temperature=3),
            body(path, unknown=1),
            {"model": "tiny"},
            body(path, stop=1),
        ):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_of_a_request(
    service: Service, http: httpx.AsyncClient, stream: bool
) -> None:
    service.source.stall_after = 0
    answer = await http.post(
        TEXT, json=body(TEXT, stream=stream), headers={"x-request-timeout": "0.05"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    service.source.stall_after = None
    answer = await http.post(
        TEXT, json=body(TEXT, stream=stream), headers={"x-request-timeout": "60"}
    )
    assert answer.status_code == 200
