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
    return (await prepare(message, model, arrived=1.0, deadline=9.0, default_max_tokens=default_max_tokens)).tokens


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
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "typical_p": 0.75,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {0: -100.0, 257: 2.5},
    }
    stopping = {"max_tokens": 3, "stop": ["a", "b"], "stop_token_ids": [1, 257], "ignore_eos": True, "min_tokens": 2}
    message = request(sampling=sampling, stopping=stopping, n=2, best_of=3, logprobs=4, prompt_logprobs=5, priority=-7)
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    accepted = await prepare(message, model, arrived=0.0, deadline=None)
    tokens = accepted.tokens
    assert tokens.sampling == inference_pb2.SamplingParams(**sampling)
    assert (tokens.max_tokens, tokens.stop_token_ids, tokens.ignore_eos) == (3, (1, 257), True)
    assert (tokens.num_choices, accepted.num_answers, tokens.min_tokens, tokens.priority) == (3, 2, 2, -7)
    assert (tokens.logprobs, tokens.prompt_logprobs, accepted.wants_logprobs) == (4, 5, True)
    assert accepted.stop == ("a", "b")


async def test_best_of_wants_logprobs_for_itself() -> None:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    accepted = await prepare(request(best_of=2), model, arrived=0.0, deadline=None)
    assert (accepted.tokens.logprobs, accepted.wants_logprobs, accepted.num_answers) == (0, False, 1)
    assert (await prepared(request(n=2, best_of=2))).logprobs is None


async def test_minus_zero_is_zero() -> None:
    names = ("temperature", "min_p", "presence_penalty", "frequency_penalty")
    tokens = await prepared(request(sampling=dict.fromkeys(names, -0.0)))
    assert [math.copysign(1, getattr(tokens.sampling, name)) for name in names] == [1.0] * 4


async def test_bad_words_with_and_without_a_space_before() -> None:
    tokens = await prepared(request(sampling={"bad_words": ["ab", " ab", "c"]}))
    assert tokens.bad_words == (tuple(b"ab"), tuple(b" ab"), tuple(b"c"), tuple(b" c"))
    assert not tokens.sampling.bad_words


async def test_a_beam_search_has_every_field_set() -> None:
    tokens = await prepared(request(beam_search={"width": 4}, n=3))
    assert tokens.beam_search == inference_pb2.BeamSearch(width=4, length_penalty=1.0, early_stopping=False)
    assert tokens.beam_search.HasField("length_penalty")
    assert tokens.num_choices == 3
    other = await prepared(request(beam_search={"width": 1, "length_penalty": -0.5, "early_stopping": True}))
    assert other.beam_search == inference_pb2.BeamSearch(width=1, length_penalty=-0.5, early_stopping=True)


async def test_no_tokens_with_echo_or_prompt_logprobs_only() -> None:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    for fields in ({"echo": True}, {"prompt_logprobs": 0}):
        accepted = await prepare(request(stopping={"max_tokens": 0}, **fields), model, arrived=0.0, deadline=None)
        assert (accepted.is_empty, accepted.tokens.max_tokens) == (True, 1)
    assert (await refused(request("x" * 64, stopping={"max_tokens": 0}, echo=True))).field == "prompt"


CHAT = {"messages": [{"role": "user", "content": "x"}]}
TOOL_CHAT = CHAT | {"tools": [{"name": "f"}], "tool_choice": {"mode": inference_pb2.ToolChoice.MODE_REQUIRED}}


async def test_a_demanded_call_is_a_grammar() -> None:
    assert "call" in (await prepared(request(prompt={"chat": TOOL_CHAT}))).grammar
    assert (await prepared(request(prompt={"chat": CHAT}))).grammar == ""


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
        ({"stopping": {"max_tokens": 0, "min_tokens": 0}, "echo": False}, "stopping.max_tokens", "1 to 1048576"),
        ({"stopping": {"max_tokens": -1}, "echo": True}, "stopping.max_tokens", "0 to 1048576"),
        ({"stopping": {"min_tokens": -1}}, "stopping.min_tokens", "0 to 1048576"),
        ({"stopping": {"min_tokens": 5, "max_tokens": 4}}, "stopping.min_tokens", "max_tokens, which is 4"),
        ({"stopping": {"min_tokens": 63}}, "stopping.min_tokens", "max_tokens, which is 62"),
        ({"sampling": {"typical_p": 0.0}}, "sampling.typical_p", "greater than 0"),
        ({"sampling": {"typical_p": 1.1}}, "sampling.typical_p", "at most 1"),
        ({"sampling": {"typical_p": math.nan}}, "sampling.typical_p", "at most 1"),
        ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty", "0.01 to 10"),
        ({"sampling": {"repetition_penalty": 0.0099}}, "sampling.repetition_penalty", "0.01 to 10"),
        ({"sampling": {"repetition_penalty": 10.1}}, "sampling.repetition_penalty", "0.01 to 10"),
        ({"sampling": {"repetition_penalty": math.inf}}, "sampling.repetition_penalty", "0.01 to 10"),
        ({"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty", "-2 to 2"),
        ({"sampling": {"presence_penalty": math.nan}}, "sampling.presence_penalty", "-2 to 2"),
        ({"sampling": {"frequency_penalty": -2.1}}, "sampling.frequency_penalty", "-2 to 2"),
        ({"sampling": {"frequency_penalty": -math.inf}}, "sampling.frequency_penalty", "-2 to 2"),
        ({"sampling": {"logit_bias": {1: 100.1}}}, "sampling.logit_bias[1]", "-100 to 100"),
        ({"sampling": {"logit_bias": {7: math.nan}}}, "sampling.logit_bias[7]", "-100 to 100"),
        ({"sampling": {"logit_bias": {VOCAB: 1.0}}}, "sampling.logit_bias", "258 tokens"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(1_025), 1.0)}}, "sampling.logit_bias", "at most 1024"),
        ({"sampling": {"bad_words": ["x"] * 129}}, "sampling.bad_words", "at most 128"),
        ({"sampling": {"bad_words": ["x", "y", "z", ""]}}, "sampling.bad_words[3]", "1 to 256"),
        ({"sampling": {"bad_words": ["x" * 257]}}, "sampling.bad_words[0]", "1 to 256"),
        ({"sampling": {"bad_words": ["x", "y" * 64]}}, "sampling.bad_words[1]", "at most 64"),
        ({"n": 33}, "n", "0 to 32"),
        ({"best_of": 33}, "best_of", "0 to 32"),
        ({"n": 3, "best_of": 2}, "best_of", "n, which is 3"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
        ({"priority": 101}, "priority", "-100 to 100"),
        ({"priority": -101}, "priority", "-100 to 100"),
        ({"echo": True, "prompt": {"chat": CHAT}}, "echo", "chat"),
        ({"beam_search": {}}, "beam_search.width", "1 to 16"),
        ({"beam_search": {"width": 17}}, "beam_search.width", "1 to 16"),
        ({"beam_search": {"width": 3}, "n": 4}, "n", "beam_search.width, which is 3"),
        ({"beam_search": {"width": 3, "length_penalty": 10.1}}, "beam_search.length_penalty", "-10 to 10"),
        ({"beam_search": {"width": 3, "length_penalty": math.nan}}, "beam_search.length_penalty", "-10 to 10"),
        ({"beam_search": {"width": 3}, "sampling": {"seed": 0}}, "sampling.seed", "beam_search"),
        ({"beam_search": {"width": 3}, "sampling": {"temperature": 1.0}}, "sampling.temperature", "beam_search"),
        ({"beam_search": {"width": 3}, "best_of": 3}, "best_of", "beam_search"),
        ({"beam_search": {"width": 3}, "logprobs": 0}, "logprobs", "beam_search"),
        ({"beam_search": {"width": 3}, "constraint": {"regex": "a"}}, "constraint", "beam_search"),
        ({"constraint": {"regex": "a"}, "stopping": {"min_tokens": 1}}, "stopping.min_tokens", "constraint"),
        ({"constraint": {"regex": "a"}, "stopping": {"ignore_eos": True}}, "stopping.ignore_eos", "constraint"),
        ({"constraint": {"regex": "a("}}, "constraint.regex", "unclosed group"),
        ({"constraint": {"regex": "a"}, "prompt": {"chat": TOOL_CHAT}}, "constraint", "tool_choice"),
        ({"beam_search": {"width": 3}, "prompt": {"chat": TOOL_CHAT}}, "beam_search", "tool_choice"),
        ({"stopping": {"min_tokens": 1}, "prompt": {"chat": TOOL_CHAT}}, "stopping.min_tokens", "constraint"),
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
        ({"n": 32, "best_of": 32, "logprobs": 20, "prompt_logprobs": 20, "priority": 100, "echo": True}, "hi"),
        ({"priority": -100, "stopping": {"min_tokens": 62}}, "hi"),
        ({"sampling": {"repetition_penalty": 0.01, "presence_penalty": 2.0, "frequency_penalty": -2.0}}, "hi"),
        ({"sampling": {"repetition_penalty": 10.0, "typical_p": 1.0, "bad_words": ["x" * 63] * 128}}, "hi"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(VOCAB), 100.0)}}, "hi"),
        ({"beam_search": {"width": 16, "length_penalty": -10.0}, "n": 16}, "hi"),
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
