"""A stream that breaks after any message goes on at another router as if nothing had happened."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.api.openai.resume import event_signer, with_id
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Caller
from tandem.router.auth.rate import Quota
from tandem.router.dispatch.submit import rest_of
from tandem.router.frontend.prepare import RequestContext
from tandem.router.frontend.served_model import ServedModel
from tandem.router.request import TokenDelta, TokenRequest
from tandem.router.resume import event_ids
from tandem.router.resume.policy import ResumePolicy
from tandem.router.scheduling.capacity import required_capacity
from tandem.tests.router.api.answers import Answers, request
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer

KEY = b"k" * 32
MODEL = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
CALL = b'<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CHAT = {"messages": [{"role": "user", "content": "x"}]}
TOOLS = CHAT | {"tools": [{"name": "f"}]}
Fields = dict[str, Any]


class CachingSource(FakeTokenSource):
    """Reuses one token more of the prompt with each request."""

    async def generate(
        self,
        request: TokenRequest,
        timeline: inference_pb2.Timeline,
        cancelled: Collection[int] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        timeline.cached_tokens = 1 + len(self.requests)
        async with aclosing(super().generate(request, timeline, cancelled)) as deltas:
            async for delta in deltas:
                yield delta


def ageless() -> ResumePolicy:
    """Returns a policy for which no time passes.

    Tokens are made when this file is imported, minutes before the tests.
    """
    return ResumePolicy(wall_clock=lambda: 0.0)


async def answer(
    message: inference_pb2.GenerateRequest,
    source: FakeTokenSource,
    *,
    key: bytes = KEY,
    tenant: str = "",
    model: ServedModel = MODEL,
) -> Answers:
    """The answer of a router of its own."""
    service = GenerationService([model], source, resume_key=key, resume_policy=ageless())
    context = RequestContext(
        arrived=time.monotonic(), caller=Caller(tenant=tenant), is_resumable=True
    )
    prepared = await service.accept(message, context)
    return [each async for each in service.run(prepared, inference_pb2.Timeline())]


async def answer_after(
    message: inference_pb2.GenerateRequest,
    source: FakeTokenSource,
    event_id: str,
    model: ServedModel = MODEL,
) -> list[tuple[inference_pb2.GenerateResponse, str]]:
    """Returns the messages of a new router that its client lacks, each with its event id."""
    service = GenerationService([model], source, resume_key=KEY, resume_policy=ageless())
    context = RequestContext(arrived=time.monotonic(), event_id=event_id)
    prepared = await service.accept(message, context)
    signer, timeline = event_signer(prepared), inference_pb2.Timeline()
    assert signer is not None
    return [
        (each, with_id(b"\n", signer.sign(timeline.cached_tokens)).decode()[4:].strip())
        async for each in service.run(prepared, timeline)
        if not signer.take(each.choice, each.token_ids, bool(each.finish_reason))
    ]


def resumed(
    message: inference_pb2.GenerateRequest, delivered: Answers
) -> inference_pb2.GenerateRequest:
    """The request with which a client goes on after these messages."""
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(message)
    found = {each.choice: inference_pb2.ResumedChoice() for each in delivered}
    for each in delivered:
        found[each.choice].token_ids.extend(each.token_ids)
        found[each.choice].resume_token = each.resume_token
    again.resume.extend(found.values())
    return again


def whole(messages: Answers) -> dict[str, Any]:
    """What a client makes of a stream. Calls of another answer have other ids."""
    choices: dict[int, Fields] = {}
    for each in messages:
        found = choices.setdefault(
            each.choice, {"text": "", "ids": [], "logprobs": [], "calls": [], "end": []}
        )
        assert each.first_index == len(found["ids"])
        found["text"] += each.text
        found["ids"] += each.token_ids
        found["logprobs"] += map(str, each.logprobs)
        found["calls"] += [(call.name, call.arguments) for call in each.tool_calls]
        found["end"] += [(each.finish_reason, each.score)] if each.finish_reason else []
    prompt = [str(entry) for each in messages for entry in each.prompt_logprobs]
    usages = [str(each.usage) for each in messages if each.HasField("usage")]
    return {"choices": choices, "prompt": prompt, "usages": usages}


def make_source(
    seed: int, tokens_per_delta: int, num_choices: int, *, calls: bool
) -> FakeTokenSource:
    """Returns a source of answers with few different bytes, so that short stop strings occur.

    They have characters of several bytes and calls.
    """
    chance = random.Random(seed)
    parts = ["a", "b", "ab ", " ", "ü", "🦊", "<tool"]
    answers: list[list[int]] = []
    for _ in range(num_choices):
        text = "".join(chance.choices(parts, k=chance.randrange(1, 25))).encode()
        text += (CALL if chance.random() < 0.7 else b"") + b"ba" if calls else b""
        answers.append([*text, *([EOS_ID] if chance.random() < 0.5 else [])])
    return CachingSource(answers=answers, tokens_per_delta=tokens_per_delta)


@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3),
    tokens_per_delta=st.integers(1, 4),
    num_choices=st.integers(1, 3),
    stop=st.lists(st.text("ab ü", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 6),
    stop_regex=st.sampled_from(["", "", "[ab]+ü", "b b|aaa", "(ab )+🦊"]),
    repetition=st.sampled_from([(0, 0), (0, 0), (1, 3), (3, 2)]),
    logprobs=st.none() | st.integers(0, 2),
    kind=st.sampled_from(["text", "echo", "tools", "best_of", "beam", "one token"]),
    prompt_logprobs=st.booleans(),
    id_bytes=st.sampled_from([None, 0, 20, event_ids.MAX_ID_BYTES]),
)
def test_what_came_before_and_after_a_cut_is_the_answer_without_one(
    seed: int,
    cuts: list[float],
    tokens_per_delta: int,
    num_choices: int,
    stop: list[str],
    min_tokens: int,
    stop_regex: str,
    repetition: tuple[int, int],
    logprobs: int | None,
    kind: str,
    prompt_logprobs: bool,
    id_bytes: int | None,
) -> None:
    """The client has resume tokens or, over HTTP, event ids with a bounded number of id bytes."""
    fields: Fields = {
        "n": num_choices,
        "stopping": {
            "stop": stop,
            "min_tokens": min_tokens,
            "max_tokens": 120,
            "stop_regex": stop_regex,
            "repetition_stop_ngram": repetition[0],
            "repetition_stop_count": repetition[1],
        },
    }
    fields |= {"sampling": {"seed": seed}} if kind != "beam" else {"beam_search": {"width": 4}}
    if kind != "beam":
        fields |= {"logprobs": logprobs, "prompt_logprobs": 1 if prompt_logprobs else None}
    kinds: dict[str, Fields] = {
        "echo": {"echo": True},
        "tools": {"prompt": {"chat": TOOLS}},
        "best_of": {"best_of": 4},
        "one token": {"prompt": {"text": "h"}},
    }
    fields |= kinds.get(kind, {})
    message = request(**fields)
    source = make_source(seed, tokens_per_delta, 4, calls=kind == "tools")
    expected = asyncio.run(answer(message, source))
    delivered: Answers = []
    rest = expected
    if id_bytes is not None:
        with patch.object(event_ids, "MAX_ID_BYTES", id_bytes):
            assert whole(after_events(message, source, cuts)) == whole(expected)
        return
    for cut in cuts:  # each breaks what was left
        delivered += rest[: int(cut * len(rest))]
        if not delivered:  # a first try; its cached tokens count
            source.requests.clear()
        rest = asyncio.run(answer(resumed(message, delivered), source))
    assert whole(delivered + rest) == whole(expected)
    assert bool(source.requests[-1].emitted) == (
        bool(delivered) and kind not in ("best_of", "beam")
    )


def after_events(
    message: inference_pb2.GenerateRequest, source: FakeTokenSource, cuts: list[float]
) -> Answers:
    """Returns the answer at the client of an HTTP stream that breaks, with new cuts each time."""
    event_id, delivered = "", Answers()
    source.requests.clear()
    rest = asyncio.run(answer_after(message, source, ""))
    for cut in cuts:
        if came := rest[: int(cut * len(rest))]:
            delivered += [each for each, _ in came]
            event_id = came[-1][1]
        else:
            source.requests.clear()
        source.tokens_per_delta = source.tokens_per_delta % 4 + 1
        rest = asyncio.run(answer_after(message, source, event_id))
    return delivered + [each for each, _ in rest]


async def test_a_chat_goes_on_after_midnight_although_its_prompt_has_the_date() -> None:
    now = datetime(2026, 3, 1, 23, 59, 50).timestamp()
    policy = ResumePolicy(wall_clock=lambda: now)
    template = "{{ strftime_now('%d %B') }}: {{ messages[0].content }}"
    model = replace(MODEL, tokenizer=byte_tokenizer(template))
    source = FakeTokenSource()
    service = GenerationService([model], source, resume_key=KEY, resume_policy=policy)

    async def ask(message: inference_pb2.GenerateRequest) -> Answers:
        context = RequestContext(arrived=time.monotonic(), is_resumable=True)
        prepared = await service.accept(message, context)
        return [each async for each in service.run(prepared, inference_pb2.Timeline())]

    message = request(prompt={"chat": CHAT}, stopping={"max_tokens": 9}, sampling={"seed": 7})
    expected = await ask(message)
    now += 40
    rest = await ask(resumed(message, expected[:4]))
    now += 40
    again = await ask(resumed(message, expected[:4] + rest[:2]))
    assert whole(expected[:4] + rest) == whole(expected)
    assert whole(expected[:4] + rest[:2] + again) == whole(expected)
    await ask(message)
    prompts = [bytes(each.submit.token_ids) for each in source.requests]
    assert prompts == [b"01 March: x"] * 3 + [b"02 March: x"]


@pytest.mark.parametrize("held", [40, 512])
async def test_an_answer_keeps_its_context_where_workers_hold_another_one(held: int) -> None:
    """Otherwise other turns would be dropped, or the answer would end at another place."""
    first, later = MODEL.held_by(64, 64), MODEL.held_by(held, held)
    turns = [("user", "x" * 40), ("assistant", "y"), ("user", "z")]
    messages = [{"role": role, "content": content} for role, content in turns]
    message = request(
        prompt={"chat": {"messages": messages}}, truncation="auto", sampling={"seed": 7}
    )
    source = FakeTokenSource()
    expected = await answer(message, source, model=first)
    rest = await answer(resumed(message, expected[:4]), source, model=later)
    assert whole(expected[:4] + rest) == whole(expected)
    events = await answer_after(message, source, "", first)
    others = await answer_after(message, source, events[3][1], later)
    assert whole([each for each, _ in events[:4] + others]) == whole(expected)
    submits = [each.submit for each in source.requests]
    assert {bytes(each.token_ids) for each in submits} == {b"[user] z\n[assistant] "}
    assert {each.max_tokens for each in submits} == {64 - len(submits[0].token_ids)}


def test_a_random_seed_is_kept() -> None:
    message = request(n=2, stopping={"max_tokens": 20})
    source = FakeTokenSource()
    expected = asyncio.run(answer(message, source))
    rest = asyncio.run(answer(resumed(message, expected[:9]), source))
    assert whole(expected[:9] + rest) == whole(expected)
    assert source.requests[1].submit.sampling.seed == source.requests[0].submit.sampling.seed


def test_long_answers_leave_the_event_loop() -> None:
    message = request(stopping={"max_tokens": 400})
    expected = asyncio.run(answer(message, FakeTokenSource()))
    rest = asyncio.run(answer(resumed(message, expected[:300]), FakeTokenSource()))
    assert whole(expected[:300] + rest) == whole(expected)


MESSAGE = request(n=2, sampling={"seed": 7}, stopping={"max_tokens": 10})
DELIVERED = asyncio.run(answer(MESSAGE, FakeTokenSource()))


def refusal(message: inference_pb2.GenerateRequest, **router: Any) -> tuple[str, str]:
    """The field that the refusal names, and its text."""
    source = FakeTokenSource()
    with pytest.raises(InvalidArgument) as caught:
        asyncio.run(answer(message, source, **router))
    assert source.requests == []
    return caught.value.field, caught.value.message


@pytest.mark.parametrize("byte", range(0, 50, 7))
def test_a_changed_token_is_refused(byte: int) -> None:
    message = resumed(MESSAGE, DELIVERED[:6])
    token = bytearray(message.resume[1].resume_token)
    token[byte] ^= 1
    message.resume[1].resume_token = bytes(token)
    assert refusal(message) == (
        "resume[1].resume_token",
        "resume[1].resume_token: is not a resume token of this service",
    )


@pytest.mark.parametrize(
    "token",
    [b"", b"x", DELIVERED[0].resume_token + b"x", DELIVERED[0].resume_token[:-1]],
    ids=["empty", "short", "longer", "shorter"],
)
def test_bytes_of_another_length_are_refused(token: bytes) -> None:
    message = resumed(MESSAGE, DELIVERED[:1])
    message.resume[0].resume_token = token
    assert refusal(message)[0] == "resume[0].resume_token"


def test_a_token_of_another_service_is_refused() -> None:
    assert (
        "not a resume token of this service"
        in refusal(resumed(MESSAGE, DELIVERED[:6]), key=b"x" * 32)[1]
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": {"text": "ho"}},
        {"sampling": {"seed": 8}},
        {"sampling": {"seed": 7, "top_k": 3}},
        {"stopping": {"max_tokens": 11}},
        {"stopping": {"max_tokens": 10, "stop": ["x"]}},
        {"logprobs": 0},
        {"n": 3},
    ],
)
def test_another_request_is_refused(changed: Fields) -> None:
    other = request(**({"n": 2, "sampling": {"seed": 7}, "stopping": {"max_tokens": 10}} | changed))
    assert refusal(resumed(other, DELIVERED[:6])) == (
        "resume[0].resume_token",
        "resume[0].resume_token: belongs to another request: prompt or parameters differ",
    )


def test_another_tenant_is_refused() -> None:
    assert "another request" in refusal(resumed(MESSAGE, DELIVERED[:6]), tenant="other")[1]


def test_name_and_priority_may_change() -> None:
    other = request(
        n=2,
        sampling={"seed": 7},
        stopping={"max_tokens": 10},
        request_id="x",
        priority=3,
        model="tiny",
    )
    rest = asyncio.run(answer(resumed(other, DELIVERED[:6]), FakeTokenSource()))
    assert whole(DELIVERED[:6] + rest) == whole(DELIVERED)


def test_other_ids_are_refused() -> None:
    message = resumed(MESSAGE, DELIVERED[:6])
    message.resume[0].token_ids[1] += 1
    assert refusal(message) == (
        "resume[0].token_ids",
        "resume[0].token_ids: are not the ids that were sent",
    )
    del message.resume[0].token_ids[1]
    assert refusal(message) == (
        "resume[0].token_ids",
        "resume[0].token_ids: has 2 ids; the resume token is for 3",
    )


def test_choices_that_do_not_fit_together_are_refused() -> None:
    message = resumed(MESSAGE, DELIVERED[:6])
    message.resume.add().CopyFrom(message.resume[0])
    assert refusal(message) == ("resume[2]", "resume[2]: choice 0 occurs twice")
    unseeded = request(n=2, stopping={"max_tokens": 10})
    first, second = (asyncio.run(answer(unseeded, FakeTokenSource())) for _ in range(2))
    mixed = resumed(unseeded, [first[0], second[1]])
    assert refusal(mixed)[1] == "resume: the tokens are of several runs of the request"
    assert "nothing is left" in refusal(resumed(MESSAGE, DELIVERED))[1]


@pytest.mark.parametrize(("num_came", "charged"), [(0, 2 + 10), (6, 2 + 6 + 4), (9, 2 + 9 + 1)])
def test_what_is_computed_again_is_charged(num_came: int, charged: int) -> None:
    """The tokens that the client has are a part of the prompt, or generated again."""
    message = request(sampling={"seed": 7}, stopping={"max_tokens": 10, "ignore_eos": True})
    sent = resumed(message, asyncio.run(answer(message, FakeTokenSource()))[:num_came])
    assert (
        asyncio.run(tokens_taken(sent, RequestContext(arrived=0.0, is_resumable=True))) == charged
    )
    event_id = ""
    if num_came:
        events = asyncio.run(answer_after(message, FakeTokenSource(), ""))
        event_id = events[num_came - 1][1]
    context = RequestContext(arrived=0.0, event_id=event_id)
    assert asyncio.run(tokens_taken(message, context)) == charged
    with patch.object(event_ids, "MAX_ID_BYTES", 0):
        if num_came:
            events = asyncio.run(answer_after(message, FakeTokenSource(), ""))
            context = replace(context, event_id=events[num_came - 1][1])
        assert asyncio.run(tokens_taken(message, context)) == 2 + 10


async def tokens_taken(message: inference_pb2.GenerateRequest, context: RequestContext) -> int:
    """How much of a minute's tokens a request takes."""
    quota = Quota(clock=lambda: 0.0)
    quota.resize(None, 1000, None)
    context = replace(context, arrived=time.monotonic(), caller=Caller(quota=quota))
    service = GenerationService([MODEL], FakeTokenSource(), resume_key=KEY, resume_policy=ageless())
    prepared = await service.accept(message, context)
    _ = [each async for each in service.run(prepared, inference_pb2.Timeline())]
    return 1000 - int(quota.headers()["x-ratelimit-remaining-tokens"])


def test_a_resumed_request_needs_room_for_what_its_client_has() -> None:
    message = resumed(MESSAGE, DELIVERED[:7])
    service = GenerationService([MODEL], FakeTokenSource(), resume_key=KEY, resume_policy=ageless())
    context = RequestContext(arrived=time.monotonic(), is_resumable=True)
    fresh, again = (
        asyncio.run(service.accept(each, context)).tokens for each in (MESSAGE, message)
    )
    needed, needed_again = required_capacity(fresh), required_capacity(again)
    assert needed_again.prompt_tokens == needed.prompt_tokens + 7
    assert needed_again.kv_tokens == needed.kv_tokens + 7
    assert required_capacity(rest_of(again, 0, again.emitted[0] or ())).prompt_tokens == 2 + 4


def test_the_time_of_an_answer_counts_from_its_arrival_at_the_first_router() -> None:
    """With resume tokens as with event ids; each router has a monotonic clock of its own."""
    wall = [0.0]
    policy = ResumePolicy(lifetime=1_000.0, wall_clock=lambda: wall[0])
    service = GenerationService([MODEL], FakeTokenSource(), resume_key=KEY, resume_policy=policy)
    message = request(stopping={"max_tokens": 9, "max_time_ms": 1_000_000})

    async def seconds_left(again: inference_pb2.GenerateRequest, event_id: str | None) -> float:
        arrived = time.monotonic()
        context = RequestContext(arrived=arrived, event_id=event_id, is_resumable=True)
        ends_at = (await service.accept(again, context)).tokens.ends_at
        assert ends_at is not None
        return ends_at - arrived

    async def first(event_id: str | None) -> tuple[Answers, str]:
        context = RequestContext(
            arrived=time.monotonic(), event_id=event_id, is_resumable=event_id is None
        )
        prepared = await service.accept(message, context)
        signer = event_signer(prepared)
        messages = [each async for each in service.run(prepared, inference_pb2.Timeline())]
        if signer is None:
            return messages, ""
        signer.take(0, messages[0].token_ids, False)
        return messages, with_id(b"\n", signer.sign(0)).decode()[4:].strip()

    messages, _ = asyncio.run(first(None))
    _, event = asyncio.run(first(""))
    assert asyncio.run(seconds_left(message, None)) == pytest.approx(1_000, abs=60)
    wall[0] = 700.0
    left = asyncio.run(seconds_left(resumed(message, messages[:3]), None))
    assert left == pytest.approx(300, abs=60)
    assert asyncio.run(seconds_left(message, event)) == pytest.approx(300, abs=60)


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 5])
def test_a_choice_that_its_time_has_ended_is_not_computed_beyond_its_end(
    tokens_per_delta: int,
) -> None:
    """The client of an event id without token ids has all of choice 0 and the begin of choice 1."""
    message = request(n=2, stopping={"max_tokens": 9, "max_time_ms": 1_000_000})
    source = FakeTokenSource(answers=[b"abcdef", b"uvwxyz"], tokens_per_delta=tokens_per_delta)
    service = GenerationService([MODEL], source, resume_key=KEY, resume_policy=ageless())
    context = RequestContext(arrived=time.monotonic(), event_id="")
    with patch.object(event_ids, "MAX_ID_BYTES", 0):
        signer = event_signer(asyncio.run(service.accept(message, context)))
        assert signer is not None
        signer.take(0, list(b"abc"), True)
        signer.take(1, list(b"u"), False)
        event_id = with_id(b"\n", signer.sign(0)).decode()[4:].strip()
        rest = [each for each, _ in asyncio.run(answer_after(message, source, event_id))]
    assert {each.choice for each in rest} == {1}
    assert "".join(each.text for each in rest) == "vwxyz"
    assert rest[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert rest[-1].usage.completion_tokens == 3 + 6
