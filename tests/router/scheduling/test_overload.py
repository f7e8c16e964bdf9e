"""Tests ten times more requests than the workers can serve, in simulated time.

As many requests as before are served in time, and none is refused soon after the overload. Uses the
real admission, queue and registries of one or several routers.
"""

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tandem.cluster.sim.loop import run_simulated
from tandem.tests.examples import num_examples
from tandem.tests.router.scheduling.overload_simulation import (
    LEAST_AHEAD,
    Pool,
    SimulatedService,
)

LEAST_SHARE = 0.9
BEFORE_SECONDS = 12.0
OVERLOAD_SECONDS = 15.0


def overload(
    pool: Pool, *, max_queue_seconds: float, routers: int, seconds: float = OVERLOAD_SECONDS
) -> SimulatedService:
    """Sends half of the capacity, then for `seconds` ten times as much, and half again."""

    async def send() -> SimulatedService:
        service = SimulatedService(pool, max_queue_seconds=max_queue_seconds, routers=routers)
        rate = pool.capacity / 2
        await service.load((BEFORE_SECONDS, rate), (seconds, 10 * rate), (BEFORE_SECONDS, rate))
        return service

    return run_simulated(send())


def longest_wait(pool: Pool, max_queue_seconds: float, routers: int) -> float:
    """Returns the latest time of the first token of an accepted request, in seconds.

    It includes the allowed wait, the workers' minimum look-ahead and the prompt itself. Several
    routers learn only after a delay how many of them share the workers.
    """
    at_worker = pool.seconds_of_token * (LEAST_AHEAD + 3 * pool.prompt_tokens[1])
    return (1.25 if routers == 1 else 1.75) * max_queue_seconds + at_worker + 0.1


POOLS = {
    "equal prompts": Pool(token_seconds=8e-4),
    "short prompts": Pool(token_seconds=4e-3, prompt_tokens=(4, 40)),
    "long prompts": Pool(prefill=3, token_seconds=1e-4, prompt_tokens=(16, 3000)),
    "few sequences": Pool(max_sequences=16, decode_seconds=2.0, prompt_tokens=(50, 200)),
    "three pairs": Pool(prefill=3, decode=3, token_seconds=1.6e-3),
}


@pytest.mark.parametrize(
    ("name", "max_queue_seconds"),
    [*itertools.product(POOLS, (0.25, 5.0)), ("equal prompts", 1.0)],
)
def test_goodput_under_ten_times_overload_is_the_peak(name: str, max_queue_seconds: float) -> None:
    pool = POOLS[name]
    slo = longest_wait(pool, max_queue_seconds, routers=1)
    service = overload(pool, max_queue_seconds=max_queue_seconds, routers=1)
    begin, end = BEFORE_SECONDS, BEFORE_SECONDS + OVERLOAD_SECONDS
    assert service.goodput(begin, end, slo) >= LEAST_SHARE * pool.capacity
    assert service.share(begin + 5.0, end, slo) < 0.5
    assert service.share(end + 5.0, end + BEFORE_SECONDS, slo) >= service.share(0.0, begin, slo)
    late = [one for one in service.sent if one.ttft is not None and one.ttft > slo]
    assert len(late) <= 0.02 * len(service.sent)


@pytest.mark.parametrize("max_queue_seconds", [0.25, 5.0])
def test_three_routers_keep_the_goodput_of_one(max_queue_seconds: float) -> None:
    """Each router knows its own requests; it knows the others' only by the reports of workers."""
    pool = POOLS["three pairs"]
    slo = longest_wait(pool, max_queue_seconds, routers=3)
    service = overload(pool, max_queue_seconds=max_queue_seconds, routers=3)
    begin, end = BEFORE_SECONDS, BEFORE_SECONDS + OVERLOAD_SECONDS
    assert service.goodput(begin, end, slo) >= LEAST_SHARE * pool.capacity
    assert service.share(end + 5.0, end + BEFORE_SECONDS, slo) >= service.share(0.0, begin, slo)


@settings(
    max_examples=num_examples(8), derandomize=True, phases=[Phase.explicit, Phase.generate]
)  # to shrink takes minutes
@given(
    pool=st.builds(
        Pool,
        prefill=st.integers(1, 3),
        decode=st.integers(1, 2),
        step_seconds=st.floats(0.001, 0.05),
        token_seconds=st.floats(1e-3, 5e-3),
        max_sequences=st.sampled_from([32, 64]),
        decode_seconds=st.floats(0.2, 2.0),
        prompt_tokens=st.tuples(st.integers(16, 200), st.integers(200, 1000)),
    ),
    max_queue_seconds=st.floats(0.25, 5.0),
    routers=st.sampled_from([1, 1, 2]),
)
def test_goodput_is_the_peak_whatever_the_workers_and_the_bound(
    pool: Pool, max_queue_seconds: float, routers: int
) -> None:
    slo = longest_wait(pool, max_queue_seconds, routers)
    service = overload(pool, max_queue_seconds=max_queue_seconds, routers=routers, seconds=40.0)
    end = BEFORE_SECONDS + 40.0
    # A slow pool serves some thirty requests in this time, of random lengths: two of them are more
    # than a twentieth.
    assert service.goodput(BEFORE_SECONDS, end, slo) >= LEAST_SHARE * pool.capacity - 2 / 40.0


def test_a_refusal_names_the_time_until_earlier_requests_are_done() -> None:
    service = overload(POOLS["equal prompts"], max_queue_seconds=5.0, routers=1)
    refused = [
        one.retry_after
        for one in service.sent
        if one.ttft is None and one.at > BEFORE_SECONDS + 5.0
    ]
    assert min(refused) >= 5.0
    assert max(refused) <= 7.5
