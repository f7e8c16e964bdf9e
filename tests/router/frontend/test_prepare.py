import json
import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from tandem.proto import inference_pb2, limits, worker_pb2
from tandem.proto.errors import ContextExceeded, InvalidArgument, PromptTooLong
from tandem.proto.hashing import hash_tenant
from tandem.router.auth.authenticator import Caller
from tandem.router.frontend import constraint
from tandem.router.frontend import prepare as prepare_module
from tandem.router.frontend.prepare import RequestContext, prepare
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.validation import answer_size
from tandem.router.stopping.rules import StopRules, stop_rules
from tandem.tests.router.api.bounds import ALLOWED, CHAT, REFUSED, TOOL_CHAT
from tandem.tests.router.fake_source import byte_tokenizer

CONTEXT = RequestContext(arrived=1.0, deadline=9.0)
MODEL = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)


def request(text: str = "hi", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**({"prompt": {"text": text}} | fields))


async def prepared(
    message: inference_pb2.GenerateRequest,
    context: int = 64,
    defaults: dict[str, float] | None = None,
) -> worker_pb2.Submit:
    model = ServedModel(
        name="tiny", tokenizer=byte_tokenizer(), context_tokens=context, defaults=defaults or {}
    )
    return (await prepare(message, model, CONTEXT)).tokens.submit


async def refused(message: inference_pb2.GenerateRequest, context: int = 64) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        await prepared(message, context)
    return caught.value


async def test_defaults_are_set_explicitly() -> None:
    submit = await prepared(request())
    assert submit.token_ids == [104, 105]
    assert submit.max_tokens == 16
    assert submit.sampling.HasField("temperature")
    assert submit.sampling.HasField("top_p")
    assert submit.sampling.HasField("seed")
    assert (submit.sampling.temperature, submit.sampling.top_p) == (1.0, 1.0)
    assert (submit.sampling.top_k, submit.sampling.min_p) == (0, 0.0)
    assert not submit.ignore_eos


async def test_times_and_the_tenant_stay_at_the_router() -> None:
    sent = set()
    for tenant in ("", "ada", "bob"):
        context = replace(CONTEXT, caller=Caller(tenant=tenant))
        tokens = (await prepare(request(), MODEL, context)).tokens
        assert (tokens.tenant, tokens.arrived, tokens.deadline) == (tenant, 1.0, 9.0)
        assert tokens.submit.tenant == hash_tenant(tenant)
        assert not tenant or tenant.encode() not in tokens.submit.SerializeToString()
        sent.add(tokens.submit.tenant)
    assert len(sent) == 3


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
    stopping = {
        "max_tokens": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 257],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    message = request(
        sampling=sampling,
        stopping=stopping,
        n=2,
        best_of=3,
        logprobs=4,
        prompt_logprobs=5,
        priority=-7,
    )
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    accepted = await prepare(message, model, CONTEXT)
    submit = accepted.tokens.submit
    assert submit.sampling == inference_pb2.SamplingParams(**sampling)
    assert (submit.max_tokens, submit.ignore_eos) == (3, True)
    assert list(submit.stop_token_ids) == [1, 257]
    assert (submit.num_choices, accepted.num_returned, submit.min_tokens, submit.priority) == (
        3,
        2,
        2,
        -7,
    )
    assert (submit.logprobs, submit.prompt_logprobs, accepted.wants_logprobs) == (4, 5, True)
    assert accepted.stops.strings == ("a", "b")


async def test_processed_logprobs_need_logprobs_that_no_ranking_uses() -> None:
    submit = await prepared(request(logprobs=1, processed_logprobs=True))
    assert submit.processed_logprobs
    for wrong in (
        request(processed_logprobs=True),
        request(processed_logprobs=True, logprobs=1, n=2, best_of=3),
    ):
        with pytest.raises(InvalidArgument, match=r"^processed_logprobs: "):
            await prepared(wrong)


async def test_best_of_wants_logprobs_for_itself() -> None:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    accepted = await prepare(request(best_of=2), model, CONTEXT)
    assert (accepted.tokens.submit.logprobs, accepted.wants_logprobs, accepted.num_returned) == (
        0,
        False,
        1,
    )
    assert accepted.tokens.submit.HasField("logprobs")
    assert not (await prepared(request(n=2, best_of=2))).HasField("logprobs")


async def test_a_pattern_is_compiled_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 250 characters may take 80 ms."""
    threads = []

    def compiled(*args: Any) -> StopRules:
        threads.append(threading.current_thread())
        return stop_rules(*args)

    monkeypatch.setattr(prepare_module, "stop_rules", compiled)
    for pattern in ("", "a"):
        await prepared(request(stopping={"stop_regex": pattern}))
    assert [each is threading.current_thread() for each in threads] == [True, False]


async def test_minus_zero_is_zero() -> None:
    names = ("temperature", "min_p", "presence_penalty", "frequency_penalty")
    submit = await prepared(request(sampling=dict.fromkeys(names, -0.0)))
    assert [math.copysign(1, getattr(submit.sampling, name)) for name in names] == [1.0] * 4


async def test_bad_words_with_and_without_a_space_before() -> None:
    submit = await prepared(request(sampling={"bad_words": ["ab", " ab", "c"]}))
    assert [bytes(word.ids) for word in submit.bad_words] == [b"ab", b" ab", b"c", b" c"]
    assert not submit.sampling.bad_words


async def test_a_beam_search_has_every_field_set() -> None:
    submit = await prepared(request(beam_search={"width": 4}, n=3))
    assert submit.beam_search == inference_pb2.BeamSearch(
        width=4, length_penalty=1.0, early_stopping=False
    )
    assert submit.beam_search.HasField("length_penalty")
    assert submit.num_choices == 3
    other = await prepared(
        request(beam_search={"width": 1, "length_penalty": -0.5, "early_stopping": True})
    )
    assert other.beam_search == inference_pb2.BeamSearch(
        width=1, length_penalty=-0.5, early_stopping=True
    )


async def test_no_tokens_with_echo_or_prompt_logprobs_only() -> None:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    for fields in ({"echo": True}, {"prompt_logprobs": 0}):
        accepted = await prepare(request(stopping={"max_tokens": 0}, **fields), model, CONTEXT)
        assert (accepted.is_empty, accepted.tokens.submit.max_tokens) == (True, 1)
    assert (
        await refused(request("x" * 64, stopping={"max_tokens": 0}, echo=True))
    ).field == "prompt"


@pytest.mark.parametrize("prompt", [{"text": "x" * 30}, {"token_ids": {"ids": [120] * 30}}])
async def test_the_text_that_echo_repeats_is_bounded(
    monkeypatch: pytest.MonkeyPatch, prompt: dict[str, Any]
) -> None:
    monkeypatch.setattr(limits, "MAX_RETURNED_CHARACTERS", 100)
    assert (await prepared(request(prompt=prompt, echo=True, n=3))).num_choices == 3
    error = await refused(request(prompt=prompt, echo=True, n=4))
    assert error.message.startswith("echo: repeats 120 characters")
    monkeypatch.setattr("tandem.router.frontend.tokenizer.MAX_RETURNED_CHARACTERS", 29)
    if "token_ids" in prompt:
        error = await refused(request(prompt=prompt, echo=True))
        assert error.message == "echo: has 30 characters; the maximum is 29"


async def test_a_demanded_call_is_a_grammar() -> None:
    assert "call" in (await prepared(request(prompt={"chat": TOOL_CHAT}))).grammar
    assert (await prepared(request(prompt={"chat": CHAT}))).grammar == ""


@pytest.mark.parametrize("mode", ["MODE_REQUIRED", "MODE_UNSPECIFIED"])
async def test_schemas_of_tools_are_rewritten_in_another_process(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """This may take long, and other requests do not wait for it."""

    def here(_schema: object) -> object:
        raise AssertionError

    monkeypatch.setattr(constraint, "readable", here)
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [
            {"name": "f", "parameters": '{"properties": {"a": {"not": false, "minimum": 2}}}'}
        ],
        "tool_choice": {"mode": mode},
    }
    fields: dict[str, Any] = {}
    if mode != "MODE_REQUIRED":
        fields = {"constraint": {"json_object": True}}
    grammar = (await prepared(request(prompt={"chat": chat}, **fields))).grammar
    assert "minimum" in grammar
    assert "not" not in grammar
    chat["tools"] = [{"name": "f", "parameters": '{"properties": {"a": {"not": {}}}}'}]
    error = await refused(request(prompt={"chat": chat}, **fields))
    assert error.field == "prompt.chat.tools"
    assert "the arguments of 'f': property 'a': the keyword 'not'" in error.message


async def test_large_tools_and_a_large_schema_fit_together() -> None:
    """Each is within its bound, and the whole is longer since it quotes them."""
    parameters = {"type": "object", "description": '"' * 30_000}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "parameters": json.dumps(parameters)}],
    }
    schema = json.dumps({"enum": ["x" * 60_000]})
    message = request(prompt={"chat": chat}, constraint={"json_schema": schema})
    grammar = (await prepared(message, 2**20)).grammar
    assert len(grammar) > limits.MAX_GRAMMAR_CHARACTERS


async def test_a_seed_of_zero_is_a_seed_and_none_is_random() -> None:
    assert (await prepared(request(sampling={"seed": 0}))).sampling.seed == 0
    assert len({(await prepared(request())).sampling.seed for _ in range(4)}) == 4


async def test_top_k_of_minus_one_keeps_all() -> None:
    assert (await prepared(request(sampling={"top_k": -1}))).sampling.top_k == 0


async def test_requests_with_equal_ids_are_distinguished() -> None:
    first, second = [(await prepared(request(request_id="mine"))).request_id for _ in range(2)]
    assert first != second
    assert first.startswith("mine.")


async def test_kinds_of_prompt() -> None:
    ids = await prepared(request(prompt={"token_ids": {"ids": [0, 257]}}))
    assert ids.token_ids == [0, 257]
    chat = await prepared(
        request(prompt={"chat": {"messages": [{"role": "user", "content": "x"}]}})
    )
    assert bytes(chat.token_ids) == b"[user] x\n[assistant] "


@pytest.mark.parametrize(("fields", "field", "bound"), REFUSED)
async def test_each_bound_names_field_and_bound(
    fields: dict[str, Any], field: str, bound: str
) -> None:
    error = await refused(request(**fields))
    assert error.field == field
    assert bound in error.message
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(("fields", "prompt"), ALLOWED)
async def test_the_bounds_themselves_are_allowed(fields: dict[str, Any], prompt: str) -> None:
    assert len((await prepared(request(prompt, **fields))).token_ids) == len(prompt)


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
async def test_fit(
    length: int, explicit: int | None, truncate: bool, expected: tuple[int, int]
) -> None:
    ids = [i % 256 for i in range(length)]
    message = request(
        prompt={"token_ids": {"ids": ids}},
        stopping={"max_tokens": explicit},
        truncate_prompt=truncate,
    )
    submit = await prepared(message)
    assert (len(submit.token_ids), submit.max_tokens) == expected
    assert list(submit.token_ids) == ids[-expected[0] :]


@pytest.mark.parametrize(("length", "explicit"), [(64, None), (500, None), (64, 1), (60, 5)])
async def test_prompts_that_do_not_fit_are_refused_with_the_numbers(
    length: int, explicit: int | None
) -> None:
    error = await refused(request("x" * length, stopping={"max_tokens": explicit}))
    assert isinstance(error, ContextExceeded)
    assert error.field == "prompt"
    assert (error.num_prompt, error.num_generated, error.context) == (length, explicit or 1, 64)
    assert f"{length} prompt tokens and {explicit or 1} to generate" in error.message
    assert "64 tokens" in error.message
    remedy = "shorten the prompt" if length >= 64 else f"ask for at most {64 - length}"
    assert error.message.endswith(f"; {error.remedy}")
    assert error.remedy == remedy


CHAT_OF_21: dict[str, Any] = {"chat": {"messages": [{"role": "user", "content": "x"}]}}


@pytest.mark.parametrize("max_tokens", [None, 40, 64])
async def test_a_chat_is_kept_to_what_the_workers_hold(max_tokens: int | None) -> None:
    """A max_tokens that fits the model's context is reduced; all of the prompt has to fit."""
    model = MODEL.held_by(32, 32)
    context = replace(CONTEXT, reduces_max_tokens=True)
    message = request(prompt=CHAT_OF_21, stopping={"max_tokens": max_tokens})
    submit = (await prepare(message, model, context)).tokens.submit
    assert (len(submit.token_ids), submit.max_tokens) == (21, 11)
    with pytest.raises(ContextExceeded) as caught:
        await prepare(request("x" * 32, stopping={"max_tokens": max_tokens}), model, context)
    assert caught.value.context == 32
    with pytest.raises(InvalidArgument, match=r"65 leaves no token .* of 64 tokens"):
        await prepare(request(prompt=CHAT_OF_21, stopping={"max_tokens": 65}), model, context)


def test_workers_never_raise_the_configured_context() -> None:
    for held in (64, 65, 1_000):
        model = MODEL.held_by(40, 40).held_by(held, held)
        assert (model.context_tokens, model.common_tokens) == (64, 64)


# (prompt tokens, max_tokens, truncate) -> (kept prompt tokens, max_tokens)
@pytest.mark.parametrize(
    ("length", "explicit", "truncate", "expected"),
    [
        (16, 16, False, (16, 16)),
        (16, 17, False, (16, 17)),
        (16, 32, False, (16, 32)),
        (47, None, False, (47, 1)),
        (500, 8, True, (40, 8)),
    ],
)
async def test_a_long_request_has_the_context_of_the_largest_worker(
    length: int, explicit: int | None, truncate: bool, expected: tuple[int, int]
) -> None:
    message = request("x" * length, stopping={"max_tokens": explicit}, truncate_prompt=truncate)
    submit = (await prepare(message, MODEL.held_by(32, 48), CONTEXT)).tokens.submit
    assert (len(submit.token_ids), submit.max_tokens) == expected


async def test_a_chat_goes_to_any_worker_if_the_smallest_one_has_room_for_an_answer() -> None:
    """Room is a quarter of what it holds."""
    for held, max_tokens in ((28, 28 - 21), (26, 48 - 21)):
        message = request(prompt=CHAT_OF_21)
        submit = (await prepare(message, MODEL.held_by(held, 48), CONTEXT)).tokens.submit
        assert submit.max_tokens == max_tokens


def long_chat(last: str, size: int = limits.MAX_PROMPT_CHARACTERS - 1) -> dict[str, Any]:
    """Returns a chat of two turns, of which the first begins with a message of `size`."""
    messages = [
        {"role": "user", "content": "x" * size},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": last},
    ]
    return {"chat": {"messages": messages}}


@pytest.mark.parametrize("excess", [4, 0])
async def test_turns_with_too_many_characters_are_dropped_if_asked_for(excess: int) -> None:
    """`excess`: characters above the bound; the template adds more."""
    chat = long_chat("last", limits.MAX_PROMPT_CHARACTERS - len("ylast") + excess)
    message = request(prompt=chat, truncation="auto")
    accepted = await prepare(message, MODEL, CONTEXT)
    assert bytes(accepted.tokens.submit.token_ids) == b"[user] last\n[assistant] "
    assert accepted.dropped_messages == 2
    message.truncation = "disabled"
    assert isinstance(await refused(message), PromptTooLong)


async def test_characters_that_must_stay_are_bounded() -> None:
    last = "z" * (limits.MAX_PROMPT_CHARACTERS + 1)
    error = await refused(request(prompt=long_chat(last), truncation="auto"))
    assert isinstance(error, PromptTooLong)
    assert error.message == "prompt.chat: has 1000001 characters; the maximum is 1000000"


async def test_a_prompt_that_the_template_makes_too_long_is_refused_as_such() -> None:
    chat = {"messages": [{"role": "user", "content": "x" * limits.MAX_PROMPT_CHARACTERS}]}
    error = await refused(request(prompt={"chat": chat}))
    assert isinstance(error, PromptTooLong)
    assert "renders more than 1000000 characters" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"pooling": inference_pb2.POOLING_MEAN},
        {"stopping": {"max_tokens": 0}, "prompt_logprobs": 0},
        {"stopping": {"max_tokens": 0}, "echo": True},
    ],
)
async def test_a_prompt_without_tokens_to_generate_is_one_shorter_than_the_context(
    fields: dict[str, Any],
) -> None:
    submit = (await prepare(request("x" * 63, **fields), MODEL, CONTEXT)).tokens.submit
    assert (len(submit.token_ids), submit.max_tokens) == (63, 1)
    with pytest.raises(ContextExceeded) as caught:
        await prepare(request("x" * 64, **fields), MODEL, CONTEXT)
    assert caught.value.message == (
        "prompt: 64 prompt tokens do not fit the context of 64 tokens; shorten the prompt to at "
        "most 63"
    )


@pytest.mark.parametrize("truncate", [False, True])
async def test_max_tokens_as_long_as_the_context_are_refused(truncate: bool) -> None:
    error = await refused(request(stopping={"max_tokens": 64}, truncate_prompt=truncate))
    assert error.field == "stopping.max_tokens"


async def test_without_max_tokens_a_text_has_16_and_a_chat_what_the_context_leaves() -> None:
    assert (await prepared(request("x" * 10))).max_tokens == 16
    assert (await prepared(request("x" * 60))).max_tokens == 4
    assert (await prepared(request("x", stopping={"max_tokens": 20}))).max_tokens == 20
    chat = await prepared(inference_pb2.GenerateRequest(prompt={"chat": CHAT}))
    assert len(chat.token_ids) + chat.max_tokens == 64


@pytest.mark.parametrize("fields", [{"logprobs": 5}, {"n": 32}, {"n": 3, "prompt_logprobs": 0}])
async def test_a_chat_without_max_tokens_is_never_too_large(fields: dict[str, Any]) -> None:
    context = 2**21
    message = inference_pb2.GenerateRequest(prompt={"chat": CHAT}, **fields)
    submit = await prepared(message, context)
    size = answer_size(message, len(submit.token_ids), submit.max_tokens)
    one_more = answer_size(message, len(submit.token_ids), submit.max_tokens + 1)
    assert size <= limits.MAX_ANSWER_SIZE < one_more
    message.stopping.max_tokens = submit.max_tokens + 1
    await refused(message, context)


async def test_what_a_request_leaves_out_is_as_the_model_says_and_its_own_value_wins() -> None:
    own = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
    defaults = {f"sampling.{name}": value for name, value in own.items()} | {
        "stopping.max_tokens": 5
    }
    submit = await prepared(request(), defaults=defaults)
    assert {name: getattr(submit.sampling, name) for name in own} == own
    assert submit.max_tokens == 5
    unset = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    given = await prepared(request(sampling=unset, stopping={"max_tokens": 9}), defaults=defaults)
    assert {name: getattr(given.sampling, name) for name in unset} == unset
    assert given.max_tokens == 9
    assert (
        await prepared(request(), defaults={"stopping.max_tokens": 50})
    ).max_tokens == 16  # of a text still
    searched = await prepared(request(beam_search={"width": 2}), defaults=defaults)
    assert {name: getattr(searched.sampling, name) for name in unset} == unset


# (prompt tokens, max_tokens) in a context of 64 -> (prompt tokens, max_tokens) where an API reduces
# max_tokens
@pytest.mark.parametrize(
    ("length", "explicit", "expected"),
    [(60, 5, (60, 4)), (60, 64, (60, 4)), (63, 64, (63, 1)), (10, 20, (10, 20))],
)
async def test_max_tokens_become_what_the_prompt_leaves(
    length: int, explicit: int, expected: tuple[int, int]
) -> None:
    message = request(
        prompt={"token_ids": {"ids": range(length)}}, stopping={"max_tokens": explicit}
    )
    context = RequestContext(arrived=0.0, reduces_max_tokens=True)
    submit = (await prepare(message, MODEL, context)).tokens.submit
    assert (len(submit.token_ids), submit.max_tokens) == expected


@pytest.mark.parametrize(
    ("length", "explicit", "truncate", "field"),
    [
        (60, 65, False, "stopping.max_tokens"),
        (64, 1, False, "prompt"),
        (60, 64, True, "stopping.max_tokens"),
    ],
)
async def test_what_does_not_fit_the_context_alone_is_refused(
    length: int, explicit: int, truncate: bool, field: str
) -> None:
    message = request(
        prompt={"token_ids": {"ids": range(length)}},
        stopping={"max_tokens": explicit},
        truncate_prompt=truncate,
    )
    with pytest.raises(InvalidArgument) as caught:
        await prepare(message, MODEL, RequestContext(arrived=0.0, reduces_max_tokens=True))
    assert caught.value.field == field


@pytest.mark.parametrize(("kept", "expected"), [(5, 5), (500, 60), (0, 60), (-1, 60)])
async def test_the_end_of_a_prompt_is_kept(kept: int, expected: int) -> None:
    message = request(prompt={"token_ids": {"ids": range(60)}}, truncate_prompt_tokens=kept)
    assert list((await prepared(message)).token_ids) == list(range(60))[-expected:]


async def test_as_much_as_fits_the_context_is_kept() -> None:
    message = request(prompt={"token_ids": {"ids": range(200)}}, truncate_prompt_tokens=-1)
    assert list((await prepared(message)).token_ids) == list(range(137, 200))


async def test_special_tokens_of_stop_count_towards_the_bound_of_stop_tokens() -> None:
    stopping = {"stop": ["<|end|>"], "stop_token_ids": range(limits.MAX_STOP_TOKEN_IDS)}
    error = await refused(request(stopping=stopping))
    assert error.field == "stopping.stop_token_ids"
    stopping["stop_token_ids"] = range(limits.MAX_STOP_TOKEN_IDS - 1)
    assert (
        len((await prepared(request(stopping=stopping))).stop_token_ids)
        == limits.MAX_STOP_TOKEN_IDS
    )
