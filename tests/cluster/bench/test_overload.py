"""Tests the rule by which `tandem.tests.soak.overload` judges goodput around an overload."""

import pytest

from tandem.cluster.bench.metrics import RequestFailed, RequestRecord
from tandem.tests.soak.overload import judge, parse

BOUNDS = (0.0, 10.0, 20.0, 35.0)
SLO = {"ttft": 500.0}


def sent(at: float, ttft: float | None = 0.1) -> RequestRecord:
    """Returns a request whose first token came after `ttft` seconds; None: it was refused."""
    failure = None if ttft is not None else RequestFailed("HTTP 429", "full")
    times = [at + (ttft or 0.0)]
    return RequestRecord(
        started=at,
        ended=times[0],
        chunk_times=times,
        prompt_tokens=1,
        output_tokens=1,
        failure=failure,
    )


def every(
    seconds: float, begin: float, end: float, ttft: float | None = 0.1
) -> list[RequestRecord]:
    return [
        sent(begin + number * seconds, ttft) for number in range(round((end - begin) / seconds))
    ]


def test_goodput_counts_by_when_requests_were_sent_and_the_first_seconds_after_do_not_count() -> (
    None
):
    records = (
        every(0.5, 0, 10) + every(1, 10, 20) + every(0.1, 10, 20, None) + every(1, 20, 25, 3.0)
    )
    found = judge(records + every(0.5, 25, 35), BOUNDS, SLO)
    assert (found.before.goodput, found.during.goodput, found.after.goodput) == (2.0, 1.0, 2.0)
    assert (found.before.share, found.after.share) == (1.0, 1.0)
    assert found.during.share == pytest.approx(10 / 110)
    assert "HTTP 429 100" in str(found)
    assert not found.passed


@pytest.mark.parametrize(
    ("num_good", "num_late", "passes"), [(18, 0, True), (17, 0, False), (20, 1, False)]
)
def test_a_tenth_may_be_lost_under_overload_and_nothing_after_it(
    num_good: int, num_late: int, passes: bool
) -> None:
    during = every(0.5, 10, 10 + num_good / 2) + every(0.1, 10, 20, None)
    after = every(0.5, 25, 35 - num_late / 2) + every(0.5, 35 - num_late / 2, 35, 0.6)
    assert judge(every(0.5, 0, 10) + during + after, BOUNDS, SLO).passed == passes


def test_a_service_without_goodput_does_not_pass() -> None:
    assert not judge(every(0.5, 0, 35, None), BOUNDS, SLO).passed


def test_the_command_takes_the_options_of_its_description() -> None:
    options = parse(
        ["--url", "http://127.0.0.1:8080", "--rate", "4", "--slo", "ttft=3000,tpot=100"]
    )
    assert (options.url.url, options.rate, options.factor, options.slo) == (
        "http://127.0.0.1:8080",
        4.0,
        10.0,
        {"ttft": 3000.0, "tpot": 100.0},
    )
