import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KeyLimitReached,
    NotFound,
    Overloaded,
    Unavailable,
)
from tandem.router.adapters import AdapterAdmin, AdapterRegistry
from tandem.router.api.service import GenerationService, tandem_errors_only
from tandem.router.auth.authenticator import Caller
from tandem.router.frontend.prepare import RequestContext
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.request import LoraAdapter, TokenDelta, TokenRequest
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.capacity import Capacity
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.router.slo import SloClass
from tandem.router.telemetry.prometheus import PrometheusMetrics
from tandem.router.telemetry.requests import EndedRequest, RequestTelemetry
from tandem.tests.metrics_page import MetricsPage
from tandem.tests.router import pools
from tandem.tests.router.api.answers import (
    LENGTH,
    NONE,
    STOP,
    Answers,
    collect,
    fill,
    ids,
    request,
    start,
    text,
)
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
async def test_to_the_end_of_sequence(model: ServedModel, tokens_per_delta: int) -> None:
    answer = [*"Grüße, 🦊".encode(), EOS_ID, 33]
    messages = await collect(
        model, FakeTokenSource(answer=answer, tokens_per_delta=tokens_per_delta)
    )
    assert text(messages) == "Grüße, 🦊"
    assert ids(messages) == answer[:-1]  # the token that ends it is among the ids, not in the text
    assert messages[-1].finish_reason == STOP
    assert messages[-1].usage.prompt_tokens == 2


async def test_to_max_tokens(model: ServedModel) -> None:
    messages = await collect(
        model, FakeTokenSource(answer=b"hello"), request(stopping={"max_tokens": 3})
    )
    assert (text(messages), messages[-1].finish_reason) == ("hel", LENGTH)


async def test_a_cut_character_at_max_tokens(model: ServedModel) -> None:
    messages = await collect(
        model, FakeTokenSource(answer="a🦊".encode()), request(stopping={"max_tokens": 3})
    )
    assert text(messages) == "a\ufffd"


async def test_a_stop_token_has_no_text(model: ServedModel) -> None:
    message = request(stopping={"stop_token_ids": [ord("l")]})
    messages = await collect(model, FakeTokenSource(answer=b"hello"), message)
    assert (text(messages), ids(messages), messages[-1].finish_reason) == ("he", list(b"hel"), STOP)


async def test_an_ignored_end_of_sequence_goes_on(model: ServedModel) -> None:
    source = FakeTokenSource(answer=[97, EOS_ID, 98])
    messages = await collect(model, source, request(stopping={"ignore_eos": True}))
    assert (text(messages), ids(messages), messages[-1].finish_reason) == (
        "ab",
        [97, EOS_ID, 98],
        LENGTH,
    )


@pytest.mark.parametrize("tokens_per_delta", [1, 4, 100])
async def test_a_stop_string_ends_text_ids_and_source(
    model: ServedModel, tokens_per_delta: int
) -> None:
    source = FakeTokenSource(answer=b"one two three four", tokens_per_delta=tokens_per_delta)
    timeline = inference_pb2.Timeline()
    message = request(stopping={"stop": ["two t", "zzz"]})
    messages = await collect(model, source, message, timeline)
    assert (text(messages), messages[-1].finish_reason) == ("one ", STOP)
    assert bytes(ids(messages)) == b"one two t"
    assert timeline.completion_tokens == 9
    assert (source.running, source.cancelled) == (0, 0 if tokens_per_delta == 100 else 1)


async def test_ids_come_at_once_while_text_is_held(model: ServedModel) -> None:
    message = request(stopping={"stop": ["END"]})
    messages = await collect(model, FakeTokenSource(answer=b"ENxE"), message)
    assert [m.text for m in messages] == ["", "", "ENx", "E"]
    assert [list(m.token_ids) for m in messages] == [[i] for i in b"ENxE"]


async def test_request_id_and_timeline(model: ServedModel) -> None:
    timeline = inference_pb2.Timeline()
    source = FakeTokenSource(answer=b"hello")
    messages = await collect(model, source, request(request_id="mine"), timeline)
    assert (messages[0].request_id, timeline.request_id) == ("mine", "mine")
    assert (timeline.prompt_tokens, timeline.completion_tokens, timeline.attempts) == (2, 5, 1)
    assert source.requests[0].request_id != "mine"  # unique, though clients' names are not


async def test_the_tokens_of_the_longest_choice_are_observed(model: ServedModel) -> None:
    metrics = PrometheusMetrics(model.name)
    source = FakeTokenSource(answers=[b"ab", b"abcde"])
    service = GenerationService([model], source, telemetry=RequestTelemetry(metrics))
    message = request(n=2, stopping={"max_tokens": 9})
    prepared = await service.accept(message, RequestContext(arrived=time.monotonic()))
    async with aclosing(service.run(prepared, inference_pb2.Timeline())) as messages:
        assert sum([len(each.token_ids) async for each in messages]) == 7
    page = MetricsPage(metrics.render().decode())
    assert page.value("vllm:request_max_num_generation_tokens_sum") == 5
    assert page.value("vllm:request_generation_tokens_sum") == 7
    assert page.value("vllm:request_params_max_tokens_sum") == 9


async def test_a_refused_request_has_no_timeline_and_reaches_no_worker(model: ServedModel) -> None:
    timeline, source = inference_pb2.Timeline(), FakeTokenSource()
    with pytest.raises(InvalidArgument):
        await collect(model, source, request(sampling={"temperature": -1}), timeline)
    assert timeline.request_id == ""
    assert source.requests == []


async def test_errors_of_the_source_arrive(model: ServedModel) -> None:
    timeline = inference_pb2.Timeline()
    source = FakeTokenSource(answer=b"hello", error=Overloaded("full", 3.0), error_after=2)
    seen: Answers = []
    with pytest.raises(Overloaded, match="full"):
        await fill(seen, start(model, source, timeline=timeline))
    assert text(seen) == "he"
    assert all(message.finish_reason == NONE for message in seen)
    assert timeline.request_id


@pytest.mark.parametrize("stall_after", [0, 2])
async def test_deadline(model: ServedModel, stall_after: int) -> None:
    source = FakeTokenSource(answer=b"hello", stall_after=stall_after)
    with pytest.raises(DeadlineExceeded):
        await collect(model, source, deadline=time.monotonic() + 0.05)
    assert (source.running, source.cancelled) == (0, 1)


async def test_closing_cancels_the_source(model: ServedModel) -> None:
    source = FakeTokenSource(stall_after=1)
    async with aclosing(start(model, source)) as messages:
        await anext(messages)
        assert source.running == 1
    assert (source.running, source.cancelled) == (0, 1)


async def test_cancelling_the_task_cancels_the_source(model: ServedModel) -> None:
    source = FakeTokenSource(stall_after=1)
    task = asyncio.create_task(collect(model, source))
    await source.wait_running(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (source.running, source.cancelled) == (0, 1)


class BrokenSource:
    def __init__(self, deltas: Sequence[TokenDelta]) -> None:
        self._deltas = deltas

    async def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        for delta in self._deltas:
            yield delta


def delta(
    first_index: int, finish_reason: "inference_pb2.FinishReason" = NONE, choice: int = 0
) -> TokenDelta:
    return TokenDelta(
        first_index=first_index, ids=(65,), finish_reason=finish_reason, choice=choice
    )


@pytest.mark.parametrize(
    "deltas",
    [
        [],
        [delta(0)],
        [delta(0), delta(0, STOP)],
        [delta(0), delta(2, STOP)],
        [delta(1, STOP)],
        [delta(0, STOP), delta(1)],
        [delta(0, STOP), delta(1, STOP)],
        [delta(0, choice=1)],
    ],
    ids=["empty", "no end", "repeat", "gap", "late start", "goes on", "two ends", "another choice"],
)
async def test_a_broken_stream_never_ends_well(
    model: ServedModel, deltas: list[TokenDelta]
) -> None:
    seen: Answers = []
    with pytest.raises(InternalError):
        await fill(seen, start(model, BrokenSource(deltas)))
    assert all(message.finish_reason == NONE for message in seen)


async def test_detokenize(model: ServedModel) -> None:
    service = GenerationService([model], FakeTokenSource())
    for body in ("grüß", "x" * 5_000):
        request = inference_pb2.DetokenizeRequest(token_ids=[*body.encode(), EOS_ID])
        assert (await service.detokenize(request, Caller())).text == f"{body}<|end|>"
    with pytest.raises(InvalidArgument, match="token_ids: 258 is not a token id"):
        await service.detokenize(inference_pb2.DetokenizeRequest(token_ids=[1, 258]), Caller())
    with pytest.raises(NotFound):
        await service.detokenize(
            inference_pb2.DetokenizeRequest(model="nope", token_ids=[1]), Caller()
        )


async def test_the_text_of_token_ids_is_bounded(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token may have many characters."""
    service = GenerationService([model], FakeTokenSource())
    monkeypatch.setattr("tandem.router.frontend.tokenizer.MAX_RETURNED_CHARACTERS", 6)
    with pytest.raises(InvalidArgument, match="token_ids: has 7 characters; the maximum is 6"):
        await service.detokenize(inference_pb2.DetokenizeRequest(token_ids=[EOS_ID]), Caller())


class Full(Admission):
    """Refuses requests of more than 100 tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str, int]] = []
        self.dues: list[float | None] = []

    def check_early(
        self,
        needed: Capacity,
        tenant: str,
        priority: int = 0,
        deadline: float | None = None,
        first_token_due: float | None = None,
        arrived: float = 0.0,
    ) -> None:
        self.dues.append(first_token_due)
        self.asked.append((needed.prompt_tokens, needed.kv_tokens, tenant, priority))
        if needed.kv_tokens > 100:
            raise Overloaded("full")


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "x" * 380},
        {"token_ids": {"ids": [1] * 95}},
        {"chat": {"messages": [{"role": "user", "content": "x" * 380}]}},
    ],
)
async def test_admission_may_refuse_before_tokens_are_counted(
    model: ServedModel, prompt: dict[str, Any]
) -> None:
    admission = Full()
    service = GenerationService([model], FakeTokenSource(), admission)
    large = request(prompt=prompt, n=2, stopping={"max_tokens": 3}, priority=4)
    with pytest.raises(Overloaded):
        await service.accept(
            large, RequestContext(arrived=0, caller=Caller(tenant="t", max_priority=3))
        )
    await service.accept(request(stopping={"max_tokens": 3}), RequestContext(arrived=0))
    assert admission.asked == [(95, 101, "t", 3), (0, 3, "", 0)]


async def test_a_request_that_no_worker_takes_is_not_charged_and_not_counted(
    model: ServedModel,
) -> None:
    """Batches and clients send it again every second, until a worker is ready."""
    registry = WorkerRegistry()
    telemetry = RequestTelemetry()
    service = GenerationService(
        [model], FakeTokenSource(), Admission(registry), telemetry=telemetry
    )
    context = RequestContext(arrived=0, caller=Caller())
    context.caller.quota.resize(None, 1_000, None)
    for _ in range(3):
        with pytest.raises(Unavailable, match="no worker is ready"):
            await service.accept(request(prompt={"text": "x" * 40}), context)
    assert context.caller.quota.headers()["x-ratelimit-remaining-tokens"] == "1000"
    assert telemetry.totals.begun == 0
    pools.fill(registry, prefill=0, decode=1)
    await service.accept(request(prompt={"text": "x" * 40}), context)


async def test_observers_know_which_requests_are_embeddings(model: ServedModel) -> None:
    ended = list[EndedRequest]()
    telemetry = RequestTelemetry(observers=[ended.append])
    service = GenerationService([model], FakeTokenSource(), telemetry=telemetry)
    for pooling in (inference_pb2.POOLING_UNSPECIFIED, inference_pb2.POOLING_MEAN):
        prepared = await service.accept(request(pooling=pooling), RequestContext(arrived=0))
        async with aclosing(service.run(prepared, inference_pb2.Timeline())) as messages:
            async for _ in messages:
                pass
    assert [each.facts.is_embedding for each in ended] == [False, True]
    assert {each.facts.model for each in ended} == {"tiny"}


async def test_a_line_of_a_batch_has_no_default_class(model: ServedModel) -> None:
    classed = replace(model, slo={"default": SloClass(ttft_ms=250)})
    service = GenerationService([classed], FakeTokenSource())
    for is_batch in (False, True):
        context = RequestContext(arrived=10, is_batch=is_batch)
        prepared = await service.accept(request(), context)
        assert (prepared.slo is None, prepared.tokens.is_batch) == (is_batch, is_batch)


async def test_an_early_refusal_is_a_miss_of_its_slo_class(model: ServedModel) -> None:
    admission = Full()
    metrics = PrometheusMetrics("tiny")
    fast = replace(model, slo={"fast": SloClass(ttft_ms=250)})
    telemetry = RequestTelemetry(metrics)
    service = GenerationService([fast], FakeTokenSource(), admission, telemetry=telemetry)
    large = request(prompt={"text": "x" * 380}, n=2, stopping={"max_tokens": 3})
    for tier in ("fast", ""):
        large.service_tier = tier
        with pytest.raises(Overloaded):
            await service.accept(large, RequestContext(arrived=10))
    small = request(prompt={"text": "x"}, stopping={"max_tokens": 3}, service_tier="fast")
    prepared = await service.accept(small, RequestContext(arrived=10))
    assert prepared.tokens.first_token_due == 10.25
    assert admission.dues == [10.25, None, 10.25]
    page = MetricsPage(metrics.render().decode())
    assert page.value("tandem_slo_requests_total", slo_class="fast", outcome="refused") == 1
    assert page.value("tandem_slo_requests_total") == 1


async def test_what_fails_while_it_is_prepared_is_a_miss_of_its_slo_class_once(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_args: object, **_options: object) -> None:
        raise error

    metrics = PrometheusMetrics("tiny")
    fast = replace(model, slo={"fast": SloClass(ttft_ms=250)})
    telemetry = RequestTelemetry(metrics)
    service = GenerationService([fast], FakeTokenSource(), telemetry=telemetry)
    message = request(prompt={"text": "x"}, service_tier="fast")
    used_up = Caller()
    used_up.quota.resize(None, 1, None)
    used_up.quota.take_tokens(9)
    with pytest.raises(KeyLimitReached):  # no fault of the service
        await service.accept(message, RequestContext(arrived=0, caller=used_up))
    with pytest.raises(DeadlineExceeded):
        await service.accept(message, RequestContext(arrived=0, deadline=time.monotonic()))
    monkeypatch.setattr(Tokenizer, "encode", fail)
    error: Exception
    for error in (Overloaded("full"), Unavailable("no process"), InvalidArgument("no", "prompt")):
        with pytest.raises(type(error)):
            await service.accept(message, RequestContext(arrived=0))
    page = MetricsPage(metrics.render().decode())
    assert page.value("tandem_slo_requests_total", slo_class="fast", outcome="refused") == 1
    assert page.value("tandem_slo_requests_total", slo_class="fast", outcome="failed") == 2
    assert page.value("tandem_slo_requests_total") == 3


async def test_a_resumption_is_checked_and_not_refused_for_its_size(model: ServedModel) -> None:
    admission = Full()
    service = GenerationService([model], FakeTokenSource(), admission)
    resumed = request(
        prompt={"token_ids": {"ids": [1] * 95}},
        stopping={"max_tokens": 9},
        resume=[{"resume_token": b"forged", "token_ids": [1]}],
    )
    with pytest.raises(InvalidArgument, match="resume"):
        await service.accept(resumed, RequestContext(arrived=0, is_resumable=True))
    assert admission.asked == []


async def test_invalid_requests_are_refused_before_admission(model: ServedModel) -> None:
    """A hint to try again would be wrong for a request that is invalid or late."""
    admission = Full()
    service = GenerationService([model], FakeTokenSource(), admission)
    large = {"text": "x" * 480}
    for wrong, field in (
        ({"n": 4 * 10**9}, "n"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p"),
        ({"prompt": {"chat": {}}}, "prompt.chat.messages"),
        ({"prompt": {"token_ids": {"ids": [258] * 200}}}, "prompt.token_ids"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await service.accept(request(**{"prompt": large} | wrong), RequestContext(arrived=0))
        assert caught.value.field == field
    with pytest.raises(DeadlineExceeded):
        await service.accept(
            request(prompt=large), RequestContext(arrived=0, deadline=time.monotonic())
        )
    assert admission.asked == []


async def test_models(model: ServedModel, tokenizer: Any) -> None:
    both = GenerationService(
        [model, ServedModel(name="other", tokenizer=tokenizer, context_tokens=9)],
        FakeTokenSource(answer=b"x"),
    )
    assert {
        m.id: m.context_tokens
        for m in (await both.list_models(inference_pb2.ListModelsRequest())).models
    } == {
        "tiny": 512,
        "other": 9,
    }
    with pytest.raises(NotFound, match="tiny, other"):
        await both.tokenize(
            inference_pb2.TokenizeRequest(prompt={"text": "x"}), Caller()
        )  # which one?
    with pytest.raises(NotFound, match="'nope'"):
        await both.tokenize(
            inference_pb2.TokenizeRequest(model="nope", prompt={"text": "x"}), Caller()
        )
    with pytest.raises(InvalidArgument, match=r"model: .*256"):
        await both.tokenize(
            inference_pb2.TokenizeRequest(model="x" * 257, prompt={"text": "x"}), Caller()
        )
    answer = await both.tokenize(
        inference_pb2.TokenizeRequest(model="other", prompt={"text": "xyz"}), Caller()
    )
    assert bytes(answer.token_ids) == b"xyz"


async def test_tokenize_returns_the_tokens_of_generate(model: ServedModel) -> None:
    source = FakeTokenSource(answer=b"x")
    chat = {"chat": {"messages": [{"role": "user", "content": "hello"}]}}
    tokens = await GenerationService([model], source).tokenize(
        inference_pb2.TokenizeRequest(prompt=chat), Caller()
    )
    await collect(model, source, request(prompt=chat))
    assert tokens.token_ids == source.requests[0].submit.token_ids


def test_a_defect_becomes_an_internal_error_with_a_fixed_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InternalError) as caught, tandem_errors_only():
        raise KeyError("/secret/path")
    assert "secret" not in caught.value.message
    assert "KeyError at service.py" in caplog.text
    assert "test_service.py" in caplog.text
    assert "secret" not in caplog.text


def test_the_log_of_a_defect_has_its_last_frames_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(depth: int) -> None:
        if not depth:
            raise KeyError
        fail(depth - 1)

    with pytest.raises(InternalError), tandem_errors_only():
        fail(100)
    assert caplog.text.count("test_service.py") == 20


async def test_other_names_of_the_model(model: ServedModel) -> None:
    """All names work. Hub ids are listed; the path of a folder is not."""
    adapter = LoraAdapter(name="mine", folder="/mine", fingerprint=b"1")
    hidden = LoraAdapter(name="org/tiny", folder="/mine", fingerprint=b"1")
    service = GenerationService(
        [model],
        FakeTokenSource(answer=b"x"),
        adapters=AdapterAdmin(AdapterRegistry([adapter, hidden])),
        names=("tiny", "small"),
        aliases=("org/tiny", "/models/tiny"),
    )
    for name in ("", "tiny", "small", "org/tiny", "/models/tiny"):
        assert service.model(name) is model
        prompt = {"text": "x"}
        answer = await service.tokenize(
            inference_pb2.TokenizeRequest(model=name, prompt=prompt), Caller()
        )
        assert bytes(answer.token_ids) == b"x"
    with pytest.raises(NotFound, match=r"served: tiny, small, org/tiny, mine$"):
        service.model("other/tiny")
    listed = await service.list_models(inference_pb2.ListModelsRequest())
    assert [each.id for each in listed.models] == ["tiny", "small", "org/tiny", "mine"]
    assert service.base_name == "tiny"
