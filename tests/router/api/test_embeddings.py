"""Compares embeddings and scores of a real model over HTTP with transformers."""

import base64
import json
import math
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import pytest
import torch

from tandem.proto import inference_pb2, limits
from tandem.proto.errors import InvalidArgument
from tandem.proto.inference_pb2_grpc import InferenceStub
from tandem.router.api.openai import embeddings
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.frontend.prepare import RequestContext, prepare
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.pooling import PoolingRules
from tandem.tests.fleet import Fleet, split_fleet
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT
from tandem.tests.workers.model.helpers import prompt, reference

TEXTS = [
    "The quick brown fox.",
    "What is the capital of France? The capital of France is Paris.",
    "a",
]


@pytest.fixture
async def workers(tiny_model: Path) -> AsyncIterator[Fleet]:
    async with split_fleet(tiny_model, {"prefill": [1], "decode": [1]}) as workers:
        yield workers


@pytest.fixture
async def servers(tiny_model: Path, workers: Fleet) -> AsyncIterator[ApiServers]:
    model = served_model(tiny_model, PoolingRules())
    servers = await ApiServers.start(GenerationService([model], workers.dispatcher))
    yield servers
    await servers.stop(0)


def served_model(folder: Path, pooling: PoolingRules) -> ServedModel:
    return ServedModel(
        name="tiny", tokenizer=Tokenizer.load(folder), context_tokens=2_048, pooling=pooling
    )


@pytest.fixture
async def client(servers: ApiServers) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{servers.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


@torch.inference_mode()
def hidden_states(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Returns the last hidden states: [num_tokens, hidden]."""
    model: Any = reference(folder)
    states: torch.Tensor = model.base_model(torch.tensor([list(ids)])).last_hidden_state[0]
    return states


async def test_embeddings(tiny_model: Path, client: openai.AsyncOpenAI) -> None:
    """Embeds texts and token ids, as base64 (OpenAI's client) and as lists; normalised."""
    tokenizer = Tokenizer.load(tiny_model)
    ids = [await tokenizer.encode(text) for text in TEXTS] + [prompt(70)]
    forms: list[Any] = [(TEXTS[0], ids[:1]), (TEXTS, ids[:3]), (ids[3], ids[3:]), (ids, ids)]
    for given, tokens in forms:
        made = await client.embeddings.create(model="tiny", input=given)
        assert [each.index for each in made.data] == list(range(len(tokens)))
        assert (made.usage.prompt_tokens, made.usage.total_tokens) == (sum(map(len, tokens)),) * 2
        for each, prompt_ids in zip(made.data, tokens, strict=True):
            state = hidden_states(tiny_model, prompt_ids)[-1]
            torch.testing.assert_close(
                torch.tensor(each.embedding), state / state.norm(), atol=1e-4, rtol=0
            )


async def test_shorter_embeddings_are_cut_and_then_normalised(
    tiny_model: Path, client: openai.AsyncOpenAI
) -> None:
    ids = prompt(20)
    state = hidden_states(tiny_model, ids)[-1]
    for length in (1, 8, len(state)):
        made = await client.embeddings.create(model="tiny", input=ids, dimensions=length)
        expected = state[:length] / state[:length].norm()
        torch.testing.assert_close(
            torch.tensor(made.data[0].embedding), expected, atol=1e-4, rtol=0
        )
    with pytest.raises(openai.BadRequestError, match=f"the maximum is {len(state)}"):
        await client.embeddings.create(model="tiny", input=ids, dimensions=len(state) + 1)


async def test_mean_and_lengths_as_they_are(
    tiny_model: Path, servers: ApiServers, workers: Fleet
) -> None:
    ids = prompt(100)
    url = f"http://{servers.http_address}/v1/embeddings"
    expected = hidden_states(tiny_model, ids).mean(0)
    async with httpx.AsyncClient(timeout=WAIT) as http:
        body = {"input": ids, "pooling_type": "MEAN", "normalize": False}
        # The second request finds its prefix in the cache, and does not use it.
        for form in ("float", "base64"):
            answer = await http.post(url, json=body | {"encoding_format": form})
            found = answer.json()["data"][0]["embedding"]
            if form == "base64":
                found = list(array("f", base64.b64decode(found)))
            torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
        cached = sum(status.info.load.cached_blocks for status in await workers.statuses())
        assert cached >= len(ids) // 16
        last = await http.post(url, json={"input": ids, "normalize": False})  # which does use it
    found = last.json()["data"][0]["embedding"]
    torch.testing.assert_close(
        torch.tensor(found), hidden_states(tiny_model, ids)[-1], atol=1e-4, rtol=0
    )


async def test_the_models_own_pooling_is_the_default(tiny_model: Path, workers: Fleet) -> None:
    """A mode that is not served is refused by name, unless the request names another one."""
    ids = prompt(20)
    states = hidden_states(tiny_model, ids)
    body = {"input": ids, "normalize": False}
    found = {}
    for mode in ("mean", "lasttoken", "cls"):
        async with own_pooling(tiny_model, workers, PoolingRules(mode=mode)) as http:
            answer = await http.post("/v1/embeddings", json=body | {"pooling_type": "LAST"})
            last = torch.tensor(answer.json()["data"][0]["embedding"])
            torch.testing.assert_close(last, states[-1], atol=1e-4, rtol=0)
            found[mode] = (await http.post("/v1/embeddings", json=body)).json()
    for mode, expected in (("mean", states.mean(0)), ("lasttoken", states[-1])):
        embedding = torch.tensor(found[mode]["data"][0]["embedding"])
        torch.testing.assert_close(embedding, expected, atol=1e-4, rtol=0)
    assert found["cls"]["error"]["param"] == "pooling_type"
    assert "own pooling is cls; only LAST and MEAN are served" in found["cls"]["error"]["message"]


async def test_a_model_whose_embeddings_are_not_served_generates(
    tiny_model: Path, workers: Fleet
) -> None:
    """They are refused with any pooling, over HTTP and gRPC."""
    rules = PoolingRules(refusal="modules.json: the module Dense is not supported")
    async with own_pooling(tiny_model, workers, rules) as http:
        for more in ({}, {"pooling_type": "LAST"}):
            answer = await http.post("/v1/embeddings", json={"input": "x"} | more)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "model")
            assert "the module Dense is not supported" in error["message"]
        body = {"prompt": "x", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    request = inference_pb2.GenerateRequest(prompt={"text": "x"}, pooling="POOLING_LAST")
    with pytest.raises(InvalidArgument, match=r"^model: .*Dense"):
        await prepare(request, served_model(tiny_model, rules), RequestContext(arrived=0.0))


@asynccontextmanager
async def serving(service: GenerationService) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a service."""
    servers = await ApiServers.start(service)
    url = f"http://{servers.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=WAIT) as http:
        yield http
    await servers.stop(0)


def own_pooling(
    folder: Path, workers: Fleet, rules: PoolingRules
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """Returns a client of a service whose model has these rules."""
    return serving(GenerationService([served_model(folder, rules)], workers.dispatcher))


async def test_over_grpc(tiny_model: Path, servers: ApiServers) -> None:
    ids = prompt(20)
    request = inference_pb2.GenerateRequest(
        prompt={"token_ids": {"ids": ids}}, pooling="POOLING_LAST"
    )
    async with grpc.aio.insecure_channel(servers.grpc_address) as channel:
        messages = [each async for each in InferenceStub(channel).Generate(request)]  # type: ignore[no-untyped-call]
    (message,) = messages
    assert (message.text, list(message.token_ids), message.usage.prompt_tokens) == ("", [], 20)
    state = hidden_states(tiny_model, ids)[-1]
    torch.testing.assert_close(torch.tensor(list(message.embedding)), state, atol=1e-4, rtol=0)


async def test_scores(tiny_model: Path, servers: ApiServers) -> None:
    """A score sums the log probabilities of the second text's tokens after the first text."""
    tokenizer = Tokenizer.load(tiny_model)
    model: Any = reference(tiny_model)

    async def expected(first: str, second: str) -> float:
        before = await tokenizer.encode(first)
        after = await tokenizer.encode(second, add_special_tokens=False)
        with torch.inference_mode():
            logprobs = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
        rows = range(len(before) - 1, len(before) + len(after) - 1)
        return float(sum(logprobs[row, token] for row, token in zip(rows, after, strict=True)))

    cases: list[tuple[Any, Any]] = [
        (TEXTS[0], " dog"),
        (TEXTS[0], [" dog", " The fox", "x"]),
        (TEXTS, [" dog", " The fox", "x"]),
    ]
    async with httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http:
        for text_1, text_2 in cases:
            answer = await http.post(
                "/score", json={"model": "tiny", "text_1": text_1, "text_2": text_2}
            )
            assert answer.status_code == 200, answer.text
            seconds = text_2 if isinstance(text_2, list) else [text_2]
            firsts = text_1 if isinstance(text_1, list) else [text_1] * len(seconds)
            for each, first, second in zip(answer.json()["data"], firsts, seconds, strict=True):
                assert each["score"] == pytest.approx(await expected(first, second), abs=1e-3)
        assert answer.json()["usage"]["prompt_tokens"] > 0


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["x"] * 2_049}, "input"),
    ("/v1/embeddings", {"input": [9_999]}, "input"),
    ("/v1/embeddings", {"input": "x " * 5_000}, "input"),
    ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "x", "dimensions": 9_999}, "dimensions"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "x", "pooling_type": "CLS"}, "pooling_type"),
    ("/v1/embeddings", {"input": "x", "more": 1}, "more"),
    ("/score", {"text_1": "x"}, "text_2"),
    ("/score", {"text_1": ["x", "y"], "text_2": "z"}, "text_1"),
    ("/score", {"text_1": "x", "text_2": []}, "text_2"),
    ("/score", {"text_1": "x", "text_2": ["y", ""]}, "text_2[1]"),
    ("/score", {"text_1": "x", "text_2": "y " * 5_000}, "text_2"),
    ("/score", {"text_1": 1, "text_2": "y"}, "text_1"),
]


async def test_what_is_wrong_is_named(servers: ApiServers) -> None:
    async with httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http:
        for path, body, field in BAD:
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), (
                path,
                json.dumps(body)[:100],
                error,
            )


async def test_many_texts_run_some_at_a_time(client: openai.AsyncOpenAI) -> None:
    """These texts do not fit the queue together; one more than the bound is refused."""
    texts = [f"{number}" for number in range(1_200)]
    made = await client.embeddings.create(model="tiny", input=texts)
    assert [each.index for each in made.data] == list(range(len(texts)))
    alone = await client.embeddings.create(model="tiny", input=texts[-1])
    torch.testing.assert_close(
        torch.tensor(made.data[-1].embedding),
        torch.tensor(alone.data[0].embedding),
        atol=1e-4,
        rtol=0,
    )
    with pytest.raises(openai.BadRequestError, match="2049"):
        await client.embeddings.create(model="tiny", input=["x"] * (limits.MAX_TEXTS + 1))


async def test_documents_are_ranked_by_yes_against_no(
    tiny_model: Path, servers: ApiServers
) -> None:
    """The score is computed from the logits of transformers, for the documented prompt."""
    tokenizer = Tokenizer.load(tiny_model)
    model: Any = reference(tiny_model)
    documents = ["a dog", "The fox jumps", "x"]

    async def expected(document: str) -> float:
        chat = inference_pb2.Chat(template_kwargs='{"enable_thinking": false}')
        system = (
            "Judge whether the Document meets the requirements based on the Query and the "
            'Instruct provided. Note that the answer can only be "yes" or "no".'
        )
        user = f"<Instruct>: Find foxes\n<Query>: fox?\n<Document>: {document}"
        chat.messages.add(role="system", content=system)
        chat.messages.add(role="user", content=user)
        before = await tokenizer.encode_chat(chat, "")
        sums = []
        for answer in ("yes", "no"):
            after = await tokenizer.encode(answer, add_special_tokens=False)
            with torch.inference_mode():
                logprobs = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
            rows = range(len(before) - 1, len(before) + len(after) - 1)
            found = (logprobs[row, token] for row, token in zip(rows, after, strict=True))
            sums.append(float(sum(found)))
        return 1 / (1 + math.exp(sums[1] - sums[0]))

    scores = [await expected(document) for document in documents]
    order = sorted(range(3), key=lambda index: -scores[index])
    body = {"model": "tiny", "query": "fox?", "instruction": "Find foxes"}
    given: list[Any] = [documents[0], {"text": documents[1]}, documents[2]]
    async with httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http:
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = (await http.post(path, json=body | {"documents": given})).json()
            results = answer["results"]
            assert [each["index"] for each in results] == order
            found = [each["relevance_score"] for each in results]
            assert found == pytest.approx([scores[index] for index in order], abs=1e-4)
            assert [each["document"]["text"] for each in results] == [
                documents[index] for index in order
            ]
            assert answer["usage"]["total_tokens"] > 6 * len("fox?")
        one = body | {"documents": documents, "top_n": 1, "return_documents": False}
        (best,) = (await http.post("/v1/rerank", json=one)).json()["results"]
        assert best.keys() == {"index", "relevance_score"}
        assert best["index"] == order[0]
        refused = await http.post("/v1/rerank", json=body | {"documents": []})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
        repeated = {"instruction": "x" * 900_000, "documents": ["a"] * 5}
        refused = await http.post("/v1/rerank", json=body | repeated)
        assert "characters in all prompts" in refused.json()["error"]["message"]


async def test_long_texts_are_cut_where_asked(
    servers: ApiServers, client: openai.AsyncOpenAI
) -> None:
    ids = prompt(70)
    kept = await client.embeddings.create(model="tiny", input=ids[-8:])
    cut = await client.embeddings.create(
        model="tiny", input=ids, extra_body={"truncate_prompt_tokens": 8}
    )
    assert (cut.data[0].embedding, cut.usage) == (kept.data[0].embedding, kept.usage)
    long = prompt(70) * 40  # longer than the context
    words = "maximum context length is 2048 .* tokens for input; shorten the prompt to at most 2047"
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await client.embeddings.create(model="tiny", input=long)
    assert caught.value.code == "context_length_exceeded"
    for field in ({"truncate_prompt_tokens": -1}, {"truncate_prompt": True}):
        made = await client.embeddings.create(model="tiny", input=long, extra_body=field)
        assert made.usage.prompt_tokens == 2_047
    async with httpx.AsyncClient(base_url=f"http://{servers.http_address}", timeout=WAIT) as http:
        texts = {"text_1": "The sea. The sea.", "text_2": " A ship."}
        whole = (await http.post("/score", json=texts)).json()
        cut_answer = (await http.post("/score", json=texts | {"truncate_prompt_tokens": 5})).json()
    assert cut_answer["usage"]["prompt_tokens"] == 5 < whole["usage"]["prompt_tokens"]
    assert cut_answer["data"][0]["score"] < 0


async def test_the_numbers_of_one_answer_are_bounded(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_MAX_NUMBERS", {"float": 100, "base64": 2**20})
    with pytest.raises(openai.BadRequestError, match="encoding_format to base64"):
        await client.embeddings.create(model="tiny", input=["a"] * 9, encoding_format="float")
    await client.embeddings.create(model="tiny", input=["a"] * 9, encoding_format="base64")


@pytest.mark.parametrize(
    ("template", "field", "words"),
    [
        (None, "model", "reranking needs a chat template"),
        ("{{ raise_exception('not like this') }}", "documents", "not like this"),
    ],
)
async def test_a_model_that_cannot_rerank_is_refused_by_fields_of_the_body(
    template: str | None, field: str, words: str
) -> None:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(template), context_tokens=512)
    async with serving(GenerationService([model], FakeTokenSource())) as http:
        answer = await http.post("/rerank", json={"query": "a", "documents": ["b"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert words in error["message"]


async def test_the_tokens_of_scores_are_bounded(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SCORED_TOKENS", 20)
    pair = {"text_1": "x" * 15, "text_2": "y" * 15}
    for path, body, field in (
        ("/score", pair, "text_2"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "documents"),
    ):
        answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert "tokens in all prompts; the maximum is 20" in error["message"]
    cut = await http.post("/score", json=pair | {"truncate_prompt_tokens": 20})
    assert cut.status_code == 200
