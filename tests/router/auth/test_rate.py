"""Tests the limits of a key by properties, with a manual clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.errors import Overloaded
from tandem.router.auth.rate import Quota, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def quota(
    requests: int | None = None, tokens: int | None = None, streams: int | None = None
) -> tuple[Quota, Clock]:
    clock = Clock()
    made = Quota(clock)
    made.resize(requests, tokens, streams)
    return made, clock


Steps = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 200)), max_size=40)


@given(st.integers(1, 1_000), Steps)
def test_no_more_is_taken_than_a_minute_holds_and_time_refills(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket, begun, taken = TokenBucket(per_minute, clock), clock.now, 0
    for seconds, amount in steps:
        clock.now += seconds
        if bucket.level >= amount:
            bucket.take(amount)
            taken += amount
        assert bucket.level <= per_minute
        assert taken <= per_minute + (clock.now - begun) * per_minute / 60 + 1e-6


@given(st.integers(1, 1_000), st.integers(0, 5_000))
def test_the_time_that_is_named_is_enough_and_less_is_not(per_minute: int, amount: int) -> None:
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    bucket.take(amount)
    wait = bucket.seconds_until(1)
    assert (wait == 0) == (bucket.level >= 1)
    if wait > 1e-6:
        clock.now += wait * 0.999
        assert bucket.level < 1
        clock.now += wait * 0.002
        assert bucket.level >= 1


def test_requests_are_bounded_and_the_refusal_names_the_time() -> None:
    made, clock = quota(requests=2)
    for _ in range(2):
        with made.call():
            pass
    with pytest.raises(Overloaded, match="2 requests a minute") as caught, made.call():
        pass
    assert caught.value.retry_after == pytest.approx(30)
    clock.now += 30.001
    with made.call():
        pass


def test_streams_are_bounded_while_they_run_and_a_refusal_costs_no_request() -> None:
    made, _ = quota(requests=2, streams=1)
    with made.call(), pytest.raises(Overloaded, match="1 concurrent calls"), made.call():
        pass
    assert made.num_streams == 0
    with made.call():
        pass


def test_tokens_are_paid_after_they_were_used() -> None:
    made, clock = quota(tokens=60)
    made.check_tokens()
    made.take_tokens(59)
    made.check_tokens()  # one is left
    made.take_tokens(61)  # a long completion
    with pytest.raises(Overloaded, match="60 tokens a minute") as caught:
        made.check_tokens()
    assert caught.value.retry_after == pytest.approx(61)
    clock.now += 61.001
    made.check_tokens()


def test_limits_change_and_what_was_used_stays_used() -> None:
    made, _ = quota(requests=10, streams=2)
    for _ in range(5):
        with made.call():
            pass
    with made.call(), made.call():
        made.resize(3, None, 1)
        assert made.headers()["x-ratelimit-remaining-requests"] == "3"
        with pytest.raises(Overloaded), made.call():
            pass
    made.resize(None, None, None)
    assert made.headers() == {}
    with made.call():
        pass


def test_the_headers_are_openais() -> None:
    made, clock = quota(requests=60, tokens=600)
    with made.call():
        made.take_tokens(700)
    clock.now += 0.5
    assert made.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "0.500s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "69.500s",
    }


def test_polls_have_a_limit_of_their_own() -> None:
    """The limit is ten per second, and twenty after a pause."""
    made, clock = quota(requests=1)
    for expected in (20, 10):
        for _ in range(expected):
            made.poll()
        with pytest.raises(Overloaded):
            made.poll()
        clock.now += 1.0
    with made.call():
        pass
