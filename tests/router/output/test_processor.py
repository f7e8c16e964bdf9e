"""Tests several completions of one prompt, with echo, log probabilities and tool calls."""

import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import DeadlineExceeded
from tandem.router.api.service import GenerationService
from tandem.router.frontend.prepare import RequestContext, prepare
from tandem.router.frontend.served_model import ServedModel
from tandem.router.output.choice import ChoiceOutput
from tandem.router.output.processor import OutputProcessor
from tandem.router.request import TokenDelta
from tandem.router.telemetry.requests import EndedRequest, RequestTelemetry
from tandem.tests.router.api.answers import (
    LENGTH,
    STOP,
    collect,
    collect_all,
    ids,
    of_choice,
    request,
    text,
)
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer

TIME = inference_pb2.FINISH_REASON_TIME


class CutSource(FakeTokenSource):
    """Generates `answers`, each of at most one token, until max_time_ms ends all of them."""

    async def generate(self, *_args: Any) -> AsyncGenerator[TokenDelta, None]:
        scores = (worker_pb2.TokenScores(logprob=-9.0),)
        for choice, own in enumerate(self.answers):
            yield TokenDelta(
                first_index=0,
                ids=tuple(own),
                finish_reason=TIME,
                choice=choice,
                logprobs=scores[: len(own)],
            )


async def test_choices_end_each_for_itself(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"abc", [*b"de", EOS_ID], b"fghij"])
    timeline = inference_pb2.Timeline()
    messages = await collect_all(model, source, request(n=3, stopping={"max_tokens": 4}), timeline)
    assert [text(of_choice(messages, choice)) for choice in range(3)] == ["abc", "de", "fghi"]
    assert [of_choice(messages, choice)[-1].finish_reason for choice in range(3)] == [
        LENGTH,
        STOP,
        LENGTH,
    ]
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, timeline.completion_tokens) == (2, 10, 10)
    assert source.requests[0].submit.num_choices == 3


async def test_a_stop_string_ends_its_choice_alone(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"one END two", b"three four", b"END"])
    messages = await collect_all(model, source, request(n=3, stopping={"stop": ["END"]}))
    assert [text(of_choice(messages, choice)) for choice in range(3)] == ["one ", "three four", ""]
    assert (
        bytes(ids(of_choice(messages, 0))) == b"one END"
    )  # the source was told, and said nothing more
    assert source.cancelled == 0


async def test_when_stop_strings_have_ended_all_the_source_is_left(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"xyEND" + b"." * 50] * 2)
    messages = await collect_all(model, source, request(n=2, stopping={"stop": ["END"]}))
    assert [text(of_choice(messages, choice)) for choice in range(2)] == ["xy", "xy"]
    assert source.cancelled == 1


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, "ab"), (2, "ab"), (3, "abENDcd"), (4, "abENDcd"), (6, "abENDcd")],
)
@pytest.mark.parametrize("tokens_per_delta", [1, 4, 100])
async def test_stop_strings_begin_after_min_tokens(
    model: ServedModel, min_tokens: int, expected: str, tokens_per_delta: int
) -> None:
    source = FakeTokenSource(answer=b"abENDcdENDx", tokens_per_delta=tokens_per_delta)
    messages = await collect(
        model, source, request(stopping={"stop": ["END"], "min_tokens": min_tokens})
    )
    assert (text(messages), messages[-1].finish_reason) == (expected, STOP)


async def test_the_text_of_min_tokens_is_not_held(model: ServedModel) -> None:
    message = request(stopping={"stop": ["EN", "x"], "min_tokens": 2})
    messages = await collect(model, FakeTokenSource(answer=b"ENE"), message)
    assert [m.text for m in messages] == ["E", "N", "E"]


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
async def test_a_match_of_stop_regex_ends_its_choice_at_the_exact_token(
    model: ServedModel, tokens_per_delta: int
) -> None:
    source = FakeTokenSource(
        answers=[b"a Step 12. b Step 3: c", b"Step 4", b"x\nStep 5:"],
        tokens_per_delta=tokens_per_delta,
    )
    stopping = {"stop_regex": r"Step \d+:", "stop": ["END"], "max_tokens": 40}
    message = request(n=3, stopping=stopping)
    messages = await collect_all(model, source, message)
    choices = [of_choice(messages, choice) for choice in range(3)]
    assert [text(each) for each in choices] == ["a Step 12. b ", "Step 4", "x\n"]
    assert bytes(ids(choices[0])) == b"a Step 12. b Step 3:"
    assert [each[-1].stop_string for each in choices] == ["Step 3:", "", "Step 5:"]
    assert [each[-1].finish_reason for each in choices] == [STOP, LENGTH, STOP]


async def test_many_tokens_at_once_are_searched_outside_the_event_loop(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a client has not read for a while, or with a pattern of many positions.

    Such a pattern may cost 0.1 ms for each of the 128 characters of a token.
    """
    push = ChoiceOutput.push
    threads = []

    def pushed(self: ChoiceOutput, delta: TokenDelta) -> inference_pb2.GenerateResponse:
        threads.append(threading.current_thread())
        return push(self, delta)

    monkeypatch.setattr(ChoiceOutput, "push", pushed)
    stops: dict[int, dict[str, Any]] = {
        0: {"stop": ["abb"]},
        6: {"stop_regex": "ab+c|abb"},
        255: {"stop_regex": "[^x]{252}|abb"},
    }
    for length, num_positions in ((30, 6), (60, 6), (100, 0), (300, 0), (2, 255)):
        source = FakeTokenSource(answer=b"a" * length + b"bb", tokens_per_delta=400)
        stopping = stops[num_positions] | {"max_tokens": 400}
        assert text(await collect(model, source, request(stopping=stopping))) == "a" * (length - 1)
    is_here = [each is threading.current_thread() for each in threads]
    assert is_here == [True, False, True, False, False]


@pytest.mark.parametrize("tokens_per_delta", [1, 4, 100])
async def test_a_repetition_ends_its_choice_with_its_text(
    model: ServedModel, tokens_per_delta: int
) -> None:
    source = FakeTokenSource(
        answers=[b"xabababab", b"ababab", [*b"abab", EOS_ID]], tokens_per_delta=tokens_per_delta
    )
    stopping = {"repetition_stop_ngram": 2, "repetition_stop_count": 3, "stop": ["abx"]}
    messages = await collect_all(model, source, request(n=3, stopping=stopping))
    choices = [of_choice(messages, choice) for choice in range(3)]
    assert [text(each) for each in choices] == ["xababab", "ababab", "abab"]
    assert [bytes(ids(each)[:7]) for each in choices[:2]] == [b"xababab", b"ababab"]
    repetition = inference_pb2.FINISH_REASON_REPETITION
    assert [each[-1].finish_reason for each in choices] == [repetition, repetition, STOP]


async def test_the_rule_that_holds_at_the_earlier_token_counts(model: ServedModel) -> None:
    stopping = {
        "repetition_stop_ngram": 1,
        "repetition_stop_count": 3,
        "stop_regex": "ab+",
        "min_tokens": 2,
    }
    for answer, expected in ((b"xxxab", "xxx"), (b"xxabbb", "xx"), (b"abxxxx", "abxxx")):
        source = FakeTokenSource(answer=answer, tokens_per_delta=10)
        assert text(await collect(model, source, request(stopping=stopping))) == expected


async def test_the_requested_stop_token_is_named(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"abc", [*b"d", EOS_ID], b"xy"])
    message = request(n=3, stopping={"stop_token_ids": [ord("c")], "stop": ["y"]})
    messages = await collect_all(model, source, message)
    last = [of_choice(messages, choice)[-1] for choice in range(3)]
    assert [each.stop_token_id for each in last] == [ord("c"), 0, 0]
    assert [each.HasField("stop_token_id") for each in last] == [True, False, False]


async def test_echo_repeats_the_prompt_before_each_choice(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"ab", b"c"])
    messages = await collect_all(model, source, request(prompt={"text": "grüß "}, echo=True, n=2))
    assert [of_choice(messages, choice)[0].text for choice in range(2)] == ["grüß a", "grüß c"]
    assert [text(of_choice(messages, choice)) for choice in range(2)] == ["grüß ab", "grüß c"]


async def test_echo_of_tokens_and_of_a_truncated_prompt(model: ServedModel) -> None:
    source = FakeTokenSource(answer=b"x")
    tokens = {"token_ids": {"ids": [*b"abc", EOS_ID]}}
    assert text(await collect(model, source, request(prompt=tokens, echo=True))) == "abc<|end|>x"
    message = request(
        prompt={"text": "ab" * 300},
        echo=True,
        truncate_prompt=True,
        stopping={"max_tokens": 1, "stop": ["b"]},
    )
    assert text(await collect(model, source, message)) == ("ab" * 300)[-511:] + "x"


@pytest.mark.parametrize(
    ("answer", "is_cut", "reason"),
    [(b"x", False, LENGTH), ([EOS_ID], False, LENGTH), (b"x", True, TIME)],
)
async def test_no_tokens_at_all(
    model: ServedModel,
    answer: Sequence[int],
    is_cut: bool,
    reason: "inference_pb2.FinishReason",
) -> None:
    source = FakeTokenSource(answer=answer, stall_after=0 if is_cut else None)
    message = request(
        echo=True,
        prompt_logprobs=1,
        logprobs=1,
        stopping={"max_tokens": 0, "max_time_ms": 1 if is_cut else 0},
    )
    (only,) = await collect(model, source, message)
    assert (only.text, list(only.token_ids), list(only.logprobs), only.finish_reason) == (
        "hi",
        [],
        [],
        reason,
    )
    found = [entry.token.text for entry in only.prompt_logprobs]
    assert found == ([] if is_cut else [b"h", b"i"])
    assert (only.usage.prompt_tokens, only.usage.completion_tokens) == (2, 0)
    assert source.requests[0].submit.max_tokens == 1


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize(
    ("answers", "expected"), [([b""], 0), ([b"", b""], 0), ([b"b"], 2), ([b"b", b""], 2)]
)
async def test_a_prompt_that_the_time_has_left_uncomputed_is_not_written_to_the_cache(
    model: ServedModel, answers: list[bytes], expected: int, max_tokens: int
) -> None:
    message = request(
        n=len(answers),
        prompt_cache_retention="1h",
        stopping={"max_tokens": max_tokens, "max_time_ms": 1},
    )
    messages = await collect_all(model, CutSource(answers=answers), message)
    assert messages[0].cache_write_tokens == expected
    assert messages[-1].usage.cache_write_tokens == expected


def logprob_of(token: int) -> float:
    return -(token + 1) / 1000


async def test_logprobs_have_the_bytes_of_tokens(model: ServedModel) -> None:
    answer = [*"aü".encode(), EOS_ID]
    messages = await collect(
        model, FakeTokenSource(answer=answer, tokens_per_delta=2), request(logprobs=2)
    )
    entries = [entry for message in messages for entry in message.logprobs]
    assert [entry.token.token_id for entry in entries] == answer
    assert [entry.token.text for entry in entries] == [b"a", b"\xc3", b"\xbc", b"<|end|>"]
    assert [entry.token.logprob for entry in entries] == pytest.approx(
        [logprob_of(token) for token in answer]
    )
    assert [[top.token_id for top in entry.top] for entry in entries] == [[0, 1]] * 4
    assert all(len(message.logprobs) == len(message.token_ids) for message in messages)


async def test_logprobs_end_with_the_stop_string(model: ServedModel) -> None:
    source = FakeTokenSource(answer=b"abENDxyz", tokens_per_delta=100)
    messages = await collect(model, source, request(logprobs=0, stopping={"stop": ["END"]}))
    assert (
        bytes(entry.token.token_id for message in messages for entry in message.logprobs)
        == b"abEND"
    )


async def test_logprobs_only_where_they_are_asked_for(model: ServedModel) -> None:
    messages = await collect(model, FakeTokenSource(answer=b"abc"), request())
    assert not any(message.logprobs or message.prompt_logprobs for message in messages)


@pytest.mark.parametrize("prompt", ["hello", "x" * 400, "h"])
async def test_prompt_logprobs_come_with_the_first_message_of_choice_0(
    model: ServedModel, prompt: str
) -> None:
    source = FakeTokenSource(answers=[b"ab", b"cd"])
    messages = await collect_all(
        model, source, request(prompt={"text": prompt}, n=2, prompt_logprobs=1)
    )
    first, *rest = of_choice(messages, 0)
    assert b"".join(entry.token.text for entry in first.prompt_logprobs) == prompt.encode()
    assert [entry.token.HasField("logprob") for entry in first.prompt_logprobs] == [False] + [
        True
    ] * (len(prompt) - 1)
    assert [len(entry.top) for entry in first.prompt_logprobs] == [0] + [1] * (len(prompt) - 1)
    assert not any(message.prompt_logprobs for message in rest + of_choice(messages, 1))


async def test_best_of_answers_the_likeliest(model: ServedModel) -> None:
    """The fake's log probability of a token is the lower the greater its number."""
    source = FakeTokenSource(answers=[b"zz", b"ba", b"zzzz", b"aaay", b"cc"])
    message = request(n=2, best_of=5, echo=True, prompt_logprobs=0)
    messages = await collect_all(model, source, message)
    assert [(m.choice, m.text, bytes(m.token_ids), m.finish_reason) for m in messages] == [
        (0, "hiba", b"ba", LENGTH),
        (1, "hicc", b"cc", LENGTH),
    ]
    assert not any(m.logprobs for m in messages)
    assert [len(m.prompt_logprobs) for m in messages] == [2, 0]
    assert messages[-1].usage.completion_tokens == 14  # all that were generated
    assert (source.requests[0].submit.num_choices, source.requests[0].submit.logprobs) == (5, 0)


async def test_best_of_counts_all_tokens_and_reports_logprobs(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"bSTOPzzzzzz", b"ccccc"])
    message = request(n=1, best_of=2, logprobs=1, stopping={"stop": ["ST"]})
    (only,) = await collect_all(model, source, message)
    assert (only.text, bytes(only.token_ids)) == ("b", b"bST")
    assert [entry.token.text for entry in only.logprobs] == [b"b", b"S", b"T"]


async def test_a_completion_that_the_time_has_left_empty_is_the_worst(model: ServedModel) -> None:
    message = request(n=2, best_of=3, stopping={"max_time_ms": 1})
    messages = await collect_all(model, CutSource(answers=[b"", b"b", b""]), message)
    assert [m.text for m in messages] == ["b", ""]


async def test_the_answered_completions_are_counted_alone(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"z", b"yb", b"zzz"])
    message = request(best_of=3, stopping={"stop": ["b"]})
    assert await counted_reasons(model, source, message) == ("stop",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"best_of": 3}, ("error",)),
        ({"n": 2, "best_of": 3}, ("error", "error")),
        ({"n": 3, "beam_search": {"width": 3}}, ("error", "error", "error")),
        ({"n": 3}, ("length", "error", "error")),
    ],
)
async def test_no_completion_of_a_held_answer_counts_before_all_have_ended(
    model: ServedModel, fields: dict[str, Any], expected: tuple[str, ...]
) -> None:
    class FailingSource(FakeTokenSource):
        async def generate(self, *_args: Any) -> AsyncGenerator[TokenDelta, None]:
            yield TokenDelta(first_index=0, ids=(1,), finish_reason=LENGTH)
            raise DeadlineExceeded("late")

    assert await counted_reasons(model, FailingSource(), request(**fields)) == expected


async def counted_reasons(
    model: ServedModel, source: FakeTokenSource, message: inference_pb2.GenerateRequest
) -> tuple[str, ...]:
    """Returns the finish reasons of the request that metrics and logs count."""
    found: list[EndedRequest] = []
    service = GenerationService(
        [model], source, telemetry=RequestTelemetry(observers=[found.append])
    )
    prepared = await service.accept(message, RequestContext(arrived=time.monotonic()))
    with suppress(DeadlineExceeded):
        async with aclosing(service.run(prepared, inference_pb2.Timeline())) as messages:
            async for _ in messages:
                pass
    (ended,) = found
    return ended.finish_reasons


async def test_beams_have_scores(model: ServedModel) -> None:
    source = FakeTokenSource(answers=[b"ab", b"cd"], tokens_per_delta=100)
    messages = await collect_all(model, source, request(n=2, beam_search={"width": 3}))
    assert [m.text for m in messages] == ["ab", "cd"]
    assert [m.score for m in messages] == pytest.approx([-0.197, -0.201])


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 1000])
async def test_tool_calls_are_not_in_the_text(model: ServedModel, tokens_per_delta: int) -> None:
    source = FakeTokenSource(
        answers=[[*f"So: {CALL}".encode(), EOS_ID], b"plain"], tokens_per_delta=tokens_per_delta
    )
    messages = await collect_all(model, source, request(prompt={"chat": TOOLS}, n=2))
    calling, plain = of_choice(messages, 0), of_choice(messages, 1)
    assert text(calling).rstrip() == "So:"
    (call,) = [call for message in calling for call in message.tool_calls]
    assert (call.name, call.arguments) == ("f", '{"x": 1}')
    assert calling[-1].finish_reason == inference_pb2.FINISH_REASON_TOOL_CALLS
    assert (text(plain), plain[-1].finish_reason) == ("plain", LENGTH)


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 1000])
async def test_a_cut_answer_ends_by_its_length_although_it_has_calls(
    model: ServedModel, tokens_per_delta: int
) -> None:
    source = FakeTokenSource(answer=f"{CALL}\n<tool_".encode(), tokens_per_delta=tokens_per_delta)
    messages = await collect(model, source, request(prompt={"chat": TOOLS}))
    assert [call.name for message in messages for call in message.tool_calls] == ["f"]
    assert messages[-1].finish_reason == LENGTH


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 1000])
async def test_a_call_of_gpt_oss_that_is_cut_after_its_header_is_text(
    tokens_per_delta: int,
) -> None:
    tokenizer = byte_tokenizer(chat_template="<|channel|>analysis")
    model = ServedModel(name="tiny", tokenizer=tokenizer, context_tokens=512)
    header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    called = inference_pb2.FINISH_REASON_TOOL_CALLS
    for answer, expected in (
        (header.encode(), (header, [], LENGTH)),
        ([*header.encode(), EOS_ID], ("", ["f"], called)),
    ):
        source = FakeTokenSource(answer=answer, tokens_per_delta=tokens_per_delta)
        messages = await collect(model, source, request(prompt={"chat": TOOLS}))
        names = [call.name for message in messages for call in message.tool_calls]
        assert (text(messages), names, messages[-1].finish_reason) == expected


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 1000])
async def test_an_answer_of_a_single_call_ends_after_it(
    model: ServedModel, tokens_per_delta: int
) -> None:
    source = FakeTokenSource(answer=f"So: {CALL}{CALL}".encode(), tokens_per_delta=tokens_per_delta)
    chat = TOOLS | {"tool_choice": {"single_call": True}}
    messages = await collect(model, source, request(prompt={"chat": chat}, logprobs=0))
    assert [call.name for message in messages for call in message.tool_calls] == ["f"]
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_TOOL_CALLS
    expected = f"So: {CALL}".encode()
    assert bytes(token for message in messages for token in message.token_ids) == expected
    assert len([each for message in messages for each in message.logprobs]) == len(expected)
    assert messages[-1].usage.completion_tokens == len(expected)


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 1000])
@pytest.mark.parametrize("stopping", [{"stop": ["END"]}, {"stop_token_ids": [ord("!")]}])
async def test_what_stops_after_a_single_call_is_not_named(
    model: ServedModel, stopping: dict[str, Any], tokens_per_delta: int
) -> None:
    source = FakeTokenSource(answer=f"{CALL}\nEND!".encode(), tokens_per_delta=tokens_per_delta)
    chat = TOOLS | {"tool_choice": {"single_call": True}}
    messages = await collect(model, source, request(prompt={"chat": chat}, stopping=stopping))
    assert bytes(ids(messages)) == CALL.encode()
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_TOOL_CALLS
    assert (messages[-1].stop_string, messages[-1].HasField("stop_token_id")) == ("", False)


async def test_a_stop_string_that_is_a_special_token_ends_the_choice(model: ServedModel) -> None:
    """The token has no text in which a stop string could be found."""
    source = FakeTokenSource(answer=[*b"ab", EOS_ID, *b"cd"])
    stopping = {"stop": ["x", "<|end|>"], "ignore_eos": True}
    messages = await collect(model, source, request(stopping=stopping))
    assert text(messages) == "ab"
    assert (messages[-1].finish_reason, messages[-1].stop_string) == (STOP, "<|end|>")
    assert messages[-1].usage.completion_tokens == 3
    assert source.requests[-1].submit.stop_token_ids == [EOS_ID]


async def test_the_first_message_alone_has_the_cached_tokens(model: ServedModel) -> None:
    request_ = await prepare(request(), model, RequestContext(arrived=0.0))
    timeline = inference_pb2.Timeline(cached_tokens=7)
    source = FakeTokenSource(answer=b"abc")
    deltas = source.generate(request_.tokens, inference_pb2.Timeline())
    run = OutputProcessor(request_, timeline).run(deltas)
    messages = [message async for message in run]
    assert [message.cached_tokens for message in messages] == [7] + [0] * (len(messages) - 1)
    assert messages[-1].usage.cached_tokens == 7
