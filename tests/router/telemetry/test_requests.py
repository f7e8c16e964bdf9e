"""Tests what is counted of requests, without servers."""

import asyncio
from collections import Counter
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import Cancelled, InternalError, Overloaded, Unavailable
from tandem.proto.metrics import (
    DECODE_TIME,
    E2E,
    FINISHED,
    GENERATION_TOKENS,
    PREFIX_HITS,
    PROMPT_TOKENS,
    QUEUE_TIME,
    SLO_REQUESTS,
    SLO_TOKENS,
    TTFT,
    Metric,
    Metrics,
)
from tandem.router.slo import OUTCOMES, RequestSlo, SloClass
from tandem.router.telemetry.requests import (
    EndedRequest,
    RequestFacts,
    RequestTelemetry,
    RequestTotals,
)

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
TOOLS = inference_pb2.FINISH_REASON_TOOL_CALLS


class Recorder(Metrics):
    """Sums what is counted."""

    def __init__(self) -> None:
        self.sums: Counter[tuple[Any, ...]] = Counter()

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        self.sums[metric, *labels.values()] += amount  # type: ignore[assignment]

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        self.sums[metric] += count  # type: ignore[index]


class Outputs:
    """Has as many tokens as a test says."""

    def __init__(self) -> None:
        self.num_generated = 0
        self.longest_choice = 0
        self.finish_reasons: list[inference_pb2.FinishReason] = []


def make_facts(
    num_choices: int = 1, slo: RequestSlo | None = None, *, is_batch: bool = False
) -> RequestFacts:
    return RequestFacts(
        request_id="r",
        arrived=0.0,
        began=0.0,
        num_prompt=10,
        num_choices=num_choices,
        max_tokens=8,
        slo=slo,
        is_batch=is_batch,
    )


class Requests:
    """Runs one request after the other."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.ended: list[EndedRequest] = []
        self.telemetry = RequestTelemetry(self.recorder, [self.ended.append])
        self.timeline = inference_pb2.Timeline(
            cached_tokens=4, end_to_end_seconds=2.0, ttft_seconds=0.5
        )

    def run(
        self,
        num_tokens: int,
        *reasons: Any,
        error: BaseException | None = None,
        num_choices: int = 1,
        slo: RequestSlo | None = None,
        is_batch: bool = False,
    ) -> None:
        outputs = Outputs()
        facts = make_facts(num_choices, slo, is_batch=is_batch)
        with suppress(BaseException), self.telemetry.track(facts, self.timeline, outputs):
            outputs.num_generated = num_tokens
            outputs.finish_reasons += reasons
            if error is not None:
                raise error

    def count(self, metric: Metric, *labels: str) -> float:
        return self.recorder.sums[metric, *labels] if labels else self.recorder.sums[metric,]

    def histogram(self, metric: Metric) -> float:
        return self.recorder.sums[metric]  # type: ignore[index]


def test_completions_are_counted_by_why_they_ended() -> None:
    requests = Requests()
    requests.run(5, STOP)
    requests.run(8, LENGTH, LENGTH, STOP, TOOLS, num_choices=4)
    assert requests.count(FINISHED, "stop") == 3
    assert requests.count(FINISHED, "length") == 2
    assert requests.count(PROMPT_TOKENS) == 20
    assert requests.count(GENERATION_TOKENS) == 13
    assert requests.count(PREFIX_HITS) == 8
    assert requests.histogram(E2E) == requests.histogram(TTFT) == 2
    assert [each.finish_reasons for each in requests.ended] == [
        ("stop",),
        ("length", "length", "stop", "tool_calls"),
    ]
    assert all(each.is_complete for each in requests.ended)


def test_a_line_of_a_batch_is_counted_without_its_waits() -> None:
    requests = Requests()
    requests.run(5, STOP, is_batch=True)
    for waits in (TTFT, E2E, QUEUE_TIME):
        assert requests.histogram(waits) == 0
    assert requests.count(FINISHED, "stop") == requests.histogram(DECODE_TIME) == 1
    assert (requests.count(PROMPT_TOKENS), requests.count(GENERATION_TOKENS)) == (10, 5)


def test_requests_of_an_slo_class_are_counted_by_outcome() -> None:
    requests = Requests()  # of 0.5 s to the first token and 2 s
    tight, loose = (RequestSlo(f"{ms}", SloClass(ttft_ms=ms)) for ms in (400, 600))
    requests.run(5, STOP, slo=loose)
    requests.run(6, LENGTH, slo=tight)
    requests.run(2, slo=loose, error=Unavailable("no worker"))
    requests.run(0, slo=loose, error=Overloaded("full"))
    requests.run(3, slo=loose, error=Cancelled("the client left"))
    requests.run(9, STOP)
    requests.run(0, inference_pb2.FINISH_REASON_TIME, slo=tight)  # not even a first token
    counts = {
        (name, outcome): count
        for name, outcome in product(("400", "600"), OUTCOMES)
        if (count := requests.count(SLO_REQUESTS, name, outcome))
    }
    assert counts == dict.fromkeys(
        [
            ("400", "ttft"),
            ("400", "failed"),
            ("600", "met"),
            ("600", "failed"),
            ("600", "refused"),
        ],
        1,
    )
    assert requests.count(SLO_TOKENS, "600", "met") == 5
    assert requests.count(SLO_TOKENS, "400", "ttft") == 6


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (asyncio.CancelledError(), "abort", "CANCELLED"),
        (GeneratorExit(), "abort", "CANCELLED"),
        (Cancelled("unread"), "abort", "CANCELLED"),
        (Unavailable("no worker"), "error", "UNAVAILABLE"),
        (InternalError("given up"), "error", "INTERNAL"),
        (ValueError("a defect"), "error", "INTERNAL"),
    ],
)
def test_what_has_not_ended_is_an_abort_or_an_error(
    error: BaseException, reason: str, code: str
) -> None:
    requests = Requests()
    requests.run(3, STOP, error=error, num_choices=3)
    assert requests.count(FINISHED, "stop") == 1
    assert requests.count(FINISHED, reason) == 2
    assert requests.count(GENERATION_TOKENS) == 3
    assert requests.histogram(TTFT) == 1
    assert requests.histogram(E2E) == 0  # how long it would have taken is not known
    requests.run(3, STOP, error=error)  # after the end of its only choice
    assert requests.histogram(E2E) == 0
    assert [(each.error, each.is_complete) for each in requests.ended] == [(code, False)] * 2


def test_one_that_is_given_up_before_its_first_token_has_none_of_its_times() -> None:
    requests = Requests()
    requests.run(0, error=asyncio.CancelledError())
    assert requests.count(FINISHED, "abort") == 1
    assert requests.count(PROMPT_TOKENS) == requests.histogram(TTFT) == 0


def test_one_that_was_not_let_in_is_none() -> None:
    requests = Requests()
    requests.run(0, error=Overloaded("the queue is full"))
    assert not requests.recorder.sums
    assert [each.was_refused for each in requests.ended] == [True]  # for the console alone


def test_a_prompt_without_an_answer_is_counted() -> None:
    """As with echo and max_tokens 0."""
    requests = Requests()
    requests.run(0, LENGTH)
    assert (requests.count(PROMPT_TOKENS), requests.count(GENERATION_TOKENS)) == (10, 0)


def test_tokens_are_counted_while_the_request_runs_and_once() -> None:
    requests, outputs = Requests(), Outputs()
    with requests.telemetry.track(make_facts(), requests.timeline, outputs):
        assert [each.facts.request_id for each in requests.telemetry.running] == ["r"]
        seen = []
        for outputs.num_generated in (0, 2, 2, 7):
            requests.telemetry.count_running()
            seen.append((requests.count(PROMPT_TOKENS), requests.count(GENERATION_TOKENS)))
        outputs.num_generated = 9
    assert seen == [(0, 0), (10, 2), (10, 2), (10, 7)]
    assert (requests.count(PROMPT_TOKENS), requests.count(GENERATION_TOKENS)) == (10, 9)
    requests.telemetry.count_running()
    assert requests.count(GENERATION_TOKENS) == 9
    assert not requests.telemetry.running


def test_the_totals_are_of_all_requests() -> None:
    requests = Requests()
    requests.run(5, STOP)
    requests.run(3, error=asyncio.CancelledError())
    requests.run(0, error=Overloaded("the queue is full"))
    totals = RequestTotals(begun=3, ended=3, failed=1, tokens=8, prompt_tokens=20)
    assert requests.telemetry.totals == totals
