import math
from typing import Any

import pytest

from tandem.proto import inference_pb2, limits
from tandem.proto.errors import InvalidArgument
from tandem.router.fake import byte_tokenizer
from tandem.router.prepare import ServedModel, prepare
from tandem.router.request import TokenRequest

VOCAB = 258


def request(text: str = "hi", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**({"prompt": {"text": text}} | fields))


async def prepared(
    message: inference_pb2.GenerateRequest, context: int = 64, default_max_tokens: int | None = None
) -> TokenRequest:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=context)
    tokens, _ = await prepare(message, model, arrived=1.0, deadline=9.0, default_max_tokens=default_max_tokens)
    return tokens


async def refused(message: inference_pb2.GenerateRequest, context: int = 64) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        await prepared(message, context)
    return caught.value


async def test_defaults_are_set_explicitly() -> None:
    tokens = await prepared(request())
    assert tokens.prompt == (104, 105)
    assert tokens.max_tokens == 62
    assert (tokens.arrived, tokens.deadline) == (1.0, 9.0)
    assert tokens.sampling.HasField("temperature")
    assert tokens.sampling.HasField("top_p")
    assert tokens.sampling.HasField("seed")
    assert (tokens.sampling.temperature, tokens.sampling.top_p) == (1.0, 1.0)
    assert (tokens.sampling.top_k, tokens.sampling.min_p) == (0, 0.0)
    assert not tokens.ignore_eos


async def test_given_values_pass_through() -> None:
    sampling: dict[str, Any] = {"temperature": 0.0, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 2**64 - 1}
    stopping = {"max_tokens": 3, "stop": ["a", "b"], "stop_token_ids": [1, 257], "ignore_eos": True}
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    tokens, stop = await prepare(request(sampling=sampling, stopping=stopping), model, arrived=0.0, deadline=None)
    assert tokens.sampling == inference_pb2.SamplingParams(**sampling)
    assert (tokens.max_tokens, tokens.stop_token_ids, tokens.ignore_eos) == (3, (1, 257), True)
    assert stop == ("a", "b")


async def test_a_seed_of_zero_is_a_seed_and_none_is_random() -> None:
    assert (await prepared(request(sampling={"seed": 0}))).sampling.seed == 0
    assert len({(await prepared(request())).sampling.seed for _ in range(4)}) == 4


async def test_top_k_of_minus_one_keeps_all() -> None:
    assert (await prepared(request(sampling={"top_k": -1}))).sampling.top_k == 0


async def test_requests_of_one_name_are_told_apart() -> None:
    first, second = [(await prepared(request(request_id="mine"))).request_id for _ in range(2)]
    assert first != second
    assert first.startswith("mine.")


async def test_kinds_of_prompt() -> None:
    ids = await prepared(request(prompt={"token_ids": {"ids": [0, 257]}}))
    assert ids.prompt == (0, 257)
    chat = await prepared(request(prompt={"chat": {"messages": [{"role": "user", "content": "x"}]}}))
    assert bytes(chat.prompt) == b"[user] x\n[assistant] "


@pytest.mark.parametrize(
    ("fields", "field", "bound"),
    [
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature", "0 to 2"),
        ({"sampling": {"temperature": math.inf}}, "sampling.temperature", "0 to 2"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature", "0 to 2"),
        ({"sampling": {"temperature": 2.1}}, "sampling.temperature", "0 to 2"),
        ({"sampling": {"top_k": -2}}, "sampling.top_k", "-1 to 1000000"),
        ({"sampling": {"top_k": 1_000_001}}, "sampling.top_k", "-1 to 1000000"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p", "greater than 0"),
        ({"sampling": {"top_p": 1.1}}, "sampling.top_p", "at most 1"),
        ({"sampling": {"top_p": math.nan}}, "sampling.top_p", "at most 1"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p", "0 to 1"),
        ({"sampling": {"min_p": 1.1}}, "sampling.min_p", "0 to 1"),
        ({"sampling": {"min_p": math.nan}}, "sampling.min_p", "0 to 1"),
        ({"stopping": {"max_tokens": -1}}, "stopping.max_tokens", "1 to 1048576"),
        ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens", "1 to 1048576"),
        ({"stopping": {"max_tokens": 1_048_577}}, "stopping.max_tokens", "1 to 1048576"),
        ({"stopping": {"stop": ["x"] * 17}}, "stopping.stop", "at most 16"),
        ({"stopping": {"stop": ["x", ""]}}, "stopping.stop[1]", "1 to 1024"),
        ({"stopping": {"stop": ["x" * 1_025]}}, "stopping.stop[0]", "1 to 1024"),
        ({"stopping": {"stop_token_ids": [1] * 65}}, "stopping.stop_token_ids", "at most 64"),
        ({"stopping": {"stop_token_ids": [VOCAB]}}, "stopping.stop_token_ids", "258 tokens"),
        ({"prompt": {"token_ids": {"ids": [1, VOCAB]}}}, "prompt.token_ids", "258 tokens"),
        ({"prompt": {"token_ids": {}}}, "prompt", "at least 1"),
        ({"prompt": {"text": ""}}, "prompt", "at least 1"),
        ({"prompt": {}}, "prompt", "must be set"),
        ({"prompt": {"text": "x" * (limits.MAX_PROMPT_CHARACTERS + 1)}}, "prompt.text", "at most 1000000"),
        ({"prompt": {"chat": {}}}, "prompt.chat.messages", "1 to 1024"),
        ({"prompt": {"chat": {"messages": [{"role": "user"}] * 1_025}}}, "prompt.chat.messages", "1 to 1024"),
        ({"prompt": {"chat": {"messages": [{"content": "x"}]}}}, "prompt.chat.messages[0].role", "1 to 64"),
        ({"prompt": {"chat": {"messages": [{"role": "r" * 65}]}}}, "prompt.chat.messages[0].role", "1 to 64"),
        ({"prompt": {"chat": {"messages": [{"role": "robot", "content": "x"}]}}}, "prompt.chat", "unknown role"),
        (
            {"prompt": {"chat": {"messages": [{"role": "user", "content": "x" * 500_001}] * 2}}},
            "prompt.chat",
            "at most 1000000",
        ),
        ({"request_id": "x" * 129}, "request_id", "128"),
        ({"request_id": "a\nb"}, "request_id", "ASCII"),
    ],
)
async def test_each_bound_names_field_and_bound(fields: dict[str, Any], field: str, bound: str) -> None:
    error = await refused(request(**fields))
    assert error.field == field
    assert bound in error.message
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"sampling": {"temperature": 2.0, "top_k": 1_000_000, "top_p": 1.0, "min_p": 1.0}}, "hi"),
        ({"stopping": {"stop": ["x" * 1_024] * 16, "stop_token_ids": [257] * 64}}, "hi"),
        ({"request_id": "x" * 128}, "hi"),
        ({}, "x" * 63),
    ],
)
async def test_the_bounds_themselves_are_allowed(fields: dict[str, Any], prompt: str) -> None:
    assert len((await prepared(request(prompt, **fields))).prompt) == len(prompt)


# (prompt tokens, max_tokens, truncate) in a context of 64 -> (kept prompt tokens, max_tokens)
@pytest.mark.parametrize(
    ("length", "explicit", "truncate", "expected"),
    [
        (60, None, False, (60, 4)),
        (63, None, False, (63, 1)),
        (60, 4, False, (60, 4)),
        (60, 4, True, (60, 4)),
        (64, None, True, (63, 1)),
        (500, None, True, (63, 1)),
        (60, 5, True, (59, 5)),
        (500, 63, True, (1, 63)),
    ],
)
async def test_fit(length: int, explicit: int | None, truncate: bool, expected: tuple[int, int]) -> None:
    ids = [i % 256 for i in range(length)]
    message = request(prompt={"token_ids": {"ids": ids}}, stopping={"max_tokens": explicit}, truncate_prompt=truncate)
    tokens = await prepared(message)
    assert (len(tokens.prompt), tokens.max_tokens) == expected
    assert list(tokens.prompt) == ids[-expected[0] :]


@pytest.mark.parametrize(("length", "explicit"), [(64, None), (500, None), (64, 1), (60, 5)])
async def test_what_does_not_fit_is_refused_with_the_numbers(length: int, explicit: int | None) -> None:
    error = await refused(request("x" * length, stopping={"max_tokens": explicit}))
    assert error.field == "prompt"
    assert f"{length} prompt tokens and {explicit or 1} to generate" in error.message
    assert "64 tokens" in error.message


@pytest.mark.parametrize("truncate", [False, True])
async def test_max_tokens_that_leave_no_room_are_refused(truncate: bool) -> None:
    error = await refused(request(stopping={"max_tokens": 64}, truncate_prompt=truncate))
    assert error.field == "stopping.max_tokens"


async def test_default_max_tokens_gives_way_to_the_context() -> None:
    assert (await prepared(request("x" * 10), default_max_tokens=16)).max_tokens == 16
    assert (await prepared(request("x" * 60), default_max_tokens=16)).max_tokens == 4
    assert (await prepared(request("x", stopping={"max_tokens": 20}), default_max_tokens=16)).max_tokens == 20
